"""How late round-to-nearest will serve a model's updates, from its weights and the learning rate alone.

Two things decide it: how wide the bf16 grid is at each weight, which the file says exactly, and how far AdamW carries a
weight in so many steps, which is simulated. Gradients are drawn as ``signal + noise`` with noise of unit variance, and
run through AdamW's own recursion (its step does not depend on the gradients' scale); a weight that starts on the grid
at spacing ``ulp`` and has moved by ``x`` is served as if moved by ``round(x / ulp) * ulp``. Summed over the model this
gives the share of the movement that is served, and from it the lag, both as ``LagMeter`` defines them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_EXPONENTS = 256
_FLOATING = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_SIMULATED = 4096


@dataclass
class Grid:
    """The bf16 grid under a set of weights.

    Attributes:
        on_grid: How many weights lie on the bf16 grid, by exponent field: int64 of shape ``(256,)``.
        between: How many lie between its points.
    """

    on_grid: torch.Tensor
    between: torch.Tensor

    @property
    def weights(self) -> int:
        """How many weights there are."""
        return int(self.on_grid.sum() + self.between.sum())

    def __add__(self, other: Grid) -> Grid:
        """Both sets together."""
        return Grid(self.on_grid + other.on_grid, self.between + other.between)


@dataclass
class Outlook:
    """What round-to-nearest will do to a set of weights.

    Attributes:
        name: The layer group: parameter names with their numbers left out.
        weights: How many weights.
        steps_to_move: Steps of one full learning rate in one direction that carry the median weight half an ulp.
        tracked: Share of the displacement that is served, one for each of ``steps``.
        lag: Lag in steps, one for each of ``steps``.
    """

    name: str
    weights: int
    steps_to_move: float
    tracked: list[float]
    lag: list[float]


def grid_of(tensor: torch.Tensor) -> Grid:
    """Count a tensor's weights by exponent field.

    Args:
        tensor: Floating, of any shape. float64 and float16 are read as float32.
    """
    bits = tensor.detach().reshape(-1).to(torch.float32).view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    on = (bits & 0xFFFF) == 0
    counts = [torch.bincount(exponent[chosen], minlength=_EXPONENTS) for chosen in (on, ~on)]
    return Grid(*counts)


def spacing() -> torch.Tensor:
    """The bf16 grid's spacing at each exponent field, float64 of shape ``(256,)``."""
    exponent = torch.arange(_EXPONENTS, dtype=torch.float64).clamp(min=1)
    return torch.exp2(exponent - 127 - 7)


def simulate(steps: int, *, beta1: float, beta2: float, signal: float) -> torch.Tensor:
    """Displacements of weights under AdamW, in units of the learning rate.

    Args:
        steps: How many steps.
        beta1: AdamW's.
        beta2: AdamW's.
        signal: Mean of a weight's gradient over its standard deviation.

    Returns:
        float64 of shape ``(steps + 1, 4096)``, the first row zeros. Drawn with a seed of its own.
    """
    generator = torch.Generator().manual_seed(0)
    path = torch.zeros(steps + 1, _SIMULATED, dtype=torch.float64)
    first, second = torch.zeros(_SIMULATED, dtype=torch.float64), torch.zeros(_SIMULATED, dtype=torch.float64)
    for step in range(1, steps + 1):
        gradient = signal + torch.randn(_SIMULATED, generator=generator, dtype=torch.float64)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        move = (first / (1 - beta1**step)) / (second / (1 - beta2**step)).sqrt()
        path[step] = path[step - 1] + move
    return path


def tracked_share(grid: Grid, moved: torch.Tensor) -> float:
    """Share of a displacement that round-to-nearest serves.

    Weights between grid points are dithered by where they lie, so on average their whole displacement is served.

    Args:
        grid: The weights.
        moved: A sample of displacements, float64.
    """
    ulp = spacing()[:, None]
    served = torch.round(moved / ulp) * ulp
    by_exponent = (served * moved).sum(1) / (moved * moved).sum()
    shares = grid.on_grid.double() @ by_exponent + grid.between.sum().double()
    return float(shares / grid.weights)


def lag_of(path: torch.Tensor, step: int, tracked: float) -> float:
    """How many steps before ``step`` the masters stood where the served weights project.

    Args:
        path: From ``simulate``.
        step: The step.
        tracked: The share served then; at 1 or more there is no lag.
    """
    if tracked >= 1:
        return 0.0
    now = path[step]
    behind = (path[: step + 1] @ now / (now @ now)).flip(0).tolist()
    for age in range(1, len(behind)):
        if behind[age] <= tracked:
            newer, older = float(behind[age - 1]), float(behind[age])
            return age - (tracked - older) / (newer - older)
    return float(step)


def look_ahead(name: str, grid: Grid, path: torch.Tensor, lr: float, steps: Sequence[int]) -> Outlook:
    """Forecast one set of weights.

    Args:
        name: What to call it.
        grid: The weights.
        path: From ``simulate``, at least ``max(steps)`` long.
        lr: Learning rate.
        steps: The steps to forecast.
    """
    tracked = [tracked_share(grid, path[step] * lr) for step in steps]
    everything = grid.on_grid + grid.between
    median = int(torch.searchsorted(everything.cumsum(0), (grid.weights + 1) // 2))
    to_move = float(spacing()[median]) / 2 / lr
    return Outlook(name, grid.weights, to_move, tracked, [lag_of(path, s, t) for s, t in zip(steps, tracked)])


def read_grids(path: Path) -> dict[str, Grid]:
    """Read a model's weights tensor by tensor and count them by layer group.

    Args:
        path: A safetensors file, or a folder that holds some.

    Raises:
        ValueError: There is no such file, it can't be read, or it holds no floating weights.
    """
    grids: dict[str, Grid] = {}
    for name, tensor in _tensors(path):
        if tensor.dtype in _FLOATING and tensor.numel():
            group = re.sub(r"\.\d+(?=\.|$)", ".*", name)
            found = grid_of(tensor)
            grids[group] = grids[group] + found if group in grids else found
    if not grids:
        raise ValueError(f"{path} holds no floating weights")
    return grids


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(
            f"there is no safetensors file at {path}; give a .safetensors file or a folder that holds some"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no dict)
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is no readable safetensors file: {error}") from error
