"""The keyed hash behind the unbiased rounding rules, written once in plain Python and torch.

The dither of an element depends on five things and nothing else: the seed, the parameter's name, the
element's index in the whole (unsharded) parameter, and how often that parameter was cast. So replicas agree
without talking, sharding changes nothing, a resume is exact, and torch's random state is never touched.

How the bits are made, so that the three back ends can be held against this file:

1. ``parameter_key`` digests (seed, name) to 64 bits. ``stream_keys`` mixes in the cast count and splits the
   result into two 32-bit keys, once per tensor and cast, on the host.
2. Elements are taken in tiles of 2,048. One 32-bit hash word serves two elements, lane ``j`` of the tile's
   first half (the word's low 16 bits) and lane ``j`` of its second half (the high 16 bits). Neighbours in
   memory therefore never share a word, and a vector unit never has to interleave halves.
3. A word is ``mix32(mix32(w ^ k0) + k1)`` for word number ``w``. One key alone would not do: with ``w ^ k0``
   only, two casts would see the same numbers in another order. The second key enters after the first mixing,
   so the two casts' streams have no such relation.
4. Word numbers beyond 32 bits put their high half into both keys, so no stream ever wraps around.

``mix32`` is the "lowbias32" finaliser (C. Wellons, "Prospecting for Hash Functions", 2018), ``mix64`` the
finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

TILE = 2048
HALF = TILE // 2

MIX32_A = 0x7FEB352D
MIX32_B = 0x846CA68B
GOLDEN32 = 0x9E3779B9
GOLDEN64 = 0x9E3779B97F4A7C15

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@lru_cache(maxsize=1 << 16)
def parameter_key(seed: int, name: str) -> int:
    """Digest a seed and a parameter's full name to the 64-bit key that ``cast_`` takes.

    Args:
        seed: Any integer.
        name: The parameter's name in the unwrapped model, for example ``"layers.0.mlp.up_proj.weight"``.

    Returns:
        An integer in ``[0, 2**64)``; the first 8 bytes of BLAKE2b over both.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix64(x: int) -> int:
    """Scramble a 64-bit integer (the SplitMix64 finaliser, a bijection)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def stream_keys(key: int, count: int) -> tuple[int, int]:
    """Return the two 32-bit keys of one cast of one parameter.

    Args:
        key: The parameter's key, from ``parameter_key``.
        count: Which cast of that parameter this is; the dither rule and the accumulators' start use 0.

    Returns:
        ``(k0, k1)``, both in ``[0, 2**32)``.
    """
    mixed = mix64(key ^ mix64((count * GOLDEN64 + GOLDEN64) & _MASK64))
    return mixed & _MASK32, mixed >> 32


def mix32(x: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit values held in an int64 tensor (lowbias32, a bijection).

    int64 products wrap modulo 2**64, which leaves their low 32 bits right; the masks drop the rest.
    """
    x = ((x ^ (x >> 16)) * MIX32_A) & _MASK32
    x = ((x ^ (x >> 15)) * MIX32_B) & _MASK32
    return x ^ (x >> 16)


def dither_bits(keys: tuple[int, int], index: torch.Tensor) -> torch.Tensor:
    """Return 16 uniform bits for each element index.

    Args:
        keys: The two keys from ``stream_keys``.
        index: Element indices in the unsharded parameter, int64, any shape.

    Returns:
        int64 values in ``[0, 2**16)``, of the same shape.
    """
    word = (index // TILE) * HALF + index % HALF
    high = word >> 32
    k0 = keys[0] ^ mix32(high)
    k1 = keys[1] + high * GOLDEN32
    bits = mix32((mix32((word & _MASK32) ^ k0) + k1) & _MASK32)
    second_half = (index % TILE) >= HALF
    return torch.where(second_half, bits >> 16, bits & 0xFFFF)
