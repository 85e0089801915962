"""The definition of every rule, in plain torch on any device; the kernels are checked against it bit for bit.

A finite fp32 word is ``hi:16 | lo:16``, and ``hi`` is a bf16 number. Every rule is one line,

    served = hi + carry(lo + d)        carry = 1 where lo + d >= 2**16

and only ``d`` differs: half an ulp with ties to even, 16 hashed bits, or an accumulator that each cast adds
``lo`` to. Three observations settle the special values:

- A NaN is replaced, before anything else, by the quiet NaN of its sign and upper payload with ``lo = 0``. So
  it can't be carried into an infinity or a zero, and its accumulator stands still.
- Infinities, zeros and grid values have ``lo = 0``, and ``d < 2**16``: no carry, no move.
- A carry out of the largest finite number would give infinity. The unbiased rules drop that carry (they
  saturate), ``nearest`` keeps it, as torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bits import dither_bits
from .rules import ACCUMULATED, HASHED, NEAREST, Job, Runs, index_of

_CHUNK = 1 << 18
_LARGEST = 0x7F7F
_INFINITY = 0x7F800000
_QUIET = 0x00400000


def split_word(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 values into ``hi`` and ``lo``, with NaNs made quiet.

    Args:
        master: float32, contiguous, any shape.

    Returns:
        ``(hi, lo)``, int64 values in ``[0, 2**16)`` of the same shape.
    """
    word = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    nan = (word & 0x7FFFFFFF) > _INFINITY
    word = torch.where(nan, (word | _QUIET) & 0xFFFF0000, word)
    return word >> 16, word & 0xFFFF


def round_word(hi: torch.Tensor, lo: torch.Tensor, d: torch.Tensor, *, saturate: bool) -> torch.Tensor:
    """Apply the one line of algebra above.

    Args:
        hi: Upper halves, int64 in ``[0, 2**16)``.
        lo: Lower halves, likewise.
        d: What is added to the lower half, likewise (``nearest`` goes up to ``2**15``).
        saturate: Whether the largest finite number swallows its carry.

    Returns:
        The bits of the served bfloat16 values, int64 in ``[0, 2**16)``.
    """
    carry = (lo + d) >> 16
    if saturate:
        carry = carry * ((hi & 0x7FFF) != _LARGEST)
    return hi + carry


def _as_signed16(bits: torch.Tensor) -> torch.Tensor:
    return (((bits + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16)


def _as_served(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = _as_signed16(bits)
    if dtype is torch.bfloat16:
        return narrow.view(torch.bfloat16)
    return (narrow.to(torch.int32) << 16).view(torch.float32)


def _cast_chunk(job: Job, code: int, first: int, last: int) -> int:
    """Cast the elements ``first <= i < last`` in logical order; return how many served bits changed."""
    local = torch.arange(first, last, device=job.master.device)
    hi, lo = split_word(torch.take(job.master, local))
    if code == NEAREST:
        d = 0x7FFF + (hi & 1)
    elif code == HASHED:
        d = dither_bits(job.keys, job.indices(first, last))
    else:
        assert code == ACCUMULATED and job.accumulator is not None
        d = torch.take(job.accumulator, local).to(torch.int64) & 0xFFFF
        job.accumulator.put_(local, _as_signed16(d + lo))
    new = _as_served(round_word(hi, lo, d, saturate=code != NEAREST), job.served.dtype)
    bits = torch.int16 if job.served.dtype is torch.bfloat16 else torch.int32
    changed = torch.take(job.served, local).view(bits) != new.view(bits)
    job.served.put_(local, new)
    return int(changed.sum())


def fill_dither_(accumulator: torch.Tensor, keys: tuple[int, int], start: int | Runs) -> None:
    """Overwrite int16 accumulators with the 16 dither bits of their elements."""
    for first in range(0, accumulator.numel(), _CHUNK):
        last = min(first + _CHUNK, accumulator.numel())
        local = torch.arange(first, last, device=accumulator.device)
        accumulator.put_(local, _as_signed16(dither_bits(keys, index_of(start, first, last, accumulator.device))))


def rewind(accumulator: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return the accumulators, int16, from which a cast of ``master`` led to these.

    int16 arithmetic wraps, so it is modulo 2**16 as the accumulators are; int32 to int16 keeps the lower half.
    """
    lo = master.view(torch.int32).to(torch.int16)
    return lo.masked_fill_(master.isnan(), 0).neg_().add_(accumulator)


def cast_jobs(jobs: Sequence[Job], code: int, changed: torch.Tensor | None = None) -> None:
    """Cast every job in place.

    Args:
        jobs: What to cast.
        code: The rule's code.
        changed: int64 of shape ``(len(jobs),)``, filled with how many served values changed, or None.
    """
    with torch.no_grad():
        for number, job in enumerate(jobs):
            count = 0
            for first in range(0, job.master.numel(), _CHUNK):
                count += _cast_chunk(job, code, first, min(first + _CHUNK, job.master.numel()))
            if changed is not None:
                changed[number] = count
