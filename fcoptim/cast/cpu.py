"""The rounding rules on the CPU: one pass over any number of tensors by torch's number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from . import cpu_kernel as kernel
from . import reference
from .bits import TILE
from .rules import ACCUMULATED, HASHED, Job, Runs
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
    table, dims, owners = _layout(jobs, code)
    # Each element is read once and written once; accumulators both.
    widths = np.where(table[:, kernel.FLAGS] & kernel.WIDE, 8, 6) + (4 if code == ACCUMULATED else 0)
    weights = np.cumsum(table[:, kernel.NUMEL] * widths)
    total = int(weights[-1]) if len(weights) else 0
    threads = max(1, min(torch.get_num_threads(), total // _GRAIN))
    counts = np.zeros((threads, len(table)), dtype=np.int64)
    cuts = [_cut(table, weights, part, threads) for part in range(threads + 1)]
    shares = [_Share(*begin, *end, row) for begin, end, row in zip(cuts, cuts[1:], counts)]

    def work(share: _Share) -> None:
        # This closure also keeps the tensors alive for as long as a thread works on them.
        job, tile, last_job, last_tile, row = share
        space = np.empty(kernel.BUFFER, dtype=np.uint8)
        kernel.cast_share(table, dims, code, changed is not None, job, tile, last_job, last_tile, space, row)

    run_shares(work, shares)
    if changed is not None:
        of_jobs = np.zeros(len(jobs), dtype=np.int64)
        np.add.at(of_jobs, owners, counts.sum(axis=0))
        changed.copy_(torch.from_numpy(of_jobs))


def fill_dither_(accumulator: torch.Tensor, keys: tuple[int, int], start: int) -> None:
    """Overwrite int16 accumulators with the dither bits of their elements; those of whole tiles by the kernel.

    Args:
        accumulator: int16, contiguous, on the CPU.
        keys: From ``bits.stream_keys``.
        start: Index, in the unsharded parameter, of the first element.
    """
    flat = accumulator.view(-1)
    head = min(-start % TILE, len(flat))
    tiles = (len(flat) - head) // TILE
    body = head + tiles * TILE
    reference.fill_dither_(flat[:head], keys, start)
    reference.fill_dither_(flat[body:], keys, start + body)
    first = (start + head) // TILE

    def work(share: tuple[int, int]) -> None:
        begin, end = share
        space = np.empty(kernel.BUFFER, dtype=np.uint8)
        kernel.fill_tiles(flat[head + begin * TILE :].data_ptr(), first + begin, end - begin, *keys, space)

    threads = max(1, min(torch.get_num_threads(), tiles * TILE // _GRAIN))
    cuts = [tiles * part // threads for part in range(threads + 1)]
    run_shares(work, list(itertools.pairwise(cuts)))


def _cut(table: kernel.Table, ends: kernel.Table, part: int, parts: int) -> tuple[int, int]:
    """Find the row, and the tile of that row, at which a share begins if all are equally heavy.

    Args:
        table: The rows.
        ends: Weight of all rows up to and including each.
        part: The share's number.
        parts: How many shares there are.

    Returns:
        The row and the tile, counted from the one in which the row begins.
    """
    if part in (0, parts):
        return (len(table) if part else 0), 0
    target = int(ends[-1]) * part // parts
    number = int(np.searchsorted(ends, target, side="right"))
    before = int(ends[number - 1]) if number else 0
    numel, start = int(table[number, kernel.NUMEL]), int(table[number, kernel.START])
    element = (target - before) * numel // (int(ends[number]) - before)
    return number, (start + element) // TILE - start // TILE


def _layout(jobs: Sequence[Job], code: int) -> tuple[kernel.Table, kernel.Table, kernel.Table]:
    """Lay out the two tables that ``cpu_kernel.cast_share`` takes, and name the job of each row of the first."""
    rows: list[tuple[int, ...]] = []
    dims: list[_Dim] = []
    for served, master, keys, start, accumulator in jobs:
        numel = master.numel()
        if isinstance(start, Runs):
            start = 0  # see _spread
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
    table = np.array(rows, dtype=np.int64).reshape(len(rows), kernel.COLUMNS)
    table, owners = _spread(table, jobs)
    return table, np.array(dims, dtype=np.int64).reshape(len(dims), kernel.DIM_COLUMNS), owners


def _spread(table: kernel.Table, jobs: Sequence[Job]) -> tuple[kernel.Table, kernel.Table]:
    """Give every run of a job that has several a row of its own, and name the job of each row."""
    lengths = [len(job.start.starts) if isinstance(job.start, Runs) else 1 for job in jobs]
    owners = np.repeat(np.arange(len(jobs)), lengths)
    if len(owners) == len(jobs):
        return table, owners
    table = table[owners]
    first = 0
    for job, length in zip(jobs, lengths):
        if isinstance(job.start, Runs):
            own = table[first : first + length]
            own[:, kernel.SERVED] += job.start.offsets * job.served.element_size()
            own[:, kernel.MASTER] += job.start.offsets * 4
            own[:, kernel.NUMEL], own[:, kernel.START] = job.start.lengths, job.start.starts
        first += length
    return table, owners


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
