"""What a run shows: a bar and a growing table while it trains, the whole table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Record = Mapping[str, Any]


def _cell(measure: Mapping[str, float | None]) -> str:
    tracked = measure["tracked"]
    changed = 100 * (measure["changed"] or 0)
    return f"{changed:.{2 if changed < 9.995 else 1}f}% / " + ("-" if tracked is None else f"{tracked:.3f}")


def pick(count: int, most: int) -> list[int]:
    """Choose at most ``most`` of ``count`` positions, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def table(records: Sequence[Record], trained: str) -> Table:
    """Make the table of steps and rules: share of served weights changed / share of the displacement served.

    Args:
        records: The step records to show.
        trained: The rule the policy is served by; marked in the heading.
    """
    title = "served weights changed in the step / share of the masters' displacement served"
    made = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for heading in ("step", "reward", "signal"):
        made.add_column(heading, justify="right", no_wrap=True)
    for rule in records[0]["rules"] if records else ():
        mark = " *" if rule == trained else ""
        made.add_column(rule.replace("_", " ") + mark, justify="right", min_width=13)
    for record in records:
        signal = f"{record['groups_with_signal']}/{record['groups']}"
        cells = [_cell(measure) for measure in record["rules"].values()]
        made.add_row(str(record["step"]), f"{record['reward']:.3f}", signal, *cells)
    return made


def plain(record: Record, steps: int) -> str:
    """One line on a step, for output that is no terminal."""
    rules = "  ".join(f"{rule} {_cell(measure)}" for rule, measure in record["rules"].items())
    signal = f"{record['groups_with_signal']}/{record['groups']}"
    return f"step {record['step']}/{steps}  reward {record['reward']:.3f}  signal {signal}  {rules}"


class Screen:
    """Live progress on a terminal, one line for each step elsewhere.

    Args:
        console: Where to write.
        steps: How many steps there will be.
        trained: The rule the policy is served by.
    """

    def __init__(self, console: Console, steps: int, trained: str) -> None:
        self._console, self._steps, self._trained = console, steps, trained
        self._records: list[Record] = []
        self._bar = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=steps)
        self._live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None

    def announce(self, phase: str) -> None:
        """Show what the run is doing now."""
        self._bar.update(self._task, description=phase)

    def add(self, record: Record) -> None:
        """Show a finished step."""
        self._records.append(record)
        self._bar.update(self._task, advance=1)
        if self._live is None:
            self._console.print(plain(record, self._steps), soft_wrap=True, highlight=False, markup=False)
        else:
            room = max(4, min(12, self._console.height - 10))
            self._live.update(Group(table(self._records[-room:], self._trained), self._bar), refresh=True)

    def __enter__(self) -> Screen:
        """Start the live display."""
        if self._live is not None:
            self._live.update(self._bar)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        if self._live is not None:
            self._live.stop()
