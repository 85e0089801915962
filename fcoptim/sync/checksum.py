"""A checksum of a whole set of weights that follows a sparse change at the cost of the change.

Each tensor's checksum is a sum over its elements, ``sum_i w(name, i) * bits_i`` modulo 2**64, plus a number for its
name, dtype and shape; the state's is the sum over its tensors. The weights ``w`` are odd, so no change of a single
element is missed; they are fixed pseudo-random numbers, so that any other change is missed with a chance of 2**-48 at
most between bf16 values, 2**-32 between others (multilinear hashing: Dietzfelbinger, "Universal hashing and k-wise
independent random variables via integer arithmetic without primes", 1996). It finds faults, not forgeries. It is
computed where the tensor lies; integer sums don't depend on their order, so all devices agree.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from ..cast.bits import GOLDEN64, mix64, parameter_key

MODULUS = 1 << 64
# Elements of one block share one factor and take the other by their place in the block.
_BLOCK = 1 << 12
_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor's elements as one row of integers, in row-major order; shares memory where it can.

    Raises:
        TypeError: Its elements are not 1, 2, 4 or 8 bytes of plain memory.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.element_size() not in _WORDS:
        raise TypeError(f"can't sync a tensor of {tensor.dtype} and layout {tensor.layout}; pass plain dense tensors")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(_WORDS[tensor.element_size()])


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """The checksum of one tensor, an integer in ``[0, 2**64)``.

    Args:
        name: Its name.
        tensor: Any shape and device.
    """
    row = words(tensor)
    total = parameter_key(0, f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}")
    key = parameter_key(0, name)
    inner = _inner(row.device)
    for first in range(0, row.numel(), _CHUNK):
        part = _numbers(row[first : first + _CHUNK])
        short = -part.numel() % _BLOCK
        part = torch.nn.functional.pad(part, (0, short)).view(-1, _BLOCK)
        outer = _outer(key, first // _BLOCK, part.shape[0]).to(row.device)
        total += int(((part * inner).sum(1) * outer).sum())
    return total % MODULUS


def change_checksum(name: str, numel: int, indices: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> int:
    """What a sparse change adds to ``tensor_checksum``, modulo 2**64.

    Args:
        name: The tensor's name.
        numel: Its number of elements.
        indices: Flat indices, each at most once; any integer dtype.
        old: The elements' ``words`` before.
        new: The elements' ``words`` after, on the same device.
    """
    outer = _outer(parameter_key(0, name), 0, -(-numel // _BLOCK)).to(indices.device)
    inner = _inner(indices.device)
    total = 0
    for first in range(0, indices.numel(), _CHUNK):
        here = slice(first, first + _CHUNK)
        index = indices[here].to(torch.int64)
        difference = _numbers(new[here]) - _numbers(old[here])
        total += int((outer[index // _BLOCK] * inner[index % _BLOCK] * difference).sum())
    return total % MODULUS


def to_hex(checksum: int) -> str:
    """Sixteen hexadecimal digits."""
    return f"{checksum:016x}"


def _numbers(row: torch.Tensor) -> torch.Tensor:
    """Bits as int64. Of 64 bits the high half is folded into the low one: an odd factor leaves the top bit alone."""
    if row.dtype is torch.int64:
        return row ^ ((row >> 32) & 0xFFFFFFFF)
    return row.to(torch.int64)


def _mixed(start: int, count: int) -> torch.Tensor:
    """``count`` odd pseudo-random 64-bit numbers: SplitMix64 from a start, as int64."""
    x = np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64))


@lru_cache(maxsize=16)
def _inner(device: torch.device) -> torch.Tensor:
    return _mixed(mix64(_BLOCK), _BLOCK).to(device)


def _outer(key: int, first: int, count: int) -> torch.Tensor:
    start = (key + first * GOLDEN64) % MODULUS
    with np.errstate(over="ignore"):
        return _mixed(start, count)
