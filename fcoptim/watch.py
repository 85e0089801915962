"""Noticing served weights that somebody else has written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .masters import Member, replayed, same_bits


class Watch:
    """Remembers the version counter of each served parameter since it was last cast or checked.

    Copies of an optimizer start without memory and check once by bits.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def remember(self, members: Iterable[Member]) -> None:
        """Note that these served weights are what their masters say."""
        for member in members:
            self._seen[member.name] = (id(member.param), member.param._version)

    def foreign(self, members: Sequence[Member]) -> list[str]:
        """Name the parameters whose served bits are not those of the last cast.

        A parameter whose version counter stands where it stood is not looked at; one written with the same
        bits is forgiven.
        """
        written = []
        for member in members:
            if member.kept or self._seen.get(member.name) == (id(member.param), member.param._version):
                continue
            if same_bits(replayed(member), member.param):
                self.remember([member])
            else:
                written.append(member.name)
        return written

    def __getstate__(self) -> dict[str, object]:
        return {"_seen": {}}
