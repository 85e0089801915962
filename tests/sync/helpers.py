"""Weights to send, changes to make to them, and comparisons by bits."""

from collections.abc import Mapping
from typing import Any

import torch

BF16 = torch.bfloat16


def noise(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict with all kinds of entries: bf16, fp32, integers, booleans, a scalar, an empty tensor, a tie."""
    state = {
        "embed.weight": noise(seed, 40, 8),
        "layer.weight": noise(seed + 1, 300),
        "norm.weight": noise(seed + 2, 8, dtype=torch.float32),
        "norm.running_var": noise(seed + 3, 8, dtype=torch.float32).abs(),
        "norm.batches": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(0.5, dtype=BF16),
        "empty": torch.empty(0, 4, dtype=BF16),
    }
    return {**state, "head.weight": state["embed.weight"]}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().cpu().contiguous().view(-1).view(kinds[tensor.element_size()])


def copied(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def assert_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(bits(a[name]), bits(b[name])), name


@torch.no_grad()
def nudge(tensor: torch.Tensor, share: float, seed: int) -> int:
    """Raise the bits of a random share of a contiguous tensor's elements by one; return how many."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.device) < share
    tensor.view(kinds[tensor.element_size()]).add_(chosen.to(kinds[tensor.element_size()]))
    return int(chosen.sum())
