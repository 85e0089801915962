"""safetensors files: written in a stream and hashed meanwhile, read through a memory map.

The library's own writer wants all tensors of a file in host memory at once. The format is simple: eight bytes with
the length of a JSON header, the header, the tensors' bytes one after the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .layout import CheckpointError, Record

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_RESERVED = "__metadata__"
_LARGEST_HEADER = 100_000_000  # as the library has it
CHUNK = 1 << 20  # small enough to be hashed and written while it lies in a core's cache

Advance = Callable[[int], object]


@dataclass
class Item:
    """One tensor to write.

    Attributes:
        key: Its name in the file.
        tensor: Dense, of any device and stride; read when its turn comes.
        dtype: What it is written as.
    """

    key: str
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.numel() * self.dtype.itemsize

    def on_host(self) -> Item:
        """A copy that later steps leave alone, as it will be written."""
        return Item(self.key, self.tensor.detach().to("cpu", self.dtype, copy=True), self.dtype)


@dataclass
class TensorFile:
    """One file to write.

    Attributes:
        name: Its path, relative to the checkpoint.
        items: Its tensors.
        metadata: Strings for its header.
    """

    name: str
    items: list[Item]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(item.nbytes for item in self.items)


Fetch = Callable[[Item], torch.Tensor]


def ordered(items: Sequence[Item]) -> list[Item]:
    """Wide dtypes first, so that every tensor is aligned."""
    return sorted(items, key=lambda item: -item.dtype.itemsize)


def make_header(items: Sequence[Item], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor.

    Raises:
        CheckpointError: A tensor has a dtype that the format lacks, or its key is taken.
    """
    table: dict[str, Any] = {_RESERVED: dict(metadata)} if metadata else {}
    end = 0
    for item in items:
        if item.key in table or item.key == _RESERVED:
            raise CheckpointError(f"there are two tensors named {item.key!r}; rename one")
        if item.dtype not in CODES:
            raise CheckpointError(f"tensor {item.key!r} is {item.dtype}, which safetensors files can't hold")
        begin, end = end, end + item.nbytes
        table[item.key] = {
            "dtype": CODES[item.dtype],
            "shape": list(item.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(folder: Path, file: TensorFile, advance: Advance, fetch: Fetch = lambda item: item.tensor) -> Record:
    """Write one file, hash it on the way, and have the disk hold it.

    Args:
        folder: The checkpoint that is being written.
        file: What to write. One chunk of it is in host memory at a time.
        advance: Told how many bytes were written since it was last called.
        fetch: Gives the tensor of an item when its turn comes, in the order of ``ordered``. Default: the item's own.

    Returns:
        Its record for the manifest.
    """
    items = ordered(file.items)
    digest, size = hashlib.sha256(), 0
    with new_file(folder / file.name) as descriptor:
        for chunk in _contents(items, file.metadata, fetch):
            digest.update(chunk)
            write_all(descriptor, chunk)
            size += chunk.nbytes
            advance(chunk.nbytes)
            del chunk  # it may keep a whole tensor alive while the next one is fetched
        os.fsync(descriptor)
    return Record(size, digest.hexdigest())


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Open a file that must not be there yet, as a descriptor."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of it; one call to the system may write less."""
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _contents(items: Sequence[Item], metadata: Mapping[str, str], fetch: Fetch) -> Iterator[memoryview]:
    yield memoryview(make_header(items, metadata))
    for item in items:
        yield from _converted(fetch(item).detach(), item.dtype)


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    for part in _parts(tensor, CHUNK // dtype.itemsize):
        yield as_bytes(part.to("cpu", dtype))


def _parts(tensor: torch.Tensor, elements: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into parts of some elements at most, in row-major order; none is copied."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), elements)
    elif tensor.numel() <= elements:
        yield tensor
    else:
        rows = elements // (tensor.numel() // tensor.shape[0])
        for part in torch.split(tensor, max(rows, 1)):
            if rows:
                yield part
            else:
                yield from _parts(part[0], elements)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory, row by row; not copied if it is contiguous."""
    raw: Any = _raw(tensor.resolve_conj().resolve_neg().contiguous())
    return memoryview(raw)


@torch.no_grad()  # a setting of each thread
def copy_into(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``target.copy_(source)`` for threads of our own.

    Within host memory it keeps to the calling thread: torch would start a team of threads for each of ours, which
    spin while they wait for each other.
    """
    alike = target.dtype is source.dtype and target.shape == source.shape
    if alike and all(tensor.is_cpu and tensor.is_contiguous() for tensor in (target, source)):
        np.copyto(_raw(target.detach()), _raw(source.detach()))
        torch.autograd.graph.increment_version([target])
        return target
    return target.copy_(source)


def count_differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of two contiguous tensors in host memory differ in their bits; of one dtype and shape."""
    left, right = _raw(a.detach()), _raw(b.detach())
    wide = left.nbytes // 8 * 8
    if np.array_equal(left[:wide].view("u8"), right[:wide].view("u8")) and np.array_equal(left[wide:], right[wide:]):
        return 0
    words = f"u{a.element_size()}"
    return int(np.count_nonzero(left.view(words) != right.view(words)))


def _raw(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy()


class _Place(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Reader:
    """A safetensors file, ours or not, its header checked; tensors are memory-mapped.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is missing, cut short, or its header lies.

    Attributes:
        metadata: The header's strings.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                    raise CheckpointError(f"{path} is truncated or no safetensors file: its header is not all there")
                table = json.loads(file.read(length).decode())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged, its header is no JSON: {error}") from error
        self._start = 8 + length
        try:
            self.metadata: dict[str, str] = dict(table.pop(_RESERVED, None) or {})
            self.places = {key: _read_place(place) for key, place in table.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged, its header can't be read: {error!r}") from error
        self._check_places(size - self._start)

    def _check_places(self, available: int) -> None:
        """Tensors follow each other without gap or overlap and end with the file, as the format demands."""
        end = 0
        for key, place in sorted(self.places.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
            if place.begin != end:
                raise CheckpointError(f"{self.path} is damaged: tensor {key!r} begins at {place.begin}, not at {end}")
            end = place.end
        if end != available:
            raise CheckpointError(f"{self.path} is truncated or damaged: it holds {available} bytes, not {end}")

    def tensor(self, key: str) -> torch.Tensor:
        """A tensor that shares the file's pages; don't write to it."""
        place = self.places[key]
        count = place.end - place.begin
        if count == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=self._start + place.begin, count=count)
        if (self._start + place.begin) % place.dtype.itemsize:
            raw = raw.clone()
        return raw.view(place.dtype).view(place.shape)


def _read_place(place: Mapping[str, Any]) -> _Place:
    dtype, shape = DTYPES[place["dtype"]], tuple(place["shape"])
    begin, end = place["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"a shape or offset is no natural number: {dict(place)}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} and {dtype} in {end - begin} bytes")
    return _Place(dtype, shape, begin, end)
