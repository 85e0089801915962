"""Index encodings: exact, small, and clear about damage."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcoptim.sync import SyncError
from fcoptim.sync.codec import ENCODINGS, check_encoding, pack, unpack

PACKED = [name for name in ENCODINGS if name != "int32"]


@pytest.fixture(params=PACKED)
def encoding(request) -> str:
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    return request.param


def through(indices: list[int], encoding: str) -> list[int]:
    return unpack(pack(torch.tensor(indices, dtype=torch.int32), encoding), encoding, len(indices)).tolist()


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 2**31 - 1), max_size=60))
def test_any_indices_come_back(chosen):
    gaps_cost = sum(gap // 255 + 1 for gap in np.diff(sorted(chosen), prepend=-1) - 1) if chosen else 0
    if gaps_cost > 1 << 22:  # a gap of 2**31 is 8 MB of escapes
        chosen = {index % 1_000_003 for index in chosen}
    for encoding in ("gaps", "zlib"):
        assert through(sorted(chosen), encoding) == sorted(chosen)


@pytest.mark.parametrize(
    "indices", [[], [0], [254], [255], [256], [509, 510, 511], [0, 255, 256, 511, 767], [*range(600)], [2**31 - 2]]
)
def test_edges_of_the_escape(indices, encoding):
    assert through(indices, encoding) == indices


def test_int32_is_written_as_it_is():
    assert pack(torch.tensor([1, 2], dtype=torch.int32), "int32") is None


@pytest.mark.parametrize("share", [0.003, 0.01, 0.05, 0.3])
def test_size_is_near_the_entropy(share, encoding):
    """Independent changes at a share p need H(p) / p bits an index; compressed gaps come within 16%."""
    indices = (torch.rand(2_000_000, generator=torch.Generator().manual_seed(0)) < share).nonzero().view(-1)
    size = pack(indices.int(), encoding).numel() / len(indices)
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share / 8
    assert entropy < size < (2.0 if encoding == "gaps" else 1.16 * entropy if share < 0.1 else 1.4 * entropy)


class TestDamage:
    def test_cut(self, encoding):
        packed = pack(torch.arange(0, 3000, 3, dtype=torch.int32), encoding)
        with pytest.raises(SyncError, match="damaged"):
            unpack(packed[:-2], encoding, 1000)

    def test_empty(self, encoding):
        with pytest.raises(SyncError, match="damaged"):
            unpack(torch.zeros(0, dtype=torch.uint8), encoding, 1)

    def test_wrong_count(self, encoding):
        with pytest.raises(SyncError, match="3 of them for 4 values"):
            unpack(pack(torch.tensor([1, 5, 9], dtype=torch.int32), encoding), encoding, 4)

    def test_open_escape(self):
        with pytest.raises(SyncError, match="no end"):
            unpack(torch.tensor([3, 255], dtype=torch.uint8), "gaps", 1)

    def test_beyond_int32(self):
        coded = torch.full(((1 << 31) // 255 + 2,), 255, dtype=torch.uint8)
        coded[-1] = 0
        with pytest.raises(SyncError, match="damaged"):
            unpack(coded, "gaps", 1)


def test_unknown_encoding():
    with pytest.raises(ValueError, match="'gaps', 'zlib', 'zstd', got 'brotli'"):
        check_encoding("brotli")


def test_zstd_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r'pip install "fcoptim\[sync\]"'):
        check_encoding("zstd")
