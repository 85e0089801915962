"""The lag's part of a step: start what groups ask for, pull masters, move lags, cast their targets."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import lag as lags
from .cast import cast_, get_rule
from .lag import LAG, LAG_KEYS, DeadZone, Delay
from .masters import COUNT, Changes, Entry, Member, accumulator_of, cast_members


@torch.no_grad()
def prepare(members: Iterable[Member]) -> None:
    """Let members remember as their groups' lags want, from the masters as they are.

    Args:
        members: Served by their last cast. Entries that fit already are left alone.
    """
    for member in members:
        member = member.local
        lag = None if member.kept else lags.of_group(member.group)
        if lag is not None and not lag.fits(member.entry):
            lag.start(member.entry, member.master, member.param)


def check_pull(members: Iterable[Member]) -> None:
    """Refuse a pull that would carry masters past their lagged copies; a tensor lr is not waited for.

    Raises:
        ValueError: lr times pull is above 1.
    """
    for member in members:
        lag, lr = lags.of_group(member.group), member.group.get("lr", 0.0)
        if lag is not None and not isinstance(lr, torch.Tensor) and lr * lag.pull > 1:
            raise ValueError(
                f"lr x pull must be at most 1, or masters overshoot their lagged copy; got {lr} x {lag.pull}"
            )


def stale(members: Iterable[Member]) -> list[Member]:
    """Those that are served by a lag which their group no longer asks for."""
    return [member for member in members if LAG in member.entry and member.group.get(LAG) is None]


class Trials:
    """Puts lags back to where the step began, for a closure that is evaluated several times.

    Each evaluation sees what would be served if its trial masters were the step's result.
    """

    def __init__(self) -> None:
        self._begin: dict[int, Entry] = {}

    @torch.no_grad()
    def cast(self, members: Iterable[Member]) -> None:
        """Serve trial masters."""
        members = [member.local for member in members]
        self.rewind(members)
        for member in members:
            if LAG in member.entry and id(member.param) not in self._begin:
                self._begin[id(member.param)] = {k: member.entry[k].clone() for k in LAG_KEYS & member.entry.keys()}
        advance_and_cast(members)

    @torch.no_grad()
    def rewind(self, members: Iterable[Member]) -> None:
        """Undo what trials did to the lags of these members."""
        for member in members:
            member = member.local
            for key, value in self._begin.get(id(member.param), {}).items():
                member.entry[key].copy_(value)


@torch.no_grad()
def pull_masters(members: Iterable[Member]) -> None:
    """Pull masters toward their lagged copies as the last step left them, by the group's lr times the lag's pull."""
    for member in members:
        member = member.local
        lag = lags.of_group(member.group)
        if lag is None or lag.pull == 0 or LAG not in member.entry:
            continue
        rate = member.group["lr"] * lag.pull
        lagged = lags.target(member.entry, member.master).to(torch.float32)
        member.master.lerp_(lagged, rate)


@torch.no_grad()
def advance_and_cast(members: Iterable[Member], *, count_changes: bool = False) -> Changes:
    """Move the lags of members whose masters have moved, and cast the targets.

    Args:
        members: Members to cast anew. Lags that their groups no longer ask for are dropped.
        count_changes: As in ``cast_members``.

    Returns:
        As ``cast_members``.
    """
    direct: list[Member] = []
    merged: list[tuple[Member, Delay | DeadZone]] = []
    for member in members:
        member = member.local
        lag = None if member.kept else lags.of_group(member.group)
        if lag is None:
            lags.drop(member.entry)
            direct.append(member)
            continue
        if not lag.fits(member.entry):
            lag.start(member.entry, member.master, member.param)
        lag.advance(member.entry, member.master)
        if isinstance(lag, DeadZone) or (isinstance(lag, Delay) and lag.dtype == "bfloat16"):
            merged.append((member, lag))
        else:
            direct.append(member)
    changes = cast_members(direct, advance=True, count_changes=count_changes)
    for member, lag in merged:
        changed = _cast_and_merge(member, lag, count_changes)
        if changed is not None:
            changes.append(([member.name], changed.reshape(1)))
    return changes


def _cast_and_merge(member: Member, lag: Delay | DeadZone, count_changes: bool) -> torch.Tensor | None:
    """Cast a master beside the served weights, and let the lag decide what becomes of it."""
    param, entry = member.param, member.entry
    before = param.detach().clone() if count_changes else None
    entry[COUNT].add_(1)
    fresh = lags.newest(entry) if isinstance(lag, Delay) else torch.empty_like(param)
    accumulator = accumulator_of(member) if get_rule(member.group["rounding"]).accumulates else None
    advanced = accumulator.clone() if accumulator is not None and isinstance(lag, DeadZone) else accumulator
    cast_(
        fresh,
        member.master,
        rounding=member.group["rounding"],
        key=member.key,
        count=member.casts,
        error_feedback=advanced,
        start=member.place,
    )
    if isinstance(lag, Delay):
        param.copy_(lags.target(entry, member.master))
    else:
        both = None if accumulator is None or advanced is None else (accumulator, advanced)
        lag.merge(param, member.master, fresh, both)
        entry[LAG] = param.detach()
    return None if before is None else _count_changes(before, param)


def _count_changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    bits = torch.int16 if before.element_size() == 2 else torch.int32
    return (before.view(bits) != after.detach().view(bits)).sum()


@torch.no_grad()
def recast_held(members: Iterable[Member]) -> None:
    """Cast masters afresh where a dead zone held weights that something else has written over."""
    lost = [member.local for member in members if lags.kind_of(member.entry) == DeadZone.kind]
    for member in lost:
        lags.drop(member.entry)
    cast_members(lost, advance=True)
    prepare(lost)


def relink(member: Member) -> None:
    """Let a local member's dead zone be the served weights again, after a load has put a copy there."""
    if lags.kind_of(member.entry) == DeadZone.kind:
        member.entry[LAG] = member.param.detach()
