"""The rounding rules on the CPU: one pass over any number of tensors by torch's number of threads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from . import cpu_kernel as kernel
from .bits import TILE
from .rules import ACCUMULATED, HASHED, Job
from .threads import run_shares

# Less work than this, in bytes, is not worth another thread.
_GRAIN = 1 << 18

# A dimension: its size and its strides in bytes for served, master and accumulator.
_Dim = tuple[int, int, int, int]


class _Share(NamedTuple):
    """A thread's part of the work, as ``cpu_kernel.cast_share`` takes it."""

    job: int
    tile: int
    last_job: int
    last_tile: int
    counts: np.ndarray[Any, np.dtype[np.int64]]


def cast_jobs(jobs: Sequence[Job], code: int, changed: torch.Tensor | None = None) -> None:
    """Cast every job in place, over ``torch.get_num_threads()`` threads.

    Args:
        jobs: What to cast; all on the CPU.
        code: The rule's code.
        changed: int64 of shape ``(len(jobs),)``, filled with how many served values changed bits, or None.
            Counting reads the served values, 2 more bytes per bfloat16 element.

    Raises:
        ValueError: A job reaches beyond element ``2**62``.
    """
    table, dims = _layout(jobs, code)
    # Each element is read once and written once; accumulators both.
    weights = [job.master.numel() * (4 + job.served.element_size() + (4 if code == ACCUMULATED else 0)) for job in jobs]
    threads = max(1, min(torch.get_num_threads(), sum(weights) // _GRAIN))
    counts = np.zeros((threads, len(jobs)), dtype=np.int64)
    cuts = [_cut(jobs, weights, part, threads) for part in range(threads + 1)]
    shares = [_Share(*begin, *end, row) for begin, end, row in zip(cuts, cuts[1:], counts)]

    def work(share: _Share) -> None:
        # This closure also keeps the tensors alive for as long as a thread works on them.
        job, tile, last_job, last_tile, row = share
        space = np.empty(kernel.BUFFER, dtype=np.uint8)
        kernel.cast_share(table, dims, code, changed is not None, job, tile, last_job, last_tile, space, row)

    run_shares(work, shares)
    if changed is not None:
        changed.copy_(torch.from_numpy(counts.sum(axis=0)))


def _cut(jobs: Sequence[Job], weights: Sequence[int], part: int, parts: int) -> tuple[int, int]:
    """Find the job, and the tile of that job, at which a share begins if all are equally heavy.

    Tiles are counted from the one in which the job begins.
    """
    if part in (0, parts):
        return (len(jobs) if part else 0), 0
    ends = list(accumulate(weights))
    target = ends[-1] * part // parts
    number = bisect_right(ends, target)
    job = jobs[number]
    element = (target - ends[number] + weights[number]) * job.master.numel() // weights[number]
    return number, (job.start + element) // TILE - job.start // TILE


def _layout(jobs: Sequence[Job], code: int) -> tuple[kernel.Table, kernel.Table]:
    """Lay out the two tables that ``cpu_kernel.cast_share`` takes."""
    rows: list[tuple[int, ...]] = []
    dims: list[_Dim] = []
    for served, master, keys, start, accumulator in jobs:
        numel = master.numel()
        if start + numel > 1 << 62:
            raise ValueError(f"a job must end below element 2**62; start is {start}, size {numel}")
        flags = kernel.WIDE if served.dtype is torch.float32 else 0
        own: list[_Dim] = []
        other = master if accumulator is None else accumulator
        if not (served.is_contiguous() and master.is_contiguous() and other.is_contiguous()):
            own = _dims(served, master, other, ordered=code == HASHED)
            flags |= _walks(own, (served.element_size(), 4, other.element_size()))
            flags &= ~0 if accumulator is not None else ~kernel.ACCUMULATOR_WALKS
        address = 0 if accumulator is None else accumulator.data_ptr()
        rows.append((served.data_ptr(), master.data_ptr(), address, numel, start, *keys, flags, len(dims), len(own)))
        dims += own
    return (
        np.array(rows, dtype=np.int64).reshape(len(rows), kernel.COLUMNS),
        np.array(dims, dtype=np.int64).reshape(len(dims), kernel.DIM_COLUMNS),
    )


def _dims(served: torch.Tensor, master: torch.Tensor, accumulator: torch.Tensor, *, ordered: bool) -> list[_Dim]:
    """Return the dimensions that matter, innermost first, those merged that are one in all three tensors.

    Args:
        served: For its shape and strides.
        master: For its strides.
        accumulator: For its strides.
        ordered: Whether elements must be met in logical order. Only the hash asks for it; otherwise the order in
            which ``served`` lies in memory is faster.
    """
    tensors = (served, master, accumulator)
    sizes = [tensor.element_size() for tensor in tensors]
    order = list(range(served.dim()))[::-1]
    if not ordered:
        order.sort(key=served.stride)
    dims: list[_Dim] = []
    for dim in order:
        size = served.shape[dim]
        if size == 1:
            continue
        strides = [tensor.stride(dim) * width for tensor, width in zip(tensors, sizes)]
        if dims and all(stride == inner * dims[-1][0] for stride, inner in zip(strides, dims[-1][1:])):
            _, one, two, three = dims[-1]
            dims[-1] = (size * dims[-1][0], one, two, three)
        else:
            dims.append((size, strides[0], strides[1], strides[2]))
    return dims


def _walks(dims: Sequence[_Dim], sizes: tuple[int, int, int]) -> int:
    """Say which tensors are not simply one element after the other, in the dimensions' order."""
    flags = 0
    for column, size, flag in zip(
        (1, 2, 3), sizes, (kernel.SERVED_WALKS, kernel.MASTER_WALKS, kernel.ACCUMULATOR_WALKS)
    ):
        dense = True
        for dim in dims:
            dense = dense and dim[column] == size
            size *= dim[0]
        flags |= 0 if dense else flag
    return flags
