"""The tables of a grid of matched seed-pairs, made from its summaries alone."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

Summary = dict[str, Any]
_K = TypeVar("_K", int, tuple[str, int])

ARMS = ("nearest", "stochastic", "dither", "error_feedback", "fp32")
_MARK = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    for arm, lr in ordered(sampled):
        scores, nearest = sampled[arm, lr], sampled.get(("nearest", lr), {})
        lines.append(_line(arm, lr, scores, nearest, greedy[arm, lr], summaries[0]["tie"]))
    return "\n".join(lines)


def best_table(summaries: Sequence[Summary]) -> str:
    """Each arm at its own best learning rate, beside nearest at its best."""
    sampled, greedy, best = pairs(summaries), pairs(summaries, "greedy"), best_rates(summaries)
    lines = _header(_COLUMNS)
    for arm, lr in ordered(best.items()):
        scores, nearest = sampled[arm, lr], sampled["nearest", best["nearest"]]
        lines.append(_line(arm, lr, scores, nearest, greedy[arm, lr], summaries[0]["tie"]))
    return "\n".join(lines)


def mechanism_table(summaries: Sequence[Summary]) -> str:
    """What each rule served: means over the seeds."""
    lines = _header(_MECHANISM)
    for arm, lr in ordered(pairs(summaries)):
        some = [summary for summary in summaries if (summary["arm"], summary["lr"]) == (arm, lr)]
        gap = halves_apart(some)
        if "tracked" in some[0]:
            shown = [_tracked(some, at) for at in ("20", "middle", "end")]
            changed = f"{100 * np.mean([s['changed'] for s in some]):.2f}%"
            lag = f"{np.mean([s['lag_peak'] for s in some]):.0f}"
        else:
            shown, changed, lag = [], "", "0"
        kl = f"{1e5 * np.mean([s['kl'] for s in some]):.2f}e-5"
        lines.append(f"| {arm} | {lr:g} | {changed} | {' / '.join(shown)} | {lag} | {kl} | {gap:+.2f} |")
    return "\n".join(lines)


def _tracked(summaries: Sequence[Summary], at: str) -> str:
    """Mean share that was served at a step; a dash if the runs are shorter."""
    values = [summary["tracked"][at] for summary in summaries if at in summary["tracked"]]
    return f"{np.mean(values):.2f}" if values else "-"


def halves_apart(summaries: Sequence[Summary]) -> float:
    """Mean held-out reward of the masters less that of the served weights, in points."""
    return float(np.mean([_apart(summary) for summary in summaries]))


def ordered(keys: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Arms and their learning rates: by rate, then in the order of ``ARMS``, lags last."""
    return sorted(keys, key=lambda key: (key[1], ARMS.index(key[0]) if key[0] in ARMS else len(ARMS), key[0]))


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
        for arm in (arm for arm, _ in ordered((arm, 0.0) for arm in best) if arm != "nearest"):
            versus = _versus(against(sampled[arm, best[arm]], nearest, some[0]["tie"]))
            lines.append(f"| {name} | {some[0]['steps']} | {start} | {_mean(nearest.values())} | {arm} | {versus} |")
    return "\n".join(lines)


def pooled_table(summaries: Sequence[Summary]) -> str:
    """Each rule beside nearest at the same learning rate, over all settings that have every rule."""
    return _pooled(summaries, "minus nearest", [(arm, "nearest", arm) for arm in ARMS[1:]])


def dither_table(summaries: Sequence[Summary]) -> str:
    """Dither beside the other unbiased rules, and fp32, at the same learning rate, over the same settings."""
    others = ("stochastic", "error_feedback", "fp32")
    return _pooled(summaries, "dither minus arm", [("dither", arm, arm) for arm in others])


def _pooled(summaries: Sequence[Summary], difference: str, comparisons: Sequence[tuple[str, str, str]]) -> str:
    """Lines of one arm less another, each under a name."""
    settings = _whole(summaries)
    lines = _header(f"arm | lr | settings | pairs | {difference} [95%] | ahead / tied / behind")
    for lr in sorted({summary["lr"] for some in settings.values() for summary in some}):
        for one, other, name in comparisons:
            ours, theirs = (_scores(settings, arm, {}, lr) for arm in (one, other))
            found = against(ours, theirs, summaries[0]["tie"])
            if found:
                count = len({setting for setting, _ in ours.keys() & theirs.keys()})
                lines.append(f"| {name} | {lr:g} | {count} | {found['pairs']} | {_versus(found)} |")
    return "\n".join(lines)


def headline_table(summaries: Sequence[Summary]) -> str:
    """What the published result reports, beside the settings that have every rule: round-to-nearest and dither.

    Ranges are over the means of the settings, at the lowest learning rate of all.

    Raises:
        ValueError: No setting has every rule.
    """
    by_setting = _whole(summaries)
    if not by_setting:
        raise ValueError(f"no setting has finished runs of all of {', '.join(ARMS)}")
    some = [summary for name in by_setting for summary in by_setting[name]]
    slow = min(summary["lr"] for summary in some)
    lines = _header("figure | published: nearest | published: unbiased | here: nearest | here: dither")
    for label, published, figure, form in (
        ("served weights that change in a step", "0.4 to 0.5% | ", lambda s: 100 * s["changed"], "{:.2f}%"),
        ("peak lag in steps", "50 to 150 | ", lambda s: s["lag_peak"], "{:.0f}"),
        ("share of the movement that is served, at the end", " | ", lambda s: s["tracked"]["end"], "{:.2f}"),
        ("reward of the fp32 masters minus that of the served weights, points", " | agree", _apart, "{:+.2f}"),
    ):
        ours = [_range(by_setting.values(), arm, slow, figure, form) for arm in ("nearest", "dither")]
        lines.append(f"| {label}, lr {slow:g} | {published} | {' | '.join(ours)} |")
    best = {name: best_rates(found) for name, found in by_setting.items()}
    for label, published, rates in (
        (f"pairs ahead / tied / behind and mean gain in points, lr {slow:g}", "", {}),
        ("the same, each rule at its best rate", "18 / 6 / 1, +6.1", best),
    ):
        found = against(*(_scores(by_setting, arm, rates, slow) for arm in ("dither", "nearest")), some[0]["tie"])
        ours = f"{found['ahead']} / {found['tied']} / {found['behind']}, {100 * found['mean']:+.2f}" if found else ""
        lines.append(f"| {label} | | {published} | | {ours} |")
    zebra = {name: by_setting[name] for name in by_setting if name.startswith("zebra")}
    ours = [_mean(_scores(zebra, arm, best, slow).values()) for arm in ("nearest", "dither")] if zebra else ["", ""]
    lines.append(
        f"| zebra puzzles: reward in percent, each rule at its best rate | 33 ± 10 | 57 ± 16 | {' | '.join(ours)} |"
    )
    return "\n".join(lines)


def _whole(summaries: Iterable[Summary]) -> dict[str, list[Summary]]:
    """The settings that have every rule."""
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary["setting"], []).append(summary)
    return {name: some for name, some in found.items() if {s["arm"] for s in some} >= set(ARMS)}


def _apart(summary: Summary) -> float:
    return 100 * (summary["master"]["sampled"] - summary["served"]["sampled"])


def _range(
    settings: Iterable[list[Summary]], arm: str, lr: float, figure: Callable[[Summary], float], form: str
) -> str:
    runs = [[figure(s) for s in some if (s["arm"], s["lr"]) == (arm, lr)] for some in settings]
    means = sorted(float(np.mean(values)) for values in runs if values)
    ends = [form.format(value) for value in (means[0], means[-1])]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _scores(
    settings: dict[str, list[Summary]], arm: str, rates: dict[str, dict[str, float]], lr: float
) -> dict[tuple[str, int], float]:
    """An arm's rewards by setting and seed, at its rate of each setting, or at one for all."""
    found = {}
    for name, some in settings.items():
        rate = rates[name][arm] if name in rates else lr
        found |= {(name, seed): score for seed, score in pairs(some).get((arm, rate), {}).items()}
    return found


TABLES = {"reward": reward_table, "best": best_table, "mechanism": mechanism_table}
_OVER_ALL = {"headline": headline_table, "overview": overview_table, "pooled": pooled_table, "dither": dither_table}


def table(name: str, summaries: Sequence[Summary]) -> str:
    """Make a table by its name: one over all settings, or ``SETTING/KIND`` with a kind of ``TABLES``.

    Raises:
        ValueError: There is no such table, or no summary of that setting.
    """
    if name in _OVER_ALL:
        return _OVER_ALL[name](summaries)
    setting, _, kind = name.partition("/")
    some = [summary for summary in summaries if summary["setting"] == setting]
    if kind not in TABLES or not some:
        known = sorted({summary["setting"] for summary in summaries})
        raise ValueError(
            f"no table {name!r}; there are {', '.join(_OVER_ALL)} and {', '.join(TABLES)} of {', '.join(known)}"
        )
    return TABLES[kind](some)


def fill(page: str, summaries: Sequence[Summary]) -> str:
    """Make the tables of a page anew, between ``<!-- begin: NAME -->`` and ``<!-- end -->``."""
    return _MARK.sub(lambda found: f"{found[1]}{table(found[2], summaries)}\n{found[3]}", page)
