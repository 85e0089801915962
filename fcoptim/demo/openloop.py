"""One master trajectory, cast by every rule into copies of its own, and how well each copy follows it.

The copies are served to nobody: training runs on the optimizer's served model alone. With the optimizer's
seed and rule, a copy equals the served model bit for bit, since a cast depends on (seed, name, element, count)
and nothing else; ``OpenLoop.agrees`` checks that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..cast import RULES, cast_, parameter_key, start_accumulator_

_CHUNK = 1 << 19


@dataclass
class Measure:
    """How one rule's copy stands after a step.

    Attributes:
        changed: Share of its values whose bits the step changed.
        tracked: Share of the masters' displacement that is served, ``<s, D> / |D|^2``, with ``D`` and ``s`` the
            displacements of masters and copy since the start. NaN while the masters have not moved.
    """

    changed: float
    tracked: float


@dataclass
class _Copy:
    served: list[torch.Tensor]
    accumulators: list[torch.Tensor] | None = None
    changed: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


def displacement_sums(
    start: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], served: Sequence[Sequence[torch.Tensor]]
) -> tuple[float, list[float]]:
    """Sum ``D * D`` and, for each copy, ``s * D``, in float64 and chunk by chunk, so that memory stays bounded.

    Args:
        start: Where masters and copies began; any floating dtype.
        masters: Tensors of the same shapes.
        served: For each copy, tensors of the same shapes.

    Returns:
        ``(sum of D * D, [sum of s * D for each copy])`` with ``D = masters - start``, ``s = copy - start``.
    """
    squares, products = 0.0, [0.0] * len(served)
    for number, (begin, master) in enumerate(zip(start, masters)):
        begin, master = begin.reshape(-1), master.detach().reshape(-1)
        flat = [copy[number].detach().reshape(-1) for copy in served]
        for first in range(0, len(begin), _CHUNK):
            here = slice(first, first + _CHUNK)
            origin = begin[here].double()
            moved = master[here].double() - origin
            squares += float(moved @ moved)
            for copy, tensor in enumerate(flat):
                products[copy] += float((tensor[here].double() - origin) @ moved)
    return squares, products


class OpenLoop:
    """Copies of a model's weights, one for each rounding rule.

    Args:
        named_masters: Names and fp32 masters, as ``FairCastOptimizer.named_masters`` gives them. The masters are
            kept and read later. They must lie on the bf16 grid, as those of a bf16 checkpoint do.
        seed: The optimizer's seed.
        rules: Names of the rules. Default all.

    Raises:
        ValueError: A master does not start on the grid.
    """

    def __init__(
        self, named_masters: Iterable[tuple[str, torch.Tensor]], *, seed: int, rules: Iterable[str] = tuple(RULES)
    ) -> None:
        named = list(named_masters)
        self._names = [name for name, _ in named]
        self._masters = [master for _, master in named]
        self._start = [master.detach().bfloat16() for master in self._masters]
        self._keys = [parameter_key(seed, name) for name in self._names]
        for name, master, start in zip(self._names, self._masters, self._start):
            if not torch.equal(start.float(), master):
                raise ValueError(f"master {name!r} does not start on the bf16 grid; begin from bf16 weights")
        self._size = sum(master.numel() for master in self._masters)
        self._count = 0
        self._copies = {rule: self._new_copy(rule) for rule in rules}

    def _new_copy(self, rule: str) -> _Copy:
        copy = _Copy([start.clone() for start in self._start])
        if RULES[rule].accumulates:
            copy.accumulators = [torch.empty_like(start, dtype=torch.int16) for start in self._start]
            for accumulator, key in zip(copy.accumulators, self._keys):
                start_accumulator_(accumulator, key=key)
        copy.changed = torch.zeros(len(copy.served), dtype=torch.int64, device=copy.served[0].device)
        return copy

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the masters as they now are into every copy; call it once after each step."""
        self._count += 1
        for rule, copy in self._copies.items():
            cast_(
                copy.served,
                self._masters,
                rounding=rule,
                key=self._keys,
                count=self._count,
                error_feedback=copy.accumulators,
                changed=copy.changed,
            )

    @torch.no_grad()
    def measure(self) -> tuple[float, dict[str, Measure]]:
        """Measure every copy after the last ``cast``.

        Returns:
            ``(l2 norm of the masters' displacement, {rule: Measure})``.
        """
        copies = list(self._copies.values())
        squares, products = displacement_sums(self._start, self._masters, [copy.served for copy in copies])
        measures = {}
        for rule, copy, product in zip(self._copies, copies, products):
            tracked = product / squares if squares > 0 else math.nan
            measures[rule] = Measure(int(copy.changed.sum()) / self._size, tracked)
        return math.sqrt(squares), measures

    def agrees(self, rule: str, served: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Tell whether a rule's copy equals served weights bit for bit.

        Args:
            rule: Which copy.
            served: Names and bf16 weights; names that have no master here are passed over.
        """
        found = dict(served)
        pairs = zip(self._names, self._copies[rule].served)
        return all(
            name in found and torch.equal(copy.view(torch.int16), found[name].detach().view(torch.int16))
            for name, copy in pairs
        )
