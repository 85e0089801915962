"""The rounding rules on CUDA and ROCm: one launch for any number of tensors, and compiling ahead of time.

The kernel finds its tensors through a table of addresses. All of the table but the keys follows from where
the tensors lie, so it is laid out once per set of tensors; a step only fills in its keys and uploads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from .rules import ACCUMULATED, HASHED, NEAREST, Job

# 128 threads of 8 elements make half a tile; the served bf16 values of a thread are then 128 bits.
_THREADS = 128


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
    start: int
    wide: bool
    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...] | None


class _Plan(NamedTuple):
    """The table without its keys, the number of programs, and whether any job is not contiguous."""

    table: np.ndarray[Any, np.dtype[np.int64]]
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
        options = {"num_warps": _warps(_warp_size()), "enable_fp_fusion": False} if compiled else {}
        variant = Variant(code, changed is not None, plan.strided)
        _launch(plan.programs, table, counts, len(jobs), variant, options)
    if changed is not None and counts is not changed:
        changed.copy_(counts)


def _launch(
    programs: int,
    table: torch.Tensor,
    counts: torch.Tensor,
    jobs: int,
    variant: Variant,
    options: dict[str, int],
) -> None:
    kernel.cast_tiles[(programs,)](
        table, counts, jobs, CODE=variant.code, COUNT=variant.counted, STRIDED=variant.strided, **options
    )


def _warp_size() -> int:
    return int(triton.runtime.driver.active.get_current_target().warp_size)


def _warps(warp_size: int) -> int:
    return _THREADS // warp_size


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
    types = {"table": "*i64", "changed": "*i64", "jobs": "i32"}
    kernels = {}
    for variant in variants:
        chosen = dict(zip(("CODE", "COUNT", "STRIDED"), variant))
        source = ASTSource(kernel.cast_tiles, types | dict.fromkeys(chosen, "constexpr"), chosen)
        kernels[variant] = triton.compile(
            source, target=target, options={"num_warps": _warps(target.warp_size), "enable_fp_fusion": False}
        )
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
        tuple(master.shape),
        None if dense else tuple(tensor.stride() for tensor in tensors),
    )


@lru_cache(maxsize=32)
def _plan(places: tuple[_Place, ...]) -> _Plan:
    """Lay out the table described in ``gpu_kernel.cast_tiles``."""
    first_programs: list[int] = []
    rows: list[int] = []
    dims: list[int] = []
    programs = 0
    dims_begin = len(places) * (1 + kernel.ROW)
    for place in places:
        numel = math.prod(place.shape)
        if place.start + numel > 1 << 62:
            raise ValueError(f"a job must end below element 2**62; start is {place.start}, size {numel}")
        layout = [(numel, 1, 1, 1)] if place.strides is None else _coalesce(place.shape, place.strides)
        row = [0] * kernel.ROW
        row[kernel.SERVED], row[kernel.MASTER], row[kernel.ACCUMULATOR] = place[:3]
        row[kernel.NUMEL], row[kernel.START] = numel, place.start
        row[kernel.FLAGS] = _flags(place)
        row[kernel.DIMS], row[kernel.NDIM] = dims_begin + len(dims), len(layout)
        first_programs.append(programs)
        rows += row
        for dim in reversed(layout):
            dims += dim
        if numel > 0:
            programs += (place.start + numel - 1) // TILE - place.start // TILE + 1
    table = np.array(first_programs + rows + dims, dtype=np.int64)
    return _Plan(table, programs, any(place.strides is not None for place in places))


def _flags(place: _Place) -> int:
    """Say what the kernel may rely on.

    Tiles begin at multiples of 2,048 of the whole parameter, hence 16-byte aligned exactly if its element 0
    would be, were it there.
    """
    sizes = (4 if place.wide else 2, 4, 2)
    begins = [address - place.start * size for address, size in zip(place[:3], sizes) if address]
    aligned = place.strides is None and all(begin % 16 == 0 for begin in begins)
    return (kernel.WIDE if place.wide else 0) | (kernel.ALIGNED if aligned else 0)


def _coalesce(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """Merge dimensions that are one in all three tensors.

    Returns:
        ``(size, served stride, master stride, accumulator stride)`` for each dimension left, outermost first.
    """
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides):
        if size == 1:
            continue
        if merged and all(outer == step * size for outer, step in zip(merged[-1][1:], steps)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def _upload(plan: _Plan, keys: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Fill the keys into a fresh copy of the table and send it; pinned, so that the host need not wait."""
    pinned = device.type == "cuda"
    host = torch.empty(plan.table.size, dtype=torch.int64, pin_memory=pinned)
    table = host.numpy()
    table[:] = plan.table
    rows = table[len(keys) : len(keys) * (1 + kernel.ROW)].reshape(len(keys), kernel.ROW)
    rows[:, kernel.KEY0 : kernel.KEY1 + 1] = keys
    return host.to(device, non_blocking=pinned)
