"""The rounding rules on CUDA and ROCm: one launch for any number of tensors, and compiling ahead of time.

The kernel finds its tensors through a table of addresses. All of the table but the keys follows from where
the tensors lie, so it is laid out once per set of tensors; a step only fills in its keys and uploads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from . import gpu_kernel as kernel
from .bits import TILE
from .rules import ACCUMULATED, HASHED, NEAREST, Job, Runs

# 128 threads of 8 elements make half a tile; the served bf16 values of a thread are then 128 bits.
_THREADS = 128
_ADDRESSES = (kernel.SERVED, kernel.MASTER, kernel.ACCUMULATOR)


class Variant(NamedTuple):
    """What the kernel is specialised on; nothing else makes it compile again.

    Attributes:
        code: The rule's code.
        counted: Whether changed elements are counted.
        strided: Whether any tensor is not contiguous.
    """

    code: int
    counted: bool
    strided: bool


VARIANTS = tuple(
    Variant(code, counted, strided)
    for code in (NEAREST, HASHED, ACCUMULATED)
    for counted in (False, True)
    for strided in (False, True)
)


class _Place(NamedTuple):
    """Where a job's tensors lie; the strides are those of served, master and accumulator, None if contiguous."""

    served: int
    master: int
    accumulator: int
    start: int | Runs
    wide: bool
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...] | None


# (size, served stride, master stride, accumulator stride) for each dimension, outermost first.
_Layout = list[tuple[int, ...]]


class _Plan(NamedTuple):
    """The table without its keys, how many rows and programs, and whether any job is not contiguous."""

    table: np.ndarray[Any, np.dtype[np.int64]]
    rows: int
    programs: int
    strided: bool


def cast_jobs(jobs: Sequence[Job], code: int, changed: torch.Tensor | None = None) -> None:
    """Cast every job in place, with one launch.

    Args:
        jobs: What to cast; all on one CUDA or ROCm device (on the CPU if Triton interprets its kernels).
        code: The rule's code.
        changed: int64 of shape ``(len(jobs),)`` on that device, filled with how many served values changed,
            or None. Counting reads the served values, 2 more bytes per bfloat16 element.

    Raises:
        ValueError: The tensors are on the CPU, or a job reaches beyond element ``2**62``.
    """
    if changed is not None:
        changed.zero_()
    plan = _plan(tuple(map(_place, jobs)))
    if plan.programs == 0:
        return
    device = jobs[0].master.device
    compiled = isinstance(kernel.cast_tiles, triton.JITFunction)
    if compiled and device.type != "cuda":
        raise ValueError(f"the GPU kernel got tensors on {device}; move them to a GPU or call cast_")
    table = _upload(plan, [job.keys for job in jobs], device)
    counts = table if changed is None else changed.contiguous()
    with torch.cuda.device(device) if compiled else nullcontext():
        options = _options(triton.runtime.driver.active.get_current_target()) if compiled else {}
        variant = Variant(code, changed is not None, plan.strided)
        _launch(plan, table, counts, variant, options)
    if changed is not None and counts is not changed:
        changed.copy_(counts)


def _launch(plan: _Plan, table: torch.Tensor, counts: torch.Tensor, variant: Variant, options: dict[str, Any]) -> None:
    code, counted, strided = variant
    grid = (plan.programs,)
    kernel.cast_tiles[grid](table, counts, plan.rows, CODE=code, COUNT=counted, STRIDED=strided, **options)


def _options(target: GPUTarget) -> dict[str, Any]:
    """Return Triton's options for a device; there is one choice, as a kernel that updates can't be tuned.

    On CUDA the register limit is far above need. But it ends the assembler's habit of spilling a few to fit
    one more block on the chip.
    """
    options = {"num_warps": _THREADS // target.warp_size, "enable_fp_fusion": False}
    return options | ({"maxnreg": 96} if target.backend == "cuda" else {})


def compile_for(target: GPUTarget, variants: Sequence[Variant] = VARIANTS) -> dict[Variant, CompiledKernel]:
    """Compile the kernel for a device that need not be there.

    Args:
        target: For example ``GPUTarget("cuda", 90, 32)`` or ``GPUTarget("hip", "gfx942", 64)``.
        variants: Which variants; default all that ``cast_jobs`` ever launches.

    Returns:
        For each variant Triton's compiled kernel, whose ``asm`` holds the machine code by kind (``"ptx"``,
        ``"cubin"``, ``"amdgcn"``, ``"hsaco"``).

    Raises:
        RuntimeError: Triton interprets its kernels in this process and compiles none.
    """
    if not isinstance(kernel.cast_tiles, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so nothing can be compiled; unset it and start again")
    types = {"table": "*i64", "changed": "*i64", "rows": "i32"}
    kernels = {}
    for variant in variants:
        chosen = dict(zip(("CODE", "COUNT", "STRIDED"), variant))
        source = ASTSource(kernel.cast_tiles, types | dict.fromkeys(chosen, "constexpr"), chosen)
        kernels[variant] = triton.compile(source, target=target, options=_options(target))
    return kernels


def _place(job: Job) -> _Place:
    served, master, _, start, accumulator = job
    dense = served.is_contiguous() and master.is_contiguous()
    if accumulator is not None:
        dense = dense and accumulator.is_contiguous()
    tensors = (served, master, master if accumulator is None else accumulator)
    return _Place(
        served.data_ptr(),
        master.data_ptr(),
        0 if accumulator is None else accumulator.data_ptr(),
        start,
        served.dtype is torch.float32,
        master.shape,
        None if dense else tuple(tensor.stride() for tensor in tensors),
    )


@lru_cache(maxsize=32)
def _plan(places: tuple[_Place, ...]) -> _Plan:
    """Lay out the table described in ``gpu_kernel.cast_tiles``."""
    pieces = [piece for number, place in enumerate(places) for piece in _pieces(number, place)]
    dims_begin = len(pieces) * (1 + kernel.ROW)
    first_programs: list[int] = []
    rows: list[int] = []
    dims: list[int] = []
    programs = 0
    for row, layout in pieces:
        row[kernel.DIMS], row[kernel.NDIM] = dims_begin + len(dims), len(layout)
        for dim in reversed(layout):
            dims += dim
        rows += row
        first_programs.append(programs)
        start, numel = row[kernel.START], row[kernel.NUMEL]
        if numel > 0:
            programs += (start + numel - 1) // TILE - start // TILE + 1
    table = np.array(first_programs + rows + dims, dtype=np.int64)
    return _Plan(table, len(pieces), programs, any(place.strides is not None for place in places))


def _pieces(number: int, place: _Place) -> Iterator[tuple[list[int], _Layout]]:
    """Yield a job's rows of the table, one unless it is huge or has runs, each with its sizes and strides."""
    if isinstance(place.start, Runs):
        runs, size = place.start, 4 if place.wide else 2
        for start, length, offset in zip(runs.starts.tolist(), runs.lengths.tolist(), runs.offsets.tolist()):
            served, master = place.served + size * offset, place.master + 4 * offset
            yield from _pieces(number, place._replace(served=served, master=master, start=start, shape=(length,)))
        return
    numel = math.prod(place.shape)
    if place.start + numel > 1 << 62:
        raise ValueError(f"a job must end below element 2**62; start is {place.start}, size {numel}")
    layout: _Layout = [(numel, 1, 1, 1)] if place.strides is None else _coalesce(place.shape, place.strides)
    for first, part, offsets in _split(layout):
        row = [0] * kernel.ROW
        sizes = (4 if place.wide else 2, 4, 2)
        for column, address, offset, size in zip(_ADDRESSES, place[:3], offsets, sizes):
            row[column] = address + offset * size
        row[kernel.NUMEL] = _size(part)
        row[kernel.START] = place.start + first
        row[kernel.FLAGS] = _flags(place)
        row[kernel.COUNTER] = number
        yield row, part


def _size(layout: _Layout) -> int:
    return math.prod(dim[0] for dim in layout)


def _flags(place: _Place) -> int:
    """Say what the kernel may rely on.

    Tiles begin at multiples of 2,048 of the whole parameter, hence 16-byte aligned exactly if its element 0
    would be, were it there.
    """
    assert isinstance(place.start, int)
    start, sizes = place.start, (4 if place.wide else 2, 4, 2)
    begins = [address - start * size for address, size in zip(place[:3], sizes) if address]
    aligned = place.strides is None and all(begin % 16 == 0 for begin in begins)
    return (kernel.WIDE if place.wide else 0) | (kernel.ALIGNED if aligned else 0)


def _coalesce(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> _Layout:
    """Drop dimensions of size 1 and merge those that are one in all three tensors."""
    merged: _Layout = []
    for size, *steps in zip(shape, *strides):
        if size == 1:
            continue
        if merged and all(outer == step * size for outer, step in zip(merged[-1][1:], steps)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def _split(
    layout: _Layout, first: int = 0, offsets: tuple[int, ...] = (0, 0, 0)
) -> Iterator[tuple[int, _Layout, tuple[int, ...]]]:
    """Cut a layout into parts of at most ``kernel.LIMIT`` elements.

    Yields:
        The part's first element, its layout and its offset in each of the three tensors.
    """
    if _size(layout) <= kernel.LIMIT:
        yield first, layout, offsets
        return
    (outer, *steps), rest = layout[0], layout[1:]
    inner = _size(rest)
    most = max(1, kernel.LIMIT // inner)
    for begin in range(0, outer, most):
        part = rest if inner > kernel.LIMIT else [(min(most, outer - begin), *steps), *rest]
        moved = tuple(offset + begin * step for offset, step in zip(offsets, steps))
        yield from _split(part, first + begin * inner, moved)


def _upload(plan: _Plan, keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Fill the keys into a fresh copy of the table and send it; pinned, so that the host need not wait."""
    pinned = device.type == "cuda"
    host = torch.empty(plan.table.size, dtype=torch.int64, pin_memory=pinned)
    table = host.numpy()
    table[:] = plan.table
    rows = table[plan.rows : plan.rows * (1 + kernel.ROW)].reshape(plan.rows, kernel.ROW)
    rows[:, [kernel.KEY0, kernel.KEY1]] = np.array(keys, dtype=np.int64)[rows[:, kernel.COUNTER]]
    return host.to(device, non_blocking=pinned)
