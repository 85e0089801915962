"""The plots of a grid of matched seed-pairs, made from its summaries alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pairs_tables import ARMS, Summary, halves_apart, ordered

from fcoptim.plots import new_figure

_COLOURS = dict(zip(ARMS, ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "0")))
_MORE_COLOURS = ("#E69F00", "#56B4E9", "#999999")


def plot(summaries: Sequence[Summary], file: Path) -> None:
    """Draw a setting: reward and lag along the run, with bands of one sd, KL and the gap between the two halves."""
    figure = new_figure(11.5, 7.0)
    axes = figure.subplots(2, 2).flatten()
    rates = sorted({summary["lr"] for summary in summaries})
    slow = rates[0]  # where the lag is longest
    arms = [arm for arm, _ in ordered({(summary["arm"], 0.0) for summary in summaries})]
    spare = iter(_MORE_COLOURS)
    colours = {arm: _COLOURS.get(arm) or next(spare) for arm in arms}
    for measure, place in (("reward", axes[0]), ("lag", axes[1])):
        for arm in arms:
            curves = [s[measure] for s in summaries if s["arm"] == arm and s["lr"] == slow and measure in s]
            if curves:
                _band(place, np.array(curves), summaries[0]["steps"], colours[arm], arm)
    axes[0].set(title=f"training reward, lr {slow:g}", xlabel="optimizer step")
    axes[1].set(title=f"lag in steps, lr {slow:g}", xlabel="optimizer step")
    axes[0].legend(fontsize=8)
    for arm in arms:
        some = {lr: [s for s in summaries if (s["arm"], s["lr"]) == (arm, lr)] for lr in rates}
        some = {lr: found for lr, found in some.items() if found}
        if arm != "fp32":  # whose halves are one
            kl = [np.mean([s["kl"] for s in found]) for found in some.values()]
            axes[2].plot(list(some), kl, "o-", color=colours[arm])
            axes[3].plot(list(some), [halves_apart(found) for found in some.values()], "o-", color=colours[arm])
    axes[2].set(title="KL(served, master) at the end", xlabel="learning rate", xscale="log", ylim=(0, None))
    axes[3].set(title="reward of the masters minus the served, points", xlabel="learning rate", xscale="log")
    for place in axes:
        place.grid(True, color="0.9", linewidth=0.6)
        place.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{summaries[0]['setting']} (bf16)")
    figure.savefig(file)


def _band(place: Any, curves: np.ndarray, steps: int, colour: str, label: str) -> None:
    width = steps / curves.shape[1]
    x = (np.arange(curves.shape[1]) + 0.5) * width
    mean, spread = curves.mean(0), curves.std(0)
    place.plot(x, mean, color=colour, label=label)
    place.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
