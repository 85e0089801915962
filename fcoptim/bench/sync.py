"""``fcoptim bench sync``: bytes that each rounding rule makes a sparse weight sync carry, on a synthetic trajectory.

fp32 masters of SmolLM2-135M's shapes start on the bf16 grid and drift as weights under AdamW do at a small learning
rate: each step moves a weight by about ``lr``, partly in a direction of its own that lasts, partly at random. Spread
and lasting part are set so that changed shares and displacement over 20 steps come near those recorded on the real
model. All rules cast the same masters.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .. import Exporter
from ..cast import RULES
from ..sync import Receiver, Sender, Update
from ..sync.codec import ENCODINGS, pack
from .cast import smollm2_shapes
from .table import print_table

# Standard deviation of the starting weights, and the lasting share of a step's movement.
SPREAD, LASTING = 0.12, 0.48


@dataclass
class Row:
    """What one rule made a sync carry.

    Attributes:
        rule: Its name.
        changed: Share of the values that a version changes, by step.
        nbytes: Bytes of a version in each encoding, by step.
        publish: Seconds to find and pack the changes, by step; int32 indices.
        apply: Seconds to check and apply them, by step.
    """

    rule: str
    changed: list[float] = field(default_factory=list)
    nbytes: dict[str, list[int]] = field(default_factory=dict)
    publish: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)


def available_encodings() -> list[str]:
    """The encodings whose libraries are installed."""
    return [name for name in ENCODINGS if name != "zstd" or importlib.util.find_spec("zstandard") is not None]


def sizes(update: Update, encodings: Iterable[str]) -> dict[str, int]:
    """Bytes of an update in each encoding, with each tensor dense where that is smaller.

    Args:
        update: With indices for every tensor, as ``Sender(dense=False)`` makes it.
        encodings: Which to try.
    """
    found = dict.fromkeys(encodings, 0)
    for one in update.tensors:
        assert one.indices is not None
        for name in found:
            packed = pack(one.indices, name)
            indices = one.indices.nbytes if packed is None else packed.nbytes
            found[name] += min(indices + one.values.nbytes, one.numel * one.values.element_size())
    return found


class Drift:
    """Masters that move as under AdamW.

    Args:
        shapes: Of the tensors.
        lr: About how far a weight moves in a step.
        device: Where they lie.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]], lr: float, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._lr = lr
        self.masters: dict[str, torch.Tensor] = {}
        self._direction: dict[str, torch.Tensor] = {}
        for number, shape in enumerate(shapes):
            start = self._normal(shape, device) * SPREAD
            self.masters[f"p{number}"] = start.bfloat16().float()
            self._direction[f"p{number}"] = (self._normal(shape, device) > 0).to(torch.int8) * 2 - 1

    def _normal(self, shape: tuple[int, ...], device: str | torch.device) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=device)

    def step(self) -> None:
        """Move every master once."""
        for name, master in self.masters.items():
            noise = self._normal(tuple(master.shape), master.device).mul_(self._lr * (1 - LASTING**2) ** 0.5)
            master.add_(noise).add_(self._direction[name], alpha=self._lr * LASTING)


def run(
    steps: int = 20,
    lr: float = 1e-6,
    device: str = "cpu",
    shapes: Iterable[tuple[int, ...]] | None = None,
    rules: Iterable[str] = tuple(RULES),
) -> list[Row]:
    """Publish and apply a version after every step, for every rule, and weigh it.

    Args:
        steps: How many.
        lr: About how far a weight moves in a step.
        device: Where senders and receivers hold their tensors.
        shapes: Default those of SmolLM2-135M.
        rules: Names of rounding rules.

    Raises:
        ValueError: A number is not positive, or the device is not there.
        RuntimeError: A receiver did not end up with the sender's bits.
    """
    if steps < 1 or not lr > 0:
        raise ValueError(f"steps and lr must be positive; got {steps}, {lr}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("there is no CUDA or ROCm device here; pass --device cpu")
    drift = Drift(smollm2_shapes() if shapes is None else shapes, lr, device)
    encodings = available_encodings()
    lanes = [_Lane(rule, drift.masters, encodings) for rule in rules]
    for _ in range(steps):
        drift.step()
        for lane in lanes:
            lane.step(drift.masters)
    for lane in lanes:
        lane.check()
    return [lane.row for lane in lanes]


class _Lane:
    """One rule's served weights with a sender and a receiver."""

    def __init__(self, rule: str, masters: Mapping[str, torch.Tensor], encodings: list[str]) -> None:
        self.row = Row(rule, nbytes={name: [] for name in encodings})
        self._export = Exporter(rule)
        self._served = self._export(masters)
        self._sender = Sender(self._served, anchor_every=None, dense=False, snapshot="same")
        self._copy: dict[str, torch.Tensor] = {}
        self._receiver = Receiver(self._copy)
        self._receiver.apply(self._sender.publish())

    def step(self, masters: Mapping[str, torch.Tensor]) -> None:
        self._export(masters, out=self._served)
        before = time.perf_counter()
        update = self._sender.publish().update
        published = time.perf_counter()
        self._receiver.apply(update)
        self.row.apply.append(time.perf_counter() - published)
        self.row.publish.append(published - before)
        self.row.changed.append(1.0 - update.sparsity)
        for name, size in sizes(update, self.row.nbytes).items():
            self.row.nbytes[name].append(size)

    def check(self) -> None:
        self._receiver.verify()
        for name, tensor in self._served.items():
            if not torch.equal(tensor.view(torch.int16), self._copy[name].view(torch.int16)):
                raise RuntimeError(f"the receiver's {name} differs from the sender's")


def main(steps: int = 20, lr: float = 1e-6, device: str = "cpu") -> None:
    """Run the benchmark and print its table; see ``run`` for the arguments."""
    rows = run(steps, lr, device)
    last = max(1, steps // 4)
    encodings = list(rows[0].nbytes)
    dense = sum(torch.Size(shape).numel() for shape in smollm2_shapes()) * 2
    print_table(
        f"Sparse sync, synthetic drift on SmolLM2-135M's shapes, lr {lr:g}, mean of steps {steps - last + 1}-{steps} "
        f"({device}, torch {torch.__version__}). Dense: {dense / 1e6:.0f} MB",
        ("rule", "changed first", "changed", *(f"MB {name}" for name in encodings), "publish s", "apply s"),
        [
            (
                row.rule,
                f"{row.changed[0]:.2%}",
                f"{statistics.fmean(row.changed[-last:]):.2%}",
                *(f"{statistics.fmean(row.nbytes[name][-last:]) / 1e6:.2f}" for name in encodings),
                f"{statistics.median(row.publish):.2f}",
                f"{statistics.median(row.apply):.2f}",
            )
            for row in rows
        ],
    )
