"""Figures: runs side by side, and the forecast's histogram. matplotlib is imported on use."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
# What a plot shows, and the keys under which logs hold it: the demo's records, a LagMeter's figures, a Trainer's log.
MEASURES: dict[str, tuple[str, ...]] = {
    "changed": ("changed", "fcoptim/changed"),
    "tracked": ("tracked", "fcoptim/tracked"),
    "lag": ("lag", "fcoptim/lag"),
    "reward": ("reward", "mean_reward", "rewards/mean"),
}
_TITLES = {
    "changed": "served weights changed in a step",
    "tracked": "share of the movement that is served",
    "lag": "lag in steps",
    "reward": "reward",
}


@dataclass
class Curve:
    """One line of a plot.

    Attributes:
        label: Run, and rule where a run holds several.
        steps: Optimizer steps.
        values: One for each of them.
    """

    label: str
    steps: list[int]
    values: list[float]


def new_figure(width: float, height: float) -> Any:
    """Make a figure that belongs to no window and no global registry.

    Raises:
        ImportError: matplotlib is not installed; the message says what to install.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError('plots need matplotlib: pip install "fcoptim[demo]"')
    figure: Any = importlib.import_module("matplotlib.figure")
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    made = figure.Figure(figsize=(width, height), layout="constrained", dpi=140)
    agg.FigureCanvasAgg(made)
    return made


def run_name(path: Path) -> str:
    """What a run is called: its file, or the folder of the demo's ``steps.jsonl``."""
    return path.parent.name if path.stem == "steps" and path.parent.name else path.stem


def read_run(path: Path, name: str | None = None) -> dict[str, list[Curve]]:
    """Read a run's log.

    Args:
        path: JSON lines: ``steps.jsonl`` of the demo, or any objects that hold ``"step"`` and some of the measures.
        name: What to call the run. Default ``run_name(path)``.

    Returns:
        For each measure found, its curves.

    Raises:
        ValueError: The file is missing, is no JSON lines, or holds no measure.
    """
    name = run_name(path) if name is None else name
    curves: dict[str, dict[str, Curve]] = {}
    for record in _records(path):
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for label, values in _labelled(name, record):
            for measure, keys in MEASURES.items():
                value = next((values[key] for key in keys if isinstance(values.get(key), (int, float))), None)
                if value is not None and math.isfinite(value):
                    curve = curves.setdefault(measure, {}).setdefault(label, Curve(label, [], []))
                    curve.steps.append(step)
                    curve.values.append(float(value))
    if not curves:
        raise ValueError(f"{path} holds no step with any of {', '.join(MEASURES)}")
    return {measure: list(by_label.values()) for measure, by_label in curves.items()}


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()  # of bytes: text may hold other line separators inside JSON strings
    except OSError as error:
        raise ValueError(f"can't read {path}: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:  # no JSON, or half a character
            if number == len(lines):
                break  # a run that was interrupted while it wrote
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if isinstance(record, dict):
            records.append(record)
    return records


def _labelled(name: str, record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """A record's own measures under the run's name, and those of its rules under run and rule."""
    rules = record.get("rules")
    found: list[tuple[str, Mapping[str, Any]]] = [(name, record)]
    if isinstance(rules, Mapping):
        found += [(f"{name}: {rule}", measures) for rule, measures in rules.items() if isinstance(measures, Mapping)]
    return found


def plot_runs(runs: Sequence[Mapping[str, list[Curve]]], path: Path) -> list[str]:
    """Draw runs side by side: a panel for each measure that any of them has.

    Args:
        runs: From ``read_run``.
        path: Where the PNG goes. Written.

    Returns:
        The measures drawn.
    """
    shown = [measure for measure in MEASURES if any(measure in run for run in runs)]
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(5.8 * columns, 3.9 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for measure, place in zip(shown, axes):
        curves = [curve for run in runs for curve in run.get(measure, [])]
        for number, curve in enumerate(curves):
            style = {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _DASHES[number // len(_COLOURS) % 4]}
            place.plot(curve.steps, curve.values, label=curve.label, linewidth=1.6, **style)
        place.set(title=_TITLES[measure], xlabel="optimizer step")
        if measure == "changed" and any(value > 0 for curve in curves for value in curve.values):
            place.set_yscale("log")
        place.grid(True, color="0.9", linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
        place.legend(fontsize=7.5, framealpha=0.9)
    for place in axes[len(shown) :]:
        place.set_visible(False)
    figure.savefig(path)
    return shown


def plot_forecast(counts: torch.Tensor, ulps: torch.Tensor, lr: float, path: Path, *, title: str) -> None:
    """Draw the histogram of steps that a weight needs to move half an ulp.

    Args:
        counts: Weights by exponent field, int64 of shape ``(256,)``.
        ulps: The grid's spacing at each, float64.
        lr: Learning rate.
        path: Where the PNG goes. Written.
        title: Heading.
    """
    steps, share = ulps / 2 / lr, 100 * counts.double() / counts.sum()
    kept = share > 1e-4
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    axes.bar(steps[kept].tolist(), share[kept].tolist(), width=(0.6 * steps[kept]).tolist(), color=_COLOURS[0])
    axes.set_xscale("log")
    axes.set(title=title, ylabel="% of weights", xlabel="half an ulp, in steps of one full learning rate")
    axes.axvline(1.0, color=_COLOURS[1], linewidth=1.2, label="one step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5)
    figure.savefig(path)
