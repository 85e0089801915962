"""What the last cast did, measured from masters and served weights as they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .distributed.census import Census
from .masters import Changes, Member

_CHUNK = 1 << 20


@dataclass
class CastStats:
    """Figures about served weights against their masters.

    Attributes:
        elements: Number of weights that have a master.
        changed: Share of them whose served bits changed in the last step; NaN before the first.
        error_mean: Mean of (served - master), in ulps of the served grid at each weight.
        error_rms: Root mean square of the same.
        saturated: Finite masters beyond the largest finite bf16, served as that number.
        nonfinite: Masters that are infinite or NaN.
        skipped_steps: Steps that ``on_nonfinite="skip"`` has skipped since construction.
    """

    elements: int
    changed: float
    error_mean: float
    error_rms: float
    saturated: int
    nonfinite: int
    skipped_steps: int


@torch.no_grad()
def measure(members: Iterable[Member], changed: Changes | None, skipped_steps: int) -> CastStats:
    """Compare served weights with their masters, chunk by chunk, over all ranks that share them.

    Args:
        members: All members; those kept in fp32 are passed over.
        changed: How many served values the last step changed, by parameter, or None before the first.
        skipped_steps: Handed on.
    """
    chosen = [member for member in members if not member.kept]
    census = Census(member.param for member in chosen)
    here = {member.name: member.local for member in chosen if census.counts(member.param)}
    moved = sum(
        int(counts[[number for number, name in enumerate(names) if name in here]].sum())
        for names, counts in changed or []
    )
    sums = torch.tensor([sum(member.master.numel() for member in here.values()), moved, 0, 0, 0, 0, 0]).double()
    for member in here.values():
        served, master = member.param.detach().reshape(-1), member.master.reshape(-1)
        for first in range(0, master.numel(), _CHUNK):
            figures = _chunk(served[first : first + _CHUNK], master[first : first + _CHUNK])
            sums[2:] += torch.tensor(figures, dtype=torch.float64)
    elements, moved, finite, total, squares, saturated, bad = census.total(sums).tolist()
    share = math.nan if changed is None or not elements else moved / elements
    mean = total / finite if finite else math.nan
    rms = math.sqrt(squares / finite) if finite else math.nan
    return CastStats(int(elements), share, mean, rms, int(saturated), int(bad), skipped_steps)


def _chunk(served: torch.Tensor, master: torch.Tensor) -> tuple[int, float, float, int, int]:
    """Return (finite elements, sum and sum of squares of the error in ulps, saturated, non-finite)."""
    finite = torch.isfinite(master)
    magnitude = master.abs()
    largest = torch.finfo(torch.bfloat16).max
    saturated = finite & (magnitude > largest) & (served.float().abs() == largest)
    error = errors_in_ulps(served, master)[finite & torch.isfinite(served.float())]
    return (
        error.numel(),
        float(error.sum()),
        float(error.square().sum()),
        int(saturated.sum()),
        int((~finite).sum()),
    )


def errors_in_ulps(served: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """``served - master`` in units of the bf16 grid's spacing at each master, in float64.

    Args:
        served: Of any floating dtype.
        master: float32, of the same shape.
    """
    # The spacing at a master is 2**(exponent - 7); frexp's exponent is one above IEEE's, and all numbers below
    # 2**-126 share the spacing 2**-133.
    exponent = torch.frexp(master.double().abs()).exponent.clamp(min=-125) - 8
    return torch.ldexp(served.double() - master.double(), -exponent)
