"""Sharded parameters: their local part, and where its elements lie in the unsharded parameter.

A parameter of FSDP2 or of a tensor-parallel plan is a ``DTensor``. Rounding is keyed by an element's index in the
unsharded parameter, row by row, so what is served does not depend on how many ranks there are or how they share a
parameter. All that casts, replays or remembers works on local tensors; no full tensor is needed for it.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from ..cast import Runs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_Index = np.ndarray[Any, np.dtype[np.int64]]


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of whatever placement. Does not import what made it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor
    return part


def mark_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Another after every write that torch sees: identities and version counters, for a DTensor also the local part's.

    Operations on a DTensor raise its own counter only.
    """
    part = local(tensor)
    mark = (id(tensor), tensor._version)
    return mark if part is tensor else (*mark, id(part), part._version)


def place_of(tensor: torch.Tensor) -> int | Runs:
    """Where the local part lies in the whole, as ``cast_`` takes it under ``start``.

    Raises:
        ValueError: The placement says that values are still to be summed up, or the local part has another size.
    """
    if not is_sharded(tensor):
        return 0
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh and holds nothing
        return 0
    where = _place(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tuple(tensor.placements))
    held = where.numel if isinstance(where, Runs) else None
    if held is not None and held != local(tensor).numel():
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} on mesh {tuple(mesh.shape)} with {tensor.placements} should "
            f"hold {held} elements on this rank, but holds {local(tensor).numel()}"
        )
    return where


@lru_cache(maxsize=4096)
def _place(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> int | Runs:
    """The runs of one shard, in the order in which its elements lie."""
    held = _held(shape, mesh, coordinate, placements)
    cut = [dim for dim, index in enumerate(held) if len(index) != shape[dim]]
    if not cut:
        return 0
    last = cut[-1]
    strides = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
    outer = np.zeros(1, dtype=np.int64)
    for dim in range(last):
        outer = (outer[:, None] + held[dim] * strides[dim]).reshape(-1)
    # Consecutive indices of the innermost dimension that is cut make one run.
    index = held[last]
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    begins = index[np.concatenate([[0], breaks])] if len(index) else index
    sizes = np.diff(np.concatenate([[0], breaks, [len(index)]])) if len(index) else index
    starts = (outer[:, None] + begins * strides[last]).reshape(-1)
    return Runs(starts, np.tile(sizes * strides[last], len(outer)))


@lru_cache(maxsize=4096)
def _held(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[_Index]:
    """For each dimension the indices that a shard holds, as torch splits: mesh dimension by mesh dimension."""
    held = [torch.arange(size) for size in shape]
    for size, own, placement in zip(mesh, coordinate, placements):
        if placement.is_partial():
            raise ValueError(f"a parameter can't have the placement {placement}; its values are not final")
        if placement.is_replicate():
            continue
        kind, dim = _on_first_dimension(placement)
        parts, _ = kind._split_tensor(held[dim], size, with_padding=False, contiguous=True)
        held[dim] = parts[own]
    return [index.numpy() for index in held]


def held_by(tensor: DTensor, coordinate: tuple[int, ...]) -> list[_Index]:
    """For each dimension the indices, in ascending order, that the rank at a place of the mesh holds of a DTensor."""
    return _held(tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, tuple(tensor.placements))


def _on_first_dimension(placement: Any) -> tuple[Any, int]:
    """A placement that splits dimension 0 as this one splits its own, and which that is."""
    factor = getattr(placement, "split_factor", None)
    same = type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)
    return same, placement.dim


def wrapped_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Make a local part a DTensor placed like another; a plain tensor where the other is plain.

    Args:
        part: Shaped as the local part of ``like``, or with one more dimension in front.
        like: What it belongs to.
    """
    if not is_sharded(like) or is_sharded(part):
        return part
    more = part.ndim - like.ndim
    shape = torch.Size([*part.shape[:more], *like.shape])
    strides = tuple(int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape)))
    placements = [_shifted(placement, more) for placement in like.placements]
    return type(like).from_local(part, like.device_mesh, placements, run_check=False, shape=shape, stride=strides)


def _shifted(placement: Any, dims: int) -> Any:
    if dims == 0 or placement.is_replicate():
        return placement
    factor = getattr(placement, "split_factor", None)
    dim = placement.dim + dims
    return type(placement)(dim) if factor is None else type(placement)(dim, split_factor=factor)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, gathered on every rank by all of them together; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    if tensor.dtype is not torch.int16:
        return tensor.full_tensor()
    # Neither NCCL nor gloo sends int16; bits travel as bfloat16 just as well.
    bits = wrapped_like(local(tensor).view(torch.bfloat16), tensor)
    return full(bits).view(torch.int16)


def fits(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a tensor is laid out like a parameter: both plain or both on one mesh and placed alike, on one device."""
    if is_sharded(tensor) != is_sharded(param) or tensor.device != param.device:
        return False
    if is_sharded(tensor) and is_sharded(param):
        return bool(tensor.device_mesh == param.device_mesh and tensor.placements == param.placements)
    return True


def placed_like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to where a parameter lies, cut as it is cut; dtype and bits stay.

    A full tensor is cut without communication. A DTensor that is placed otherwise is redistributed, which all ranks
    have to do together.

    Args:
        value: Of the parameter's shape, or with one more dimension in front; of any other shape it just moves to the
            parameter's device.
        param: Plain or a DTensor.
    """
    value = value.detach()
    more = value.ndim - param.ndim
    if more not in (0, 1) or value.shape[more:] != param.shape:
        return value.to(param.device, copy=True)
    if is_sharded(value):
        if not is_sharded(param):
            return value.full_tensor().to(param.device, copy=True)
        placements = [_shifted(placement, more) for placement in param.placements]
        if value.device_mesh == param.device_mesh and list(value.placements) != placements:
            value = value.redistribute(placements=placements)
        return value.to(param.device, copy=True)
    if not is_sharded(param):
        return value.to(param.device, copy=True)
    return wrapped_like(_cut(value, param, more).to(param.device), param)


def _cut(full: torch.Tensor, like: DTensor, more: int) -> torch.Tensor:
    """A contiguous copy of the part of a full tensor that this rank holds of another."""
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return full.new_empty(local(like).shape)
    return part_of(full, like, more).clone(memory_format=torch.contiguous_format)


def part_of(full: torch.Tensor, like: torch.Tensor, more: int = 0) -> torch.Tensor:
    """The part of a full tensor that this rank holds of another; a view of it where the part is in one piece.

    Args:
        full: Shaped as ``like``, or with more dimensions in front.
        like: Plain, then that is all; or a DTensor on a mesh that this rank is part of.
        more: How many dimensions more.
    """
    if not is_sharded(like):
        return full
    held = held_by(like, tuple(like.device_mesh.get_coordinate() or ()))
    for dim, index in enumerate(held):
        if len(index) == like.shape[dim]:
            continue
        if len(index) == 0 or index[-1] - index[0] == len(index) - 1:
            full = full.narrow(dim + more, int(index[0]) if len(index) else 0, len(index))
        else:
            full = full.index_select(dim + more, torch.from_numpy(index).to(full.device))
    return full


class LocalEntry(dict[str, Any]):
    """A state entry seen from one rank: its tensors are local parts, and what is written becomes DTensors again.

    Args:
        entry: The state entry of a sharded parameter. Kept in step with this one.
        param: The parameter.
        keys: The keys whose tensors are placed like the parameter.
    """

    def __init__(self, entry: dict[str, Any], param: torch.Tensor, keys: frozenset[str]) -> None:
        super().__init__({k: local(v) if isinstance(v, torch.Tensor) else v for k, v in entry.items()})
        self._entry, self._param, self._keys = entry, param, keys

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._entry[key] = wrapped_like(value, self._param) if key in self._keys else value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self._entry[key]

    def pop(self, key: str, *default: Any) -> Any:
        """As of a dict."""
        self._entry.pop(key, None)
        return super().pop(key, *default)
