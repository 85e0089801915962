"""The trainer's side: find what changed since the last published version, and number the versions."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .checksum import MODULUS
from .codec import check_encoding
from .difference import Differ, Finding, Known, whole
from .files import write_file
from .source import Reader, Source
from .update import Publication, SyncError, TensorUpdate, Update

Delivery = str | os.PathLike[str] | Callable[[Update], object]


class Sender:
    """Publish served weights as numbered versions, each by what changed since the version before.

    To find changed values it keeps the last published bits of the tensors that are trained in bf16: 2 bytes for each
    such weight. Frozen tensors, buffers and those kept in fp32 have no copy; of them a checksum is kept, and a change
    sends them whole. A parameter whose version counter stands still is not read at all. Publish between steps.

    Args:
        source: A FairCastOptimizer (or what a framework put around it), a model, a state dict whose tensors are
            updated in place, or a function without arguments that returns a state dict or an iterable of pairs, for
            example ``lambda: export(fp32_model.state_dict())``. bf16 tensors are sent sparse, others whole.
        anchor_every: After so many versions the full state is published too, for receivers that join. Default 10;
            None for the first version only.
        encoding: How indices are written in files: ``"int32"`` (default, what other readers know), ``"gaps"`` (one
            byte for most), ``"zlib"`` or ``"zstd"`` (those, compressed).
        dense: Whether a tensor is sent whole where that is smaller, or where indices can't say it. Default True. With
            False every change is indices and values, for readers of files that know nothing else.
        snapshot: ``"cpu"`` (default) keeps the last published bits in host memory, ``"same"`` on the tensor's device.
        first_version: Number of the first version. Default 0. To go on in a folder, ``latest_version(folder) + 1``.

    Raises:
        ValueError: An option that is not offered.
        TypeError: ``source`` is none of these.
        ImportError: ``encoding="zstd"`` without its package.

    Examples:
        >>> weights = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
        >>> sender = Sender(weights)
        >>> first = sender.publish()
        >>> _ = weights["w"][7].fill_(1)
        >>> sender.publish().delta.changed
        1
    """

    def __init__(
        self,
        source: Source | Any,
        *,
        anchor_every: int | None = 10,
        encoding: str = "int32",
        dense: bool = True,
        snapshot: str = "cpu",
        first_version: int = 0,
    ) -> None:
        check_encoding(encoding)
        if snapshot not in ("cpu", "same"):
            raise ValueError(f"snapshot must be 'cpu' or 'same', got {snapshot!r}")
        if anchor_every is not None and anchor_every < 1:
            raise ValueError(f"anchor_every must be at least 1, or None, got {anchor_every}")
        if first_version < 0:
            raise ValueError(f"first_version must not be negative, got {first_version}")
        self.run = uuid.uuid4().hex
        self._reader = Reader(source)
        self._encoding = encoding
        self._differ = Differ(encoding, dense, on_host=snapshot == "cpu")
        self._anchor_every = anchor_every
        self._first = self._next = first_version
        self._version: int | None = None
        self._known: dict[str, Known] = {}
        self._anchor_due = True

    @property
    def version(self) -> int | None:
        """The last version that was delivered; None before the first."""
        return self._version

    @property
    def snapshot_bytes(self) -> int:
        """Memory held to compare with, in bytes."""
        return sum(known.snapshot.nbytes for known in self._known.values() if known.snapshot is not None)

    @torch.no_grad()
    def publish(self, to: Delivery | None = None, *, anchor: bool = False) -> Publication:
        """Publish the weights as they are now.

        Args:
            to: A folder to write files into, or a function that is called with each update. If that fails, this
                version is not published: the next one starts from the same base, under another number.
            anchor: Whether to publish the full state too though none is due, and to read every tensor, also those
                whose version counter stands still. Default False.

        Returns:
            The version, with its delta and, where one was due, its anchor. Without ``to`` the version counts as
            published: hand its updates on, in order.

        Raises:
            SyncError: A tensor can't be sent sparse and ``dense=False``; or tensors of a streamed source came, went or
                changed shape and no anchor was asked for.
        """
        deliver = _delivery(to)
        due = anchor or self._anchor_due or self._is_due()
        draft = self._draft(due, reread=anchor)
        publication = self._publication(draft)
        self._next += 1
        self._anchor_due = True  # if this is not delivered, the next version comes with a full state
        for update in publication:
            deliver(update)
        self._known = {finding.name: finding.commit() for finding in draft.findings}
        self._version, self._anchor_due = publication.version, False
        return publication

    def _is_due(self) -> bool:
        return self._anchor_every is not None and (self._next - self._first) % self._anchor_every == 0

    def _draft(self, due: bool, reread: bool) -> _Draft:
        """Read and compare all tensors; nothing is changed."""
        items, streamed = self._reader.read()
        findings, state = [], []
        for item in items:
            known = self._known.get(item.name)
            if streamed and (due or known is None):  # the anchor outlives the gathered tensor
                item = item._replace(tensor=item.tensor.cpu())
            # A sparse "w" and a tensor called "w.indices" would have the same key in a file.
            free = f"{item.name}.indices" not in self._known and f"{item.name}.values" not in self._known
            findings.append(self._differ.examine(item, known, reread=reread, sparse_key_free=free))
            if due or not streamed:
                state.append(whole(item))
        forms = {finding.name: finding.known.form for finding in findings}
        if len(forms) != len(findings):
            raise SyncError("the source gives two tensors of one name")
        same = forms == {name: known.form for name, known in self._known.items()}
        if streamed and not (same or due):
            raise SyncError("tensors came, went or changed shape since the last version; call publish(anchor=True)")
        return _Draft(findings, state if due or not same else None, has_delta=same and self._version is not None)

    def _publication(self, draft: _Draft) -> Publication:
        elements = sum(finding.numel for finding in draft.findings)
        checksum = sum(finding.known.checksum for finding in draft.findings) % MODULUS
        common = (self.run, checksum, elements, self._encoding)
        delta = anchor = None
        if draft.has_delta:
            base = sum(known.checksum for known in self._known.values()) % MODULUS
            updates = [finding.update for finding in draft.findings if finding.update is not None]
            changed = sum(finding.changed for finding in draft.findings)
            delta = Update(self._next, self._version, base, updates, changed, *common)
        if draft.state is not None:
            anchor = Update(self._next, None, 0, draft.state, elements, *common)
        return Publication(self._next, delta, anchor)


class _Draft(NamedTuple):
    """A version that is not delivered yet.

    Attributes:
        findings: All tensors, compared with the last version.
        state: All tensors in full, where an anchor is due.
        has_delta: Whether the last version had the same tensors.
    """

    findings: list[Finding]
    state: list[TensorUpdate] | None
    has_delta: bool


def _delivery(to: Delivery | None) -> Callable[[Update], object]:
    if to is None:
        return lambda update: None
    if isinstance(to, (str, os.PathLike)):
        return lambda update: write_file(update, to)
    if not callable(to):
        raise TypeError(f"publish() takes a folder or a function that is called with each update, got {to!r}")
    return to
