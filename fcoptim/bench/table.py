"""The table that each benchmark prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WIDTH_OFF_TERMINAL = 120


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> None:
    """Print a table; into a file or a pipe it is as wide as it needs to be for its columns.

    Args:
        title: Stands above it.
        headings: One for each column.
        rows: Cells as text.
        texts: How many columns from the left are text, aligned left. Default 1; the others are figures.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OFF_TERMINAL)
    table = Table(title=title)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right", no_wrap=number < texts)
    for row in rows:
        table.add_row(*row)
    console.print(table)
