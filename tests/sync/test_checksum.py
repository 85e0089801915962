"""The checksum: additive under changes, the same on every layout, and sensitive to all that matters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcoptim.sync import checksum as module
from fcoptim.sync.checksum import MODULUS, change_checksum, tensor_checksum, words

from .helpers import noise

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 2**16), st.integers(0, 50))
def test_change_is_added(numel, seed, changes):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int16)
    indices = torch.randperm(numel, generator=generator)[:changes]
    after = before.clone()
    after[indices] = torch.randint(-(2**15), 2**15, (len(indices),), generator=generator, dtype=torch.int16)
    a, b = (tensor_checksum("w", row.view(torch.bfloat16)) for row in (before, after))
    added = change_checksum("w", numel, indices, before[indices], after[indices])
    assert (a + added) % MODULUS == b
    assert (a == b) == torch.equal(before, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_flipped_bit_shows(dtype):
    tensor = torch.zeros(6, dtype=torch.uint8).repeat_interleave(torch.empty(0, dtype=dtype).element_size())
    sums = {tensor_checksum("w", tensor.view(dtype))}
    flips = 0
    for place in range(tensor.numel()):
        for bit in range(1 if dtype is torch.bool else 8):
            changed = tensor.clone()
            changed[place] ^= 1 << bit
            sums.add(tensor_checksum("w", changed.view(dtype)))
            flips += 1
    assert len(sums) == flips + 1


def test_depends_on_name_shape_dtype_and_order():
    tensor = noise(0, 4, 6)
    variants = [
        tensor_checksum("w", tensor),
        tensor_checksum("v", tensor),
        tensor_checksum("w", tensor.reshape(6, 4)),
        tensor_checksum("w", tensor.view(torch.float16)),
        tensor_checksum("w", tensor.flip(0)),
        tensor_checksum("w", tensor.t().contiguous()),
    ]
    assert len(set(variants)) == len(variants)


def test_strides_and_chunks_don_t_matter(monkeypatch):
    tensor = noise(1, 100, 150)
    whole = tensor_checksum("w", tensor)
    assert tensor_checksum("w", tensor.t().contiguous().t()) == whole
    monkeypatch.setattr(module, "_CHUNK", 2 * module._BLOCK)
    assert tensor_checksum("w", tensor) == whole


def test_signed_zeros_and_nans_are_told_apart():
    patterns = torch.tensor([0, -32768, 0x7F81, 0x7FC0, -1], dtype=torch.int16).view(torch.bfloat16)
    assert len({tensor_checksum("w", value) for value in patterns}) == 5


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128)])
def test_refuses_what_is_no_plain_memory(tensor):
    with pytest.raises(TypeError, match="plain dense"):
        words(tensor)
