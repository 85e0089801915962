"""``fcoptim bench distributed``: what the ranks say to each other in a step, and what of that is fcoptim's."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from ..cast import DEFAULT, get_rule
from .table import print_table

SETUPS = ("DDP, bf16", "FSDP2, bf16", "FSDP2, fp32 + mixed precision", "FSDP2, fp32 + mixed precision, Muon")
_QUIET = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
_WARMUP = 2


@dataclass
class Row:
    """One line of the result, of rank 0.

    Attributes:
        setup: How the model is spread.
        construction: Bytes communicated when FairCastOptimizer is constructed.
        engine: Bytes that forward and backward communicate in a step.
        plain: Bytes in a step of the same optimizer without FairCastOptimizer.
        fair: Bytes in a step with it.
        stats: Bytes in a call of ``cast_stats()``.
        plain_ms: Median time of a step without it, in milliseconds.
        fair_ms: With it.
    """

    setup: str
    construction: int
    engine: int
    plain: int
    fair: int
    stats: int
    plain_ms: float
    fair_ms: float


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the payload of each collective on this rank: the larger of what goes in and what comes out, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, then run."""
        if "c10d" in func.namespace and not any(name in str(func) for name in _QUIET):
            factor = args[1] if "all_gather_into_tensor" in str(func) and isinstance(args[1], int) else 1
            self.bytes += factor * max((_size(arg) for arg in args), default=0)
        return func(*args, **(kwargs or {}))

    def during(self, call: Callable[[], Any]) -> int:
        """The bytes of one call."""
        before = self.bytes
        with self:
            call()
        return self.bytes - before


def _size(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return arg.numel() * arg.element_size()
    return sum(map(_size, arg)) if isinstance(arg, (list, tuple)) else 0


def _model(width: int, layers: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(*blocks, nn.Linear(width, width))


def _spread(model: nn.Sequential, setup: str) -> nn.Module:
    """Spread a model over all ranks; a bf16 one is bf16 already, as FairCastOptimizer or its user would make it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if setup.startswith("DDP"):
        return DistributedDataParallel(model.bfloat16())
    wide = "fp32" in setup
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if wide else None)
    shard = functools.partial(fully_shard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    for layer in model if wide else model.bfloat16():
        if isinstance(layer, nn.Linear):
            shard(layer)
    shard(model)
    return model


def _optimizer(setup: str) -> tuple[Any, dict[str, Any]]:
    from ..muon import Muon

    return (Muon, {"lr": 1e-3}) if "Muon" in setup else (torch.optim.AdamW, {"lr": 1e-3, "foreach": False})


def _measure(setup: str, width: int, layers: int, rounding: str, steps: int) -> Row:
    """Train the same model without and with FairCastOptimizer."""
    from .. import FairCastOptimizer

    x = torch.randn(8, width, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    kind, options = _optimizer(setup)
    traffic = Traffic()

    def backward(model: nn.Module) -> None:
        model(x).float().square().mean().backward()

    model = _spread(_model(width, layers), setup)
    plain = kind(kind.param_groups(model, **options) if "Muon" in setup else model.parameters(), **options)
    engine, plain_bytes, plain_ms = _steps(functools.partial(backward, model), plain, traffic, steps)

    model = _spread(_model(width, layers), setup)
    made: list[FairCastOptimizer] = []
    construction = traffic.during(lambda: made.append(FairCastOptimizer(model, kind, rounding=rounding, **options)))
    _, fair_bytes, fair_ms = _steps(functools.partial(backward, model), made[0], traffic, steps)
    stats = traffic.during(made[0].cast_stats)
    return Row(setup, construction, engine, plain_bytes, fair_bytes, stats, plain_ms, fair_ms)


def _steps(
    backward: Callable[[], None], optimizer: torch.optim.Optimizer, traffic: Traffic, steps: int
) -> tuple[int, int, float]:
    """Bytes of forward and backward, bytes of a step, and its median time in milliseconds."""
    seconds = []
    for number in range(_WARMUP + steps):
        backward()
        begin = time.perf_counter()
        optimizer.step()
        if number >= _WARMUP:
            seconds.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    engine = traffic.during(backward)
    return engine, traffic.during(optimizer.step), 1e3 * statistics.median(seconds)


def _work(rank: int, ranks: int, folder: str, width: int, layers: int, rounding: str, steps: int) -> None:
    """One rank: measure every set-up; rank 0 writes the rows down."""
    import json
    import warnings

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = [asdict(_measure(setup, width, layers, rounding, steps)) for setup in SETUPS]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def run(ranks: int = 2, width: int = 256, layers: int = 4, rounding: str = DEFAULT, steps: int = 5) -> list[Row]:
    """Measure on processes of this machine, over gloo.

    Args:
        ranks: How many processes. Default 2.
        width: Width of the model's linear layers. Default 256.
        layers: How many there are before the last one. Default 4.
        rounding: The rule. Default ``"dither"``.
        steps: Timed steps. Default 5.

    Raises:
        ValueError: A number is not positive, or the rule is unknown.
    """
    import json

    get_rule(rounding)
    if min(ranks, width, layers, steps) < 1:
        raise ValueError(f"ranks, width, layers and steps must be positive; got {ranks}, {width}, {layers}, {steps}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, width, layers, rounding, steps)
        start_processes(_work, arguments, ranks, start_method="spawn")  # type: ignore[no-untyped-call]
        return [Row(**row) for row in json.loads(Path(folder, "rows.json").read_text())]


def main(ranks: int = 2, width: int = 256, layers: int = 4, rounding: str = DEFAULT, steps: int = 5) -> None:
    """Run the benchmark and print its table; see ``run`` for the arguments."""
    rows = run(ranks, width, layers, rounding, steps)
    values = (layers + 1) * (width * width + width)
    print_table(
        f"Bytes of collectives by rank and step ({ranks} ranks, gloo, {values:,} weights, {rounding}); ms of a step",
        ("set-up", "fwd + bwd", "optimizer", "fcoptim", "built", "stats", "ms plain", "ms"),
        [
            (
                row.setup,
                f"{row.engine:,}",
                f"{row.plain:,}",
                f"{row.fair - row.plain:,}",
                f"{row.construction:,}",
                f"{row.stats:,}",
                f"{row.plain_ms:.1f}",
                f"{row.fair_ms:.1f}",
            )
            for row in rows
        ],
    )
