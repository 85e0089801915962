"""The tensors a receiver writes: found by name, read and written by their bits."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..naming import canonical_name
from .checksum import words
from .update import SyncError

_LOW = 0xFFFF


class Target:
    """The named tensors of a model or a state dict, as they are at this moment.

    Args:
        held: A model, or a mapping of names to tensors.
    """

    def __init__(self, held: nn.Module | Mapping[str, Any]) -> None:
        self._mapping = held.state_dict(keep_vars=True) if isinstance(held, nn.Module) else held
        self._growing = not isinstance(held, nn.Module) and isinstance(held, MutableMapping)
        self._by_canonical: dict[str, list[str]] = {}
        for name in self.names():
            self._by_canonical.setdefault(canonical_name(name), []).append(name)

    def names(self) -> list[str]:
        """All names of tensors."""
        return [name for name, value in self._mapping.items() if isinstance(value, torch.Tensor)]

    def find(self, name: str) -> str | None:
        """The name a tensor has here: the same, or one that differs in wrappers' prefixes alone."""
        if isinstance(self._mapping.get(name), torch.Tensor):
            return name
        close = self._by_canonical.get(canonical_name(name), [])
        return close[0] if len(close) == 1 else None

    def get(self, name: str) -> torch.Tensor:
        """The tensor of a name that is here."""
        tensor: torch.Tensor = self._mapping[name].detach()
        return tensor

    def tensors(self, names: Sequence[str], dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """The different tensors that go by these names here.

        Args:
            names: All names of one tensor of the sender.
            dtype: Its dtype.
            shape: Its shape.

        Returns:
            One, if the names are tied here too; none, if no name is there but can be added.

        Raises:
            SyncError: None is there, or one has another shape or a dtype that can't hold the values.
        """
        found: dict[tuple[Any, ...], torch.Tensor] = {}
        for name in names:
            here = self.find(name)
            if here is not None:
                tensor = self.get(here)
                _check_fit(here, tensor, dtype, shape)
                found.setdefault(place_of(tensor), tensor)
        if not found and not self._growing:
            raise SyncError(f"the receiver has no tensor {names[0]!r}; its model has to be built like the sender's")
        return list(found.values())

    def add(self, names: Sequence[str], values: torch.Tensor) -> None:
        """Add one tensor under all its names, as a copy."""
        assert isinstance(self._mapping, MutableMapping)
        copy = values.detach().clone(memory_format=torch.contiguous_format)
        for name in names:
            self._mapping[name] = copy


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements of the same memory."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _check_fit(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise SyncError(f"{name!r} has shape {tuple(tensor.shape)} here and {shape} at the sender")
    if tensor.dtype is not dtype and not (dtype is torch.bfloat16 and tensor.dtype is torch.float32):
        raise SyncError(
            f"{name!r} is {tensor.dtype} here and {dtype} at the sender; give the receiver {dtype}"
            + (" or torch.float32" if dtype is torch.bfloat16 else "")
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
        raise SyncError(f"{name!r} is an expanded tensor here, whose elements share memory; give the receiver a copy")


def read_words(name: str, tensor: torch.Tensor, dtype: torch.dtype, indices: torch.Tensor | None) -> torch.Tensor:
    """The bits of a tensor in the sender's dtype: of some elements, or of all.

    Raises:
        SyncError: fp32 storage holds a value that is not bf16.
    """
    found = words(tensor)
    if indices is not None:
        found = found[indices]
    if tensor.dtype is dtype:
        return found
    if bool((found & _LOW).any()):
        raise SyncError(f"{name!r} holds fp32 values here that are not on the bf16 grid, so not the sender's")
    return (found >> 16).to(torch.int16)


def write_words(tensor: torch.Tensor, new: torch.Tensor, indices: torch.Tensor | None) -> None:
    """Write bits into a tensor of the same dtype, or, if they are bf16, into fp32 storage.

    Args:
        tensor: Any strides.
        new: ``words``, on the tensor's device if there are indices.
        indices: int64 flat indices, on the tensor's device; None for all elements.
    """
    if new.element_size() != tensor.element_size():
        new = new.to(torch.int32) << 16
    bits = tensor.view(new.dtype)
    if indices is None:
        bits.copy_(new.view(bits.shape))
    elif bits.is_contiguous():
        bits.view(-1)[indices] = new
    else:
        bits[torch.unravel_index(indices, bits.shape)] = new
