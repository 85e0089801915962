"""FSDP2 with FairCastOptimizer, from one process to many; runs on CPUs and on GPUs.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py --checkpoint /tmp/fair

Run it again with another number of processes: it goes on from the checkpoint, and the digest of the served weights
at each step does not depend on how many there are.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fcoptim import FairCastOptimizer


def sharded_model(device: str) -> nn.Module:
    """A small model, the same on every rank, with fp32 shards that FSDP2 gathers in bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 100), nn.Tanh(), nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 1)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def digest(opt: FairCastOptimizer) -> str:
    """A digest of the served bf16 weights, gathered one tensor at a time as a rollout engine would take them."""
    bits = hashlib.sha256()
    for name, weight in opt.served_state_dict(full=True):
        bits.update(name.encode() + weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()[:16]


def train_step(model: nn.Module, opt: FairCastOptimizer, step: int, device: str) -> float:
    """One step on a batch that is the same on every rank, so that the mean gradient is the same for any number."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(32, 16, generator=generator).to(device), torch.randn(32, 1, generator=generator).to(device)
    loss = (model(x).float() - y).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def main() -> None:
    """Train for some steps, from a checkpoint if there is one, and save."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--checkpoint", type=Path)
    arguments.add_argument("--steps", type=int, default=5)
    chosen = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())

    model = sharded_model(device)
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, storage="float32")
    first = 0
    if chosen.checkpoint and chosen.checkpoint.exists():
        weights, state = get_state_dict(model, opt)
        saved = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=chosen.checkpoint)
        set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        first = saved["step"]

    for step in range(first, first + chosen.steps):
        loss = train_step(model, opt, step, device)
        stats, served = opt.cast_stats(), digest(opt)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.4f}  changed {stats.changed:.1%}  served {served}")

    if chosen.checkpoint:
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "optimizer": state, "step": first + chosen.steps}, checkpoint_id=chosen.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
