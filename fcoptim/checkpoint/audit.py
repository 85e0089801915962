"""``fcoptim audit``: whether two halves agree, and how well one set of weights serves another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..masters import MASTER
from ..stats import errors_in_ulps
from .folder import resolve
from .layout import CheckpointError
from .opened import Opened, differing, open_weights
from .tensorfile import count_differing

KEPT = "kept in fp32"
NOT_TRAINED = "not trained"
_CHUNK = 1 << 20


@dataclass
class Row:
    """One tensor of an audit.

    Attributes:
        name: The tensor.
        elements: How many values it has.
        rule: The rounding rule it was served by, or ``KEPT`` or ``NOT_TRAINED``.
        differing: Served values that are not what the saved state serves.
        fit: How they stand to the masters, if they were cast.
    """

    name: str
    elements: int
    rule: str
    differing: int
    fit: Fit | None


@dataclass
class Fit:
    """How served weights stand to masters, summed up over tensors with ``+``.

    Attributes:
        elements: Number of values.
        nearest: Values whose bits are those of the master rounded to nearest.
        total: Sum of (served - master), in ulps.
        squares: Sum of its squares.
        largest: The largest of its magnitudes.
        nonfinite: Values where either is infinite or NaN; they count in ``elements`` only.
        moved: Inner products of the masters' movement with the served one's and with itself, if a start is given.
    """

    elements: int = 0
    nearest: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0
    moved: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: Fit) -> Fit:
        return Fit(
            self.elements + other.elements,
            self.nearest + other.nearest,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.nonfinite + other.nonfinite,
            (self.moved[0] + other.moved[0], self.moved[1] + other.moved[1]),
        )

    @property
    def nearest_share(self) -> float:
        """Share of values equal to the nearest rounding."""
        return self.nearest / self.elements if self.elements else math.nan

    @property
    def mean(self) -> float:
        """Mean error in ulps."""
        finite = self.elements - self.nonfinite
        return self.total / finite if finite else math.nan

    @property
    def rms(self) -> float:
        """Root mean square error in ulps."""
        finite = self.elements - self.nonfinite
        return math.sqrt(self.squares / finite) if finite else math.nan

    @property
    def tracked(self) -> float:
        """Projection of the served movement on the masters': 1 where all is served."""
        return self.moved[0] / self.moved[1] if self.moved[1] else math.nan


@dataclass
class Report:
    """What an audit found.

    Attributes:
        folder: The checkpoint.
        step: Its step.
        problems: Everything that is wrong, in words; empty if nothing is.
        rows: By tensor.
    """

    folder: Path
    step: int
    problems: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is whole and its halves agree."""
        return not self.problems


def audit(path: str | Path) -> Report:
    """Check a checkpoint: manifest, hashes, then served weights against the cast of the masters.

    Args:
        path: A folder that ``save_checkpoint`` wrote.

    Returns:
        The report. A checkpoint so damaged that it can't be read is reported likewise.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    report = Report(resolve(path), 0)
    try:
        opened = Opened(report.folder)
        if opened.manifest is None:
            raise CheckpointError(
                f"{report.folder} is no checkpoint of fcoptim's; to compare two model folders pass --served and "
                "--masters"
            )
        report.step = opened.manifest.step
        report.problems += opened.damaged()
        report.rows = list(_rows(opened))
        report.problems += [
            f"{row.name}: {row.differing} of {row.elements} served values are not what the saved state serves"
            for row in report.rows
            if row.differing
        ]
    except (CheckpointError, KeyError) as error:
        report.problems.append(f"it can't be read: {error}")
    return report


def _rows(opened: Opened) -> Iterator[Row]:
    """Trained parameters, then what else the model holds."""
    left = dict.fromkeys(opened.served)
    for saved in opened.parameters():
        left.pop(saved.weight, None)
        served, master = opened.served[saved.weight], opened.masters[saved.weight]
        if served.shape != master.shape:
            raise CheckpointError(f"{saved.weight!r} has another shape among the masters")
        if MASTER in saved.entry:
            rule, wrong, how = str(saved.group["rounding"]), differing(saved, served), fit(served, master)
        else:
            rule, wrong, how = KEPT, _differing(served, master), None
        yield Row(saved.weight, served.numel(), rule, wrong, how)
    for name in left:
        served, master = opened.served[name], opened.masters[name]
        yield Row(name, served.numel(), NOT_TRAINED, _differing(served, master.to(served.dtype)), None)


def _differing(served: torch.Tensor, again: torch.Tensor) -> int:
    """How many values differ in their bits; all of them where the dtype is another."""
    if served.dtype != again.dtype:
        return served.numel()
    return count_differing(served.contiguous(), again.contiguous())


def compare(served: str | Path, masters: str | Path, start: str | Path | None = None) -> dict[str, Fit]:
    """Hold one set of weights against another, ours or not.

    Args:
        served: A folder or file of safetensors.
        masters: Another, for instance the ``masters`` of a checkpoint.
        start: The weights at the start of the run, for the share of the movement that is served. Default None.

    Returns:
        By tensor, those floating tensors that all of them have.

    Raises:
        CheckpointError: A folder can't be read, a shape differs, or they have no tensor in common.
    """
    a, b = open_weights(resolve(served)), open_weights(resolve(masters))
    first = None if start is None else open_weights(resolve(start))
    shared = [key for key in a if key in b and (first is None or key in first)]
    fits = {}
    for key in shared:
        if not (a[key].is_floating_point() and b[key].is_floating_point()):
            continue
        origin = None if first is None else first[key]
        for other in (b[key], origin):
            if other is not None and other.shape != a[key].shape:
                raise CheckpointError(f"{key!r} has shapes {tuple(a[key].shape)} and {tuple(other.shape)}")
        fits[key] = fit(a[key], b[key], origin)
    if not fits:
        raise CheckpointError(f"{served} and {masters} have no floating tensor in common")
    return fits


def left_out(served: str | Path, masters: str | Path) -> list[str]:
    """Tensors that only one of two sets has."""
    return sorted(open_weights(resolve(served)).keys() ^ open_weights(resolve(masters)).keys())


def fit(served: torch.Tensor, master: torch.Tensor, start: torch.Tensor | None = None) -> Fit:
    """Compare one tensor, chunk by chunk; see ``Fit``."""
    out = Fit()
    rows = [tensor.reshape(-1) for tensor in (served, master, *([] if start is None else [start]))]
    for first in range(0, served.numel(), _CHUNK):
        out += _fit_chunk(*(row[first : first + _CHUNK].float() for row in rows))
    return out


def _fit_chunk(served: torch.Tensor, master: torch.Tensor, start: torch.Tensor | None = None) -> Fit:
    nearest = (served.view(torch.int32) == master.bfloat16().float().view(torch.int32)) | (
        served.isnan() & master.isnan()
    )
    finite = served.isfinite() & master.isfinite()
    error = errors_in_ulps(served, master)[finite]
    moved = (0.0, 0.0)
    if start is not None:
        begin = start.double()[finite]
        served_move, master_move = served.double()[finite] - begin, master.double()[finite] - begin
        moved = (float(served_move @ master_move), float(master_move @ master_move))
    return Fit(
        served.numel(),
        int(nearest.sum()),
        float(error.sum()),
        float(error.square().sum()),
        float(error.abs().max()) if error.numel() else 0.0,
        served.numel() - error.numel(),
        moved,
    )
