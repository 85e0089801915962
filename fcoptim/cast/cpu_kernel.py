"""The CPU kernel: the rules of ``reference.py`` as small loops that LLVM turns into vector code.

How it is cut, and why:

- Work goes by tiles of 2,048 elements (``bits.TILE``), which stay in the first-level cache, so that a tile may
  be passed over more than once for the memory traffic of one pass.
- A rule is one 32-bit addition. With ``w = hi:lo``, ``w + d`` carries from ``lo`` into ``hi`` by itself: the
  served bits are its upper half, and under error feedback the new accumulator is its lower half.
- Hash words are made in a loop of their own, into a buffer. One more loop adds their lower halves to the first
  half of the tile and another their upper halves to the second half. Fused to one loop, LLVM no longer
  vectorises them.
- Special values cost next to nothing: the same loops also take the largest magnitude they meet. Only where it
  reaches the largest bf16 number is the tile cast again, element by element. That is possible as masters
  aren't written, and as the accumulators from before are ``(w + a) - w``.
- Counting needs the old and the new bits, so the new ones go to a buffer, from which one loop compares them
  with the served tile and stores them.
- Making the hash words is arithmetic alone, and memory would stand idle meanwhile. So it is cut into parts, and
  before each part some lines of the next tile are prefetched (a prefetch past the end of memory does nothing).
- Tensors with strides are copied to a buffer tile by tile, and back.

All integers are unsigned and of fixed width, and every intermediate is cast back to it: numba computes with 64
bits otherwise, and the loops would be half as wide. Memory is read and written by address, with no assumption on
alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import int64, types, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from .bits import GOLDEN32, HALF, MIX32_A, MIX32_B, TILE
from .rules import ACCUMULATED, HASHED, NEAREST

_F = TypeVar("_F", bound=Callable[..., Any])
Table = np.ndarray[Any, np.dtype[np.int64]]
# What numba's casts return: an integer of fixed width, which Python has no type for.
_Word = Any

# Columns of the table: addresses, size, index of element 0, keys, flags, and where the job's dimensions are.
SERVED, MASTER, ACCUMULATOR, NUMEL, START, KEY0, KEY1, FLAGS, DIMS, NDIM, COLUMNS = range(11)

# Flags: served is float32; which tensors need a walk over the dimensions.
WIDE, SERVED_WALKS, MASTER_WALKS, ACCUMULATOR_WALKS = 1, 2, 4, 8

# Columns of the dimensions, innermost first: the size, and the strides in bytes.
SIZE, SERVED_STRIDE, MASTER_STRIDE, ACCUMULATOR_STRIDE, DIM_COLUMNS = range(5)

# A thread's buffer in bytes: hash words, masters, accumulators, served bits; and room to align it.
_HASHES, _MASTERS, _ACCUMULATORS, _RESULTS = 0, 4 * HALF, 4 * (HALF + TILE), 4 * (HALF + TILE) + 2 * TILE
_ALIGN = 64
# A cache line in bytes, and in how many parts a tile's hash words are made.
_LINE, _PARTS = 64, 16
BUFFER = 4 * (HALF + TILE) + 4 * TILE + _ALIGN

_GATHER32, _GATHER16, _SCATTER16, _WIDEN = range(4)

_LOW = np.uint32(0xFFFF)
_SIXTEEN = np.uint32(16)
_FIFTEEN = np.uint32(15)
_ONE = np.uint32(1)
_HALF_ULP = np.uint32(0x7FFF)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST = np.uint32(0x7F7F0000)
_INFINITY = np.uint32(0x7F800000)
_UPPER = np.uint32(0xFFFF0000)
_QUIET = np.uint32(0x00400000)
_A = np.uint32(MIX32_A)
_B = np.uint32(MIX32_B)
_GOLDEN = np.uint32(GOLDEN32)


def _compiled(function: _F) -> _F:
    """Apply ``numba.njit`` (untyped): the interpreter's lock is let go, and nothing may raise."""
    return numba.njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def _compiled_once(function: _F) -> _F:
    """Like ``_compiled``, and keep the machine code on disk, if there is a folder that can be written."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return _compiled(function)


def _accessors(kind: types.Integer) -> tuple[Any, Any]:
    """Make ``load(address, i)`` and ``store(address, i, value)`` for an unsigned type, alignment 1."""
    word = ir.IntType(kind.bitwidth)

    def pointer(builder: Any, address: Any, index: Any) -> Any:
        return builder.gep(builder.inttoptr(address, word.as_pointer()), [index], source_etype=word)

    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args[0], args[1]), align=1, typ=word)

        return kind(types.int64, types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing: Any, address: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[2], pointer(builder, args[0], args[1]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), generate

    return load, store


def _prefetcher(write: int) -> Any:
    """Make ``prefetch(address)``, which asks for a cache line to read, or to write."""
    level_one, of_data = 3, 1

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            flags = (ir.Constant(flag, value) for value in (write, level_one, of_data))
            builder.call(function, [builder.inttoptr(args[0], byte), *flags])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return prefetch


_load16, _store16 = _accessors(types.uint16)
_load32, _store32 = _accessors(types.uint32)
_prefetch_to_read, _prefetch_to_write = _prefetcher(0), _prefetcher(1)


@_compiled
def _mix32(x: int) -> _Word:
    """Scramble a word, as ``bits.mix32``."""
    x = uint32(uint32(x ^ uint32(x >> _SIXTEEN)) * _A)
    x = uint32(uint32(x ^ uint32(x >> _FIFTEEN)) * _B)
    return uint32(x ^ uint32(x >> _SIXTEEN))


@_compiled
def _fill_hashes(hashes: int, word: int, key0: int, key1: int, n: int) -> None:
    """Write the hash words of ``n`` word numbers from ``word`` on; the keys hold the number's high half."""
    for i in range(n):
        x = uint32(uint32(word + uint32(i)) ^ key0)
        _store32(hashes, i, _mix32(uint32(_mix32(x) + key1)))


@_compiled
def _tile_keys(key0: int, key1: int, tile: int) -> tuple[int, int]:
    """Rule 4 of bits.py: a word number's high half goes into both keys; it is the same all over a tile."""
    high = uint32((tile * HALF) >> 32)
    return uint32(uint32(key0) ^ _mix32(high)), uint32(uint32(key1) + uint32(high * _GOLDEN))


@_compiled_once
def fill_tiles(
    out: int, tile: int, tiles: int, key0: int, key1: int, space: np.ndarray[Any, np.dtype[np.uint8]]
) -> None:
    """Write the 16 dither bits of whole tiles.

    Args:
        out: Address of the int16 of the first element.
        tile: Number of the first tile in the unsharded parameter.
        tiles: How many.
        key0: The first of the two keys.
        key1: The other.
        space: uint8 of ``BUFFER`` bytes.
    """
    hashes = (space.ctypes.data + _ALIGN - 1) // _ALIGN * _ALIGN
    for number in range(tile, tile + tiles):
        keys = _tile_keys(key0, key1, number)
        _fill_hashes(hashes, uint32(number * HALF), keys[0], keys[1], HALF)
        for i in range(HALF):
            _store16(out, i, uint16(_load32(hashes, i)))
        for i in range(HALF):
            _store16(out + 2 * HALF, i, uint16(_load32(hashes, i) >> _SIXTEEN))
        out += 2 * TILE


@_compiled
def _prefetch_part(address: int, width: int, part: int, write: bool) -> None:
    """Ask for one of the ``_PARTS`` of a tile whose elements have ``width`` bytes."""
    size = width * TILE // _PARTS
    for line in range(size // _LINE):
        if write:
            _prefetch_to_write(address + size * part + _LINE * line)
        else:
            _prefetch_to_read(address + size * part + _LINE * line)


@_compiled
def _hash_tile(
    hashes: int, word: int, keys: tuple[int, int], lane: int, n: int, master: int, served: int, width: int
) -> None:
    """Write the hash words that ``n`` elements from lane ``lane`` of a tile need.

    Args:
        hashes: Address of the tile's hash words.
        word: Number of its first word.
        keys: Both keys.
        lane: The first element's place in the tile.
        n: How many elements.
        master: Address of the next tile's masters, to prefetch during a whole tile.
        served: Likewise of its served values.
        width: Bytes of a served value.
    """
    if n == TILE:
        words = HALF // _PARTS
        for part in range(_PARTS):
            _prefetch_part(master, 4, part, False)
            _prefetch_part(served, width, part, True)
            _fill_hashes(hashes + 4 * words * part, uint32(word + uint32(words * part)), keys[0], keys[1], words)
        return
    end = lane + n
    low = max(min(end, HALF) - lane, 0)
    # Words: those of the lanes in both halves, or all between where the part covers some of each.
    first = 0 if low > 0 and low < n else lane % HALF
    last = min(end, HALF) if low == n else (HALF if low > 0 else end - HALF)
    _fill_hashes(hashes + 4 * first, uint32(word + uint32(first)), keys[0], keys[1], last - first)


@_compiled
def _nearest(master: int, out: int, n: int) -> _Word:
    peak = uint32(0)
    for i in range(n):
        w = _load32(master, i)
        peak = max(peak, uint32(w & _MAGNITUDE))
        d = uint32(_HALF_ULP + uint32(uint32(w >> _SIXTEEN) & _ONE))
        _store16(out, i, uint16(uint32(w + d) >> _SIXTEEN))
    return peak


@_compiled
def _hashed_low(master: int, hashes: int, out: int, n: int) -> _Word:
    peak = uint32(0)
    for i in range(n):
        w = _load32(master, i)
        peak = max(peak, uint32(w & _MAGNITUDE))
        _store16(out, i, uint16(uint32(w + uint32(_load32(hashes, i) & _LOW)) >> _SIXTEEN))
    return peak


@_compiled
def _hashed_high(master: int, hashes: int, out: int, n: int) -> _Word:
    peak = uint32(0)
    for i in range(n):
        w = _load32(master, i)
        peak = max(peak, uint32(w & _MAGNITUDE))
        _store16(out, i, uint16(uint32(w + uint32(_load32(hashes, i) >> _SIXTEEN)) >> _SIXTEEN))
    return peak


@_compiled
def _accumulated(master: int, accumulator: int, out: int, n: int) -> _Word:
    peak = uint32(0)
    for i in range(n):
        w = _load32(master, i)
        peak = max(peak, uint32(w & _MAGNITUDE))
        x = uint32(w + _load16(accumulator, i))
        _store16(accumulator, i, uint16(x))
        _store16(out, i, uint16(x >> _SIXTEEN))
    return peak


@_compiled
def _special(code: int, master: int, accumulator: int, hashes: int, out: int, lane: int, n: int) -> None:
    """Cast a tile again, after a loop above, with all that ``reference.py`` says on special values.

    Args:
        code: The rule's code.
        master: Address of the first element's master.
        accumulator: Likewise, updated already; only used if the rule accumulates.
        hashes: Address of the tile's hash words; only used if the rule hashes.
        out: Address of the first element's served bits.
        lane: The first element's place in its tile.
        n: How many elements.
    """
    for i in range(n):
        raw = _load32(master, i)
        w = raw
        if uint32(w & _MAGNITUDE) > _INFINITY:
            w = uint32(uint32(w | _QUIET) & _UPPER)
        low = uint32(w & _LOW)
        if code == NEAREST:
            d = uint32(_HALF_ULP + uint32(uint32(w >> _SIXTEEN) & _ONE))
        elif code == HASHED:
            bits = _load32(hashes, (lane + i) % HALF)
            d = uint32(bits >> _SIXTEEN) if lane + i >= HALF else uint32(bits & _LOW)
        else:
            d = uint32(uint32(_load16(accumulator, i) - raw) & _LOW)
            _store16(accumulator, i, uint16(d + low))
        if code != NEAREST and uint32(w & uint32(_MAGNITUDE & _UPPER)) == _LARGEST:
            d = uint32(0)
        _store16(out, i, uint16(uint32(w + d) >> _SIXTEEN))


@_compiled
def _cast_tile(code: int, master: int, accumulator: int, hashes: int, out: int, lane: int, n: int) -> None:
    """Cast ``n`` elements of a tile from its lane ``lane`` on; see ``_special`` for the arguments."""
    if code == NEAREST:
        peak = _nearest(master, out, n)
    elif code == ACCUMULATED:
        peak = _accumulated(master, accumulator, out, n)
    else:
        low = max(min(lane + n, HALF) - lane, 0)
        peak = uint32(0)
        if low > 0:
            peak = _hashed_low(master, hashes + 4 * lane, out, low)
        if low < n:
            begin = hashes + 4 * (lane + low - HALF)
            peak = max(peak, _hashed_high(master + 4 * low, begin, out + 2 * low, n - low))
    if peak >= _LARGEST:
        _special(code, master, accumulator, hashes, out, lane, n)


@_compiled
def _settle(new: int, served: int, n: int) -> _Word:
    """Store new bits, and return how many differ from the old ones (a tile's count fits 16 bits)."""
    count = uint16(0)
    for i in range(n):
        value = _load16(new, i)
        count = uint16(count + uint16(value != _load16(served, i)))
        _store16(served, i, value)
    return int64(count)


@_compiled
def _settle_wide(new: int, served: int, n: int) -> _Word:
    """Like ``_settle``, with the new bits as the upper halves of float32 values."""
    count = uint32(0)
    for i in range(n):
        value = uint32(uint32(_load16(new, i)) << _SIXTEEN)
        count = uint32(count + uint32(value != _load32(served, i)))
        _store32(served, i, value)
    return int64(count)


@_compiled
def _copy_run(kind: int, buffer: int, address: int, stride: int, n: int) -> int:
    """Copy ``n`` elements that lie ``stride`` bytes apart into or out of a buffer; return how many changed."""
    if kind == _GATHER32:
        for i in range(n):
            _store32(buffer, i, _load32(address + i * stride, 0))
        return 0
    if kind == _GATHER16:
        for i in range(n):
            _store16(buffer, i, _load16(address + i * stride, 0))
        return 0
    changed = 0
    if kind == _SCATTER16:
        for i in range(n):
            value = _load16(buffer, i)
            changed += value != _load16(address + i * stride, 0)
            _store16(address + i * stride, 0, value)
    else:
        for i in range(n):
            wide = uint32(uint32(_load16(buffer, i)) << _SIXTEEN)
            changed += wide != _load32(address + i * stride, 0)
            _store32(address + i * stride, 0, wide)
    return changed


@_compiled
def _walk(kind: int, buffer: int, address: int, dims: Table, column: int, index: Table, begin: int, n: int) -> int:
    """Copy the elements ``begin .. begin + n``, in logical order, of a tensor with strides.

    Args:
        kind: What ``_copy_run`` is to do.
        buffer: Address of the tile's buffer.
        address: Address of the tensor's first element.
        dims: The job's dimensions.
        column: Which column of ``dims`` holds the tensor's strides.
        index: Space for one number for each dimension.
        begin: The first element.
        n: How many.

    Returns:
        How many elements of the tensor changed bits.
    """
    rest = begin
    for dim in range(len(dims)):
        index[dim] = rest % dims[dim, SIZE]
        rest //= dims[dim, SIZE]
        address += index[dim] * dims[dim, column]
    width = 4 if kind == _GATHER32 else 2
    changed = 0
    done = 0
    while done < n:
        run = min(dims[0, SIZE] - index[0], n - done)
        changed += _copy_run(kind, buffer + width * done, address, dims[0, column], run)
        done += run
        address -= index[0] * dims[0, column]
        index[0] = 0
        for dim in range(1, len(dims)):
            index[dim] += 1
            address += dims[dim, column]
            if index[dim] < dims[dim, SIZE]:
                break
            address -= dims[dim, SIZE] * dims[dim, column]
            index[dim] = 0
    return changed


@_compiled
def _cast_part(
    row: Table,
    dims: Table,
    code: int,
    counted: bool,
    buffer: int,
    index: Table,
    tile: int,
    lane: int,
    begin: int,
    n: int,
) -> _Word:
    """Cast the elements ``begin .. begin + n`` of a job, which lie in one tile; return how many changed."""
    flags = row[FLAGS]
    master = row[MASTER] + 4 * begin
    accumulator = row[ACCUMULATOR] + 2 * begin
    width = 4 if flags & WIDE else 2
    served = row[SERVED] + width * begin
    hashes = buffer + _HASHES
    # Measured: rounding to nearest is faster by way of the buffer, too.
    out = buffer + _RESULTS if counted or code == NEAREST or flags & (WIDE | SERVED_WALKS) else served
    if flags & MASTER_WALKS:
        master = buffer + _MASTERS
        _walk(_GATHER32, master, row[MASTER], dims, MASTER_STRIDE, index, begin, n)
    if flags & ACCUMULATOR_WALKS:
        accumulator = buffer + _ACCUMULATORS
        _walk(_GATHER16, accumulator, row[ACCUMULATOR], dims, ACCUMULATOR_STRIDE, index, begin, n)

    if code == HASHED:
        keys = _tile_keys(row[KEY0], row[KEY1], tile)
        _hash_tile(hashes, uint32(tile * HALF), keys, lane, n, master + 4 * n, served + width * n, width)
    if code != HASHED and n == TILE:
        size = TILE // _PARTS
        for part in range(_PARTS):
            _prefetch_part(master + 4 * n, 4, part, False)
            _prefetch_part(served + width * n, width, part, True)
            done = size * part
            _cast_tile(code, master + 4 * done, accumulator + 2 * done, hashes, out + 2 * done, lane + done, size)
    else:
        _cast_tile(code, master, accumulator, hashes, out, lane, n)

    if flags & ACCUMULATOR_WALKS:
        _walk(_SCATTER16, accumulator, row[ACCUMULATOR], dims, ACCUMULATOR_STRIDE, index, begin, n)
    if flags & SERVED_WALKS:
        kind = _WIDEN if flags & WIDE else _SCATTER16
        return _walk(kind, out, row[SERVED], dims, SERVED_STRIDE, index, begin, n)
    if flags & WIDE:
        return _settle_wide(out, served, n)
    return _settle(out, served, n) if out != served else 0


@_compiled_once
def cast_share(
    table: Table,
    dims: Table,
    code: int,
    counted: bool,
    job: int,
    tile: int,
    last_job: int,
    last_tile: int,
    space: np.ndarray[Any, np.dtype[np.uint8]],
    counts: Table,
) -> None:
    """Cast one thread's share: from a tile of one job up to, not including, a tile of another.

    Args:
        table: int64 of shape ``(jobs, COLUMNS)``.
        dims: int64 of shape ``(any, DIM_COLUMNS)``, the dimensions of all jobs that need a walk.
        code: The rule's code.
        counted: Whether changed values are counted.
        job: The first job's number.
        tile: The first tile, counted from the tile in which that job begins.
        last_job: The job in which the share ends.
        last_tile: The tile of that job before which it ends.
        space: uint8 of ``BUFFER`` bytes, this thread's own.
        counts: int64 of shape ``(jobs,)``, this thread's own; the number of changed values is added.
    """
    buffer = (space.ctypes.data + _ALIGN - 1) // _ALIGN * _ALIGN
    index = np.empty(len(dims) + 1, np.int64)
    while job <= last_job and job < len(table):
        row = table[job]
        own = dims[row[DIMS] : row[DIMS] + row[NDIM]]
        first, end = row[START], row[START] + row[NUMEL]
        number = first // TILE + tile
        stop = (end + TILE - 1) // TILE
        if job == last_job:
            stop = min(stop, first // TILE + last_tile)
        changed = 0
        while number < stop:
            begin = max(number * TILE, first)
            n = min((number + 1) * TILE, end) - begin
            lane = begin - number * TILE
            changed += _cast_part(row, own, code, counted, buffer, index, number, lane, begin - first, n)
            number += 1
        counts[job] += changed
        tile = 0
        job += 1
