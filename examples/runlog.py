"""A run's log as JSON lines: a header with the run's options, records, and an end. Survives being killed."""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class RunLog:
    """The log of one run, which may be going on where it stopped.

    Args:
        file: The log.
        options: Of the run; they are the header.

    Raises:
        ValueError: The file is of a run with other options.
    """

    def __init__(self, file: Path, options: Record) -> None:
        self._file = file
        self._header = {"kind": "header", **options}
        self.records = _read(file) or [self._header]
        if self.records[0] != self._header:
            raise ValueError(f"{file} is of a run with other options: {self.records[0]}; choose another folder")

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.records[-1]["kind"] == "end"

    def restart(self, step: int) -> None:
        """Forget what was logged after a step, or all but the header if it is 0."""
        self.records = [self._header, *(r for r in self.records[1:] if step and r["step"] <= step)]
        beside = self._file.with_suffix(".partial")
        beside.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        os.replace(beside, self._file)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a record."""
        record = {"kind": kind, "step": step, **values}
        self.records.append(record)
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _read(file: Path) -> list[Record]:
    """All whole records; the last line of a run that was killed may be half a one."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
