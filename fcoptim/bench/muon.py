"""``fcoptim bench muon``: one step of ``fcoptim.Muon`` against ``torch.optim.Muon``, and how near the updates are.

``torch.optim.Muon`` computes in bf16 whatever the device. Where that is slow, its loop is also timed in fp32, and
itself on a part of the matrices only: it takes them one by one, so its time goes with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..devices import multiplies_bf16_fast
from ..muon import Muon
from ..muon.orthogonalize import floor_flops, make_plan, plain_flops
from .table import print_table
from .timing import interleaved

TORCH = "torch.optim.Muon, bf16"
LOOP = "the same loop, fp32"
STEPS = 5
_LR = 1e-6  # weights hardly move, so that all candidates can share them
_TRIPLE = (3.4445, -4.7750, 2.0315)

Shape = tuple[int, int]


@dataclass(frozen=True)
class Workload:
    """Matrices to step.

    Attributes:
        name: What to call them.
        shapes: Their shapes.
        parts: How many equal parts they consist of; one of them stands for all where the whole would take minutes.
    """

    name: str
    shapes: Sequence[Shape]
    parts: int


@dataclass
class Row:
    """One line of the result.

    Attributes:
        workload: What was stepped.
        name: The optimizer.
        seconds: Median time of a step.
        best: The fastest step.
        over_torch: Median time over that of ``torch.optim.Muon``.
        over_loop: Median time over that of its loop in fp32.
        flops: Operations of the orthogonalisation in a step.
        floor: The fewest that would do.
        difference: Relative distance of its update from that of ``torch.optim.Muon`` at the same settings, of the
            worst matrix; NaN where the settings differ.
    """

    workload: str
    name: str
    seconds: float
    best: float
    over_torch: float
    over_loop: float
    flops: int
    floor: int
    difference: float = field(default=float("nan"))


def smollm2_matrices(layers: int) -> list[Shape]:
    """Shapes of the hidden matrices in so many layers of SmolLM2-135M: q, k, v, o, gate, up, down."""
    return [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)] * layers


class LoopMuon:
    """``torch.optim.Muon``'s step, one matrix after the other, in fp32 (``adjust_lr_fn="match_rms_adamw"``).

    Args:
        params: Matrices with gradients.
        lr: Learning rate.
    """

    def __init__(self, params: Sequence[torch.Tensor], lr: float) -> None:
        self.params, self.lr = params, lr
        self.momenta = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        a, b, c = _TRIPLE
        for param, momentum in zip(self.params, self.momenta):
            grad = param.grad
            assert grad is not None
            momentum.lerp_(grad, 0.05)
            x = grad.lerp(momentum, 0.95)
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(STEPS):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            param.mul_(1 - self.lr * 0.1)
            param.add_(x.T if tall else x, alpha=-self.lr * 0.2 * max(param.shape) ** 0.5)


def make_params(shapes: Sequence[Shape], device: str) -> list[torch.nn.Parameter]:
    """fp32 matrices with gradients, the same for the same shapes."""
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, device=device) * 0.02) for s in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, device=device) * 1e-3
    return params


def our_settings(device: str) -> dict[str, dict[str, Any]]:
    """How ``fcoptim.Muon`` is timed, by name: at torch's settings, and by default."""
    dtypes = ("bfloat16", "float32") if multiplies_bf16_fast(device) else ("float32",)
    found = {f"newton_schulz, {d}": {"orthogonalize": "newton_schulz", "dtype": d} for d in dtypes}
    return {**found, "polar_express (default)": {}}


def measure(workload: Workload, device: str, rounds: int) -> list[Row]:
    """Time all candidates on one workload.

    Args:
        workload: What to step.
        device: Where it lies.
        rounds: Timed steps of each.
    """
    params = make_params(workload.shapes, device)
    times = 1 if multiplies_bf16_fast(device) else workload.parts
    part = params[: len(params) // times]
    name = TORCH if times == 1 else f"{TORCH}, 1/{times} x {times}"
    calls: dict[str, Callable[[], object]] = {
        name: torch.optim.Muon(part, lr=_LR, adjust_lr_fn="match_rms_adamw").step,
        LOOP: LoopMuon(params, _LR).step,
    }
    settings = our_settings(device)
    calls.update({key: Muon(params, lr=_LR, **options).step for key, options in settings.items()})
    timings = interleaved(calls, rounds=rounds, device=device, warmup=1)
    timings[name].median *= times
    timings[name].best *= times
    symmetric = torch.device(device).type == "cpu"
    flops = {key: sum(plain_flops(*shape, STEPS) for shape in workload.shapes) for key in (name, LOOP)}
    planned = sum(make_plan(*shape, STEPS, symmetric).flops for shape in workload.shapes)
    floor = sum(floor_flops(*shape, STEPS) for shape in workload.shapes)
    rows = []
    for key, timing in timings.items():
        ratios = timing.median / timings[name].median, timing.median / timings[LOOP].median
        row = Row(workload.name, key, timing.median, timing.best, *ratios, flops.get(key, planned), floor)
        if "newton_schulz" in key:
            row.difference = difference(sorted(set(workload.shapes)), device, settings[key])
        rows.append(row)
    return rows


def difference(shapes: Sequence[Shape], device: str, settings: dict[str, Any]) -> float:
    """How far one update is from that of ``torch.optim.Muon``, relative to its norm, at the worst of some shapes."""
    ours, theirs = make_params(shapes, device), make_params(shapes, device)
    for param in ours + theirs:
        param.data.zero_()
    Muon(ours, lr=1.0, **settings).step()
    reference: torch.optim.Optimizer = torch.optim.Muon(theirs, lr=1.0, adjust_lr_fn="match_rms_adamw")
    reference.step()
    return max(float((a.detach() - b.detach()).norm() / b.detach().norm()) for a, b in zip(ours, theirs))


def run(layers: int = 30, threads: int | None = None, device: str = "cpu", rounds: int = 3) -> list[Row]:
    """Time a step on the hidden matrices of SmolLM2-135M and on 256 matrices of 64 x 64.

    Args:
        layers: How many of the model's 30 layers. Default 30.
        threads: torch's number of threads for the length of the run; None leaves it.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: Timed steps of each. Default 3.

    Raises:
        ValueError: A number is not positive, or the device is not there.
    """
    if layers < 1 or rounds < 1 or (threads is not None and threads < 1):
        raise ValueError(f"layers, rounds and threads must be positive; got {layers}, {rounds}, {threads}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("there is no CUDA or ROCm device here; pass --device cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        small = Workload("256 of 64 x 64", [(64, 64)] * 256, 8)
        shapes = smollm2_matrices(layers)
        large = Workload(f"SmolLM2-135M, {len(shapes)} matrices", shapes, layers)
        return measure(small, device, 3 * rounds) + measure(large, device, rounds)
    finally:
        torch.set_num_threads(before)


def main(layers: int = 30, threads: int | None = None, device: str = "cpu", rounds: int = 3) -> None:
    """Run the benchmark and print its table; see ``run`` for the arguments."""
    rows = run(layers, threads, device, rounds)
    used = f"{threads or torch.get_num_threads()} threads, " if device == "cpu" else ""
    for workload in dict.fromkeys(row.workload for row in rows):
        print_table(
            f"{workload}: one step of Muon, {STEPS} iterations ({device}, {used}torch {torch.__version__})",
            ("optimizer", "s", "best s", "x torch", "x fp32 loop", "GFLOP", "x floor", "GFLOP/s", "from torch's"),
            [_cells(row) for row in rows if row.workload == workload],
        )


def _cells(row: Row) -> tuple[str, ...]:
    apart = "" if row.difference != row.difference else f"{row.difference:.1%}"
    return (
        row.name,
        f"{row.seconds:.3f}",
        f"{row.best:.3f}",
        f"{row.over_torch:.3f}",
        f"{row.over_loop:.2f}",
        f"{row.flops / 1e9:.4g}",
        f"{row.flops / row.floor:.2f}",
        f"{row.flops / row.seconds / 1e9:.1f}",
        apart,
    )
