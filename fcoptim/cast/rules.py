"""The rounding rules by name, and the unit of work that every back end takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

Rounding = Literal["nearest", "stochastic", "dither", "error_feedback"]


@dataclass(frozen=True)
class Rule:
    """What distinguishes one rounding rule from another.

    Attributes:
        name: The value of ``rounding=``.
        code: The number by which kernels know where the dither comes from; ``stochastic`` and ``dither``
            share one, as they differ only in the count.
        counts: Whether each cast draws fresh bits.
        accumulates: Whether an int16 accumulator is kept per element.
        unbiased: Whether the served value equals the master on average.
    """

    name: Rounding
    code: int
    counts: bool
    accumulates: bool
    unbiased: bool


NEAREST, HASHED, ACCUMULATED = 0, 1, 2

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("nearest", NEAREST, counts=False, accumulates=False, unbiased=False),
        Rule("stochastic", HASHED, counts=True, accumulates=False, unbiased=True),
        Rule("dither", HASHED, counts=False, accumulates=False, unbiased=True),
        Rule("error_feedback", ACCUMULATED, counts=False, accumulates=True, unbiased=True),
    )
}

# It tracks and trains as the other unbiased rules do, at the traffic of nearest and without memory: docs/evidence.md.
DEFAULT = "dither"


def get_rule(rounding: str) -> Rule:
    """Look a rule up by name.

    Args:
        rounding: One of ``"nearest"``, ``"stochastic"``, ``"dither"``, ``"error_feedback"``.

    Raises:
        ValueError: There is no such rule; the message lists those there are.
    """
    rule = RULES.get(rounding) if isinstance(rounding, str) else None
    if rule is None:
        raise ValueError(f"rounding must be one of {', '.join(map(repr, RULES))}; got {rounding!r}")
    return rule


class Runs:
    """Where the elements of a shard lie in the unsharded parameter, if not one after the other.

    The shard, in its own logical order, is a sequence of runs of consecutive elements of the parameter (row-major).
    Two objects are equal only if they are the same one, so that they can serve as keys of a cache.

    Args:
        starts: Index, in the unsharded parameter, of each run's first element.
        lengths: How many elements each run has. Empty runs are dropped.

    Raises:
        ValueError: They differ in number, or one is negative.
    """

    def __init__(self, starts: Sequence[int] | np.ndarray[Any, Any], lengths: Sequence[int] | np.ndarray[Any, Any]):
        begin, size = np.asarray(starts, dtype=np.int64).reshape(-1), np.asarray(lengths, dtype=np.int64).reshape(-1)
        if len(begin) != len(size) or (len(begin) and min(int(begin.min()), int(size.min())) < 0):
            raise ValueError(f"runs need as many starts as lengths, none negative; got {starts!r:.80}, {lengths!r:.80}")
        self.starts, self.lengths = begin[size > 0], size[size > 0]
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.numel = int(self.lengths.sum())
        self.end = int((self.starts + self.lengths).max()) if self.numel else 0

    def index(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Indices in the unsharded parameter, int64, of the shard's elements ``first <= i < last``."""
        local = torch.arange(first, last)
        run = torch.searchsorted(torch.from_numpy(self.offsets), local, right=True) - 1
        return (torch.from_numpy(self.starts - self.offsets)[run] + local).to(device)

    def __repr__(self) -> str:
        return f"Runs({len(self.starts)} runs, {self.numel} elements)"


class Job(NamedTuple):
    """One tensor to cast, checked and ready for a back end.

    Attributes:
        served: Where the result goes: bfloat16, or float32 that will hold bfloat16 values.
        master: float32, of the same shape and device.
        keys: The two keys of this cast, from ``bits.stream_keys``.
        start: Index, in the unsharded parameter, of the first element; or the runs that the tensors, then contiguous,
            consist of.
        accumulator: int16 of the same shape under error feedback, else None.
    """

    served: torch.Tensor
    master: torch.Tensor
    keys: tuple[int, int]
    start: int | Runs
    accumulator: torch.Tensor | None

    def indices(self, first: int, last: int) -> torch.Tensor:
        """Indices in the unsharded parameter, int64, of the elements ``first <= i < last`` in logical order."""
        return index_of(self.start, first, last, self.master.device)


def index_of(start: int | Runs, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Indices in the unsharded parameter, int64, of elements counted from ``start``."""
    if isinstance(start, Runs):
        return start.index(first, last, device)
    return torch.arange(first + start, last + start, device=device)
