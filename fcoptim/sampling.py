"""A fixed sample of a model's weights: which coordinates, how much each stands for, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .distributed.shards import local

Tensors = Mapping[str, torch.Tensor]


class Sample:
    """Coordinates spread evenly over tensors, the same ones each time.

    A tensor gets its share of the sample by size, but at least a few coordinates. Within it one coordinate is drawn
    from each of as many equal stretches, by a generator of the sample's own.

    Args:
        tensors: By name. Of a sharded tensor this rank's part is sampled.
        size: About how many coordinates there are in all.
        seed: Seed of the draw. torch's global random state is not used.

    Attributes:
        names: The tensors' names, in order.
        sizes: Elements of each.
        layers: The position in ``names`` that each coordinate belongs to, int64 of shape ``(coordinates,)``.
        weights: How many elements each coordinate stands for, float64 of shape ``(coordinates,)``.
    """

    LEAST = 4

    def __init__(self, tensors: Tensors, size: int, seed: int) -> None:
        self.names = list(tensors)
        self.sizes = [local(tensor).numel() for tensor in tensors.values()]
        total = max(1, sum(self.sizes))
        generator = torch.Generator().manual_seed(seed)
        self._indices: list[torch.Tensor] = []
        weights, layers = [], []
        for number, numel in enumerate(self.sizes):
            count = min(numel, max(self.LEAST, round(size * numel / total)))
            stretch = numel / max(1, count)
            places = (torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)) * stretch
            self._indices.append(places.long().clamp_(max=max(0, numel - 1)))
            weights.append(torch.full((count,), stretch, dtype=torch.float64))
            layers.append(torch.full((count,), number))
        self.weights = torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64)
        self.layers = torch.cat(layers) if layers else torch.zeros(0, dtype=torch.int64)

    @torch.no_grad()
    def read(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Read the coordinates' values.

        Args:
            tensors: By name; others than the sampled ones are passed over. Nothing of their size is copied.
            dtype: What to read them as.

        Returns:
            Of shape ``(coordinates,)``, on the CPU; tensors of one device are waited for once.

        Raises:
            ValueError: A sampled tensor is missing or has another size.
        """
        found: list[torch.Tensor] = []
        for number, (name, numel) in enumerate(zip(self.names, self.sizes)):
            if name not in tensors:
                raise ValueError(f"{name!r} was sampled but is gone; call reset() after the model has changed")
            tensor = local(tensors[name].detach())
            if tensor.numel() != numel:
                raise ValueError(
                    f"{name!r} had {numel} elements when it was sampled and has {tensor.numel()} now; call reset() "
                    "after the model has changed"
                )
            index = self._indices[number]
            if index.device != tensor.device:
                index = self._indices[number] = index.to(tensor.device)
            found.append(torch.take(tensor, index).to(dtype))
        return _to_host(found)


def _to_host(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join parts in order, with one copy from each run of parts on one device."""
    runs: list[list[torch.Tensor]] = []
    for part in parts:
        if runs and runs[-1][0].device == part.device:
            runs[-1].append(part)
        else:
            runs.append([part])
    joined = [torch.cat(run).cpu() for run in runs]
    return torch.cat(joined) if joined else torch.zeros(0)
