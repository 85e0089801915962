"""The rounding rules by name, and the unit of work that every back end takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Job(NamedTuple):
    """One tensor to cast, checked and ready for a back end.

    Attributes:
        served: Where the result goes: bfloat16, or float32 that will hold bfloat16 values.
        master: float32, of the same shape and device.
        keys: The two keys of this cast, from ``bits.stream_keys``.
        start: Index, in the unsharded parameter, of the first element.
        accumulator: int16 of the same shape under error feedback, else None.
    """

    served: torch.Tensor
    master: torch.Tensor
    keys: tuple[int, int]
    start: int
    accumulator: torch.Tensor | None
