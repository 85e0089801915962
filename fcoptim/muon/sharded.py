"""Muon on sharded matrices: each is gathered on one rank, orthogonalised there whole, and its update scattered.

Momentum and the update itself are element by element and stay with the shards. Matrices go by rounds, one for each
rank, sorted by cost so that those of a round cost alike: no rank holds more than one whole matrix at a time, and all
are busy. A round is two all-to-alls: the directions in the momentum's dtype to their owners, the updates in the dtype
of the iteration back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..distributed.shards import full, held_by, local, wrapped_like
from .orthogonalize import make_plan
from .routing import is_stack, matrix_shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Orthogonalize = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
# A range of a parameter's rows (or columns, if it is stored transposed) and the scale of its updates.
Part = tuple[int, int, float]


class Shard(NamedTuple):
    """This rank's part of a matrix.

    Attributes:
        param: The parameter.
        direction: What is to be orthogonalised, the local part of it.
        dim: The dimension that ``parts`` are ranges of.
        parts: Ranges and scales.
    """

    param: DTensor
    direction: torch.Tensor
    dim: int
    parts: Sequence[Part]


class Peers(NamedTuple):
    """The ranks that share a matrix, and how to reach them.

    Attributes:
        group: Their process group; None where there is none, and all ranks gather everything.
        coordinates: Where each lies in the mesh, in the group's order.
        senders: For each, whether it sends its shard to owners; copies of it don't.
        me: This rank's number among them.
    """

    group: dist.ProcessGroup | None
    coordinates: Sequence[tuple[int, ...]]
    senders: Sequence[bool]
    me: int


def is_whole_here(param: DTensor, matrices: str) -> bool:
    """Whether a rank's part of a parameter consists of whole matrices: replicated, or a stack cut between them."""
    batch_dims = param.ndim - 2 if is_stack(param.ndim, matrices) else 0
    placements: Sequence[Any] = param.placements
    return all(placement.is_replicate() or placement.dim < batch_dims for placement in placements)


def directions(grad: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Move a momentum buffer on and return what is to be orthogonalised; element by element, so shards do."""
    grad = -grad if group["maximize"] else grad
    momentum.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def step_shards(shards: Sequence[Shard], group: dict[str, Any], orthogonalize: Orthogonalize) -> None:
    """Update sharded matrices, all of which have gradients on every rank.

    Args:
        shards: This rank's parts, in the same order on every rank.
        group: Their param group.
        orthogonalize: Turns a whole direction into a whole update, without its scale.
    """
    kinds: dict[Any, list[Shard]] = {}
    for shard in shards:
        kinds.setdefault((shard.param.device_mesh, tuple(shard.param.placements)), []).append(shard)
    for alike in kinds.values():
        peers = find_peers(alike[0].param)
        for turn in rounds(alike, len(peers.coordinates) if peers.group is not None else 1, group):
            for shard, update in zip(turn, _exchange(turn, peers, group, orthogonalize)):
                _apply(shard, update, group)


def rounds(shards: Sequence[Shard], owners: int, group: dict[str, Any]) -> Iterator[list[Shard]]:
    """Sort matrices into rounds of as many as there are owners, most expensive first; the owner is the place."""
    ordered = sorted(shards, key=lambda shard: -cost(tuple(shard.param.shape), group))
    for first in range(0, len(ordered), owners):
        yield ordered[first : first + owners]


def cost(shape: tuple[int, ...], group: dict[str, Any]) -> int:
    """Operations that the orthogonalisation of a parameter takes, but for splits."""
    rows, cols = matrix_shape(shape, group["matrices"])
    steps = group["steps"] if group.get("steps") else 5
    return make_plan(rows, cols, steps, True).flops * max(1, int(np.prod(shape)) // max(1, rows * cols))


def find_peers(param: DTensor) -> Peers:
    """The ranks to exchange a matrix with: those of the one mesh dimension that shards it, or all of the mesh."""
    mesh = param.device_mesh
    own = mesh.get_coordinate()
    assert own is not None
    cut = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate() and mesh.size(dim) > 1]
    if len(cut) <= 1:
        dim = cut[0] if cut else 0
        coordinates = [(*own[:dim], i, *own[dim + 1 :]) for i in range(mesh.size(dim))]
        return Peers(mesh.get_group(dim), coordinates, [True] * len(coordinates), own[dim])
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(dist.get_world_size())):
        return Peers(None, [tuple(own)], [True], 0)
    where = {rank: tuple(place) for rank, place in zip(ranks, np.ndindex(*mesh.shape))}
    coordinates = [where[rank] for rank in range(len(ranks))]
    copies = [dim for dim in range(mesh.ndim) if dim not in cut]
    senders = [all(place[dim] == 0 for dim in copies) for place in coordinates]
    return Peers(dist.group.WORLD, coordinates, senders, dist.get_rank())


def _exchange(
    turn: Sequence[Shard], peers: Peers, group: dict[str, Any], orthogonalize: Orthogonalize
) -> list[torch.Tensor]:
    """One round: the local parts of the updates of its matrices."""
    if peers.group is None:
        return [
            _cut(orthogonalize(full(wrapped_like(s.direction, s.param)), group), s.param, peers.me, peers) for s in turn
        ]
    mine = turn[peers.me] if peers.me < len(turn) else None
    sent = [shard.direction.reshape(-1) for shard in turn] if peers.senders[peers.me] else []
    sizes = [part.numel() for part in sent] or [0] * len(turn)
    arriving = [
        _size(mine.param, place) if mine and sends else 0 for place, sends in zip(peers.coordinates, peers.senders)
    ]
    received = _all_to_all(sent, sizes, arriving, turn[0].direction, peers)
    if mine is None:
        update, leaving = None, []
    else:
        whole = _assembled(received, mine.param, peers)
        update = orthogonalize(whole, group)
        leaving = [_cut(update, mine.param, number, peers).reshape(-1) for number in range(len(peers.coordinates))]
    like = turn[0].direction.new_empty(0, dtype=getattr(torch, group["dtype"]))
    sizes = [_size(shard.param, peers.coordinates[peers.me]) for shard in turn]
    back = _all_to_all(leaving, [part.numel() for part in leaving] or [0] * len(peers.coordinates), sizes, like, peers)
    parts = torch.split(back, sizes)
    return [part.view(shard.direction.shape) for part, shard in zip(parts, turn)]


def _all_to_all(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], arriving: Sequence[int], like: torch.Tensor, peers: Peers
) -> torch.Tensor:
    """Send the parts, one to each peer, and return what arrives, one after the other."""
    world = len(peers.coordinates)
    outgoing = torch.cat(list(parts)) if parts else like.new_empty(0)
    incoming = like.new_empty(sum(arriving))
    dist.all_to_all_single(
        incoming,
        outgoing,
        [*arriving, *[0] * (world - len(arriving))],
        [*sizes, *[0] * (world - len(sizes))],
        group=peers.group,
    )
    return incoming


def _size(param: DTensor, place: tuple[int, ...]) -> int:
    return int(np.prod([len(index) for index in held_by(param, place)], dtype=np.int64))


def _assembled(received: torch.Tensor, param: DTensor, peers: Peers) -> torch.Tensor:
    """The whole direction, from the shards of all senders."""
    whole = received.new_empty(param.shape)
    first = 0
    for place, sends in zip(peers.coordinates, peers.senders):
        if not sends:
            continue
        held = held_by(param, place)
        shape = [len(index) for index in held]
        size = int(np.prod(shape, dtype=np.int64))
        whole[_grid(held, whole.device)] = received[first : first + size].view(shape)
        first += size
    return whole


def _cut(whole: torch.Tensor, param: DTensor, number: int, peers: Peers) -> torch.Tensor:
    return whole[_grid(held_by(param, peers.coordinates[number]), whole.device)]


def _grid(held: Sequence[np.ndarray[Any, np.dtype[np.int64]]], device: torch.device) -> tuple[Any, ...]:
    """An index of the elements whose indices are given for each dimension: slices, or a grid where that won't do."""
    slices = []
    for index in held:
        if len(index) and index[-1] - index[0] + 1 != len(index):
            return tuple(
                torch.from_numpy(own).to(device).view([-1 if d == dim else 1 for d in range(len(held))])
                for dim, own in enumerate(held)
            )
        slices.append(slice(int(index[0]), int(index[-1]) + 1) if len(index) else slice(0, 0))
    return tuple(slices)


def _apply(shard: Shard, update: torch.Tensor, group: dict[str, Any]) -> None:
    """Decay the local part and subtract its update, each range of rows with its own scale."""
    param = local(shard.param)
    update = update.to(param.dtype)
    lr = float(group["lr"])
    if group["weight_decay"] != 0:
        param.mul_(1 - lr * group["weight_decay"])
    coordinate = shard.param.device_mesh.get_coordinate()
    assert coordinate is not None
    index = held_by(shard.param, tuple(coordinate))[shard.dim]
    for begin, end, scale in shard.parts:
        # Local rows are in ascending order, so those of a range lie side by side.
        first, last = np.searchsorted(index, [begin, end]).tolist()
        rows = param.narrow(shard.dim, first, last - first)
        rows.add_(update.narrow(shard.dim, first, last - first), alpha=-lr * scale)


def parts_of(sizes: Sequence[int], scales: Sequence[float]) -> list[Part]:
    """Ranges of rows, one after the other, with their scales."""
    edges = [0, *np.cumsum(sizes).tolist()]
    return [(begin, end, scale) for (begin, end), scale in zip(pairwise(edges), scales)]
