"""At construction: do all ranks mean the same? One small all-gather finds it out, and names who does not."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .census import Census
from .shards import is_sharded

Group = dist.ProcessGroup | str | None
WEIGHTS = "other weights"


def check_agreement(facts: Mapping[str, object], params: Sequence[torch.Tensor], group: Group) -> None:
    """Compare facts with the other ranks that train the same parameters.

    Sharded parameters are compared over their mesh, others over ``group``. 8 bytes for each fact are gathered.

    Args:
        facts: What has to be the same everywhere, by what to call it; compared by ``repr``.
        params: The parameters.
        group: ``"default"`` for all ranks, a process group, or None to compare nothing.

    Raises:
        ValueError: A rank differs; raised on all ranks, with the ranks and the facts. Or ``group`` is something else.
    """
    chosen = chosen_group(group)
    if chosen is None:
        return
    row = torch.tensor([_digest(value) for value in facts.values()], dtype=torch.int64)
    home = Census(params).home
    if home is not None:
        ranks, rows = _gather_over_mesh(row, home)
    else:
        ranks, rows = _gather(row, chosen)
    differing = _differences(list(facts), ranks, rows)
    if differing:
        raise ValueError(_message(differing, facts))


def chosen_group(group: Group) -> dist.ProcessGroup | None:
    """The process group that an argument stands for; None where nothing is to be communicated.

    Raises:
        ValueError: It is something else.
    """
    if group is not None and group != "default" and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group must be 'default', None or a torch.distributed.ProcessGroup, got {group!r}")
    if group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD if isinstance(group, str) else group


def bits_of(params: Iterable[torch.Tensor]) -> list[int]:
    """A number for each parameter's bits that other bits hardly share; 0 for sharded ones, which differ by rank."""
    sums = [
        torch.zeros((), dtype=torch.int64) if is_sharded(param) else _sum_of_bits(param.detach()) for param in params
    ]
    return torch.stack([value.cpu() for value in sums]).tolist() if sums else []


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(kind).sum(dtype=torch.int64)


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _gather(row: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[list[int]]]:
    """The ranks of a group and the row of each."""
    if dist.get_rank(group) < 0:
        return [], []
    row = row.to(device_of(group))
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return dist.get_process_group_ranks(group), torch.stack(rows).tolist()


def _gather_over_mesh(row: torch.Tensor, mesh: DeviceMesh) -> tuple[list[int], list[list[int]]]:
    """The ranks of a mesh and the row of each, gathered dimension by dimension so that all ranks see all."""
    if mesh.get_coordinate() is None:
        return [], []
    gathered = row.to(mesh.device_type)
    for dim in reversed(range(mesh.ndim)):
        rows = [torch.empty_like(gathered) for _ in range(mesh.size(dim))]
        dist.all_gather(rows, gathered.contiguous(), group=mesh.get_group(dim))
        gathered = torch.stack(rows)
    return mesh.mesh.flatten().tolist(), gathered.reshape(-1, len(row)).tolist()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """A device whose tensors the group can send."""
    if any(name in dist.get_backend(group) for name in ("gloo", "mpi", "fake")):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _differences(names: Sequence[str], ranks: Sequence[int], rows: Sequence[Sequence[int]]) -> dict[int, list[str]]:
    """What each rank that differs from most of the others has different."""
    if not rows:
        return {}
    most, count = Counter(map(tuple, rows)).most_common(1)[0]
    usual = most if 2 * count > len(rows) else tuple(rows[0])
    found = {
        rank: [name for name, own, other in zip(names, row, usual) if own != other] for rank, row in zip(ranks, rows)
    }
    return {rank: what for rank, what in found.items() if what}


def _message(differing: Mapping[int, Sequence[str]], facts: Mapping[str, object]) -> str:
    said = "; ".join(f"rank {rank} has {' and '.join(what)}" for rank, what in list(differing.items())[:4])
    more = f"; and {len(differing) - 4} more ranks" if len(differing) > 4 else ""
    named = dict.fromkeys(name for what in differing.values() for name in what if name != WEIGHTS)
    own = ", ".join(f"{name.removeprefix('another ').removeprefix('other ')}: {facts[name]!r:.120}" for name in named)
    here = f"On this rank ({dist.get_rank()}) {own}. " if own else ""
    return (
        f"the ranks don't agree, so their weights would drift apart: {said}{more}. {here}Construct FairCastOptimizer "
        "with the same arguments and weights on every rank; where ranks are meant to train other parameters, pass "
        "process_group=their group, or None to leave this check out"
    )
