"""The GPU kernel against the reference, bit for bit, run by Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET while it is imported, so these tests need a process of their own:
``test_gpu_interpret.py`` starts it. By hand: ``TRITON_INTERPRET=1 pytest tests/cast/gpu_interpreted.py``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget

from fcoptim.cast import bits, gpu
from fcoptim.cast.rules import ACCUMULATED, HASHED, NEAREST

from .cases import CODES, CONTIGUOUS, STRIDED, Case, Layout, alike, any_case, dense, prepare
from .cases import check as check_back_end
from .runs import SHARDS
from .runs import check as check_runs

check = functools.partial(check_back_end, gpu.cast_jobs)
codes = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


@codes
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layouts", [CONTIGUOUS, STRIDED], ids=["contiguous", "strided"])
def test_layouts_in_one_call(code: int, wide: bool, layouts: dict[str, Layout]) -> None:
    check([Case(layout, 0, wide) for layout in layouts.values()], code, "cpu", counted=not wide)


@codes
@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
def test_everything_mixed_in_one_call(code: int, counted: bool) -> None:
    layouts = [CONTIGUOUS["whole tiles"], STRIDED["three ways"], CONTIGUOUS["empty"], CONTIGUOUS["cut tile"]]
    starts = [8, 2047, 5, 2048]
    cases = [
        Case(layout, start, number % 2 == 0, (number * 0x1234567, 0xFFFFFFFF - number))
        for number, (layout, start) in enumerate(zip(layouts, starts))
    ]
    check(cases, code, "cpu", counted=counted)


@pytest.mark.parametrize("start", [1, 8, 2040, 2047, 2048, 4096 * 7 + 5])
def test_shards_begin_anywhere(start: int) -> None:
    """A shard's first tile may be cut, and its later tiles lie at 16 bytes or not."""
    views = [dense((4100,), offset=start % 8) for _ in range(3)]
    aligned, unaligned = Layout((4100,), *views), Layout((4100,), *views[:2], dense((4100,), offset=start % 8 + 1))
    for code in (HASHED, ACCUMULATED):
        check([Case(aligned, start), Case(unaligned, start)], code, "cpu", counted=False)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_shards_of_several_runs(wide: bool, shard: str) -> None:
    check_runs(gpu.cast_jobs, HASHED, shard, wide)


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_alignment_is_claimed_where_all_tiles_have_it(wide: bool) -> None:
    """The hint that makes accesses 128 bits wide must be true, or a device faults."""
    claims = []
    for start in range(0, 2060, 11):
        offsets = (start % 3 * 8 + start % 8, start % 7 + start % 4, start % 8 * (start % 5 != 0))
        layout = Layout((4100,), *(dense((4100,), offset=offset) for offset in offsets))
        job = prepare([Case(layout, start, wide)], ACCUMULATED)[0].job
        tensors = (job.served, job.master, job.accumulator)
        first = -(-start // bits.TILE) * bits.TILE - start
        begins = [tensor[first:].data_ptr() % 16 for tensor in tensors if tensor is not None]
        claim = bool(gpu._flags(gpu._place(job)) & gpu.kernel.ALIGNED)
        assert claim == (begins == [0, 0, 0])
        claims.append(claim)
    assert 10 < sum(claims) < len(claims) - 10


@pytest.mark.parametrize("start", [2**31 - 100, 2**33 - 1000, 2**33, 2**34 + 2**33 - 8, 2**45 + 7, 2**61 - 3000])
def test_words_beyond_32_bits(start: int) -> None:
    """Rule 4 of bits.py: the word number's high half goes into both keys; word 2**32 is element 2**33."""
    strided = Layout((50, 41), dense((50, 41)), dense((50, 41), (1, 0)), dense((50, 41)))
    check([Case(CONTIGUOUS["whole tiles"], start), Case(strided, start)], HASHED, "cpu", counted=False)


def test_keys_enter_in_full() -> None:
    keys = [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (1, 0), (0, 1), (0x80000000, 0x7FFFFFFF)]
    check([Case(CONTIGUOUS["whole tiles"], 0, False, pair) for pair in keys], HASHED, "cpu", counted=False)


@pytest.mark.parametrize("jobs", [1, 2, 3, 16, 37])
def test_every_tile_finds_its_tensor(jobs: int) -> None:
    """Sizes of 0 to 2 tiles in any order: empty jobs first, last and between."""
    sizes = [(number * 5 % 4) // 2 * 2047 + number % 3 - (number % 7 == 0) for number in range(jobs)]
    cases = [
        Case(alike((max(size, 0),), dense((1,))), 0, False, (number, ~number & 0xFFFFFFFF))
        for number, size in enumerate(sizes)
    ]
    check(cases, HASHED, "cpu", counted=True)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(case=any_case(), code=st.sampled_from([NEAREST, HASHED, ACCUMULATED]), counted=st.booleans())
def test_any_case(case: Case, code: int, counted: bool) -> None:
    check([case], code, "cpu", counted=counted)


def test_large_jobs_take_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows count in 32 bits; with a low limit, jobs of this size are cut as huge ones would be."""
    monkeypatch.setattr(gpu.kernel, "LIMIT", 700)
    gpu._plan.cache_clear()
    layouts = [CONTIGUOUS["cut tile"], STRIDED["every other column"], STRIDED["master transposed"]]
    cases = [Case(layout, 1000) for layout in layouts]
    check(cases, ACCUMULATED, "cpu", counted=True)
    plan = gpu._plan(tuple(gpu._place(each.job) for each in prepare(cases, ACCUMULATED)))
    gpu._plan.cache_clear()
    rows = plan.table[plan.rows : plan.rows * (1 + gpu.kernel.ROW)].reshape(plan.rows, gpu.kernel.ROW)
    assert rows[:, gpu.kernel.COUNTER].tolist() == [0] * 3 + [1] * 3 + [2] * 4
    assert rows[:, gpu.kernel.NUMEL].tolist() == [700, 700, 650, 700, 700, 100, 660, 660, 660, 420]


def test_layouts_are_cut_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to rows inside of rows: the parts' elements, walked in order, are those of the whole."""
    monkeypatch.setattr(gpu.kernel, "LIMIT", 10)
    shape, strides = (2, 3, 5, 7), ((1, 2, 6, 30), (200, 70, 14, 2), (105, 35, 7, 1))
    whole = [torch.arange(1000).as_strided(shape, step).flatten() for step in strides]
    seen: list[list[torch.Tensor]] = [[], [], []]
    for first, layout, offsets in gpu._split([(size, *steps) for size, *steps in zip(shape, *strides)]):
        sizes = [size for size, *_ in layout]
        assert math.prod(sizes) <= 10
        assert first == sum(map(len, seen[0]))
        for tensor, offset in enumerate(offsets):
            step = [dim[1 + tensor] for dim in layout]
            seen[tensor].append(torch.arange(1000).as_strided(sizes, step, offset).flatten())
    for parts, expected in zip(seen, whole):
        assert torch.equal(torch.cat(parts), expected)


def test_one_launch_and_no_stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is laid out once for the same tensors; keys are not part of what is kept."""
    launches: list[gpu._Plan] = []
    launch = gpu._launch

    def counting(*arguments: Any) -> None:
        launches.append(arguments[0])
        launch(*arguments)

    monkeypatch.setattr(gpu, "_launch", counting)
    cases = [Case(CONTIGUOUS["cut tile"]), Case(STRIDED["three ways"]), Case(CONTIGUOUS["scalar"])]
    prepared = prepare(cases, HASHED)
    gpu._plan.cache_clear()
    seen = []
    for count in range(2):
        jobs = [each.job._replace(keys=bits.stream_keys(5, count)) for each in prepared]
        gpu.cast_jobs(jobs, HASHED, None)
        seen.append(prepared[0].bits()[0].clone())
    assert [plan.programs for plan in launches] == [4, 4]
    assert gpu._plan.cache_info().hits == 1
    assert not torch.equal(*seen)


def test_counters_of_any_stride() -> None:
    prepared = prepare([Case(CONTIGUOUS["cut tile"]), Case(STRIDED["three ways"])], NEAREST)
    counts = torch.full((4,), 9, dtype=torch.int64)
    gpu.cast_jobs([each.job for each in prepared], NEAREST, counts[::2])
    again = torch.full((4,), 9, dtype=torch.int64)
    gpu.cast_jobs([each.job for each in prepared], NEAREST, again[::2])
    assert counts[1::2].tolist() == [9, 9]
    assert counts[0] > 2000
    assert counts[2] > 150
    assert again.tolist() == [0, 9, 0, 9]


def test_nothing_to_do() -> None:
    counts = torch.full((2,), 9, dtype=torch.int64)
    prepared = prepare([Case(CONTIGUOUS["empty"])] * 2, HASHED)
    gpu.cast_jobs([each.job for each in prepared], HASHED, counts)
    gpu.cast_jobs([], HASHED, None)
    assert counts.tolist() == [0, 0]


def test_too_far_an_element_is_refused() -> None:
    prepared = prepare([Case(CONTIGUOUS["cut tile"], 2**62)], HASHED)
    with pytest.raises(ValueError, match=rf"2\*\*62; start is {2**62}, size 2050"):
        gpu.cast_jobs([prepared[0].job], HASHED, None)


def test_compiling_is_refused_here() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        gpu.compile_for(GPUTarget("cuda", 90, 32))
