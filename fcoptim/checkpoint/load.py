"""``load_checkpoint``: everything is checked before anything is changed."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import lagging, loading
from ..distributed.agreement import Group
from ..distributed.shards import fits, is_sharded, local, part_of, wrapped_like
from ..masters import MASTER, Entry, Member
from ..optimizer import FairCastOptimizer, unwrap
from . import naming
from .folder import resolve
from .layout import CheckpointError
from .opened import Opened, Saved
from .plan import cut_like
from .save import wait_for
from .start import start_from
from .target import Pair, match
from .team import Team
from .tensorfile import copy_into
from .writing import in_threads

_DAMAGED = "these files are damaged or don't belong to it"
_MISALIGNED = "the saved served weights are not what the saved masters and state serve, in these tensors"


def load_checkpoint(
    path: str | os.PathLike[str], opt: FairCastOptimizer, *, strict: bool = True, process_group: Group = "default"
) -> dict[str, Any]:
    """Load what ``save_checkpoint`` wrote, so that training goes on bit for bit.

    Parameters are matched by name. Every file is compared with the manifest, and the served weights are rebuilt from
    masters and state and compared with the saved ones, before anything is changed.

    A folder that holds nothing but a model is taken too: its weights become the masters, and a warning says so.

    With ``torch.distributed`` every rank has to make the call; each reads its own part of sharded parameters. It does
    not matter how many ranks saved the checkpoint, nor how they shared the model.

    Args:
        path: The folder.
        opt: Built on the same model, with the same kind of optimizer; or what a framework has put around it.
        strict: Whether a difference is an error. With False it is a warning; masters and state are loaded as they are,
            and the served weights are what they say. What can't be read is an error in any case. Default True.
        process_group: With ``torch.distributed``, the ranks that load together: ``"default"`` (all), a process group,
            or None for this process alone.

    Returns:
        The training's own values, by name, and ``"step"``.

    Raises:
        CheckpointError: The checkpoint is damaged or doesn't fit; files, tensors or parameters are named. Nothing was
            changed.
        FileNotFoundError: There is no such folder.
    """
    opt = unwrap(opt)
    folder = resolve(path)
    source = f"checkpoint {folder}"
    team = Team(process_group, f"loading {source}")
    wait_for(opt, folder)
    opened = _open(team, folder, opt, strict)
    # Whole copies on several machines may differ, so only what is sharded, and so read in parts, is checked in parts.
    share = (team.rank, team.size) if any(is_sharded(member.param) for member in opt._flat()) else (0, 1)
    _judge(_union(team.together(lambda: opened.damaged(*share))), f"{source}: {_DAMAGED}", strict)
    if not opened.has_state:
        tied = opened.served.metadata
        team.together(lambda: len(match(opt, opened.served, tied, source)))
        start_from(opt, opened.served, tied, source)
        warnings.warn(
            f"{opened.folder} holds a model only: its weights are now the masters, the optimizer's state starts anew",
            stacklevel=2,
        )
        return {"step": 0}
    found = []

    def prepare() -> list[str]:
        groups, saved = _match_parameters(opened, opt, source)
        pairs = match(opt, opened.served, opened.state["tied"], source)
        found.append((groups, saved, pairs, opened.extra()))
        return opened.misaligned(*share)

    misaligned = _union(team.together(prepare))
    _judge(misaligned, f"{source}: {_MISALIGNED}", strict)
    groups, saved, pairs, extra = found[0]
    _commit(opt, opened, groups, saved, pairs, aligned=not misaligned)
    return {"step": opened.manifest.step if opened.manifest is not None else 0, **extra}


def _open(team: Team, folder: Path, opt: FairCastOptimizer, strict: bool) -> Opened:
    """Open a checkpoint on all ranks.

    Raises:
        CheckpointError: It can't be opened, or the ranks see different ones.
    """
    found = []

    def work() -> str | None:
        if opt._shared.showing_masters:
            raise RuntimeError("load_checkpoint inside masters_as_weights(): leave the with block first")
        opened = Opened(folder, strict=strict)
        found.append(opened)
        return hashlib.sha256(opened.manifest.to_json()).hexdigest() if opened.manifest is not None else None

    manifests = team.together(work)
    for rank, manifest in zip(team.ranks, manifests):
        if manifest != manifests[0]:
            raise CheckpointError(f"rank {rank} sees another checkpoint at {folder} than rank {team.ranks[0]}")
    return found[0]


def _union(found: list[list[str]]) -> list[str]:
    """What any rank has found, in the order of the ranks."""
    return list(dict.fromkeys(text for texts in found for text in texts))


def _judge(found: list[str], what: str, strict: bool) -> None:
    """Refuse or warn.

    Raises:
        CheckpointError: Something was found and ``strict``.
    """
    if not found:
        return
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    text = f"{what}: {'; '.join(found[:5])}{more}"
    if strict:
        raise CheckpointError(f"{text}. Nothing was loaded; load an earlier checkpoint, or pass strict=False")
    warnings.warn(text, stacklevel=3)


class Fitting(NamedTuple):
    """A parameter with its saved state and the options its group will have.

    Attributes:
        member: As it is.
        saved: As it was saved.
        group: Its param group after the load; one dict for all of its parameters.
    """

    member: Member
    saved: Saved
    group: dict[str, Any]


def _match_parameters(
    opened: Opened, opt: FairCastOptimizer, source: str
) -> tuple[list[dict[str, Any]], list[Fitting]]:
    """Pair every parameter with its saved state, and check that it fits.

    Returns:
        The param groups after the load, and the parameters.

    Raises:
        CheckpointError: It doesn't; see ``loading.match_groups`` and ``loading.check_own``.
    """
    by_name = {saved.name: saved for saved in opened.parameters()}
    packed = [{**group, "params": group["param_names"]} for group in opened.groups]
    groups, found = [], []
    try:
        matched = loading.match_groups(opt.param_groups, packed)
        for group, members, (saved_group, ids) in zip(opt.param_groups, opt._members(), matched):
            merged = loading.load_options(group, saved_group)
            groups.append(merged)
            for member in members:
                saved = by_name[ids[member.name]]
                _check_fit(member, saved, merged)
                found.append(Fitting(member, saved, merged))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{source} doesn't fit this optimizer: {error}") from error
    return groups, found


def _check_fit(member: Member, saved: Saved, group: dict[str, Any]) -> None:
    for key, value in saved.entry.items() if is_sharded(member.param) else ():
        if isinstance(value, torch.Tensor) and value.ndim and not cut_like(value, member.param):
            raise CheckpointError(
                f"{key} of parameter {member.name!r} has shape {tuple(value.shape)}, which can't be cut for sharded "
                f"parameters of shape {tuple(member.param.shape)}; load it where the parameters are whole"
            )
    if not member.kept:
        loading.check_own(member.name, member.param, group, saved.entry)
    elif MASTER in saved.entry:
        raise CheckpointError(
            f"parameter {member.name!r} is kept in fp32 here, but was cast when it was saved; pass the same keep_fp32"
        )


@torch.no_grad()
def _commit(
    opt: FairCastOptimizer,
    opened: Opened,
    groups: list[dict[str, Any]],
    saved: list[Fitting],
    pairs: list[Pair],
    aligned: bool,
) -> None:
    """Load what was checked, into the tensors that are here already where they fit, so that memory does not grow.

    Args:
        opt: Changed, with its model.
        opened: The checkpoint.
        groups: The param groups after the load.
        saved: Its parameters.
        pairs: Its served weights.
        aligned: Whether these are what masters and state serve; else the weights are cast anew.
    """
    sizes = [_nbytes(one.saved.entry) for one in saved]
    entries = dict(zip((one.member.name for one in saved), in_threads(_refilled, saved, sizes)))
    opt._install(groups, entries)
    members = opt._flat()
    cast = {id(member.param) for member in members if not member.kept}
    chosen = [pair for pair in pairs if aligned or id(pair.value) not in cast]
    in_threads(lambda p: _fill(p.value, opened.served[p.key]), chosen, [p.value.numel() for p in chosen])
    if not aligned:
        opt._restore_served(members)
    for member in members:
        lagging.relink(member.local)
    opt._shared.watch.remember(members)
    _load_loose(opt, opened)
    for hook in opt._optimizer_load_state_dict_post_hooks.values():
        hook(opt)


def _refilled(one: Fitting) -> Entry:
    """A parameter's saved state, in the tensors it has now where these fit."""
    member = one.member
    entry, rest = {}, {}
    for key, value in one.saved.entry.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape != member.param.shape:
            rest[key] = value
            continue
        old: Any = member.entry.get(key)
        same = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype)
        if not same or not fits(old, member.param):
            shape, device = local(member.param).shape, member.param.device
            old = wrapped_like(torch.empty(shape, dtype=value.dtype, device=device), member.param)
        entry[key] = _fill(old, value)
    return {**entry, **loading.place_entry(member.param, one.group, rest)}


def _fill(target: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Write a whole tensor, or this rank's part of it, into one of the model's or the optimizer's."""
    copy_into(local(target), part_of(whole, target))
    return target


def _nbytes(entry: Entry) -> int:
    return sum(value.nbytes for value in entry.values() if isinstance(value, torch.Tensor))


def _load_loose(opt: FairCastOptimizer, opened: Opened) -> None:
    """Hand modules their extra state."""
    loose = opened.state_decoder.decode(opened.state["loose"])
    if loose and opt._shared.model is not None:
        model = naming.bare(opt._shared.model)
        names = {naming.file_name(name): name for name in model.state_dict(keep_vars=True)}
        model.load_state_dict({names[name]: value for name, value in loose.items() if name in names}, strict=False)
