"""The figure: per rule, the share of served weights changed in each step and the share of the update served."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plots import new_figure
from .model import need

# Colours after Okabe and Ito, told apart by most colour-blind readers; markers and dashes say it again.
_STYLE: dict[str, dict[str, Any]] = {
    "nearest": {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    "stochastic": {"color": "#0072B2", "marker": "s", "linestyle": "-"},
    "dither": {"color": "#009E73", "marker": "^", "linestyle": "--"},
    "error_feedback": {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
}


def _label(rule: str, value: float, text: str) -> str:
    shown = "-" if math.isnan(value) else text.format(value)
    return f"{rule.replace('_', ' ')} ({shown})"


def plot(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw the steps' measures into a PNG file.

    Args:
        records: Step records as the demo writes them, in order; at least one.
        path: Where the PNG goes. Written.
        title: Heading, for example the model, the task and the learning rate.

    Raises:
        ValueError: There is no record.
        MissingExtra: matplotlib is not installed.
    """
    if not records:
        raise ValueError("there is no step to plot")
    need("matplotlib")
    figure = new_figure(11.5, 4.8)
    ticker: Any = importlib.import_module("matplotlib.ticker")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    steps = [record["step"] for record in records]
    every = max(1, len(steps) // 10)
    for rule in records[-1]["rules"]:
        style = {**_STYLE.get(rule, {}), "markersize": 5, "markevery": every, "linewidth": 1.8, "alpha": 0.9}
        changed = [100 * record["rules"][rule]["changed"] or math.nan for record in records]  # no log of 0
        tracked = [record["rules"][rule]["tracked"] for record in records]
        tracked = [math.nan if value is None else value for value in tracked]
        left.plot(steps, changed, label=_label(rule, changed[-1], "{:.2f}%"), **style)
        right.plot(steps, tracked, label=_label(rule, tracked[-1], "{:.3f}"), **style)
    left.set(title="Traffic: served weights whose bits change in a step", ylabel="% of served weights")
    if any(measure["changed"] > 0 for record in records for measure in record["rules"].values()):
        left.set_yscale("log")
        left.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
        left.yaxis.set_minor_formatter("{x:g}")
    left.yaxis.set_major_formatter("{x:g}")
    right.axhline(1.0, color="0.55", linewidth=0.8, zorder=0)
    right.set(title="Tracking: share of the masters' displacement that is served", ylabel="<s, D> / |D|²")
    right.set_ylim(min(0.0, right.get_ylim()[0]), max(1.15, right.get_ylim()[1]))
    for axes in (left, right):
        axes.set_xlabel("optimizer step")
        axes.title.set_fontsize(10)
        axes.grid(True, which="both", color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8.5, framealpha=0.9, title=f"rule (at step {steps[-1]})", title_fontsize=8.5)
    figure.savefig(path)
