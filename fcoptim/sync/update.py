"""What passes from a sender to its receivers, whatever carries it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

# Flat indices are int32 in both layouts.
MAX_SPARSE_ELEMENTS = (1 << 31) - 1


class SyncError(ValueError):
    """An update can't be applied, read or written; nothing was changed."""


@dataclass(frozen=True, eq=False)
class TensorUpdate:
    """New values of one tensor: some of them, or all.

    Attributes:
        name: The tensor's name in the sender's state dict; of several names of one tensor the first.
        shape: Shape of the whole tensor.
        values: Absolute new values. 1-D beside ``indices``, else the whole tensor.
        indices: int32, the flat row-major indices of the values, ascending and unique; None for a dense update.
        packed: ``indices`` as the chosen encoding writes them, uint8; None where they are written as they are.
        aliases: The tensor's other names.
    """

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor
    indices: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices as they are sent."""
        written = self.indices if self.packed is None else self.packed
        return self.values.nbytes + (0 if written is None else written.nbytes)


@dataclass(frozen=True, eq=False)
class Update:
    """All that changed from one published version to another, or, as an anchor, everything.

    Attributes:
        version: The version this leads to.
        base_version: The version it starts from; None for an anchor.
        base: Checksum of the weights it starts from; 0 for an anchor.
        tensors: What changed, in the order of the sender's state dict.
        changed: How many values differ from the base; all of them for an anchor, and all of a tensor of which the
            sender keeps no copy.
        run: The sender's own name, a random one for each ``Sender``.
        checksum: Checksum of the weights it leads to.
        elements: Number of values of all tensors, changed or not; a tied tensor counts once.
        encoding: How indices are written in files.
    """

    version: int
    base_version: int | None
    base: int
    tensors: Sequence[TensorUpdate]
    changed: int
    run: str
    checksum: int
    elements: int
    encoding: str = "int32"

    @property
    def is_anchor(self) -> bool:
        """Whether this is a full state, which needs no base."""
        return self.base_version is None

    @property
    def nbytes(self) -> int:
        """Bytes of values and indices as they are sent, without names and metadata."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def sparsity(self) -> float:
        """Share of the values that stay as they are."""
        return 1.0 - self.changed / max(self.elements, 1)


@dataclass(frozen=True, eq=False)
class Publication:
    """One published version.

    Attributes:
        version: Its number.
        delta: From the version before to this one; None for the first version, and where tensors came, went or
            changed shape.
        anchor: The full state, where one was due. It holds the live served tensors, not copies: use it before the
            next step.
    """

    version: int
    delta: Update | None = None
    anchor: Update | None = field(default=None, repr=False)

    @property
    def update(self) -> Update:
        """What a receiver that has the version before needs: the delta, or the anchor where there is none."""
        found = self.delta if self.delta is not None else self.anchor
        assert found is not None
        return found

    def __iter__(self) -> Iterator[Update]:
        """Anchor and delta, whichever there are, in the order in which they are to be delivered."""
        return (update for update in (self.anchor, self.delta) if update is not None)
