"""What is served does not depend on how many ranks there are, nor on how they share a parameter."""

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

import fcoptim.lag
from fcoptim.cast.rules import RULES
from fcoptim.distributed import shards

from ..optimizer.helpers import assert_same
from . import setups

LAYOUTS = [  # how, ranks, storage
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


def toggled(how):
    """Lags switched on, changed and off while training."""
    _, opt = setups.built(how, "error_feedback")
    out = []
    for first, lag in enumerate((None, fcoptim.lag.Delay(1), fcoptim.lag.Delay(3), fcoptim.lag.Ema(2), None)):
        opt.lag = lag
        setups.step_with_gradients(opt, range(2 * first, 2 * first + 2))
        out.append(setups.everything(opt))
    return out


def test_lags_change_while_training(ranks):
    expected = ranks(1, toggled, "whole")[0]
    for result in ranks(4, toggled, "fsdp_tp"):
        assert_same(result, expected)


def exported(how, rounding):
    """An Exporter on fp32 shards that move, and its accumulators."""
    made = setups.shard(setups.model(torch.float32), how)
    export = fcoptim.Exporter(rounding=rounding, seed=3)
    for step in range(3):
        with torch.no_grad():
            for name, param in made.named_parameters():
                param.add_(shards.placed_like(setups.gradient(name, param.shape, step).float(), param))
        state = export(made.state_dict())
    assert all(value.dtype is torch.bfloat16 for value in state.values())
    out = {name: setups.full(value) for name, value in state.items()}
    return out, {name: setups.full(value) for name, value in export.state_dict()["error_feedback"].items()}


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_exporter_on_shards(rounding, ranks):
    """For engines that keep fp32 DTensors themselves: the bits are those of the whole."""
    expected = ranks(1, exported, "whole", rounding)[0]
    for result in ranks(2, exported, "fsdp", rounding):
        assert_same(result, expected)


def refused():
    param = setups.shard(setups.model(torch.float32), "fsdp")[0].weight.detach()
    with pytest.raises(TypeError, match="served is a DTensor; pass its local part"):
        fcoptim.cast_(param.bfloat16(), param, rounding="dither", key=1, count=0)
    partial = DTensor.from_local(torch.zeros(3), param.device_mesh, [Partial()])
    with pytest.raises(ValueError, match="can't have the placement"):
        fcoptim.FairCastOptimizer([("w", torch.nn.Parameter(partial))], torch.optim.SGD)
    wrapped = FullyShardedDataParallel(setups.model(torch.float32), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP1"):
        fcoptim.FairCastOptimizer(wrapped, torch.optim.SGD)
    return True


def test_what_has_no_place_is_refused(ranks):
    """DTensors in the bare cast, placements without final values, and FSDP1."""
    assert all(ranks(2, refused))


def partly_frozen(how, storage):
    made = setups.model(getattr(torch, storage))
    with torch.no_grad():
        made[2].weight.mul_(1 + 2.0**-7)  # off the grid where storage is fp32
    made[2].weight.requires_grad_(False)
    made = setups.shard(made, how)
    opt = fcoptim.FairCastOptimizer(made, torch.optim.AdamW, lr=1e-3, seed=5, storage=storage)
    setups.step_with_gradients(opt, range(2))
    return {name: setups.full(value) for name, value in opt.served_state_dict().items()}, setups.full(
        made[2].weight
    ).float()


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_frozen_parameters_are_rounded_once(storage, ranks):
    expected = ranks(1, partly_frozen, "whole", storage)[0]
    for result in ranks(2, partly_frozen, "fsdp", storage):
        assert_same(result, expected)
