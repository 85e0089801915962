"""What each lag serves, against its definition computed by hand, under every rounding rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcoptim.lag import DeadZone, Delay, Ema
from tests.optimizer.helpers import equal_bits

from .helpers import LR, Caster, gradient, made, served, step, trajectory, ulp

STEPS = 14


def served_steps(lag, rounding: str, storage: str = "bfloat16", steps: int = STEPS):
    """Train; return the served weights after 0, 1, ... steps, as bf16."""
    model, opt = made(lag, rounding, storage=storage)
    out = [served(model)]
    for number in range(steps):
        step(opt, model, number)
        out.append(served(model))
    return [{name: value.bfloat16() for name, value in weights.items()} for weights in out], opt


def same(a: dict, b: dict) -> bool:
    return all(equal_bits(a[name], b[name]) for name in a)


def averages(masters: list[dict], steps: float) -> list[dict]:
    """The moving average by its formula, in float64."""
    average = {name: value.double() for name, value in masters[0].items()}
    out = [average]
    for current in masters[1:]:
        average = {name: value + (current[name].double() - value) / steps for name, value in average.items()}
        out.append(average)
    return out


def test_average_is_the_formula(rounding, storage):
    """The buffer follows the formula to fp32 precision, and what is served is the rule's cast of the buffer."""
    model, opt = made(Ema(5), rounding, storage=storage)
    masters = trajectory(STEPS)
    casters = {name: Caster(name, m.shape, rounding) for name, m in masters[0].items()}
    for name, caster in casters.items():
        caster(masters[0][name])
    for number in range(STEPS):
        step(opt, model, number)
        for name, param in model.named_parameters():
            buffer, expected = opt.state[param]["lag"], averages(masters, 5)[number + 1][name]
            larger = torch.maximum(expected.abs(), masters[number + 1][name].abs())
            assert buffer.dtype is torch.float32
            assert ((buffer.double() - expected).abs() <= 2.0**-16 * ulp(larger)).all()
            assert equal_bits(param.detach().bfloat16(), casters[name](buffer)), (name, number)


def test_first_step_of_the_average():
    """After one step it has moved by a fraction 1 / steps of what the master moved, with no correction of a start."""
    model, opt = made(Ema(8))
    start = {name: master.clone() for name, master in opt.named_masters()}
    step(opt, model, 0)
    for name, master in opt.named_masters():
        param = dict(model.named_parameters())[name]
        expected = start[name].double() + (master.double() - start[name].double()) / 8
        assert ((opt.state[param]["lag"].double() - expected).abs() <= 2.0**-16 * ulp(expected) * 0.51).all()
        assert not torch.equal(opt.state[param]["lag"], start[name])


@pytest.mark.parametrize("steps", [1e4, 1e6])
def test_thousand_updates_at_a_tiny_rate(steps):
    """Each update is a fraction of the buffer's last bit or a few of them; together they are the analytic amount."""
    lag, entry = Ema(steps), {}
    start = torch.linspace(0.5, 4, 4096)
    lag.start(entry, start, start.bfloat16())
    master = start * (1 + 2.0**-8)
    for _ in range(1000):
        lag.advance(entry, master)
    moved = (entry["lag"].double() + entry["lag_rest"].double() - start.double()) / (master - start).double()
    expected = -math.expm1(1000 * math.log1p(-1 / steps))
    assert (moved / expected - 1).abs().max() < 0.02
    visible = (entry["lag"].double() - start.double()) / (master - start).double()
    assert abs(visible.mean() / expected - 1) < 0.01


@pytest.mark.parametrize("steps", [2.5, 10, 1000])
@pytest.mark.parametrize("side", [-1, 1])
def test_distance_to_a_fixed_master_shrinks(steps, side):
    """Field report 21: the average nears a fixed master at every step, by the stated rate and never past it."""
    lag, entry = Ema(steps), {}
    start = torch.linspace(0.25, 2, 512)
    lag.start(entry, start, start.bfloat16())
    master = start + side * 0.3
    distance = (master - entry["lag"]).double() * side
    for _ in range(60):
        lag.advance(entry, master)
        total = entry["lag"].double() + entry["lag_rest"].double()
        now = (master.double() - total) * side
        assert (now < distance).all()
        unit = 2.0**-16 * ulp(master)
        assert ((now - distance * (1 - 1 / steps)).abs() <= 0.01 * unit + 1e-6 * distance).all()
        assert (now > -unit).all()
        distance = now


def test_served_average_of_a_drift_lies_steps_behind():
    """Under a constant drift of the master the average comes to lie steps - 1 steps behind."""
    lag, entry = Ema(20), {}
    master = torch.full((8,), 1.0)
    lag.start(entry, master, master.bfloat16())
    for number in range(1, 400):
        lag.advance(entry, 1.0 + number * torch.full((8,), 2.0**-12))
    behind = (399 - (entry["lag"] - 1.0) * 2**12).mean()
    assert abs(float(behind) - 19) < 0.01


def test_average_over_one_step_is_the_master(rounding):
    assert all(same(a, b) for a, b in zip(served_steps(Ema(1), rounding)[0], served_steps(None, rounding)[0]))


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_delay_casts_the_master_of_that_many_steps_ago(steps, rounding, storage):
    """What is served is the rule's cast, by its own count, of the master of ``steps`` steps ago."""
    masters = trajectory(STEPS)
    found, _ = served_steps(Delay(steps), rounding, storage)
    for name in masters[0]:
        caster = Caster(name, masters[0][name].shape, rounding)
        for number in range(STEPS + 1):
            assert equal_bits(found[number][name], caster(masters[max(0, number - steps)][name])), (name, number)


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_delay_in_bf16_serves_what_was_served_then(steps, rounding, storage):
    """A ring of bf16 holds what the rule made of each master: the undelayed run's served weights, later."""
    plain, _ = served_steps(None, rounding)
    found, _ = served_steps(Delay(steps, dtype="bfloat16"), rounding, storage)
    for number in range(STEPS + 1):
        assert same(found[number], plain[max(0, number - steps)]), number


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("other", [2, 5, 8, 0])
def test_delay_is_rescheduled_while_training(other, dtype):
    """A longer delay keeps what it knows and waits for more; a shorter one takes effect at the next step."""
    model, opt = made(Delay(5, dtype=dtype), "dither")
    plain, _ = served_steps(None, "dither", steps=24)
    for number in range(24):
        if number == 12:
            opt.lag.steps = other
        step(opt, model, number)
        known = 12 - 5 if number >= 12 else 0
        delay = other if number >= 12 else 5
        assert same(served(model), plain[max(known, number + 1 - delay)]), number


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
@pytest.mark.parametrize("ulps", [0, 0.5, 1.5, 4])
def test_dead_zone_holds_and_casts(ulps, rounding, storage):
    """A weight stays until its master is ``ulps`` ulps away, then it is the rule's cast at that step's count."""
    masters = trajectory(STEPS)
    found, opt = served_steps(DeadZone(ulps), rounding, storage)
    for name in masters[0]:
        caster = Caster(name, masters[0][name].shape, rounding)
        held = caster(masters[0][name])
        for number in range(1, STEPS + 1):
            master = masters[number][name]
            far = (master.double() - held.double()).abs() >= ulps * ulp(master)
            before = caster.accumulator.clone()
            held = torch.where(far, caster(master), held)
            caster.accumulator = torch.where(far, caster.accumulator, before)
            assert equal_bits(found[number][name], held), (name, number)
    if rounding == "error_feedback":
        param = opt.param_groups[0]["params"][-1]
        assert torch.equal(opt.state[param]["error_feedback"], caster.accumulator)


def test_dead_zone_of_half_an_ulp_is_nearest(storage):
    """The lag that is hidden in rounding to nearest, made explicit: nothing is left of the difference."""
    explicit, _ = served_steps(DeadZone(0.5), "nearest", storage, steps=60)
    plain, _ = served_steps(None, "nearest", storage, steps=60)
    assert all(same(a, b) for a, b in zip(explicit, plain))
    assert not same(plain[0], plain[-1])


SPECIAL = [0, 1, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x0080, 0x007F, 0x3F80, 0x3F7F, 0x4000, 0x3FFF]
WORDS = st.one_of(st.integers(0, 2**16 - 1), st.sampled_from([s | sign for s in SPECIAL for sign in (0, 0x8000)]))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(WORDS, st.integers(-3, 3), st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])), min_size=1)
)
def test_dead_zone_of_half_an_ulp_is_nearest_for_every_word(cases):
    """Field report 8 in spirit: ties, powers of two, zeros' signs, subnormals, infinities and NaNs of every payload."""
    held = torch.tensor([word - 2**16 if word >= 2**15 else word for word, _, _ in cases], dtype=torch.int16)
    near = [((word + shift) % 2**16) << 16 | low for word, shift, low in cases]
    master = torch.tensor([w - 2**32 if w >= 2**31 else w for w in near], dtype=torch.int32).view(torch.float32)
    plain = Caster("w", master.shape, "nearest")(master)
    merged = held.clone().view(torch.bfloat16)
    DeadZone(0.5).merge(merged, master, plain)
    assert equal_bits(merged, plain)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    st.floats(0, 8, width=16),
    st.sampled_from(["nearest", "stochastic", "dither"]),
)
def test_served_stays_within_the_zone(values, ulps, rounding):
    """After a cast a weight is within the zone of its master, or a neighbour of it on the grid."""
    master = torch.tensor(values)
    held = torch.tensor(values[::-1]).bfloat16()
    DeadZone(ulps).merge(held, master, Caster("w", master.shape, rounding)(master))
    assert ((held.double() - master.double()).abs() <= max(ulps, 1) * ulp(master)).all()


def test_pull_is_decoupled(lag):
    """Before the lag is updated the master moves toward its lagged copy by lr x pull; 0.4 of the way here."""
    lag.pull = 1.6
    model, opt = made(lag)
    for number in range(6):
        before = {name: master.clone() for name, master in opt.named_masters()}
        lagged = {member.name: member.target.clone() for member in opt._flat()}
        step(opt, model, number)
        for name, master in opt.named_masters():
            stepped = before[name].add(gradient(name, master.shape, number), alpha=-LR)
            assert torch.equal(master, torch.lerp(stepped, lagged[name], LR * 1.6)), (name, number)


def test_pull_brings_the_master_to_a_fixed_copy():
    """Field report 21: with no gradient to speak of, the distance of master and lagged copy shrinks at every step."""
    model, opt = made(Delay(50, pull=0.4))
    step(opt, model, 0)
    start = {name: param.detach().clone() for name, param in trajectory(0)[0].items()}
    distance = {name: (master - start[name]).abs() for name, master in opt.named_masters()}
    for _ in range(10):
        for param in model.parameters():
            param.grad = torch.zeros(param.shape)
        opt.step()
        for name, master in opt.named_masters():
            now = (master - start[name]).abs()
            assert torch.allclose(now, distance[name] * (1 - 0.4 * LR), rtol=0, atol=2e-7 * 4)
            distance[name] = now
