"""Reading an optimizer's state dict: matched by name, without a change of dtype, without a shared tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import lag as lags
from .cast import get_rule
from .distributed.shards import placed_like
from .masters import ACCUMULATOR, COUNT, MASTER, OWN_KEYS, Entry, Member, wrapped_part
from .naming import canonical_name, is_positional

Group = dict[str, Any]


def read_state(
    groups: Sequence[Group], members: Sequence[Sequence[Member]], state_dict: Mapping[str, Any]
) -> tuple[list[Group], dict[str, Entry]]:
    """Read a state dict into new groups and entries; nothing is changed.

    Args:
        groups: Our param groups.
        members: Their members, as they are.
        state_dict: Ours, or a plain optimizer's, whose state goes beside the masters that are here.

    Returns:
        New param groups, and state entries by canonical name.

    Raises:
        ValueError: It does not fit; see ``match_groups`` and ``load_entry``.
    """
    missing = {"state", "param_groups"} - state_dict.keys()
    if missing:
        raise ValueError(f"this is no optimizer state dict: {sorted(missing)} missing, found {list(state_dict)[:5]}")
    matched = match_groups(groups, state_dict["param_groups"])
    saved_state = state_dict["state"]
    ours = any(MASTER in saved for saved in saved_state.values() if isinstance(saved, Mapping))
    new_groups, entries = [], {}
    for group, inside, (saved_group, ids) in zip(groups, members, matched):
        merged = load_options(group, saved_group)
        new_groups.append(merged)
        for member in inside:
            saved = saved_state.get(ids[member.name], {})
            if ours:
                entries[member.name] = load_entry(member.name, member.param, merged, saved, member.kept)
            else:
                entries[member.name] = load_foreign_entry(member.param, merged, saved, member.entry)
    return new_groups, entries


def own_members(members: Sequence[Sequence[Member]], state_dict: Mapping[str, Any]) -> list[Member]:
    """The members whose very masters a state dict holds: it is the optimizer's own, not one that was saved."""
    held = {
        id(saved[MASTER]) for saved in state_dict["state"].values() if isinstance(saved, Mapping) and MASTER in saved
    }
    return [member for group in members for member in group if not member.kept and id(member.master) in held]


def is_complete(entries: Iterable[Entry]) -> bool:
    """Whether entries hold more than what construction captures, so that they belong into ``state``.

    A state with masters but without moments would keep distributed checkpoint from creating the moments.
    """
    return any(wrapped_part(entry) or int(entry.get(COUNT, 0)) > 0 for entry in entries)


def match_groups(groups: Sequence[Group], saved: Sequence[Group]) -> list[tuple[Group, dict[str, Any]]]:
    """Pair our groups with saved ones, and each of our parameters with its saved id.

    By name where both sides have names, else by position.

    Args:
        groups: Our param groups.
        saved: The ``param_groups`` of a state dict.

    Returns:
        For each of our groups the saved group and a dict from our names to saved ids.

    Raises:
        ValueError: Parameters are missing or too many on either side.
    """
    ours = [list(group["param_names"]) for group in groups]
    theirs = [_saved_names(group) for group in saved]
    named = all(names is not None for names in theirs)
    flat_ours = [name for names in ours for name in names]
    flat_theirs = [name for names in theirs if names is not None for name in names]
    if named and not any(map(is_positional, flat_ours)) and not any(map(is_positional, flat_theirs)):
        return _match_by_name(ours, saved, [names or [] for names in theirs])
    sizes, saved_sizes = [len(names) for names in ours], [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise ValueError(
            f"the state dict holds param groups of {saved_sizes} parameters, this optimizer groups of {sizes}; "
            "build it with the same groups as the one that was saved"
        )
    return [(group, dict(zip(names, group["params"]))) for names, group in zip(ours, saved)]


def _saved_names(group: Group) -> list[str] | None:
    names = group.get("param_names")
    return None if names is None else [canonical_name(name) for name in names]


def _match_by_name(
    ours: Sequence[Sequence[str]], saved: Sequence[Group], theirs: Sequence[Sequence[str]]
) -> list[tuple[Group, dict[str, Any]]]:
    ids = {name: i for names, group in zip(theirs, saved) for name, i in zip(names, group["params"])}
    wanted = {name for names in ours for name in names}
    missing, unexpected = sorted(wanted - ids.keys()), sorted(ids.keys() - wanted)
    if missing or unexpected:
        raise ValueError(
            "the state dict belongs to another set of parameters: "
            + "; ".join(
                f"{len(names)} {what}, for example {', '.join(map(repr, names[:3]))}"
                for what, names in (("are missing in it", missing), ("are unknown here", unexpected))
                if names
            )
        )
    home = {name: number for number, names in enumerate(theirs) for name in names}
    matched = []
    for number, names in enumerate(ours):
        homes = {home[name] for name in names}
        if len(homes) > 1:
            raise ValueError(
                f"param group {number} holds parameters that the state dict keeps in groups {sorted(homes)}; "
                "build the optimizer with the same groups as the one that was saved"
            )
        source = saved[homes.pop()] if homes else saved[min(number, len(saved) - 1)]
        matched.append((source, {name: ids[name] for name in names}))
    return matched


def load_options(group: Group, saved: Group) -> Group:
    """Merge a saved group's options into ours: a new dict with our parameters and names.

    Raises:
        ValueError: The saved rounding rule or lag is unknown.
    """
    options = {key: copy.deepcopy(value) for key, value in saved.items() if key not in ("params", "param_names")}
    merged = {**group, **options}
    get_rule(merged["rounding"])
    merged["lag"] = lags.as_options(merged.get("lag"))
    return merged


def load_entry(name: str, param: torch.Tensor, group: Group, saved: Mapping[str, Any], kept: bool) -> Entry:
    """Copy one parameter's saved state that holds a master.

    Tensors keep their dtype and bits and go to the parameter's device (``step`` only where torch moves it,
    for capturable and fused optimizers; the cast count never).

    Raises:
        ValueError: A part is missing or has another shape; the message names the parameter.
    """
    if not kept:
        check_own(name, param, group, saved)
    return place_entry(param, group, saved)


def place_entry(param: torch.Tensor, group: Group, saved: Mapping[str, Any]) -> Entry:
    """Copy checked state to where its parameter lies; see ``load_entry``."""
    move_step = bool(group.get("capturable") or group.get("fused"))

    def place(key: str, value: torch.Tensor) -> torch.Tensor:
        stays = key in (COUNT, lags.LAG_COUNT) or (key == "step" and not move_step)
        return value.detach().clone() if stays else placed_like(value, param)

    return {key: _copied(key, value, place) for key, value in saved.items()}


def load_foreign_entry(param: torch.Tensor, group: Group, saved: Mapping[str, Any], own: Entry) -> Entry:
    """Copy a plain optimizer's state of one parameter beside the master that is already here.

    Floating tensors become float32, as the wrapped optimizer steps on fp32 masters; ``step`` keeps its dtype.
    """
    move_step = bool(group.get("capturable") or group.get("fused"))

    def place(key: str, value: torch.Tensor) -> torch.Tensor:
        if key == "step":
            return value.detach().to(param.device, copy=True) if move_step else value.detach().clone()
        placed = placed_like(value, param)
        return placed.to(torch.float32) if value.is_floating_point() else placed

    mine = {key: value for key, value in own.items() if key in OWN_KEYS}
    return {**mine, **{key: _copied(key, value, place) for key, value in saved.items()}}


def check_own(name: str, param: torch.Tensor, group: Group, saved: Mapping[str, Any]) -> None:
    """Refuse a saved entry that lacks what its group's rule needs, or that doesn't fit the parameter.

    Raises:
        ValueError: As ``load_entry``.
    """
    if MASTER not in saved or COUNT not in saved:
        raise ValueError(
            f"the state dict has no fp32 master of parameter {name!r}, though it has those of others; the file is "
            "incomplete (or the parameter was kept in fp32 when it was saved: pass the same keep_fp32)"
        )
    needed = [MASTER]
    if get_rule(group["rounding"]).accumulates:
        if ACCUMULATOR not in saved:
            raise ValueError(
                f"the state dict says rounding='error_feedback' but has no accumulators of parameter {name!r}; "
                "it can't be resumed exactly. Load a complete one, or set the group's rounding to another rule"
            )
        needed.append(ACCUMULATOR)
    for key in needed:
        shape = tuple(saved[key].shape)
        if shape != tuple(param.shape):
            raise ValueError(f"{key} of parameter {name!r} has shape {shape}, the parameter {tuple(param.shape)}")
    if saved[MASTER].dtype is not torch.float32:
        raise ValueError(
            f"the master of parameter {name!r} was saved as {saved[MASTER].dtype}: its low bits are gone, so the run "
            "can't be resumed exactly. Something cast the state dict; save it as it is"
        )
    lags.check_saved(name, saved, param.shape)


def _copied(key: str, value: Any, place: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Copy a state value of any nesting, placing its tensors."""
    if isinstance(value, torch.Tensor):
        return place(key, value)
    if isinstance(value, dict):
        return {k: _copied(str(k), v, place) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(key, item, place) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else tuple(items)
    return copy.deepcopy(value)
