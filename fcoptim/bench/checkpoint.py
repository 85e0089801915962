"""``fcoptim bench checkpoint``: save_checkpoint and load_checkpoint against torch.save and torch.load."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..checkpoint import load_checkpoint, save_checkpoint
from ..optimizer import FairCastOptimizer
from .cast import smollm2_shapes
from .table import print_table
from .timing import interleaved

SAVE = "torch.save"
LOAD = "torch.load"
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


class _Workload:
    """A model of SmolLM2's shapes, as many layers as fit, with AdamW's state; and the calls to time on it."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.model, self.opt = self._pair(nbytes)
        for _, param in self.model.named_parameters():
            param.grad = torch.full(param.shape, 1e-3)
        self.opt.step()
        self.opt.zero_grad()
        self.other_model, self.other = self._pair(nbytes)
        weights = sum(param.numel() for param in self.model.parameters())
        self.nbytes = weights * _BYTES_PER_WEIGHT
        self.path, self.file = folder / "step-0", folder / "torch.pt"
        save_checkpoint(self.path, self.opt)
        self.save_torch()

    @staticmethod
    def _pair(nbytes: int) -> tuple[nn.Module, FairCastOptimizer]:
        torch.manual_seed(0)
        model = nn.ParameterList()
        for shape in smollm2_shapes()[1:] * (1 + nbytes // 1_500_000_000):
            if sum(param.numel() for param in model) * _BYTES_PER_WEIGHT >= nbytes:
                break
            model.append(nn.Parameter(torch.randn(shape) * 0.02))
        return model, FairCastOptimizer(model, torch.optim.AdamW, lr=1e-4)

    def save(self) -> None:
        self.count += 1
        save_checkpoint(self.folder / f"step-{self.count}", self.opt, keep=2)

    def load(self) -> None:
        load_checkpoint(self.folder / f"step-{self.count}" if self.count else self.path, self.other)

    def save_torch(self) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}, self.file)

    def save_torch_synced(self) -> None:
        self.save_torch()
        with open(self.file, "rb") as file:
            os.fsync(file.fileno())

    def read_torch(self) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = torch.load(self.file, weights_only=True)
        return found

    def load_torch(self) -> None:
        found = self.read_torch()
        self.other_model.load_state_dict(found["model"])
        self.other.load_state_dict(found["optimizer"])


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
    with tempfile.TemporaryDirectory(prefix="fcoptim-bench-", dir=folder) as place:
        work = _Workload(megabytes * 1_000_000, Path(place))
        saves: dict[str, Callable[[], object]] = {
            SAVE: work.save_torch,
            "torch.save, then fsync": work.save_torch_synced,
            "save_checkpoint (SHA-256, fsync)": work.save,
        }
        loads: dict[str, Callable[[], object]] = {
            LOAD: work.read_torch,
            "torch.load, then load_state_dict of both": work.load_torch,
            "load_checkpoint (SHA-256, served weights checked)": work.load,
        }
        rows = _timed(saves, SAVE, work.nbytes, rounds) + _timed(loads, LOAD, work.nbytes, rounds)
        return work.nbytes, rows


def _timed(calls: dict[str, Callable[[], object]], base: str, nbytes: int, rounds: int) -> list[Row]:
    timings = interleaved(calls, rounds=rounds, warmup=1)
    first = timings[base]
    return [
        Row(name, t.median, t.median / first.median, t.best / first.best, nbytes / t.median / 1e9)
        for name, t in timings.items()
    ]


def main(megabytes: int = 1000, folder: Path | None = None, rounds: int = 5) -> None:
    """Run the benchmark and print its table; see ``run`` for the arguments."""
    nbytes, rows = run(megabytes, folder, rounds)
    print_table(
        f"Checkpoints of {nbytes / 1e9:.2f} GB (AdamW, torch {torch.__version__}, {torch.get_num_threads()} threads; "
        "files in the page cache)",
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
