"""LagMeter over shards: the same figures on every rank, and those of one process where everything is watched."""

import pytest

from fcoptim.meter import LagMeter

from . import setups


def metered(how, rounding):
    _, opt = setups.built(how, rounding)
    meter = LagMeter(opt, sample=1 << 20, per_layer=True)
    found = []
    for step in range(4):
        setups.step_with_gradients(opt, range(step, step + 1))
        found.append(meter.update())
    return found


@pytest.mark.parametrize(("how", "world"), [("fsdp", 4), ("hsdp", 4)])
def test_meter_is_global(how, world, ranks):
    """With a sample larger than the model: no layer is missing on ranks that hold none of it."""
    expected = ranks(1, metered, "whole", "nearest")[0]
    results = ranks(world, metered, how, "nearest")
    for found, alone in zip(results[0], expected):
        exact = {name: value for name, value in alone.items() if "lag" not in name and "recent" not in name}
        assert found.keys() == alone.keys()
        assert {name: found[name] for name in exact} == pytest.approx(exact, rel=1e-6)
    assert all(result == results[0] for result in results)
