"""Flat indices as few bytes: gaps between ascending indices, one byte each, then a general compressor.

A gap (the count of unchanged elements before a changed one) below 255 is one byte; each byte 255 adds 255 and goes on.
Changes that fall independently at a share ``p`` have gaps of ``H(p) / p`` bits, and a compressor of bytes comes within
a few percent of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .update import SyncError

ENCODINGS = ("int32", "gaps", "zlib", "zstd")
_ESCAPE = 255
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def check_encoding(encoding: str) -> None:
    """Refuse an encoding that there is not, or whose library is not installed.

    Raises:
        ValueError: There is no such encoding.
        ImportError: ``"zstd"`` without the package ``zstandard``.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding must be one of {', '.join(map(repr, ENCODINGS))}, got {encoding!r}")
    if encoding == "zstd":
        _zstd()


def pack(indices: torch.Tensor, encoding: str) -> torch.Tensor | None:
    """Encode indices.

    Args:
        indices: int32, 1-D, ascending and unique, any device.
        encoding: One of ``ENCODINGS``.

    Returns:
        uint8 on the CPU, or None under ``"int32"``, which writes them as they are.
    """
    if encoding == "int32":
        return None
    coded = _to_gaps(indices.cpu().numpy().astype(np.int64))
    if encoding != "gaps":
        coded = np.frombuffer(_compress(encoding)(coded.tobytes()), dtype=np.uint8)
    return torch.from_numpy(coded.copy())


def unpack(packed: torch.Tensor, encoding: str, count: int) -> torch.Tensor:
    """Decode what ``pack`` wrote.

    Args:
        packed: uint8, 1-D, on the CPU.
        encoding: As it was packed.
        count: How many indices there have to be.

    Returns:
        int32.

    Raises:
        SyncError: It is damaged.
    """
    coded: _Bytes = packed.numpy()
    if encoding != "gaps":
        try:
            coded = np.frombuffer(_decompress(encoding)(coded.tobytes()), dtype=np.uint8)
        except (zlib.error, ValueError, _zstd_error()) as error:
            raise SyncError(f"the indices are damaged: {error}") from error
    indices = _from_gaps(coded)
    if len(indices) != count or (count and int(indices[-1]) > np.iinfo(np.int32).max):
        raise SyncError(f"the indices are damaged: {len(indices)} of them for {count} values")
    return torch.from_numpy(indices.astype(np.int32))


def _to_gaps(indices: np.ndarray[Any, np.dtype[np.int64]]) -> _Bytes:
    gaps = np.diff(indices, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1)
    coded = np.full(int(ends[-1]) if len(ends) else 0, _ESCAPE, dtype=np.uint8)
    coded[ends - 1] = gaps % _ESCAPE
    return coded


def _from_gaps(coded: _Bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    if len(coded) and coded[-1] == _ESCAPE:
        raise SyncError("the indices are damaged: the last gap has no end")
    ends = np.flatnonzero(coded != _ESCAPE)
    # An end byte of g stands for g unchanged elements and the changed one, an escape for 255 unchanged ones.
    return np.cumsum(coded, dtype=np.int64)[ends] + np.arange(len(ends))


def _compress(encoding: str) -> Callable[[bytes], bytes]:
    # Higher levels cost several times the time for one to three percent.
    compress: Callable[[bytes], bytes]
    compress = (lambda data: zlib.compress(data, 1)) if encoding == "zlib" else _zstd().ZstdCompressor(level=3).compress
    return compress


def _decompress(encoding: str) -> Callable[[bytes], bytes]:
    decompress: Callable[[bytes], bytes] = (
        zlib.decompress if encoding == "zlib" else _zstd().ZstdDecompressor().decompress
    )
    return decompress


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            "encoding='zstd' needs the package zstandard: pip install \"fcoptim[sync]\"; encoding='zlib' needs nothing"
        ) from error
    return zstandard


def _zstd_error() -> type[Exception]:
    import sys

    module = sys.modules.get("zstandard")
    found: type[Exception] = zlib.error if module is None else module.ZstdError
    return found
