"""``fcoptim diff``: which bits differ between two sets of weights, and what a sparse patch of them would weigh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..sync.codec import pack
from .folder import resolve
from .layout import CheckpointError
from .opened import open_weights

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Change:
    """What differs in one tensor.

    Attributes:
        elements: Number of values.
        changed: Values whose bits differ.
        dense: Bytes of the whole tensor.
        sparse: Bytes of int32 indices and values of those that differ.
        packed: The same with the gaps between indices compressed by zlib, as ``fcoptim.sync`` sends them.
    """

    elements: int = 0
    changed: int = 0
    dense: int = 0
    sparse: int = 0
    packed: int = 0

    def __add__(self, other: Change) -> Change:
        return Change(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    @property
    def share(self) -> float:
        """Share of values that differ."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass
class Difference:
    """Two sets of weights.

    Attributes:
        tensors: What differs, by tensor.
        only_a: Tensors that only the first has.
        only_b: Tensors that only the second has.
    """

    tensors: dict[str, Change]
    only_a: list[str]
    only_b: list[str]

    @property
    def total(self) -> Change:
        """All tensors together."""
        return sum(self.tensors.values(), Change())

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.only_a or self.only_b or self.total.changed)


def diff(a: str | Path, b: str | Path) -> Difference:
    """Compare two folders or files of safetensors bit by bit.

    Args:
        a: For instance a checkpoint (its served weights are compared), or its ``masters``.
        b: Another.

    Raises:
        CheckpointError: One can't be read, or a tensor has another shape or dtype.
    """
    first, second = open_weights(resolve(a)), open_weights(resolve(b))
    tensors = {}
    for key in first:
        if key in second:
            old, new = first[key], second[key]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CheckpointError(
                    f"{key!r} is {old.dtype} of shape {tuple(old.shape)} in {a}, {new.dtype} of shape "
                    f"{tuple(new.shape)} in {b}"
                )
            tensors[key] = compare_bits(old, new)
    return Difference(tensors, sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys()))


def compare_bits(old: torch.Tensor, new: torch.Tensor) -> Change:
    """Compare two tensors of one shape and dtype, chunk by chunk."""
    word = _WORDS[old.element_size()]
    before, after = old.reshape(-1).view(word), new.reshape(-1).view(word)
    parts = [
        (before[first : first + _CHUNK] != after[first : first + _CHUNK]).nonzero().view(-1) + first
        for first in range(0, len(before), _CHUNK)
    ]
    indices = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    values = len(indices) * old.element_size()
    packed = pack(indices, "zlib")
    return Change(
        old.numel(),
        len(indices),
        old.nbytes,
        values + 4 * len(indices),
        values + (0 if packed is None else packed.numel()),
    )
