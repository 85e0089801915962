"""What changed in one tensor since it was last published, and in which form that is smallest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checksum import MODULUS, change_checksum, tensor_checksum, words
from .codec import pack
from .source import Item
from .update import MAX_SPARSE_ELEMENTS, SyncError, TensorUpdate

Mark = tuple[torch.Tensor, int, int]
Form = tuple[tuple[str, ...], tuple[int, ...], torch.dtype]
_CHUNK = 1 << 22


@dataclass
class Known:
    """A tensor as it was last published.

    Attributes:
        form: Its other names, shape and dtype.
        checksum: Its checksum.
        mark: The object that held it, its version counter and its memory's address then.
        snapshot: Its bits, where single values are looked for.
    """

    form: Form
    checksum: int
    mark: Mark | None
    snapshot: torch.Tensor | None = None


@dataclass
class Finding:
    """One tensor compared with what is known of it.

    Attributes:
        name: Its name.
        known: What will be known of it once this version is delivered, but for the bits in ``known.snapshot``.
        update: What to send; None where nothing changed.
        changed: How many values that changes; all of a tensor of which no copy is kept.
        keep_on: Where to keep a copy, if single values are to be looked for.
    """

    name: str
    known: Known
    update: TensorUpdate | None = None
    changed: int = 0
    keep_on: torch.device | None = None

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.known.form[1]).numel()

    def commit(self) -> Known:
        """Bring the copy up to what was sent."""
        known, update = self.known, self.update
        if update is None:
            return known
        if known.snapshot is None:
            if self.keep_on is not None:
                known.snapshot = words(update.values).to(self.keep_on, copy=True)
        elif update.indices is None:
            known.snapshot.copy_(words(update.values))
        else:
            place = known.snapshot.device
            known.snapshot[update.indices.to(place, torch.int64)] = words(update.values).to(place)
        return known


def whole(item: Item) -> TensorUpdate:
    """The full tensor, without a copy."""
    return TensorUpdate(item.name, tuple(item.tensor.shape), item.tensor, aliases=item.aliases)


class Differ:
    """Compares tensors and chooses between sparse and dense.

    Args:
        encoding: How indices are written.
        dense: Whether dense updates are allowed.
        on_host: Whether copies are kept in host memory, else beside the tensor.
    """

    def __init__(self, encoding: str, dense: bool, *, on_host: bool) -> None:
        self._encoding = encoding
        self._dense = dense
        self._on_host = on_host

    def examine(self, item: Item, known: Known | None, *, reread: bool, sparse_key_free: bool) -> Finding:
        """Compare a tensor with what is known of it.

        Args:
            item: The tensor as it is now.
            known: As it was last published, if it was.
            reread: Whether to look at its values although its version counter stands still.
            sparse_key_free: Whether a sparse update of this name can be written into a file.
        """
        form = (item.aliases, tuple(item.tensor.shape), item.tensor.dtype)
        mark = None if item.owner is None else (item.owner, item.owner._version, item.owner.data_ptr())
        place = torch.device("cpu") if self._on_host else item.tensor.device
        keep_on = place if item.sparse else None
        if known is None or known.form != form:
            found = Known(form, tensor_checksum(item.name, item.tensor), mark)
            return Finding(item.name, found, whole(item), item.tensor.numel(), keep_on)
        if not reread and _same_mark(mark, known.mark):
            return Finding(item.name, known)
        if known.snapshot is None:
            checksum = tensor_checksum(item.name, item.tensor)
            update = None if checksum == known.checksum else self._all_values(item)
            changed = 0 if update is None else item.tensor.numel()
            return Finding(item.name, Known(form, checksum, mark), update, changed, keep_on)
        indices, new, old = _changes(words(item.tensor), known.snapshot)
        added = change_checksum(item.name, item.tensor.numel(), indices, old, new)
        found = Known(form, (known.checksum + added) % MODULUS, mark, known.snapshot)
        if not len(indices):
            return Finding(item.name, found)
        update = self._smallest(item, indices, new.view(item.tensor.dtype), sparse_key_free)
        return Finding(item.name, found, update, len(indices))

    def _smallest(self, item: Item, indices: torch.Tensor, values: torch.Tensor, sparse_key_free: bool) -> TensorUpdate:
        """Some values, or all where that is smaller or where the sparse layouts can't say it.

        NaN is among the latter, as vLLM's patches mean "unchanged" by it.
        """
        numel = item.tensor.numel()
        if self._dense and (numel > MAX_SPARSE_ELEMENTS or not sparse_key_free or bool(values.isnan().any())):
            return _copied(item)
        update = self._sparse(item, indices, values)
        if self._dense and update.nbytes > item.tensor.nbytes:
            return _copied(item)
        return update

    def _all_values(self, item: Item) -> TensorUpdate:
        """All values of a tensor, in whichever form is allowed."""
        if self._dense:
            return _copied(item)
        if item.tensor.numel() > MAX_SPARSE_ELEMENTS:
            return self._sparse(item, torch.empty(0), item.tensor)
        indices = torch.arange(item.tensor.numel(), device=item.tensor.device)
        return self._sparse(item, indices, item.tensor.reshape(-1).clone())

    def _sparse(self, item: Item, indices: torch.Tensor, values: torch.Tensor) -> TensorUpdate:
        if item.tensor.numel() > MAX_SPARSE_ELEMENTS:
            raise SyncError(
                f"{item.name!r} has {item.tensor.numel()} elements; int32 indices reach {MAX_SPARSE_ELEMENTS}. Use "
                "Sender(..., dense=True), which sends it whole, or split the tensor"
            )
        indices = indices.to(torch.int32)
        packed = pack(indices, self._encoding)
        return TensorUpdate(item.name, tuple(item.tensor.shape), values, indices, packed, item.aliases)


def _same_mark(new: Mark | None, old: Mark | None) -> bool:
    return new is not None and old is not None and new[0] is old[0] and new[1:] == old[1:]


def _copied(item: Item) -> TensorUpdate:
    return TensorUpdate(item.name, tuple(item.tensor.shape), item.tensor.clone(), aliases=item.aliases)


def _changes(row: torch.Tensor, snapshot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat indices (int64, ascending) of what differs, with the new and the old bits, on the row's device."""
    parts = []
    for first in range(0, row.numel(), _CHUNK):
        new = row[first : first + _CHUNK]
        old = snapshot[first : first + _CHUNK].to(row.device)
        index = (new != old).nonzero().view(-1)
        parts.append((index + first, new[index], old[index]))
    if not parts:
        return row.new_empty(0, dtype=torch.int64), row[:0], row[:0]
    indices, new, old = (torch.cat(column) for column in zip(*parts))
    return indices, new, old
