"""Explicit lags on the demo's master trajectory, beside round-to-nearest: which of them does what it does.

They run on a fixed sample of coordinates, so that a ring of past masters costs megabytes and not gigabytes, and by
the code that ``FairCastOptimizer`` runs: ``fcoptim.lag`` and ``cast_``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cast import cast_, parameter_key
from ..forecast import lag_of
from ..lag import DeadZone, Delay, Ema, Lag, target
from ..plots import new_figure
from ..sampling import Sample

_SAMPLE = 1 << 16
_KEY = parameter_key(0, "demo/lags")


@dataclass
class Course:
    """How served weights follow the masters.

    Attributes:
        label: The lag and the rule.
        tracked: Share of the displacement that is served, one for each step.
        lag: In steps, likewise.
    """

    label: str
    tracked: list[float]
    lag: list[float]


class LagsBeside:
    """Remembers the sampled masters of each step, and replays lags on them.

    Args:
        named_masters: As ``FairCastOptimizer.named_masters`` gives them; read again after each step.
    """

    def __init__(self, named_masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._masters = dict(named_masters)
        self._sample = Sample(self._masters, _SAMPLE, seed=0)
        self._path = [self._sample.read(self._masters, torch.float32)]

    def add(self) -> None:
        """Remember the masters as they are after a step."""
        self._path.append(self._sample.read(self._masters, torch.float32))

    def compare(self) -> list[Course]:
        """Replay round-to-nearest, and of each lag the setting that comes nearest to its tracked share.

        Returns:
            Round-to-nearest, the dead zone of half an ulp, the best ``Ema`` and the best ``Delay``, in this order.
        """
        nearest = self._course("nearest", self._served(None, "nearest"))
        products = self._products()
        ema = min(_candidates(len(self._path)), key=lambda n: _distance(_ema_tracked(products, n), nearest.tracked))
        delay = min(range(len(self._path)), key=lambda k: _distance(_delay_tracked(products, k), nearest.tracked))
        lags: list[tuple[Lag, str]] = [(DeadZone(0.5), "nearest"), (Ema(ema), "dither"), (Delay(delay), "dither")]
        courses = [nearest]
        for lag, rule in lags:
            label = f"{type(lag).__name__}({getattr(lag, lag.settings[0]):g}), {rule}"
            courses.append(self._course(label, self._served(lag, rule)))
        return courses

    def _served(self, lag: Lag | None, rule: str) -> list[torch.Tensor]:
        """The served weights of each step under a lag and a rule, the start first."""
        served = self._path[0].bfloat16()
        entry: dict[str, Any] = {}
        if lag is not None:
            lag.start(entry, self._path[0], served)
        series = [served.clone()]
        for count, master in enumerate(self._path[1:], 1):
            if lag is not None:
                lag.advance(entry, master)
            aim = master if isinstance(lag, DeadZone) else target(entry, master)
            fresh = torch.empty_like(served)
            cast_(fresh, aim, rounding=rule, key=_KEY, count=count)
            if isinstance(lag, DeadZone):
                lag.merge(served, master, fresh)
            else:
                served.copy_(fresh)
            series.append(served.clone())
        return series

    def _displacements(self, series: list[torch.Tensor]) -> torch.Tensor:
        """Displacements since the start, scaled so that plain products are weighted ones; float64, a row each."""
        rows = torch.stack(series).double()
        return (rows - rows[0]) * self._sample.weights.sqrt()

    def _products(self) -> torch.Tensor:
        """Of each pair of steps, the product of the masters' displacements."""
        moved = self._displacements(self._path)
        return moved @ moved.T

    def _course(self, label: str, series: list[torch.Tensor]) -> Course:
        moved, served = self._displacements(self._path), self._displacements(series)
        squares = (moved * moved).sum(1)
        shares = torch.where(squares > 0, (served * moved).sum(1) / squares, 1.0).tolist()
        lags = [lag_of(moved, step, shares[step]) if squares[step] > 0 else 0.0 for step in range(1, len(shares))]
        return Course(label, shares[1:], lags)


def _candidates(steps: int) -> list[float]:
    """Time constants to try, 12 to a decade, up to a hundred times the run."""
    count = int(12 * torch.log10(torch.tensor(100.0 * steps))) + 1
    return sorted({round(10 ** (number / 12)) * 1.0 for number in range(count)})


def _ema_tracked(products: torch.Tensor, steps: float) -> list[float]:
    """What an average would serve, from the displacements' products alone."""
    weights = torch.zeros(len(products), dtype=torch.float64)
    tracked = []
    for step in range(1, len(products)):
        weights = weights * (1 - 1 / steps)
        weights[step] += 1 / steps
        tracked.append(float(weights @ products[:, step] / products[step, step].clamp(min=1e-300)))
    return tracked


def _delay_tracked(products: torch.Tensor, delay: int) -> list[float]:
    steps = range(1, len(products))
    return [float(products[max(0, t - delay), t] / products[t, t].clamp(min=1e-300)) for t in steps]


def _distance(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b))


def describe(courses: list[Course]) -> list[str]:
    """Lines that say how each lag compares with round-to-nearest, the first course."""
    lines = ["explicit lags on the same masters (a sample of 65,536): tracked share / lag in steps at the end"]
    nearest = courses[0]
    for course in courses:
        off = max(abs(a - b) for a, b in zip(course.tracked, nearest.tracked))
        text = f"  {course.label:<22} {course.tracked[-1]:.3f} / {course.lag[-1]:.1f}"
        lines.append(text if course is nearest else f"{text}, at most {off:.3f} from nearest's share at any step")
    return lines


def plot_lags(courses: list[Course], path: Path, *, title: str) -> None:
    """Draw the courses into a PNG: tracked share and lag.

    Args:
        courses: From ``LagsBeside.compare``.
        path: Where the PNG goes. Written.
        title: Heading.
    """
    figure = new_figure(11.5, 4.4)
    ticker: Any = importlib.import_module("matplotlib.ticker")
    figure.suptitle(title, fontsize=11)
    steps = range(1, len(courses[0].tracked) + 1)
    for axes, name, heading in zip(
        figure.subplots(1, 2), ("tracked", "lag"), ("share of the movement that is served", "lag in steps")
    ):
        for number, course in enumerate(courses):
            width, dash = (4.0, "-") if number == 0 else (1.6, ("--", "-", ":")[number - 1])
            axes.plot(
                steps,
                getattr(course, name),
                dash,
                linewidth=width,
                alpha=0.45 if number == 0 else 1,
                label=course.label,
            )
        axes.set(title=heading, xlabel="optimizer step")
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.legend(fontsize=8.5)
    figure.savefig(path)
