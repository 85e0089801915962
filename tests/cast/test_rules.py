"""The rounding rules' algebra, proved on the reference by enumeration where that is possible."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcoptim.cast import RULES, cast_, parameter_key, replay_, start_accumulator_
from fcoptim.cast.bits import TILE, dither_bits, stream_keys
from fcoptim.cast.reference import round_word, split_word

from .cases import HUGE_WORDS, NAN_WORDS, SPECIAL_WORDS, from_words, to_words

UNBIASED = [name for name, rule in RULES.items() if rule.unbiased]
# Subnormal, smallest normal, 1, large, one below the largest: bf16 bits with both kinds of last bit.
UPPER_HALVES = [0x0000, 0x0001, 0x0080, 0x3F80, 0x3F81, 0x7E35, 0x7F7E]
KEY = parameter_key(7, "layer.weight")


def cast(master: torch.Tensor, rounding: str, count: int = 0, dtype=torch.bfloat16, key: int = KEY, **more):
    served = torch.zeros_like(master, dtype=dtype)
    cast_(served, master, rounding=rounding, key=key, count=count, **more)
    return served


def accumulators(master: torch.Tensor, key: int = KEY) -> torch.Tensor:
    return start_accumulator_(torch.zeros_like(master, dtype=torch.int16), key=key)


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("hi", UPPER_HALVES)
def test_round_ups_equal_the_fraction_exactly(hi, sign):
    """For all 65,536 lower halves, exactly ``lo`` of the 65,536 dithers carry: the mean is the master.

    A carry happens from ``2**16 - lo`` on and nowhere below; so checking both sides of that bound, for each
    lower half, counts them all.
    """
    lo = torch.arange(1 << 16)
    upper = torch.full_like(lo, hi | sign)
    first_carry = (1 << 16) - lo
    at = round_word(upper, lo, first_carry.clamp(max=0xFFFF), saturate=True)
    below = round_word(upper, lo, first_carry - 1, saturate=True)
    assert torch.equal(below, upper)
    assert torch.equal(at[1:], upper[1:] + 1)  # lo = 0 has no dither that carries


@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("lo", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 12345])
def test_round_ups_by_enumeration(lo, sign):
    """The same by counting: all dithers against one lower half."""
    d = torch.arange(1 << 16)
    hi = torch.full_like(d, 0x3F80 | sign)
    ups = (round_word(hi, torch.full_like(d, lo), d, saturate=True) != hi).sum()
    assert int(ups) == lo


def test_carry_is_monotone_in_the_dither():
    """So one bound per lower half, as in the first test, does count every dither."""
    d = torch.arange(1 << 16)
    for lo in (1, 77, 0x8000, 0xFFFE):
        served = round_word(torch.full_like(d, 0x4000), torch.full_like(d, lo), d, saturate=True)
        assert bool((served.diff() >= 0).all())


def test_nearest_is_torch_bfloat16():
    """All upper halves with the lower halves around a tie, NaNs aside: equal to torch, overflow included."""
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    words = (torch.arange(1 << 16)[:, None] << 16) | lows
    values = from_words(words.flatten())
    values = values[~values.isnan()]
    assert torch.equal(to_words(cast(values, "nearest")), to_words(values.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", RULES)
def test_special_values(rounding, dtype):
    """Field report 1: 1000 casts keep class and sign, grid values never move, only the two neighbours appear."""
    master = from_words(SPECIAL_WORDS)
    word = to_words(master)
    hi, lo = split_word(master)
    grid = (lo == 0) & ~master.isnan()
    state = {"error_feedback": accumulators(master)} if rounding == "error_feedback" else {}
    for count in range(1000):
        served = cast(master, rounding, count, dtype, **state)
        bits = to_words(served) if dtype is torch.bfloat16 else to_words(served) >> 16
        assert torch.equal(bits >> 15, word >> 31), "a sign changed"
        assert torch.equal(served.isnan(), master.isnan())
        assert torch.equal(served.isinf() & ~master.isinf(), torch.zeros_like(grid)) or rounding == "nearest"
        assert bool(served[master.isinf()].isinf().all())
        assert torch.equal(bits[grid], hi[grid])
        finite = master.isfinite()
        assert bool(((bits == hi) | (bits == hi + 1))[finite].all())
    if dtype is torch.float32:
        assert torch.equal(to_words(served) & 0xFFFF, torch.zeros_like(word))


@pytest.mark.parametrize("rounding", UNBIASED)
def test_finite_masters_stay_finite(rounding):
    """Field report 1: beyond the largest bf16 an unbiased rule saturates; nearest follows torch to infinity."""
    master = from_words(HUGE_WORDS).repeat_interleave(1000)
    state = {"error_feedback": accumulators(master)} if rounding == "error_feedback" else {}
    assert bool(cast(master, rounding, **state).isfinite().all())
    assert bool(cast(from_words([0x7F7FFFFF]), "nearest").isinf().all())


def test_nonfinite_masters_freeze_their_accumulators():
    master = torch.cat([from_words(NAN_WORDS), torch.tensor([math.inf, -math.inf])])
    state = accumulators(master)
    before = state.clone()
    for count in range(10):
        cast(master, "error_feedback", count, error_feedback=state)
    assert torch.equal(state, before)


@pytest.mark.parametrize("rounding", UNBIASED)
def test_quarter_of_an_ulp(rounding):
    """Field report 3: 65,536 masters a quarter ulp above the grid: a quarter goes up, stochastic with a new set."""
    n = 65_536
    master = torch.full((n,), 1.0 + 2.0**-9)
    state = {"error_feedback": accumulators(master)} if rounding == "error_feedback" else {}
    first, second = (cast(master, rounding, count, **state) > 1 for count in (0, 1))
    five_sigma = 5 * math.sqrt(n * 0.25 * 0.75)
    for ups in (first, second):
        assert abs(int(ups.sum()) - n / 4) < five_sigma
    both = int((first & second).sum())
    if rounding == "stochastic":
        assert abs(both - n / 16) < 5 * math.sqrt(n / 16)
    elif rounding == "dither":
        assert torch.equal(first, second)
    else:
        assert both == 0  # what went up has spent its remainder


@pytest.mark.parametrize("rounding", UNBIASED)
def test_slow_decay_is_served(rounding):
    """Field report 2: masters that shrink by 1e-4 of themselves a step; the served mean follows within 5 sigma."""
    n = 65_536
    master = torch.ones(n)
    state = {"error_feedback": accumulators(master)} if rounding == "error_feedback" else {}
    for count in range(1000):
        master.mul_(1 - 1e-3 * 0.1)
        if count % 50 == 49 or rounding == "error_feedback":
            served = cast(master, rounding, count, **state)
    ulp = 2.0**-8  # of numbers in [0.5, 1)
    assert abs(float(master[0]) - 0.9048) < 1e-4
    assert abs(float(served.double().mean()) - float(master.double().mean())) < 5 * ulp * 0.5 / math.sqrt(n)


@settings(max_examples=40, deadline=None)
@given(
    start=st.floats(0.125, 128.0, width=32),
    drift=st.floats(-3e-5, 3e-5),
    seed=st.integers(0, 2**32 - 1),
)
def test_error_feedback_tracks_a_drifting_mean(start, drift, seed):
    """After T casts the served sum is within one ulp of the masters' sum, plus one for each binade crossed."""
    steps = 64
    master = torch.full((8,), start)
    key = parameter_key(seed, "w")
    state = accumulators(master, key)
    error = torch.zeros(8, dtype=torch.float64)
    largest_ulp, crossings = 0.0, 0
    exponent = int(torch.frexp(master[0]).exponent)
    for count in range(steps):
        master = master * (1 + drift)
        error += cast(master, "error_feedback", count, key=key, error_feedback=state).double() - master.double()
        now = int(torch.frexp(master[0]).exponent)
        crossings += now != exponent
        exponent = now
        largest_ulp = max(largest_ulp, 2.0 ** (now - 8))
    assert float(error.abs().max()) < largest_ulp * (1 + crossings)


def test_crossing_a_power_of_two_costs_at_most_one_ulp_once():
    """The accumulator keeps its number while the ulp doubles: the error of the sum jumps once and stays bounded."""
    master = torch.full((4096,), 0.9995)
    state = accumulators(master)
    error = torch.zeros(4096, dtype=torch.float64)
    seen = []
    for count in range(400):
        master = master + 5e-6
        error += cast(master, "error_feedback", count, error_feedback=state).double() - master.double()
        seen.append(float(error.abs().max()))
    assert float(master[0]) > 1.0
    small, large = 2.0**-8, 2.0**-7
    assert max(seen[:50]) < small
    assert max(seen) < small + large


def test_equal_accumulators_start_late_and_hashed_ones_do_not():
    """With every accumulator at half, a steady drift is served late; started at the hash it is served at once."""
    base = torch.full((20_000,), 1.0)
    served = {}
    for name in ("equal", "hashed"):
        state = accumulators(base) if name == "hashed" else torch.full((20_000,), -0x8000, dtype=torch.int16)
        for count in range(10):
            master = base + (count + 1) * 2.0**-7 * 0.01
            served[name] = cast(master, "error_feedback", count, error_feedback=state)
    moved = float(master[0]) - 1.0
    tracked = {name: (float(value.double().mean()) - 1.0) / moved for name, value in served.items()}
    assert abs(tracked["hashed"] - 1) < 0.35
    assert tracked["equal"] == 0.0 or tracked["equal"] > 3.0  # all at once, never in step


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
    rounding=st.sampled_from(sorted(RULES)),
    count=st.integers(0, 1000),
    seed=st.integers(0, 2**63),
)
def test_replay_gives_the_last_cast(words, rounding, count, seed):
    """Served weights are a function of masters, accumulators, key and count, whatever the bits."""
    master = from_words([*words, *SPECIAL_WORDS])
    key = parameter_key(seed, "w")
    state = accumulators(master, key)
    more = {"error_feedback": state} if rounding == "error_feedback" else {}
    served = cast(master, rounding, count, key=key, **more)
    kept = state.clone()
    again = torch.empty_like(served)
    replay_(again, master, rounding=rounding, key=key, count=count, error_feedback=state)
    assert torch.equal(to_words(again), to_words(served))
    assert torch.equal(state, kept)


@pytest.mark.parametrize("rounding", RULES)
@pytest.mark.parametrize("cuts", [(0, 5000), (0, 1, 5000), (0, 700, 2048, 2049, 4100, 5000)])
def test_pieces_equal_the_whole(rounding, cuts):
    """Casting pieces by their ``start`` in the whole parameter gives the whole parameter's bits."""
    master = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    whole_state, state = accumulators(master), torch.zeros(5000, dtype=torch.int16)
    whole = cast(master, rounding, 3, **({"error_feedback": whole_state} if rounding == "error_feedback" else {}))
    pieces = []
    for first, last in itertools.pairwise(cuts):
        piece = start_accumulator_(state[first:last], key=KEY, start=first)
        more = {"error_feedback": piece} if rounding == "error_feedback" else {}
        pieces.append(cast(master[first:last], rounding, 3, start=first, **more))
    assert torch.equal(to_words(torch.cat(pieces)), to_words(whole))
    assert torch.equal(state, whole_state) or rounding != "error_feedback"


def test_dither_is_the_stochastic_rule_standing_still():
    master = torch.randn(3 * TILE, generator=torch.Generator().manual_seed(1))
    still = [cast(master, "dither", count) for count in (0, 1, 99)]
    assert torch.equal(still[0], still[1]) and torch.equal(still[0], still[2])
    assert torch.equal(still[0], cast(master, "stochastic", 0))
    assert not torch.equal(still[0], cast(master, "stochastic", 1))


def test_accumulators_start_at_the_dither():
    a = accumulators(torch.zeros(5000))
    expected = dither_bits(stream_keys(KEY, 0), torch.arange(5000))
    assert torch.equal(to_words(a), expected)
