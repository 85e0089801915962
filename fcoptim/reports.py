"""What ``fcoptim forecast`` and ``fcoptim plot`` print."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from pathlib import Path

from . import forecast, plots
from .bench.table import print_table

_LARGEST = 1e6  # beyond it squares overflow in the end; no real run comes near


def forecast_report(path: Path, *, lr: float, beta1: float, beta2: float, signal: float, steps: int, out: Path) -> None:
    """Forecast a model's lag under round-to-nearest: a table, a histogram and a verdict.

    Args:
        path: A safetensors file or a folder of them.
        lr: AdamW's learning rate.
        beta1: AdamW's.
        beta2: AdamW's.
        signal: Mean of a weight's gradient over its standard deviation.
        steps: How far to look ahead.
        out: The histogram's PNG. Written.

    Raises:
        ValueError: A number is out of range, or the weights can't be read.
    """
    for name, value, good in (
        ("lr", lr, 0 < lr <= _LARGEST),
        ("beta1", beta1, 0 <= beta1 < 1),
        ("beta2", beta2, 0 <= beta2 < 1),
        ("signal", signal, 0 <= signal <= _LARGEST),
        ("steps", steps, 1 <= steps <= 10_000),
    ):
        if not good:
            raise ValueError(f"{name} is out of range: {value}")
    grids = forecast.read_grids(path)
    total = functools.reduce(operator.add, grids.values())
    points = sorted({max(1, steps // 6), max(1, steps // 2), steps})
    walked = forecast.simulate(steps, beta1=beta1, beta2=beta2, signal=signal)
    outlooks = [forecast.look_ahead(name, grid, walked, lr, points) for name, grid in grids.items()]
    whole = forecast.look_ahead("all", total, walked, lr, points)
    print_table(
        f"Round-to-nearest at AdamW lr {lr:g}: share served / lag in steps",
        ("layer group", "weights", "steps to half an ulp", *(f"step {step}" for step in points)),
        [_row(outlook) for outlook in [*sorted(outlooks, key=lambda one: -one.weights)[:16], whole]],
    )
    plots.plot_forecast(
        total.on_grid + total.between, forecast.spacing(), lr, out, title=f"{path.name}, AdamW lr {lr:g}"
    )
    between = 100 * int(total.between.sum()) / total.weights
    if between > 1:
        print(f"{between:.0f}% of the weights lie between bf16 numbers; rounding to nearest serves those on average.")
    print(
        f"Verdict: at lr {lr:g} round-to-nearest will serve {100 * whole.tracked[-1]:.0f}% of what {steps} steps have "
        f"learned and lag {whole.lag[-1]:.0f} steps behind. Histogram: {out}"
    )


def _row(outlook: forecast.Outlook) -> tuple[str, ...]:
    cells = (f"{tracked:.3f} / {lag:.0f}" for tracked, lag in zip(outlook.tracked, outlook.lag))
    return (outlook.name, f"{outlook.weights:,}", f"{outlook.steps_to_move:.3g}", *cells)


def plot_report(paths: Sequence[Path], out: Path) -> None:
    """Plot runs side by side into a PNG, and print each curve's first, middle and last value.

    Args:
        paths: JSON lines of one or several runs.
        out: The PNG. Written.

    Raises:
        ValueError: A file can't be read or holds nothing to plot.
    """
    names = [plots.run_name(path) for path in paths]
    names = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]
    runs = [plots.read_run(path, name) for path, name in zip(paths, names)]
    shown = plots.plot_runs(runs, out)
    rows = []
    for measure in shown:
        for curve in (curve for run in runs for curve in run.get(measure, [])):
            places = (0, len(curve.steps) // 2, -1)
            cells = (f"{curve.values[place]:.4g} @ {curve.steps[place]}" for place in places)
            rows.append((measure, curve.label, *cells, _spark(curve.values)))
    print_table("value @ step", ("measure", "run", "first", "middle", "last", "course"), rows, texts=2)
    print(f"plot: {out}")


def _spark(values: Sequence[float], width: int = 24) -> str:
    """A line of block characters that rises and falls with the values."""
    count = min(width, len(values))
    picked = [values[place * (len(values) - 1) // max(1, count - 1)] for place in range(count)]
    low, high = min(picked), max(picked)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((value - low) / (high - low) * 7) if high > low else 0] for value in picked)
