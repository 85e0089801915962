"""What is served does not depend on how many ranks there are, nor on how they share a parameter."""

import pytest
import torch

import fcoptim.lag
from fcoptim.cast.rules import RULES

from ..optimizer.helpers import assert_same
from . import setups

LAYOUTS = [
    ("fsdp", 2, "bfloat16"),
    ("fsdp", 4, "bfloat16"),
    ("fsdp", 2, "float32"),
    ("fsdp_dim1", 2, "bfloat16"),
    ("fsdp_dim1", 4, "float32"),
    ("hsdp", 4, "bfloat16"),
    ("tp", 2, "bfloat16"),
    ("fsdp_tp", 4, "bfloat16"),
    ("replicate", 2, "float32"),
]
LAGS = {
    "ema": fcoptim.lag.Ema(3, pull=0.1),
    "delay": fcoptim.lag.Delay(2),
    "delay_bf16": fcoptim.lag.Delay(2, dtype="bfloat16"),
    "dead_zone": fcoptim.lag.DeadZone(0.7),
}


def with_gradients(how: str, storage: str, steps: int = 3):
    """Steps with given gradients under every rule and every lag."""
    dtype = getattr(torch, storage)
    out = {}
    for rounding in RULES:
        _, opt = setups.built(how, rounding, dtype, storage=storage)
        setups.step_with_gradients(opt, range(steps))
        out[rounding] = setups.everything(opt)
        out[f"{rounding} stats"] = vars(opt.cast_stats())
    for name, lag in LAGS.items():
        rounding = "error_feedback" if name == "dead_zone" else "stochastic"
        _, opt = setups.built(how, rounding, dtype, lag=lag.options, storage=storage)
        setups.step_with_gradients(opt, range(steps))
        out[name] = setups.everything(opt)
    return out


@pytest.fixture(scope="module")
def alone(ranks):
    """The run of one process, which storage does not change."""
    return ranks(1, with_gradients, "whole", "bfloat16")[0]


@pytest.mark.parametrize(("how", "world", "storage"), LAYOUTS)
def test_every_layout_serves_the_same(how, world, storage, alone, ranks):
    """Field report 24: rows not divisible by the ranks; masters, served bits, accumulators and lags, all rules.

    ``cast_stats`` is the same on every rank, and the same as one process says.
    """
    for result in ranks(world, with_gradients, how, storage):
        for key, value in alone.items():
            if key.endswith("stats"):
                assert result[key] == pytest.approx(value, rel=1e-12), key
            elif key == "dead_zone":
                # What it remembers is the served weights, in their storage's dtype.
                assert_same({k: v.float() for k, v in result[key].items()}, {k: v.float() for k, v in value.items()})
            else:
                assert_same(result[key], value, key)
