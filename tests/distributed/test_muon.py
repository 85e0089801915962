"""Muon under FSDP2: each matrix is orthogonalised whole, whatever the shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fcoptim import FairCastOptimizer
from fcoptim.muon import Muon, sharded, update

from ..optimizer.helpers import assert_same
from . import setups

MATRICES = ["0.weight", "2.weight", "4.weight", "6.stack"]
OPTIONS = {
    "default": {},
    "polar_fp32": {"orthogonalize": "polar_express", "dtype": "float32", "scale": "spectral", "nesterov": False},
    "split": {"split": {"0.weight": [5, 8]}, "scale": "spectral", "maximize": True},
}


class Experts(nn.Module):
    """A stack of matrices beside plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(0)).bfloat16())

    def forward(self, x):
        return x


def stepped(how, options):
    """Three steps with given gradients, and how much each rank orthogonalised."""
    made = setups.shard(nn.Sequential(*setups.model(), Experts()), how)
    opt = FairCastOptimizer(made, Muon, lr=1e-2, muon=MATRICES, adamw="5.weight", seed=5, **options)
    sizes, original = [], update.orthogonalized

    def counting(direction, group):
        sizes.append(tuple(direction.shape))
        return original(direction, group)

    update.orthogonalized = counting
    try:
        setups.step_with_gradients(opt, range(3))
    finally:
        update.orthogonalized = original
    return setups.everything(opt), sizes


LAYOUTS = [("fsdp", 2), ("fsdp", 4), ("fsdp_dim1", 2), ("hsdp", 4), ("fsdp_tp", 4)]


@pytest.mark.parametrize(
    ("how", "world", "options"),
    [
        *((*layout, "default") for layout in LAYOUTS),
        ("fsdp", 2, "polar_fp32"),
        ("fsdp", 4, "split"),
        ("fsdp_tp", 4, "split"),
    ],
)
def test_equals_one_process(how, world, options, ranks):
    """Masters and served bits after three steps are those of one process."""
    expected, _ = ranks(1, stepped, "whole", OPTIONS[options])[0]
    for state, _ in ranks(world, stepped, how, OPTIONS[options]):
        assert_same(state, expected)


def test_work_is_spread(ranks):
    """Four ranks share three matrices: nobody orthogonalises two, and each is done once a step."""
    done = [sizes for _, sizes in ranks(4, stepped, "fsdp", {})]
    assert sorted(len(sizes) for sizes in done) == [0, 3, 3, 3]
    assert sorted({size for sizes in done for size in sizes}) == [(3, 12), (12, 13), (13, 8)]


def balanced(shapes):
    """The cost that each of so many owners gets."""
    group = {"matrices": "auto", "steps": 5}
    fake = [sharded.Shard(torch.empty(shape, device="meta"), torch.empty(0), 0, []) for shape in shapes]
    loads = [0] * 4
    for turn in sharded.rounds(fake, 4, group):
        for owner, shard in enumerate(turn):
            loads[owner] += sharded.cost(tuple(shard.param.shape), group)
    return loads


def test_rounds_balance_the_cost_of_a_real_model():
    """The matrices of SmolLM2-135M over 4 ranks: the busiest has at most 2% more to do than the mean."""
    layer = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    loads = balanced(layer * 30)
    assert max(loads) <= 1.02 * sum(loads) / 4


def restored(how):
    """Muon's state under DCP's rules: momentum buffers are DTensors placed like the parameters."""
    inner = setups.shard(setups.model(), how)
    opt = FairCastOptimizer(inner, Muon, lr=1e-2, muon="*.weight", seed=5)
    setups.step_with_gradients(opt, range(1))
    assert dist.is_initialized()
    return {
        name: opt.state[param]["momentum_buffer"].placements == param.placements
        for name, param in inner.named_parameters()
        if name.endswith("weight")
    }


def test_momentum_is_sharded(ranks):
    assert all(all(found.values()) and len(found) == 4 for found in ranks(2, restored, "fsdp"))
