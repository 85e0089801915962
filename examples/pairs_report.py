"""Summaries, tables and plots of a grid that ``examples/seed_pairs.py`` has run.

A summary is one JSON line for each finished run. Tables and plots are made from summaries alone:

    python examples/pairs_report.py docs/evidence.md
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fcoptim.plots import new_figure

Summary = dict[str, Any]
_K = TypeVar("_K", int, tuple[str, int])

BINS = 10
COLOURS = {"nearest": "#D55E00", "stochastic": "#0072B2", "dither": "#009E73", "error_feedback": "#CC79A7", "fp32": "0"}
_MORE_COLOURS = ("#E69F00", "#56B4E9", "#999999")
_MARK = re.compile(r"(<!-- begin: (\S+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def summarise(log: Path, setting: dict[str, Any]) -> Summary | None:
    """Read a run's log; None if the run is not finished."""
    records = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    if not records or records[-1]["kind"] != "end":
        return None
    head = records[0]
    steps = [record for record in records if record["kind"] == "step"]
    evals = [record for record in records if record["kind"] == "eval"]
    first, last = evals[0], evals[-1]
    found = {
        "setting": setting["name"],
        "arm": head["rounding"] + (f"+{head['lag']}" if head["lag"] else ""),
        "lr": head["lr"],
        "seed": head["seed"],
        "base": setting["bases"][head["seed"] % len(setting["bases"])],
        "steps": head["steps"],
        "tie": setting["tie"],
        "start": first["served"],
        "served": last["served"],
        "master": last["master"],
        "kl": last["kl"],
        "reward": _binned([step["reward"] for step in steps]),
        "seconds": sum(step["seconds"] for step in steps),
    }
    if "tracked" in steps[0]:
        tracked = [step["tracked"] for step in steps]
        ends = {"20": 20, "60": 60, "middle": len(steps) // 2, "end": len(steps)}
        found |= {
            "changed": float(np.mean([step["changed"] for step in steps])),
            "tracked": {name: tracked[step - 1] for name, step in ends.items() if 0 < step <= len(tracked)},
            "lag": _binned([step["lag"] for step in steps]),
            "lag_peak": max(step["lag"] for step in steps),
        }
    return _rounded(found)


def _binned(values: Sequence[float]) -> list[float]:
    return [float(part.mean()) for part in np.array_split(np.array(values), min(BINS, len(values)))]


def _rounded(value: Any) -> Any:
    """Numbers to six significant digits, which keeps the file small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def collect(out: Path) -> list[Summary]:
    """Summaries of all finished runs below a grid's folder, in a fixed order."""
    found = []
    for file in sorted(out.glob("*/setting.json")):
        setting = json.loads(file.read_text())
        for log in sorted(file.parent.glob("*/log.jsonl")):
            summary = summarise(log, setting)
            if summary:
                found.append(summary)
    return found


def pairs(summaries: Iterable[Summary], measure: str = "sampled") -> dict[tuple[str, float], dict[int, float]]:
    """Held-out reward of the served weights by (arm, learning rate), and by seed in each."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for summary in summaries:
        found.setdefault((summary["arm"], summary["lr"]), {})[summary["seed"]] = summary["served"][measure]
    return found


def bootstrap(differences: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean of paired differences: percentiles of 10,000 resamples of the pairs."""
    values = np.array(differences)
    draws = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def against(arm: dict[_K, float], other: dict[_K, float], tie: float) -> dict[str, Any] | None:
    """Compare two arms on the pairs that both have, by seed; None if there are none."""
    both = sorted(arm.keys() & other.keys())
    if not both:
        return None
    gaps = [arm[key] - other[key] for key in both]
    ahead, behind = sum(gap > tie for gap in gaps), sum(gap < -tie for gap in gaps)
    low, high = bootstrap(gaps)
    return {
        "pairs": len(gaps),
        "mean": float(np.mean(gaps)),
        "low": low,
        "high": high,
        "ahead": ahead,
        "tied": len(gaps) - ahead - behind,
        "behind": behind,
    }


def best_rates(summaries: Sequence[Summary]) -> dict[str, float]:
    """The learning rate at which each arm's mean held-out reward is highest."""
    scores: dict[str, dict[float, float]] = {}
    for (arm, lr), by_seed in pairs(summaries).items():
        scores.setdefault(arm, {})[lr] = float(np.mean(list(by_seed.values())))
    return {arm: max(rates, key=lambda lr: rates[lr]) for arm, rates in scores.items()}


_COLUMNS = "arm | lr | pairs | reward | minus nearest [95%] | ahead / tied / behind | greedy"
_MECHANISM = "arm | lr | changed per step | tracked at 20 / middle / end | peak lag | KL | master minus served"


def _header(columns: str) -> list[str]:
    return [f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)]


def _versus(found: dict[str, Any] | None) -> str:
    if found is None:
        return " | "
    interval = f"[{100 * found['low']:+.2f}, {100 * found['high']:+.2f}]"
    return f"{100 * found['mean']:+.2f} {interval} | {found['ahead']} / {found['tied']} / {found['behind']}"


def _line(
    arm: str, lr: float, scores: dict[int, float], nearest: dict[int, float], greedy: dict[int, float], tie: float
) -> str:
    versus = _versus(None if arm == "nearest" else against(scores, nearest, tie))
    return f"| {arm} | {lr:g} | {len(scores)} | {_mean(scores.values())} | {versus} | {_mean(greedy.values())} |"


def reward_table(summaries: Sequence[Summary]) -> str:
    """Held-out reward by arm and learning rate, each arm beside nearest at the same rate."""
    sampled, greedy, lines = pairs(summaries), pairs(summaries, "greedy"), _header(_COLUMNS)
    for arm, lr in _ordered(sampled):
        scores, nearest = sampled[arm, lr], sampled.get(("nearest", lr), {})
        lines.append(_line(arm, lr, scores, nearest, greedy[arm, lr], summaries[0]["tie"]))
    return "\n".join(lines)


def best_table(summaries: Sequence[Summary]) -> str:
    """Each arm at its own best learning rate, beside nearest at its best."""
    sampled, greedy, best = pairs(summaries), pairs(summaries, "greedy"), best_rates(summaries)
    lines = _header(_COLUMNS)
    for arm, lr in _ordered(best.items()):
        scores, nearest = sampled[arm, lr], sampled["nearest", best["nearest"]]
        lines.append(_line(arm, lr, scores, nearest, greedy[arm, lr], summaries[0]["tie"]))
    return "\n".join(lines)


def mechanism_table(summaries: Sequence[Summary]) -> str:
    """What each rule served: means over the seeds."""
    lines = _header(_MECHANISM)
    for arm, lr in _ordered(pairs(summaries)):
        some = [summary for summary in summaries if (summary["arm"], summary["lr"]) == (arm, lr)]
        gap = _halves_apart(some)
        if "tracked" in some[0]:
            ends = [at for at in ("20", "middle", "end") if at in some[0]["tracked"]]
            shown = [f"{np.mean([s['tracked'][at] for s in some]):.2f}" for at in ends]
            changed = f"{100 * np.mean([s['changed'] for s in some]):.2f}%"
            lag = f"{np.mean([s['lag_peak'] for s in some]):.0f}"
        else:
            shown, changed, lag = [], "", "0"
        kl = f"{1e5 * np.mean([s['kl'] for s in some]):.2f}e-5"
        lines.append(f"| {arm} | {lr:g} | {changed} | {' / '.join(shown)} | {lag} | {kl} | {gap:+.2f} |")
    return "\n".join(lines)


def _halves_apart(summaries: Sequence[Summary]) -> float:
    """Mean held-out reward of the masters less that of the served weights, in points."""
    return float(100 * np.mean([s["master"]["sampled"] - s["served"]["sampled"] for s in summaries]))


def _ordered(keys: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    order = list(COLOURS)
    return sorted(keys, key=lambda key: (key[1], order.index(key[0]) if key[0] in order else len(order), key[0]))


def _mean(values: Iterable[float]) -> str:
    numbers = list(values)
    spread = f" ± {100 * np.std(numbers, ddof=1):.1f}" if len(numbers) > 1 else ""
    return f"{100 * np.mean(numbers):.1f}{spread}"


def overview_table(summaries: Sequence[Summary]) -> str:
    """One line for each setting: where it started, and how each rule at its best rate stands to nearest at its own."""
    settings = list(dict.fromkeys(summary["setting"] for summary in summaries))
    lines = _header("setting | steps | start | nearest at its best | arm | minus nearest [95%] | ahead / tied / behind")
    for name in settings:
        some = [summary for summary in summaries if summary["setting"] == name]
        sampled, best = pairs(some), best_rates(some)
        if "nearest" not in best:
            continue
        nearest = sampled["nearest", best["nearest"]]
        start = _mean({s["seed"]: s["start"]["sampled"] for s in some}.values())
        for arm in (arm for arm, _ in _ordered((arm, 0.0) for arm in best) if arm != "nearest"):
            versus = _versus(against(sampled[arm, best[arm]], nearest, some[0]["tie"]))
            lines.append(f"| {name} | {some[0]['steps']} | {start} | {_mean(nearest.values())} | {arm} | {versus} |")
    return "\n".join(lines)


def pooled_table(summaries: Sequence[Summary]) -> str:
    """Each rule beside nearest at the same learning rate, over all settings that have every rule."""
    whole = {summary["setting"] for summary in summaries if summary["arm"] == "fp32"}
    by_setting = {name: pairs(s for s in summaries if s["setting"] == name) for name in sorted(whole)}
    lines = _header("arm | lr | settings | pairs | minus nearest [95%] | ahead / tied / behind")
    keys = {key for sampled in by_setting.values() for key in sampled if key[0] != "nearest"}
    for arm, lr in _ordered(keys):
        ours, theirs = {}, {}
        for name, sampled in by_setting.items():
            for seed, score in sampled.get((arm, lr), {}).items():
                ours[name, seed] = score
            for seed, score in sampled.get(("nearest", lr), {}).items():
                theirs[name, seed] = score
        found = against(ours, theirs, summaries[0]["tie"])
        if found:
            count = len({name for name, _ in ours.keys() & theirs.keys()})
            lines.append(f"| {arm} | {lr:g} | {count} | {found['pairs']} | {_versus(found)} |")
    return "\n".join(lines)


TABLES = {"reward": reward_table, "best": best_table, "mechanism": mechanism_table}


def table(name: str, summaries: Sequence[Summary]) -> str:
    """Make a table by its name: ``overview``, ``pooled``, or ``SETTING/KIND`` with a kind of ``TABLES``.

    Raises:
        ValueError: There is no such table, or no summary of that setting.
    """
    if name in ("overview", "pooled"):
        return overview_table(summaries) if name == "overview" else pooled_table(summaries)
    setting, _, kind = name.partition("/")
    some = [summary for summary in summaries if summary["setting"] == setting]
    if kind not in TABLES or not some:
        known = sorted({summary["setting"] for summary in summaries})
        raise ValueError(f"no table {name!r}; there are overview, pooled and {', '.join(TABLES)} of {', '.join(known)}")
    return TABLES[kind](some)


def fill(page: str, summaries: Sequence[Summary]) -> str:
    """Make the tables of a page anew, between ``<!-- begin: NAME -->`` and ``<!-- end -->``."""
    return _MARK.sub(lambda found: f"{found[1]}{table(found[2], summaries)}{found[3]}", page)


def read(file: Path) -> list[Summary]:
    """Read summaries, one on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def plot(summaries: Sequence[Summary], file: Path) -> None:
    """Draw a setting: reward and lag along the run, with bands of one sd, KL and the gap between the two halves."""
    figure = new_figure(11.5, 7.0)
    axes = figure.subplots(2, 2).flatten()
    rates = sorted({summary["lr"] for summary in summaries})
    middle = rates[len(rates) // 2]
    arms = [arm for arm, _ in _ordered({(summary["arm"], 0.0) for summary in summaries})]
    spare = iter(_MORE_COLOURS)
    colours = {arm: COLOURS.get(arm) or next(spare) for arm in arms}
    for measure, place in (("reward", axes[0]), ("lag", axes[1])):
        for arm in arms:
            curves = [s[measure] for s in summaries if s["arm"] == arm and s["lr"] == middle and measure in s]
            if curves:
                _band(place, np.array(curves), summaries[0]["steps"], colours[arm], arm)
    axes[0].set(title=f"training reward, lr {middle:g}", xlabel="optimizer step")
    axes[1].set(title=f"lag in steps, lr {middle:g}", xlabel="optimizer step")
    axes[0].legend(fontsize=8)
    for arm in arms:
        some = {lr: [s for s in summaries if (s["arm"], s["lr"]) == (arm, lr)] for lr in rates}
        some = {lr: found for lr, found in some.items() if found}
        kl = [np.mean([s["kl"] for s in found]) for found in some.values()]
        gap = [
            100 * np.mean([s["master"]["sampled"] - s["served"]["sampled"] for s in found]) for found in some.values()
        ]
        if arm != "fp32":  # whose halves are one
            axes[2].plot(
                [lr for lr, value in zip(some, kl) if value > 0], [v for v in kl if v > 0], "o-", color=colours[arm]
            )
            axes[3].plot(list(some), gap, "o-", color=colours[arm])
    axes[2].set(title="KL(served, master) at the end", xlabel="learning rate", xscale="log")
    axes[2].set_yscale("symlog", linthresh=1e-7)
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


def write(out: Path, to: Path | None = None) -> str:
    """Write ``summaries.jsonl`` and a plot for each setting; return all tables as text.

    Args:
        out: The grid's folder.
        to: Where the files go. Default: the grid's folder.

    Raises:
        ValueError: No run is finished.
    """
    summaries, to = collect(out), to or out
    if not summaries:
        raise ValueError(f"{out} holds no finished run; start it with `seed_pairs.py run --out {out}`")
    to.mkdir(parents=True, exist_ok=True)
    (to / "summaries.jsonl").write_text("".join(json.dumps(summary) + "\n" for summary in summaries))
    text = [overview_table(summaries), pooled_table(summaries)]
    for setting in dict.fromkeys(summary["setting"] for summary in summaries):
        some = [summary for summary in summaries if summary["setting"] == setting]
        plot(some, to / f"{setting}.png")
        text += [f"## {setting}", *(make(some) for make in TABLES.values())]
    return "\n\n".join(text)


def main() -> None:
    """Make the tables of a page anew from the summaries in the folder of its name."""
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text(), read(page.with_suffix("") / "summaries.jsonl")))


if __name__ == "__main__":
    main()
