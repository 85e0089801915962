"""The CPU back end against the reference, bit for bit, over layouts, sizes, rules and thread counts."""

import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcoptim.cast import cast_, cpu, parameter_key, reference, start_accumulator_
from fcoptim.cast.bits import stream_keys

from .cases import CODES, CONTIGUOUS, STRIDED, Case, any_case, check

LAYOUTS = {**CONTIGUOUS, **STRIDED}
STARTS = [0, 1, 1500, (1 << 33) - 1000, (1 << 45) + 77]


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
def test_layouts(layout, code, wide, counted):
    """Every layout, at starts inside a tile and beyond 32 bits; nothing between the elements is touched."""
    check(cpu.cast_jobs, [Case(layout, start, wide) for start in STARTS], code, "cpu", counted=counted)


@settings(max_examples=150, deadline=None)
@given(cases=st.lists(any_case(), max_size=4), code=st.sampled_from(sorted(CODES.values())), counted=st.booleans())
def test_any_cases(cases, code, counted):
    check(cpu.cast_jobs, cases, code, "cpu", counted=counted)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_threads_change_nothing(rounding, threads):
    """Mixed sizes, shared out over any number of threads, give the bits of one thread."""
    sizes = [1, 300_000, 0, 5, 2048, 77_777, 2049, 150_000]
    masters = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    keys = [parameter_key(0, str(number)) for number in range(len(sizes))]

    def run() -> list[torch.Tensor]:
        served = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
        state = [torch.zeros(size, dtype=torch.int16) for size in sizes]
        changed = torch.zeros(len(sizes), dtype=torch.int64)
        cast_(
            served, masters, rounding=rounding, key=keys, count=[1] * len(sizes), error_feedback=state, changed=changed
        )
        return [*served, *state, changed]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run()
        torch.set_num_threads(threads)
        found = run()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_calls_from_several_threads():
    """Casts that run at the same time don't disturb each other."""
    masters = [torch.randn(400_000, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    expected = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    found = [torch.empty_like(served) for served in expected]
    for served, master in zip(expected, masters):
        cast_(served, master, rounding="stochastic", key=3, count=5)

    def work(number: int) -> None:
        for _ in range(20):
            cast_(found[number], masters[number], rounding="stochastic", key=3, count=5)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_cast():
    """Threads don't survive a fork; the child makes its own. Torch's own do hang there: numpy compares."""
    master = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    served = torch.empty_like(master, dtype=torch.bfloat16)
    cast_(served, master, rounding="dither", key=1, count=0)
    child = os.fork()
    if child == 0:
        again = torch.empty(1 << 20, dtype=torch.bfloat16)
        cast_(again, master, rounding="dither", key=1, count=0)
        same = again.view(torch.int16).numpy().tobytes() == served.view(torch.int16).numpy().tobytes()
        os._exit(0 if same else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("start", [0, 1, 2047, 2048, 5000, (1 << 33) - 3000, (1 << 40) + 7])
@pytest.mark.parametrize("numel", [0, 1, 1023, 2047, 2048, 2049, 300_001])
def test_accumulators_start_as_the_reference_says(numel, start, threads):
    """Whole tiles by the kernel, the rest by the reference, also where a word's number leaves 32 bits."""
    before, key = torch.get_num_threads(), parameter_key(3, "w")
    torch.set_num_threads(threads)
    try:
        found = start_accumulator_(torch.empty(numel, dtype=torch.int16), key=key, start=start)
    finally:
        torch.set_num_threads(before)
    expected = torch.empty(numel, dtype=torch.int16)
    reference.fill_dither_(expected, stream_keys(key, 0), start)
    assert torch.equal(found, expected)
