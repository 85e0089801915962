"""The rollout engine's side: apply versions in order, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .checksum import MODULUS, change_checksum, tensor_checksum, to_hex, words
from .files import Folder, file_of, read_base_version, read_file, versions
from .target import Target, place_of, read_words, write_words
from .update import Publication, SyncError, TensorUpdate, Update


class _Held(NamedTuple):
    """One of the sender's tensors as it is held here.

    Attributes:
        names: All its names.
        dtype: Its dtype at the sender.
        checksum: Its checksum.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    checksum: int


class _Write(NamedTuple):
    """A checked change, ready to be made."""

    tensors: list[torch.Tensor]
    update: TensorUpdate
    new: torch.Tensor
    indices: torch.Tensor | None


class Receiver:
    """Hold a copy of the served weights, bit-identical to the sender's after every version.

    Before anything is written, order, names, shapes, dtypes and indices are checked, and the checksum that the
    weights will have is worked out from the values that stand here now. An update that does not lead to the sender's
    checksum is refused and changes nothing. Each tensor's values are those at the sender, also where this side ties
    names otherwise, or keeps bf16 values in float32 storage.

    Args:
        held: A model, or a state dict, whose tensors are written in place, on any device. An empty dict is filled by
            the first anchor.
        strict: Whether an anchor has to have every tensor that is here. Default True.

    Examples:
        >>> from fcoptim.sync import Sender
        >>> weights, copy = {"w": torch.ones(3, dtype=torch.bfloat16)}, {}
        >>> Receiver(copy).apply(Sender(weights).publish())
        0
        >>> torch.equal(copy["w"], weights["w"])
        True
    """

    def __init__(self, held: nn.Module | Mapping[str, Any], *, strict: bool = True) -> None:
        if not isinstance(held, (nn.Module, Mapping)):
            raise TypeError(f"a Receiver takes a model or a state dict, got {type(held).__name__}")
        self._target = held
        self._strict = strict
        self._held: dict[str, _Held] = {}
        self._version: int | None = None
        self._run: str | None = None

    @property
    def version(self) -> int | None:
        """The version that is held; None before the first."""
        return self._version

    @property
    def checksum(self) -> int:
        """Checksum of the weights as the last update left them."""
        return sum(held.checksum for held in self._held.values()) % MODULUS

    @torch.no_grad()
    def apply(self, update: Update | Publication | str | os.PathLike[str]) -> int:
        """Apply one update.

        Args:
            update: An update, a publication (its delta, or its anchor where the delta does not follow), or a file.

        Returns:
            The version that is held now.

        Raises:
            SyncError: It is damaged, does not follow the version that is held, starts from other weights, or does not
                fit what is here. Nothing is changed.
        """
        if isinstance(update, Publication):
            joins = update.anchor is not None and not self._follows(update.delta)
            update = update.anchor if joins and update.anchor is not None else update.update
        elif not isinstance(update, Update):
            update = read_file(update)
        self._check_order(update)
        target = Target(self._target)
        held, writes = self._plan(update, target)
        found = sum(one.checksum for one in held.values()) % MODULUS
        if found != update.checksum:
            raise SyncError(
                f"version {update.version} leads to checksum {to_hex(found)} here and {to_hex(update.checksum)} at the "
                "sender: the update is damaged, or weights were written here since the last one. Apply an anchor"
            )
        self._write(writes, target)
        self._held, self._version, self._run = held, update.version, update.run
        return update.version

    def catch_up(self, folder: Folder) -> list[int]:
        """Apply what a folder holds beyond the version that is held: deltas in order, an anchor to begin with.

        Where a delta is missing or starts elsewhere, it goes on from a later anchor, if there is one.

        Args:
            folder: Where a ``Sender`` publishes.

        Returns:
            The versions that were applied, ascending; empty if there is nothing new.

        Raises:
            SyncError: A file is damaged, or there is no way on. Versions applied before stay applied.
        """
        applied: list[int] = []
        while True:
            current = -1 if self._version is None else self._version
            deltas = [version for version in versions(folder, anchors=False) if version > current]
            anchors = [version for version in versions(folder, anchors=True) if version > current]
            path = file_of(folder, deltas[0], anchor=False) if deltas else None
            follows = path is not None and self._version is not None and read_base_version(path) == self._version
            if not follows and anchors:
                path = file_of(folder, anchors[-1], anchor=True)
            if path is None:
                return applied
            applied.append(self.apply(path))

    def verify(self) -> None:
        """Read all weights here and compare them with the version that is held.

        Raises:
            SyncError: Some differ; the message names them. Or there is no version yet.
        """
        if self._version is None:
            raise SyncError("there is no version here to verify; apply an anchor first")
        target, differing = Target(self._target), []
        for name, held in self._held.items():
            for here in held.names:
                known = target.find(here)
                tensor = None if known is None else target.get(known)
                if tensor is None:
                    continue
                try:
                    bits = read_words(here, tensor, held.dtype, None)
                    good = tensor_checksum(name, bits.view(held.dtype).view(tensor.shape)) == held.checksum
                except SyncError:
                    good = False
                if not good:
                    differing.append(here)
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise SyncError(
                f"{', '.join(map(repr, differing[:3]))}{more} differ from version {self._version}: they were written "
                "from outside. Apply an anchor"
            )

    def _follows(self, delta: Update | None) -> bool:
        return delta is not None and delta.run == self._run and delta.base_version == self._version

    def _check_order(self, update: Update) -> None:
        """Refuse what does not come next.

        Raises:
            SyncError: With what is missing.
        """
        here, version = self._version, update.version
        if here is not None and version <= here:
            raise SyncError(f"version {version} is not newer than version {here}, which is held already")
        if update.base_version is None:
            return
        if here is None:
            raise SyncError(f"version {version} starts from version {update.base_version}; apply an anchor first")
        if update.run != self._run:
            raise SyncError(
                f"version {version} is of another sender (run {update.run[:8]}) than version {here}, which is held "
                f"(run {str(self._run)[:8]}); apply an anchor of that sender first"
            )
        if update.base_version != here:
            raise SyncError(
                f"version {version} starts from version {update.base_version}, but version {here} is held: apply the "
                "versions between, or a later anchor"
            )
        if update.base != self.checksum:
            raise SyncError(
                f"version {version} starts from weights of checksum {to_hex(update.base)}, but those held have "
                f"{to_hex(self.checksum)}: it has another base. Apply an anchor"
            )

    def _plan(self, update: Update, target: Target) -> tuple[dict[str, _Held], list[_Write]]:
        """Check every tensor and work out what will be held; nothing is changed."""
        held = {} if update.is_anchor else dict(self._held)
        writes, owners = [], dict[Any, str]()
        for one in update.tensors:
            if not update.is_anchor and one.name not in held:
                raise SyncError(f"version {update.version} changes {one.name!r}, which no version here has had")
            _check_form(one)
            names = (one.name, *one.aliases)
            tensors = target.tensors(names, one.values.dtype, one.shape)
            for tensor in tensors:
                other = owners.setdefault(place_of(tensor), one.name)
                if other != one.name:
                    raise SyncError(f"{other!r} and {one.name!r} are one tensor here and two at the sender")
            checksum, write = _prepare(one, tensors, held.get(one.name))
            held[one.name] = _Held(names, one.values.dtype, checksum)
            writes.append(write)
        if update.is_anchor and self._strict:
            named = {target.find(name) for one in held.values() for name in one.names}
            left = [name for name in target.names() if name not in named]
            if left:
                raise SyncError(
                    f"the anchor has no {left[0]!r}, which the receiver holds ({len(left)} such names); pass "
                    "strict=False to leave them as they are"
                )
        return held, writes

    def _write(self, writes: Sequence[_Write], target: Target) -> None:
        try:
            for write in writes:
                if not write.tensors:
                    target.add((write.update.name, *write.update.aliases), write.update.values)
                for tensor in write.tensors:
                    write_words(tensor, write.new.to(tensor.device), _moved(write.indices, tensor.device))
        except BaseException:
            # Out of memory, an interrupt: what is here now is no version.
            self._version, self._run, self._held = None, None, {}
            raise


def _check_form(one: TensorUpdate) -> None:
    """Refuse values and indices that don't go together."""
    values, indices = one.values, one.indices
    if indices is None:
        if tuple(values.shape) != one.shape:
            raise SyncError(f"{one.name!r} has shape {one.shape} but values of shape {tuple(values.shape)}")
        return
    if indices.dtype is not torch.int32 or indices.ndim != 1 or values.shape != indices.shape:
        raise SyncError(
            f"{one.name!r} has {indices.dtype} indices of shape {tuple(indices.shape)} and values of shape "
            f"{tuple(values.shape)}; both have to be 1-D and equally long, the indices int32"
        )
    if not len(indices):
        return
    ascending = bool((indices[1:] > indices[:-1]).all())
    if not ascending or int(indices[0]) < 0 or int(indices[-1]) >= one.numel:
        raise SyncError(f"the indices of {one.name!r} are not ascending, or leave 0..{one.numel - 1}")


def _prepare(one: TensorUpdate, tensors: Sequence[torch.Tensor], before: _Held | None) -> tuple[int, _Write]:
    """A tensor's checksum after the update, and the write that leads there."""
    new = words(one.values)
    if one.indices is None:
        return tensor_checksum(one.name, one.values), _Write(list(tensors), one, new, None)
    if before is None or not tensors:
        raise SyncError(f"the receiver has no tensor {one.name!r} to change")
    indices = one.indices.to(torch.int64)
    sums = []
    for tensor in tensors:
        here = indices.to(tensor.device)
        old = read_words(one.name, tensor, one.values.dtype, here)
        sums.append(change_checksum(one.name, one.numel, here, old, new.to(tensor.device)))
    if len(set(sums)) > 1:
        raise SyncError(f"{', '.join(map(repr, (one.name, *one.aliases)))} are tied at the sender and differ here")
    return (before.checksum + sums[0]) % MODULUS, _Write(list(tensors), one, new, indices)


def _moved(indices: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if indices is None else indices.to(device)
