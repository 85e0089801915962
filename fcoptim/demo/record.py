"""Where a run's results go: a folder of its own, a line of JSON for each step as it happens."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

STEPS = "steps.jsonl"
FIGURE = "tracking.png"
LAGS = "lags.png"


def new_folder(wanted: Path) -> Path:
    """Make a folder for a run, without touching what an earlier run wrote.

    Args:
        wanted: Taken as it is if it does not exist or is an empty folder; else ``-2``, ``-3``, ... is appended.

    Returns:
        The folder, which exists and is empty.

    Raises:
        ValueError: It can't be made.
    """
    candidate, number = wanted, 1
    while True:
        try:
            if not (candidate.is_dir() and not any(candidate.iterdir())):
                candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
            candidate = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise ValueError(f"can't make the folder {str(candidate)!r} for the results: {error}") from error


class Recorder:
    """Writes records as lines of JSON, each flushed, so that an interrupted run keeps what it has done.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STEPS
        self._file = self.path.open("x", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it must hold no NaN, which JSON does not know."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Recorder:
        """Open already; nothing to do."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()
