"""``fcoptim bench checkpoint``: save_checkpoint and load_checkpoint against torch.save and torch.load.

Saves are timed in one process, one after the other. Each load is timed in a process of its own, as at a resume: a
process that loads again and again reuses memory that the system has given to it before.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import load_checkpoint, save_checkpoint
from ..optimizer import FairCastOptimizer
from .cast import smollm2_shapes
from .table import print_table

SAVE = "torch.save"
LOADS = {
    "torch.load": "read_torch",
    "torch.load, then load_state_dict of both": "load_torch",
    "load_checkpoint (SHA-256, served weights checked)": "load",
}
FILE, FOLDER = "torch.pt", "checkpoint"
# bf16 weight, fp32 master, two fp32 moments.
_BYTES_PER_WEIGHT = 14


@dataclass
class Row:
    """One line of the result.

    Attributes:
        name: What was done.
        seconds: Median time.
        ratio: Median time over that of ``torch.save`` or ``torch.load``.
        best_ratio: The same of the fastest calls.
        gigabytes_per_second: Bytes of the checkpoint over the median time.
    """

    name: str
    seconds: float
    ratio: float
    best_ratio: float
    gigabytes_per_second: float


def make_pair(nbytes: int) -> tuple[nn.Module, FairCastOptimizer]:
    """A model of SmolLM2's shapes, as many layers as fit, and AdamW."""
    torch.manual_seed(0)
    model = nn.ParameterList()
    held = 0
    while held < nbytes:
        for shape in smollm2_shapes()[1:]:
            model.append(nn.Parameter(torch.randn(shape) * 0.02))
            held += model[-1].numel() * _BYTES_PER_WEIGHT
            if held >= nbytes:
                break
    return model, FairCastOptimizer(model, torch.optim.AdamW, lr=1e-4)


class Saves:
    """A run with AdamW's state, and the ways to save it."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.folder = folder
        self.model, self.opt = make_pair(nbytes)
        for param in self.model.parameters():
            param.grad = torch.full(param.shape, 1e-3)
        self.opt.step()
        self.opt.zero_grad()
        self.nbytes = sum(param.numel() for param in self.model.parameters()) * _BYTES_PER_WEIGHT

    def clear(self) -> None:
        """Remove what was saved before; some file systems take long for it, so it is no part of the time."""
        (self.folder / FILE).unlink(missing_ok=True)
        shutil.rmtree(self.folder / FOLDER, ignore_errors=True)

    def save(self) -> None:
        """``save_checkpoint``."""
        save_checkpoint(self.folder / FOLDER, self.opt)

    def save_torch(self) -> None:
        """``torch.save`` of both state dicts."""
        torch.save({"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}, self.folder / FILE)

    def save_torch_synced(self) -> None:
        """The same, and have the disk hold it."""
        self.save_torch()
        with open(self.folder / FILE, "rb") as file:
            os.fsync(file.fileno())


class Loads:
    """A new run, and the ways to load a saved one into it."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.folder = folder
        self.model, self.opt = make_pair(nbytes)

    def load(self) -> None:
        """``load_checkpoint``."""
        load_checkpoint(self.folder / FOLDER, self.opt)

    def read_torch(self) -> dict[str, dict[str, Any]]:
        """``torch.load`` alone."""
        found: dict[str, dict[str, Any]] = torch.load(self.folder / FILE, weights_only=True)
        return found

    def load_torch(self) -> None:
        """``torch.load``, and what it read into model and optimizer."""
        found = self.read_torch()
        self.model.load_state_dict(found["model"])
        self.opt.load_state_dict(found["optimizer"])


def time_load(name: str, nbytes: int, folder: Path) -> float:
    """Time one load in a process of its own, in seconds."""
    command = [sys.executable, "-m", __name__, LOADS[name], str(nbytes), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def _main(call: str, nbytes: str, folder: str) -> None:
    loads = Loads(int(nbytes), Path(folder))
    begin = time.perf_counter()
    getattr(loads, call)()
    print(time.perf_counter() - begin)


def run(megabytes: int = 1000, folder: Path | None = None, rounds: int = 5) -> tuple[int, list[Row]]:
    """Time saving and loading.

    Args:
        megabytes: Size of the checkpoint. Default 1000.
        folder: Where to write; None for the system's temporary folder.
        rounds: Timed calls of each. Default 5.

    Returns:
        Bytes of the checkpoint, and one row for each thing timed.

    Raises:
        ValueError: A number is not positive, or the folder is not there.
    """
    if megabytes < 1 or rounds < 1:
        raise ValueError(f"megabytes and rounds must be positive; got {megabytes}, {rounds}")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    with tempfile.TemporaryDirectory(prefix="fcoptim-bench-", dir=folder) as created:
        place, size = Path(created), megabytes * 1_000_000
        saves = Saves(size, place)
        calls = {
            SAVE: saves.save_torch,
            "torch.save, then fsync": saves.save_torch_synced,
            "save_checkpoint (SHA-256, fsync)": saves.save,
        }
        written: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(1 + rounds):
            for name, call in calls.items():
                seconds = _time_save(call, saves)
                if number:  # the first round warms up
                    written[name].append(seconds)
        saves.save_torch()
        read: dict[str, list[float]] = {name: [] for name in LOADS}
        for _ in range(rounds):
            for name in LOADS:
                read[name].append(time_load(name, size, place))
        return saves.nbytes, _rows(written, saves.nbytes) + _rows(read, saves.nbytes)


def _time_save(call: Callable[[], None], saves: Saves) -> float:
    saves.clear()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _rows(seconds: Mapping[str, Sequence[float]], nbytes: int) -> list[Row]:
    """One row for each, against the first."""
    first = next(iter(seconds.values()))
    median, best = statistics.median(first), min(first)
    return [
        Row(name, m, m / median, min(values) / best, nbytes / m / 1e9)
        for name, values in seconds.items()
        if (m := statistics.median(values))
    ]


def main(megabytes: int = 1000, folder: Path | None = None, rounds: int = 5) -> None:
    """Run the benchmark and print its table; see ``run`` for the arguments."""
    nbytes, rows = run(megabytes, folder, rounds)
    print_table(
        f"Checkpoints of {nbytes / 1e9:.2f} GB (AdamW, torch {torch.__version__}, {os.cpu_count()} cores; loads in new "
        "processes, from the page cache)",
        ("", "seconds", "x torch", "x torch, best", "GB/s"),
        [
            (
                row.name,
                f"{row.seconds:.2f}",
                f"{row.ratio:.2f}",
                f"{row.best_ratio:.2f}",
                f"{row.gigabytes_per_second:.2f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
