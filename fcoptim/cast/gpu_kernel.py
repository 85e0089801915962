"""The rounding rules as one Triton kernel; ``gpu.py`` builds its table and launches it.

One program casts one 2,048-element tile of one tensor, held as a (2, 1024) block: the two rows are the halves
that share their hash words (see ``bits.py``), so a word is mixed once and feeds both rows of its column.

The algebra on one 32-bit word, worked out before the code:

- ``word + d`` with ``d < 2**16`` carries out of the lower half by itself. The upper half of the sum is the
  served value; under error feedback the lower half is the new accumulator, ``(a + lo) mod 2**16``.
- The largest finite number is the only one whose carry an unbiased rule drops: there, the upper half of
  ``word`` is served instead of that of the sum. The accumulator takes the sum all the same.
- A NaN is made quiet with a lower half of 0, and then nothing can carry into it or move its accumulator.

Tiles are tiles of the whole parameter, so a shard may begin in the middle of one. 64-bit numbers (addresses,
tile numbers) are scalars of the program; the path for contiguous tensors counts elements in 32 bits only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from . import bits, rules

# A job's row in the table, by column. DIMS is where in the table its sizes and strides lie.
SERVED, MASTER, ACCUMULATOR, NUMEL, START, FLAGS, DIMS, NDIM, KEY0, KEY1, COUNTER = range(11)
ROW = 11
# A row's elements are counted in 32 bits; a larger job takes several rows.
LIMIT = 1 << 30
# FLAGS: served is float32; all of the job's tensors are contiguous, and their tiles begin at 16 bytes.
WIDE, ALIGNED = 1, 2

_C = tl.constexpr
_SERVED, _MASTER, _ACCUMULATOR, _NUMEL, _START = _C(SERVED), _C(MASTER), _C(ACCUMULATOR), _C(NUMEL), _C(START)
_FLAGS, _DIMS, _NDIM, _KEY0, _KEY1 = _C(FLAGS), _C(DIMS), _C(NDIM), _C(KEY0), _C(KEY1)
_COUNTER, _ROW = _C(COUNTER), _C(ROW)
_WIDE, _ALIGNED = _C(WIDE), _C(ALIGNED)
_NEAREST, _HASHED, _ACCUMULATED = _C(rules.NEAREST), _C(rules.HASHED), _C(rules.ACCUMULATED)
_TILE, _HALF, _HALF_LOG2 = _C(bits.TILE), _C(bits.HALF), _C(bits.HALF.bit_length() - 1)
_MIX_A, _MIX_B, _GOLDEN = _C(bits.MIX32_A), _C(bits.MIX32_B), _C(bits.GOLDEN32)


def _jit(function: Callable[..., Any]) -> Any:
    """Apply ``triton.jit`` (untyped) with no specialisation on values, so that all variants are known."""
    names = [name for name in ("table", "changed", "rows") if name in function.__annotations__]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


@_jit
def _mix32(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * _MIX_A
    x = (x ^ (x >> 15)) * _MIX_B
    return x ^ (x >> 16)


@_jit
def _dither(row: tl.tensor, tile: tl.tensor, lane: tl.tensor, half: tl.tensor) -> tl.tensor:
    """Hash 16 bits for each element of a tile.

    A tile's first word number is a multiple of 1,024, so its lanes are XORed in rather than added, and the
    word number's high half is the same for the whole tile.
    """
    high = (tile >> (32 - _HALF_LOG2)).to(tl.uint32)
    k0 = tl.load(row + _KEY0).to(tl.uint32) ^ _mix32(high)
    k1 = tl.load(row + _KEY1).to(tl.uint32) + high * _GOLDEN
    first = (tile << _HALF_LOG2).to(tl.uint32)
    word = _mix32(_mix32((first ^ k0) ^ lane.to(tl.uint32)) + k1)
    return (word >> (half * 16).to(tl.uint32)) & 0xFFFF


@_jit
def _pointer(address: tl.tensor, dtype: tl.constexpr, ALIGN: tl.constexpr) -> tl.tensor:
    """Turn an address from the table into a pointer; the hint is what makes accesses 128 bits wide."""
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGN:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@_jit
def _write(pointer: tl.tensor, value: tl.tensor, mask: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Store a block; return how many of its elements changed, or 0 if nobody asked."""
    moved = 0
    if COUNT:
        differs = tl.load(pointer, mask=mask) != value
        if mask is not None:
            differs = differs & mask
        moved = tl.sum(differs.to(tl.int32))
    tl.store(pointer, value, mask=mask)
    return moved


@_jit
def _cast_block(
    row: tl.tensor,
    tile: tl.tensor,
    lane: tl.tensor,
    shift: tl.tensor,
    at_served: tl.tensor,
    at_master: tl.tensor,
    at_accumulator: tl.tensor,
    mask: tl.tensor,
    CODE: tl.constexpr,
    COUNT: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    """Cast the lanes ``lane`` of both halves of a tile.

    Their elements lie ``shift + at_...`` elements behind the addresses in ``row``.
    """
    master = _pointer(tl.load(row + _MASTER) + shift * 4, tl.uint32, ALIGN) + at_master
    word = tl.load(master, mask=mask)
    # Magnitudes are compared doubled, without the sign: NVIDIA shifts left on the multiplier, and so spares
    # the logic units, which limit the hash.
    doubled = word << 1
    word = tl.where(doubled > 2 * 0x7F800000, (word | 0x00400000) & 0xFFFF0000, word)
    if CODE == _NEAREST:
        total = word + (((word >> 16) & 1) + 0x7FFF)
        new = total
    else:
        if CODE == _HASHED:
            d = _dither(row, tile, lane, tl.arange(0, 2)[:, None])
        else:
            accumulator = _pointer(tl.load(row + _ACCUMULATOR) + shift * 2, tl.uint16, ALIGN) + at_accumulator
            d = tl.load(accumulator, mask=mask).to(tl.uint32)
        total = word + d
        # The largest finite number swallows its carry; infinities and NaNs, beyond it, never have one.
        new = tl.where(doubled >= 2 * 0x7F7F0000, word, total)
    if (tl.load(row + _FLAGS) & _WIDE) != 0:
        wide = _pointer(tl.load(row + _SERVED) + shift * 4, tl.uint32, ALIGN) + at_served
        moved = _write(wide, new & 0xFFFF0000, mask, COUNT)
    else:
        narrow = _pointer(tl.load(row + _SERVED) + shift * 2, tl.uint16, ALIGN) + at_served
        moved = _write(narrow, (new >> 16).to(tl.uint16), mask, COUNT)
    if CODE == _ACCUMULATED:
        tl.store(accumulator, (total & 0xFFFF).to(tl.uint16), mask=mask)
    return moved


@_jit
def _offsets(table: tl.tensor, row: tl.tensor, index: tl.tensor) -> Any:
    """Turn logical element indices, uint32, into the memory offsets of the three tensors."""
    served = tl.zeros(index.shape, tl.int64)
    master = tl.zeros(index.shape, tl.int64)
    accumulator = tl.zeros(index.shape, tl.int64)
    dim = tl.load(row + _DIMS)
    last = dim + 4 * tl.load(row + _NDIM)
    while dim < last:  # innermost first
        size = tl.load(table + dim).to(tl.uint32)
        rest = index // size
        place = (index - rest * size).to(tl.int64)
        served += place * tl.load(table + dim + 1)
        master += place * tl.load(table + dim + 2)
        accumulator += place * tl.load(table + dim + 3)
        index = rest
        dim += 4
    return served, master, accumulator


@_jit
def _from_end(lane: tl.tensor) -> tl.tensor:
    """Where both halves' lanes are, counted from the end of the tile.

    Counted from its beginning they would be known not to be negative. Triton would then pick AMD's buffer
    accesses, which want their base in scalar registers; ours is loaded, so each would sit in a loop.
    """
    return tl.arange(0, 2)[:, None] * _HALF + lane - _TILE


@_jit
def _cast_edge(
    table: tl.tensor,
    row: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    CODE: tl.constexpr,
    COUNT: tl.constexpr,
    STRIDED: tl.constexpr,
) -> tl.tensor:
    """Cast a tile that is cut off, misaligned or strided; in parts, as masks and offsets take up registers."""
    # Elements `lower` up to `upper`, counted from the tile's end, are inside the job.
    lower = tl.maximum(-end, -_TILE).to(tl.int32)
    upper = tl.minimum(tl.load(row + _NUMEL) - end, 0).to(tl.int32)
    moved = 0
    PART: tl.constexpr = _HALF // 8 if STRIDED else _HALF // 4
    for part in range(_HALF // PART):
        lane = part * PART + tl.arange(0, PART)[None, :]
        at = _from_end(lane)
        mask = (at >= lower) & (at < upper)
        if STRIDED:
            served, master, accumulator = _offsets(table, row, tl.where(mask, end + at, 0).to(tl.uint32))
            moved += _cast_block(row, tile, lane, 0, served, master, accumulator, mask, CODE, COUNT, False)
        else:
            moved += _cast_block(row, tile, lane, end, at, at, at, mask, CODE, COUNT, False)
    return moved


@_jit
def _find_row(table: tl.tensor, rows: tl.tensor, program: tl.tensor) -> tl.tensor:
    """Find the last row whose first program is not after this one; empty rows are never the last."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table + middle) <= program:
            low = middle
        else:
            high = middle
    return low


@_jit
def cast_tiles(
    table: tl.tensor,
    changed: tl.tensor,
    rows: tl.tensor,
    CODE: tl.constexpr,
    COUNT: tl.constexpr,
    STRIDED: tl.constexpr,
) -> None:
    """Cast one tile of one row of the table; the grid has one program for each tile.

    Args:
        table: int64; the number of each row's first program, then the rows, then sizes and strides.
        changed: int64 counters, if ``COUNT``; else any pointer.
        rows: The number of rows.
        CODE: The rule's code.
        COUNT: Whether changed elements are counted.
        STRIDED: Whether any job is not contiguous. Without, the variant is leaner.
    """
    program = tl.program_id(0)
    number = _find_row(table, rows, program)
    row = table + rows + number * _ROW
    start = tl.load(row + _START)
    tile = start // _TILE + (program - tl.load(table + number))
    end = (tile + 1) * _TILE - start
    whole = (end >= _TILE) & (end <= tl.load(row + _NUMEL))
    if whole & ((tl.load(row + _FLAGS) & _ALIGNED) != 0):
        lane = tl.arange(0, _HALF)[None, :]
        at = _from_end(lane)
        moved = _cast_block(row, tile, lane, end, at, at, at, None, CODE, COUNT, True)
    else:
        moved = _cast_edge(table, row, tile, end, CODE, COUNT, STRIDED)
    if COUNT:
        tl.atomic_add(changed + tl.load(row + _COUNTER), moved.to(tl.int64), sem="relaxed")
