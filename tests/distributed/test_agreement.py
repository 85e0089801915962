"""Ranks that would drift apart are named at construction, on all ranks."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fcoptim.lag
from fcoptim import FairCastOptimizer

from . import setups

OTHER = {
    "seed": ({"seed": 7}, r"rank 1 has another seed\b.*seed: \[(7|5)\]"),
    "rule": (
        {"rounding": "stochastic"},
        "rank 1 has another rounding rule",
    ),
    "lag": ({"lag": fcoptim.lag.Ema(3).options}, "rank 1 has another lag"),
    "lr": ({"lr": 2e-3}, "rank 1 has other options"),
    "optimizer": ({"optimizer": torch.optim.Adam}, "rank 1 has another optimizer"),
}


def constructed(how, options, odd):
    """Construct with options that one rank alone has; the error, or None."""
    chosen = options if dist.get_rank() == odd else {}
    made = setups.shard(setups.model(), how)
    arguments = {"lr": 1e-3, "seed": 5, **chosen}
    optimizer = arguments.pop("optimizer", torch.optim.AdamW)
    try:
        FairCastOptimizer(made, optimizer, **arguments)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", OTHER)
def test_other_arguments_are_named(name, ranks):
    options, message = OTHER[name]
    for said in ranks(2, constructed, "whole", options, 1):
        assert said is not None
        assert re.search(message, said)
        assert "process_group" in said


@pytest.mark.parametrize("how", ["fsdp", "hsdp", "fsdp_tp"])
def test_the_odd_one_of_four(how, ranks):
    """Over one mesh dimension or two every rank hears of the one that most others differ from."""
    for said in ranks(4, constructed, how, {"seed": 7}, 2):
        assert said is not None and "rank 2 has another seed" in said and "rank 0" not in said.split("On this rank")[0]


def other_models(case):
    rank = dist.get_rank()
    model = setups.model(torch.float32, seed=rank if case == "weights" else 0)
    if case == "parameters":
        model = nn.Sequential(*model, nn.Linear(1, 1)) if rank == 1 else model
    try:
        FairCastOptimizer(model, torch.optim.AdamW)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("case", "said"), [("weights", "other weights"), ("parameters", "another parameter list")])
def test_other_models_are_named(case, said, ranks):
    """Replicas that begin with other weights, which a broadcast into the served copy alone would not mend."""
    for text in ranks(2, other_models, case):
        assert text is not None and f"rank 1 has {said}" in text
        assert ("On this rank" in text) == (case == "parameters")


def apart(kind):
    """Ranks that train different models on purpose."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = {"none": None, "pairs": pairs[rank // 2], "wrong": "everyone"}[kind]
    model = setups.model(seed=rank // 2)
    try:
        FairCastOptimizer(model, torch.optim.AdamW, seed=rank // 2, process_group=group)
    except ValueError as error:
        return str(error)
    return None


def test_ranks_that_differ_on_purpose(ranks):
    """A process group limits the check to its ranks; None leaves it out."""
    assert ranks(4, apart, "pairs") == [None] * 4
    assert ranks(4, apart, "none") == [None] * 4
    assert all("process_group must be 'default'" in said for said in ranks(4, apart, "wrong"))
