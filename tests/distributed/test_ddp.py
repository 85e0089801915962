"""DistributedDataParallel: replicas stay equal with no broadcast of ours, and what gradients are reduced in."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fcoptim import FairCastOptimizer
from fcoptim.cast.rules import RULES
from fcoptim.distributed import reduce_in_fp32

from ..optimizer.helpers import assert_same
from . import setups

BF16, FP32 = torch.bfloat16, torch.float32


def replicas(rounding, storage, hook, steps=200):
    """Every rank has data, dropout and a global seed of its own."""
    rank = dist.get_rank()
    inner = nn.Sequential(*setups.model(FP32), nn.Dropout(0.1))
    opt = FairCastOptimizer(inner, torch.optim.AdamW, lr=1e-3, rounding=rounding, seed=5, storage=storage)
    dtype = getattr(torch, storage)
    ddp = DistributedDataParallel(opt.served_model)
    if hook:
        ddp.register_comm_hook(None, reduce_in_fp32)
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        ddp(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    after = torch.get_rng_state()
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        inner(torch.randn(4, 8).to(dtype))
    return setups.everything(opt), torch.equal(after, torch.get_rng_state()), vars(opt.cast_stats())


@pytest.mark.parametrize(
    ("rounding", "storage", "hook"),
    [
        *((rule, "bfloat16", False) for rule in RULES),
        ("stochastic", "float32", False),
        ("error_feedback", "bfloat16", True),
    ],
)
def test_replicas_stay_equal(rounding, storage, hook, ranks):
    """Field report 4: masters, served weights and accumulators equal bit for bit after 200 steps.

    The global random state is where data and dropout alone would have left it (field report 28).
    """
    first, second = ranks(2, replicas, rounding, storage, hook)
    assert_same(first[0], second[0])
    assert first[1] and second[1]
    assert first[2] == second[2]


def averaged(storage, hook):
    """A gradient that is another on every rank, what DDP makes of it, and the mean in float64."""
    inner = nn.Linear(512, 1, bias=False)
    nn.init.ones_(inner.weight)
    FairCastOptimizer(inner, torch.optim.SGD, lr=1.0, storage=storage)
    ddp = DistributedDataParallel(inner)
    if hook:
        ddp.register_comm_hook(None, reduce_in_fp32)
    every = torch.randn(dist.get_world_size(), 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    ddp(every[dist.get_rank()].to(inner.weight.dtype)[None]).sum().backward()
    return inner.weight.grad.flatten(), every.double().mean(0)


def test_gradients_are_reduced_in_the_parameters_dtype(ranks):
    """bf16 storage: bf16, with more than one rounding; by the hook one rounding; fp32 storage: fp32."""
    for gradient, mean in ranks(4, averaged, "bfloat16", False):
        assert gradient.dtype is BF16
        assert not torch.equal(gradient, mean.bfloat16())
        assert torch.allclose(gradient.double(), mean, atol=2**-6)
    for gradient, mean in ranks(4, averaged, "bfloat16", True):
        assert gradient.dtype is BF16
        assert torch.equal(gradient, mean.bfloat16())
    for gradient, mean in ranks(4, averaged, "float32", False):
        assert gradient.dtype is FP32
        assert torch.equal(gradient, mean.float())


def wrapped_first():
    """DDP around bf16 weights first, the optimizer on it then; DDP has made the replicas equal."""
    ddp = DistributedDataParallel(setups.model(BF16, seed=dist.get_rank()))
    opt = FairCastOptimizer(ddp, torch.optim.AdamW, lr=1e-3, seed=5)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(4, 8, generator=generator).bfloat16()).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    return setups.everything(opt), [name for name, _ in opt.named_masters()]


def test_ddp_first(ranks):
    """Names don't contain DDP's prefix, so checkpoints and keys are those of the plain model."""
    first, second = ranks(2, wrapped_first)
    assert_same(first, second)
    assert first[1][0] == "0.weight"
