"""Fair timing: warm-up, then interleaved windows, so that a machine that drifts slows all candidates alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# OpenMP's threads spin for a while after their work and would slow the candidate that comes next.
_PAUSE = 0.03


@dataclass
class Timing:
    """Seconds of one candidate.

    Attributes:
        median: Over all windows.
        best: The fastest window.
    """

    median: float
    best: float


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 9, device: str = "cpu", warmup: int = 2
) -> dict[str, Timing]:
    """Time candidates in turn: A B C A B C ..., one call each time.

    Args:
        candidates: What to call, by name.
        rounds: Timed calls of each. Default 9.
        device: On ``"cuda"`` each call is waited for. Default ``"cpu"``.
        warmup: Untimed rounds first. Default 2.

    Returns:
        Timings by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warmup + rounds):
        for name, call in candidates.items():
            _wait(device)
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            call()
            _wait(device)
            if number >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return {name: Timing(statistics.median(values), min(values)) for name, values in seconds.items()}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
