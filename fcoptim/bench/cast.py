"""``fcoptim bench cast``: every rule against ``served.copy_(master)``, the floor of what has to be moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..cast import RULES, cast_, parameter_key, reference, start_accumulator_
from ..cast.bits import stream_keys
from ..cast.rules import Job
from .table import print_table
from .timing import interleaved

COPY = "served.copy_(master)"
# The reference works on 64-bit temporaries; a few million elements say enough about it.
_REFERENCE_ELEMENTS = 1 << 22


@dataclass
class Row:
    """One line of the result.

    Attributes:
        workload: What was cast.
        name: The rule, or what it is compared with.
        milliseconds: Median time of one call.
        ratio: Median time over that of ``served.copy_(master)``.
        best_ratio: The same of the fastest calls.
        bytes_per_element: What the call has to move at least.
        gigabytes_per_second: That, over the median time.
    """

    workload: str
    name: str
    milliseconds: float
    ratio: float
    best_ratio: float
    bytes_per_element: int
    gigabytes_per_second: float


def smollm2_shapes() -> list[tuple[int, ...]]:
    """Shapes of the 272 parameters of SmolLM2-135M (30 layers, tied embeddings)."""
    hidden, inner, key_value = 576, 1536, 3 * 64
    layer: list[tuple[int, ...]] = [
        (hidden, hidden),
        (key_value, hidden),
        (key_value, hidden),
        (hidden, hidden),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
        (hidden,),
        (hidden,),
    ]
    return [(49152, hidden), *(shape for _ in range(30) for shape in layer), (hidden,)]


class _Workload:
    """Masters, served weights and accumulators of some shapes, and the calls to time on them."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.masters = [torch.randn(shape, generator=generator, device=device) * 0.02 for shape in shapes]
        self.served = [torch.empty_like(master, dtype=torch.bfloat16) for master in self.masters]
        self.keys = [parameter_key(0, str(number)) for number in range(len(self.masters))]
        self.accumulators = [
            start_accumulator_(torch.empty_like(master, dtype=torch.int16), key=key)
            for master, key in zip(self.masters, self.keys)
        ]
        self.changed = torch.zeros(len(self.masters), dtype=torch.int64, device=device)
        self.elements = sum(master.numel() for master in self.masters)
        self.count = 0

    def copy(self) -> None:
        for served, master in zip(self.served, self.masters):
            served.copy_(master)

    def cast(self, rounding: str, counted: bool) -> None:
        self.count += 1
        cast_(
            self.served,
            self.masters,
            rounding=rounding,
            key=self.keys,
            count=[self.count] * len(self.keys),
            error_feedback=self.accumulators,
            changed=self.changed if counted else None,
        )

    def calls(self) -> dict[str, tuple[Callable[[], object], int]]:
        """What to time, with the bytes that each moves for an element."""
        found: dict[str, tuple[Callable[[], object], int]] = {COPY: (self.copy, 6)}
        for name, rule in RULES.items():
            moved = 10 if rule.accumulates else 6
            found[name] = (lambda name=name: self.cast(name, False), moved)  # type: ignore[misc]
            found[f"{name}, counting changes"] = (lambda name=name: self.cast(name, True), moved + 2)  # type: ignore[misc]
        return found


def measure(label: str, shapes: Iterable[tuple[int, ...]], device: str, rounds: int) -> list[Row]:
    """Time every rule on one workload.

    Args:
        label: What to call it.
        shapes: Shapes of its tensors.
        device: Where they lie.
        rounds: Timed calls of each rule.
    """
    workload = _Workload(shapes, device)
    calls = workload.calls()
    timings = interleaved({name: call for name, (call, _) in calls.items()}, rounds=rounds, device=device)
    copy = timings[COPY]
    rows = []
    for name, (_, moved) in calls.items():
        timing = timings[name]
        speed = moved * workload.elements / timing.median / 1e9
        ratios = timing.median / copy.median, timing.best / copy.best
        rows.append(Row(label, name, timing.median * 1e3, *ratios, moved, speed))
    return rows


def measure_reference(device: str) -> Row:
    """Time the torch reference under the stochastic rule, on its own smaller tensor."""
    workload = _Workload([(_REFERENCE_ELEMENTS,)], device)
    job = Job(workload.served[0], workload.masters[0], stream_keys(workload.keys[0], 1), 0, None)
    code = RULES["stochastic"].code
    timings = interleaved(
        {COPY: workload.copy, "reference": lambda: reference.cast_jobs([job], code)}, rounds=3, device=device, warmup=1
    )
    timing, copy = timings["reference"], timings[COPY]
    ratios = timing.median / copy.median, timing.best / copy.best
    speed = 6 * workload.elements / timing.median / 1e9
    return Row(
        f"{_REFERENCE_ELEMENTS / 2**20:.0f}M elements",
        "stochastic, torch reference",
        timing.median * 1e3,
        *ratios,
        6,
        speed,
    )


def run(elements: int = 64 << 20, threads: int | None = None, device: str = "cpu", rounds: int = 9) -> list[Row]:
    """Time the cast on one large tensor and on the 272 of SmolLM2-135M.

    Args:
        elements: Size of the large tensor. Default 64M.
        threads: torch's number of threads for the length of the run; None leaves it.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: Timed calls of each rule. Default 9.

    Raises:
        ValueError: A number is not positive, or the device is not there.
    """
    if elements < 1 or rounds < 1 or (threads is not None and threads < 1):
        raise ValueError(f"elements, rounds and threads must be positive; got {elements}, {rounds}, {threads}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("there is no CUDA or ROCm device here; pass --device cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        rows = measure(f"{elements / 2**20:.4g}M elements", [(elements,)], device, rounds)
        rows += measure("SmolLM2-135M, 272 tensors", smollm2_shapes(), device, rounds)
        rows.append(measure_reference(device))
    finally:
        torch.set_num_threads(before)
    return rows


def main(elements: int = 64 << 20, threads: int | None = None, device: str = "cpu", rounds: int = 9) -> None:
    """Run the benchmark and print its table; see ``run`` for the arguments."""
    rows = run(elements, threads, device, rounds)
    used = f"{threads or torch.get_num_threads()} threads, " if device == "cpu" else ""
    print_table(
        f"Casting fp32 masters to bf16 ({device}, {used}torch {torch.__version__})",
        ("workload", "cast", "ms", "x copy", "x copy, best", "bytes/element", "GB/s"),
        [
            (
                row.workload,
                row.name,
                f"{row.milliseconds:.2f}",
                f"{row.ratio:.2f}",
                f"{row.best_ratio:.2f}",
                str(row.bytes_per_element),
                f"{row.gigabytes_per_second:.1f}",
            )
            for row in rows
        ],
        texts=2,
    )
