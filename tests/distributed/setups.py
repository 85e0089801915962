"""Models, the ways in which engines share them among ranks, and gradients that are the same everywhere."""

import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fcoptim import FairCastOptimizer
from fcoptim.distributed import shards
from fcoptim.masters import OWN_KEYS


def model(dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, width: int = 13) -> nn.Sequential:
    """Sizes that 2 and 4 don't divide, a bias of 3 and one of 1 element: uneven and empty shards.

    The weights lie on the bf16 grid, so that models of both dtypes hold the same.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 3), nn.Linear(3, 1)]
    made = nn.Sequential(*layers)
    return made.bfloat16().to(dtype)


def device() -> str:
    """Where the ranks of this process group compute."""
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def shard(made: nn.Module, how: str, **options) -> nn.Module:
    """Share a model among all ranks.

    Args:
        made: From ``model``.
        how: ``"whole"`` (not at all), ``"fsdp"``, ``"whole_fsdp"`` (not by layer), ``"fsdp_dim1"`` (dimension 1 where
            it divides), ``"hsdp"`` (2 ranks share, others replicate), ``"tp"`` (colwise, then rowwise), ``"fsdp_tp"``
            (both, on a mesh of two dimensions) or ``"replicate"``.
        options: For ``fully_shard``.
    """
    world = dist.get_world_size()
    made = made.to(device())
    if how == "whole":
        return made
    if how == "fsdp":
        return _by_layer(made, mesh=init_device_mesh(device(), (world,)), **options)
    if how == "whole_fsdp":
        return fully_shard(made, mesh=init_device_mesh(device(), (world,)), **options)
    if how == "fsdp_dim1":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else Shard(0)
        return _by_layer(made, mesh=init_device_mesh(device(), (world,)), **options)
    if how == "hsdp":
        mesh = init_device_mesh(device(), (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        return _by_layer(made, mesh=mesh, **options)
    if how == "tp":
        return _tensor_parallel(made, init_device_mesh(device(), (world,)))
    if how == "fsdp_tp":
        mesh = init_device_mesh(device(), (world // 2, 2), mesh_dim_names=("dp", "tp"))
        return _by_layer(_tensor_parallel(made, mesh["tp"]), mesh=mesh["dp"], **options)
    assert how == "replicate"
    mesh = init_device_mesh(device(), (world,))
    for module in made.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(DTensor.from_local(param.detach(), mesh, [Replicate()])))
    return made


def _by_layer(made: nn.Module, **options) -> nn.Module:
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(made, **options)


def _tensor_parallel(made: nn.Module, mesh) -> nn.Module:
    return parallelize_module(made, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """bf16 noise that depends on name and step alone, of the size of real gradients."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return (torch.randn(shape, generator=generator) * 1e-2).bfloat16()


def step_with_gradients(opt: FairCastOptimizer, steps: range) -> None:
    """Steps with the gradients above, written into the parameters, each rank its part."""
    for step in steps:
        for group in opt.param_groups:
            for name, param in zip(group["param_names"], group["params"]):
                param.grad = shards.placed_like(gradient(name, param.shape, step).to(param.dtype), param)
        opt.step()
        opt.zero_grad()


def train(made: nn.Module, opt: FairCastOptimizer, steps: range, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """Real training on one batch that all ranks share, so that the mean of the gradients is each rank's own."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 8, generator=generator).to(dtype), torch.randn(16, 1, generator=generator)
        x, y = x.to(device()), y.to(device())
        loss = (made(x).float() - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy of the whole tensor, on every rank."""
    return shards.full(tensor.detach()).to("cpu", copy=True)


def everything(opt: FairCastOptimizer) -> dict[str, torch.Tensor]:
    """All that a cast depends on, gathered: masters, served weights in bf16, and fcoptim's part of the state."""
    out = {}
    for member in opt._flat():
        out[f"served {member.name}"] = full(member.param).to(torch.float32 if member.kept else torch.bfloat16)
        for key, value in member.entry.items():
            if key in OWN_KEYS and isinstance(value, torch.Tensor):
                out[f"{key} {member.name}"] = full(value)
    return out


def built(
    how: str, rounding: str, dtype: torch.dtype = torch.bfloat16, lag=None, mp: bool = False, width: int = 13, **options
):
    """A sharded model and AdamW around it."""
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mp else {}
    made = shard(model(dtype, width=width), how, **policy)
    options = {"lr": 1e-3, "weight_decay": 0.1, **options}
    optimizer = options.pop("optimizer", torch.optim.AdamW)
    return made, FairCastOptimizer(made, optimizer, rounding=rounding, seed=5, lag=lag, **options)
