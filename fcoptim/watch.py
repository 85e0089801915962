"""Noticing served weights that somebody else has written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from . import lag as lags
from .distributed.shards import mark_of
from .masters import Member, replayed, same_bits


class Watch:
    """Remembers the version counter of each served parameter since it was last cast or checked.

    Copies of an optimizer start without memory and check once by bits.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._rewritten: dict[str, tuple[int, ...]] = {}

    def remember(self, members: Iterable[Member]) -> None:
        """Note that these served weights are what their masters say."""
        for member in members:
            self._seen[member.name] = mark_of(member.param)
            member = member.local
            self._sums.pop(member.name, None)
            if _is_held(member):
                self._sums[member.name] = _sum_of_bits(member.param)

    def foreign(self, members: Sequence[Member]) -> list[str]:
        """Name the parameters whose served bits are not those of the last cast.

        A parameter whose version counter stands where it stood is not looked at; one written with the same
        bits is forgiven. Weights that a dead zone holds are their own memory, so there the sum of their bits is
        compared.
        """
        written = []
        for member in members:
            if member.kept or self._seen.get(member.name) == mark_of(member.param):
                continue
            if self._is_ours(member.local):
                self.remember([member])
            else:
                written.append(member.name)
        return written

    def note_rewritten(self, names: Iterable[str]) -> None:
        """Note that a load found other weights in these parameters and rewrote them."""
        self._rewritten = {name: self._seen[name] for name in names}

    def unconfirmed(self) -> list[str]:
        """Name, once, the rewritten parameters into which nobody has written the same weights since.

        Some tools load the optimizer before the model; there the model's load confirms what was rewritten.
        """
        names = [name for name, seen in self._rewritten.items() if self._seen.get(name) == seen]
        self._rewritten = {}
        return names

    def _is_ours(self, member: Member) -> bool:
        remembered = self._sums.get(member.name)
        if remembered is not None and _is_held(member):
            return bool(remembered == _sum_of_bits(member.param))
        return same_bits(replayed(member), member.param)

    def __getstate__(self) -> dict[str, object]:
        return {"_seen": {}, "_sums": {}, "_rewritten": {}}


def _is_held(member: Member) -> bool:
    """Whether what the lag remembers is the served weights themselves."""
    held = lags.kind_of(member.entry) == lags.DeadZone.kind
    return held and bool(member.entry[lags.LAG].data_ptr() == member.param.data_ptr())


def _sum_of_bits(param: torch.Tensor) -> torch.Tensor:
    bits = torch.int16 if param.element_size() == 2 else torch.int32
    return param.detach().view(bits).sum(dtype=torch.int64)
