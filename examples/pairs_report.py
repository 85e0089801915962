"""Summaries, tables and plots of a grid that ``examples/seed_pairs.py`` has run.

A summary is one JSON line for each finished run. Tables and plots are made from summaries alone:

    python examples/pairs_report.py docs/evidence.md
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pairs_plot import plot
from pairs_tables import TABLES, Summary, fill, overview_table, pooled_table

BINS = 10


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


def read(file: Path) -> list[Summary]:
    """Read summaries, one on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


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
