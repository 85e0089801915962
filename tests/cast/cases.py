"""What every back end is put through: special words, layouts, and a comparison with the reference.

A job is made twice over, from equal memory. One copy goes through a back end, the other through the reference
on the CPU, and afterwards all of the memory is compared, gaps between the elements included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fcoptim.cast import reference
from fcoptim.cast.rules import ACCUMULATED, HASHED, NEAREST, Job

CODES = {"nearest": NEAREST, "hashed": HASHED, "error_feedback": ACCUMULATED}

BackEnd = Callable[[Sequence[Job], int, "torch.Tensor | None"], None]

# NaNs of every kind, infinities, the numbers around the largest, zeros, subnormals, ties and grid values.
NAN_WORDS = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF, 0x7FBF8000]
INFINITE_WORDS = [0x7F800000]
HUGE_WORDS = [0x7F7F0000, 0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF, 0x7F7EFFFF, 0x7F7E8000]
TINY_WORDS = [0x00000000, 0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x00800000]
PLAIN_WORDS = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F80FFFF, 0x3FFFFFFF]
SPECIAL_WORDS = [*NAN_WORDS, *INFINITE_WORDS, *HUGE_WORDS, *TINY_WORDS, *PLAIN_WORDS]
SPECIAL_WORDS += [word | 0x80000000 for word in SPECIAL_WORDS]


def from_words(words: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Make float32 values of raw 32-bit patterns."""
    return torch.as_tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def to_words(values: torch.Tensor) -> torch.Tensor:
    """Return raw patterns as int64: 32 bits of float32, 16 of bfloat16 or int16."""
    if values.dtype is torch.float32:
        return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return values.view(torch.int16).to(torch.int64) & 0xFFFF


@dataclass(frozen=True)
class View:
    """A tensor's place in its memory: strides and offset in elements."""

    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Layout:
    """A shape and where served, master and accumulator lie."""

    shape: tuple[int, ...]
    served: View
    master: View
    accumulator: View


def dense(shape: Sequence[int], order: Sequence[int] | None = None, offset: int = 0) -> View:
    """Lay a shape out without gaps, its dimensions nested in ``order`` (outermost first)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return View(tuple(strides), offset)


def alike(shape: Sequence[int], view: View) -> Layout:
    return Layout(tuple(shape), view, view, view)


CONTIGUOUS = {
    "whole tiles": alike((2, 2048), dense((2, 2048))),
    "cut tile": alike((2050,), dense((2050,))),
    "scalar": alike((), View(())),
    "empty": alike((0, 3), dense((0, 3))),
    "one": alike((1, 1), View((7, 3))),
    "served off by one": Layout((2050,), dense((2050,), offset=1), dense((2050,)), dense((2050,))),
    "master off by one": Layout((2050,), dense((2050,)), dense((2050,), offset=1), dense((2050,))),
    "accumulator off by one": Layout((2050,), dense((2050,)), dense((2050,)), dense((2050,), offset=1)),
    "all off by 16 bytes": Layout((2048,), *(dense((2048,), offset=n) for n in (8, 4, 8))),
}
_MATRIX = (40, 60)
STRIDED = {
    "transposed": alike(_MATRIX, dense(_MATRIX, (1, 0))),
    "served transposed": Layout(_MATRIX, dense(_MATRIX, (1, 0)), dense(_MATRIX), dense(_MATRIX)),
    "master transposed": Layout(_MATRIX, dense(_MATRIX), dense(_MATRIX, (1, 0)), dense(_MATRIX)),
    "accumulator transposed": Layout(_MATRIX, dense(_MATRIX), dense(_MATRIX), dense(_MATRIX, (1, 0))),
    "channels last": alike((6, 5, 4, 3), dense((6, 5, 4, 3), (0, 2, 3, 1))),
    "every other column": alike((30, 1, 50), View((111, 5, 2), 3)),
    "three ways": Layout((7, 9, 3), View((30, 3, 1)), View((1, 7, 63)), View((54, 6, 2), 1)),
    "expanded master": Layout((30, 20), dense((30, 20)), View((0, 1)), dense((30, 20))),
    "nine dimensions": Layout(
        (2, 3) * 4 + (2,), dense((2, 3) * 4 + (2,), (8, 1, 6, 3, 4, 5, 2, 7, 0)), *[dense((2, 3) * 4 + (2,))] * 2
    ),
}


@dataclass(frozen=True)
class Case:
    """One job to be."""

    layout: Layout
    start: int = 0
    wide: bool = False
    keys: tuple[int, int] = (0x9ABCDEF0, 0xFEDCBA98)


def mixed_words(count: int, generator: torch.Generator) -> torch.Tensor:
    """Fill with random words, special ones among them, and random words near the special ones."""
    words = torch.randint(0, 1 << 32, (count,), generator=generator)
    special = torch.tensor(SPECIAL_WORDS)[torch.randint(len(SPECIAL_WORDS), (count,), generator=generator)]
    kind = torch.randint(4, (count,), generator=generator)
    words = torch.where(kind == 0, special, words)
    words = torch.where(kind == 1, (special & 0xFFFF0000) | (words & 0xFFFF), words)
    return from_words(words)


def _memory(case: Case, view: View, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Allocate what a view spans, and a margin behind it."""
    reach = sum((size - 1) * stride for size, stride in zip(case.layout.shape, view.strides))
    count = view.offset + max(reach, 0) + 20
    if dtype is torch.float32:
        return mixed_words(count, generator)
    return torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).to(torch.int16).view(dtype)


class Prepared:
    """A case's memory on a device and the job in it."""

    def __init__(self, case: Case, code: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        self.code = code
        served = torch.float32 if case.wide else torch.bfloat16
        self.memory = [
            _memory(case, case.layout.served, served, generator),
            _memory(case, case.layout.master, torch.float32, generator),
            _memory(case, case.layout.accumulator, torch.int16, generator),
        ]

    def on(self, device: torch.device | str) -> Prepared:
        copy = object.__new__(Prepared)
        copy.case, copy.code = self.case, self.code
        copy.memory = [memory.to(device, copy=True) for memory in self.memory]
        return copy

    @property
    def job(self) -> Job:
        layout = self.case.layout
        served, master, accumulator = (
            torch.as_strided(memory, layout.shape, view.strides, view.offset)
            for memory, view in zip(self.memory, (layout.served, layout.master, layout.accumulator))
        )
        kept = accumulator if self.code == ACCUMULATED else None
        return Job(served, master, self.case.keys, self.case.start, kept)

    def bits(self) -> list[torch.Tensor]:
        kinds = (torch.int32 if self.case.wide else torch.int16, torch.int32, torch.int16)
        return [memory.cpu().view(kind) for memory, kind in zip(self.memory, kinds)]


def prepare(cases: Sequence[Case], code: int, seed: int = 0) -> list[Prepared]:
    return [Prepared(case, code, seed + number) for number, case in enumerate(cases)]


def assert_same(left: Sequence[Prepared], right: Sequence[Prepared]) -> None:
    for one, other in zip(left, right):
        for name, a, b in zip(("served", "master", "accumulator"), one.bits(), other.bits()):
            wrong = (a != b).nonzero().flatten().tolist()
            assert not wrong, f"{name} of {one.case} differs at {wrong[:5]} of {len(a)}, {len(wrong)} in all"


def check(
    back_end: BackEnd, cases: Sequence[Case], code: int, device: torch.device | str, *, counted: bool, seed: int = 0
) -> None:
    """Cast the cases by a back end and by the reference, with one call each, and compare all bits and counts."""
    prepared = prepare(cases, code, seed)
    ours, theirs = ([each.on(where) for each in prepared] for where in (device, "cpu"))
    # Whatever is in `changed` before must not matter.
    counts = torch.full((len(cases),), 77, dtype=torch.int64, device=device) if counted else None
    expected = torch.full((len(cases),), 55, dtype=torch.int64) if counted else None
    back_end([each.job for each in ours], code, counts)
    reference.cast_jobs([each.job for each in theirs], code, expected)
    assert_same(ours, theirs)
    if counts is not None and expected is not None:
        assert counts.tolist() == expected.tolist()


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """Draw a case: up to five dimensions, each tensor permuted, gapped and shifted on its own, any start."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=5)))
    views = []
    for _ in range(3):
        order = draw(st.permutations(range(len(shape))))
        gap = draw(st.sampled_from([1, 1, 2]))
        view = dense(shape, order, draw(st.integers(0, 9)))
        views.append(View(tuple(stride * gap for stride in view.strides), view.offset))
    start = draw(st.one_of(st.integers(0, 5000), st.integers(0, 2**60)))
    word = st.integers(0, 2**32 - 1)
    return Case(Layout(shape, *views), start, draw(st.booleans()), (draw(word), draw(word)))
