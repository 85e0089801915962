"""Sums over all ranks in which every element of a sharded parameter counts once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .shards import is_sharded


class Census:
    """Who counts what, for a set of parameters that some mesh of ranks shares.

    The home of the set is the largest mesh that any of its parameters lies on. Parameters that are not sharded are
    the same on all ranks and counted by the home's first; without any sharded one each rank has the whole and
    nothing is communicated.

    Args:
        params: The parameters, the same ones on every rank.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        meshes = [param.device_mesh for param in params if is_sharded(param)]
        self.home: DeviceMesh | None = max(meshes, key=lambda mesh: mesh.size(), default=None)

    def counts(self, param: torch.Tensor) -> bool:
        """Whether this rank's part of a parameter goes into a sum, or is counted by another that has the same."""
        if self.home is None:
            return True
        first = int(self.home.mesh.flatten()[0])
        if not is_sharded(param):
            return dist.get_rank() == first
        mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
        if coordinate is None:
            return False
        if mesh != self.home and first not in mesh.mesh.flatten().tolist():
            return False
        return all(own == 0 for own, placement in zip(coordinate, param.placements) if placement.is_replicate())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the home's ranks; what came in where there is no home."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the home's ranks; what came in where there is no home."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.home is None or self.home.get_coordinate() is None:
            return values
        values = values.to(self.home.device_type, copy=True)
        for dim in range(self.home.ndim):
            if self.home.size(dim) > 1:
                dist.all_reduce(values, op=operation, group=self.home.get_group(dim))
        return values
