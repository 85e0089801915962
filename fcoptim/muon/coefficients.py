"""The odd quintics that Newton-Schulz iterations are made of: named sets, and how custom ones are read.

One step maps every singular value s of a matrix to ``a s + b s**3 + c s**5``; the singular vectors stay. A set is
one triple (a, b, c) for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

Triple = tuple[float, float, float]
Coefficients = tuple[Triple, ...]

NEWTON_SCHULZ = "newton_schulz"
POLAR_EXPRESS = "polar_express"
METHODS = (NEWTON_SCHULZ, POLAR_EXPRESS)
DEFAULT_STEPS = 5
MAX_STEPS = 100

_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

# Polar Express: smallest singular value it is optimal for, the least ratio of the ends of an interval that a
# polynomial is fitted to, and the factor by which all but the last polynomial are stretched, so that bf16's
# rounding does not push a singular value out of the interval.
_LOWER = 1e-3
_CUSHION = 0.02407327424182761
_SAFETY = 1.01


def read_coefficients(method: str, steps: int | None, custom: Sequence[object] | None) -> Coefficients:
    """Turn the options of an orthogonalisation into one triple for each step.

    Args:
        method: ``"newton_schulz"`` (the quintic of Jordan et al., the same triple at every step) or
            ``"polar_express"`` (Amsel et al., another triple at each step). Not looked at with ``custom``.
        steps: How many steps; None means 5, or as many as there are custom triples.
        custom: A triple (a, b, c), or a sequence of triples of which the last is used for all further steps.

    Returns:
        ``steps`` triples.

    Raises:
        ValueError: An unknown method, a number of steps outside 1 to 100, or malformed coefficients.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS):
        raise ValueError(f"steps must be an integer from 1 to {MAX_STEPS}, got {steps!r}")
    if custom is not None:
        triples = _read_custom(custom)
        wanted = steps or max(len(triples), DEFAULT_STEPS if len(triples) == 1 else 0)
        return (*triples[:wanted], *[triples[-1]] * (wanted - len(triples)))
    wanted = DEFAULT_STEPS if steps is None else steps
    if method == NEWTON_SCHULZ:
        return (_JORDAN,) * wanted
    if method == POLAR_EXPRESS:
        return polar_express(wanted)
    raise ValueError(f"orthogonalize must be one of {', '.join(map(repr, METHODS))}, got {method!r}")


def _read_custom(custom: Sequence[object]) -> list[Triple]:
    given = list(custom)
    rows = [given] if given and all(isinstance(value, (int, float)) for value in given) else given
    triples: list[Triple] = []
    for row in rows:
        values = list(row) if isinstance(row, Sequence) and not isinstance(row, str) else []
        if len(values) != 3 or not all(isinstance(v, (int, float)) and abs(v) < float("inf") for v in values):
            raise ValueError(f"coefficients must be a triple (a, b, c) or a sequence of triples, got {custom!r}")
        triples.append((float(values[0]), float(values[1]), float(values[2])))
    if not triples:
        raise ValueError("coefficients is empty; leave it out to use a named method")
    return triples


@lru_cache(maxsize=32)
def polar_express(steps: int) -> Coefficients:
    """Fit the Polar Express polynomials: each is the best for the interval that those before it leave.

    The interval of singular values starts as [0.001, 1]. Where its ends lie far apart, the polynomial is fitted
    to [0.024 u, u] and rescaled; all but the last of eight are stretched by 1.01 (Amsel, Persson, Musco, Gower,
    "The Polar Express", arXiv 2505.16932, section 4 and appendix).

    Args:
        steps: How many triples to return. From the eighth on they are the limit (15/8, -5/4, 3/8).
    """
    triples: list[Triple] = []
    low, high = _LOWER, 1.0
    for _ in range(min(steps, 8)):
        a, b, c = best_quintic(max(low, _CUSHION * high), high)
        rescale = 2.0 / (_odd(a, b, c, low) + _odd(a, b, c, high))
        a, b, c = a * rescale, b * rescale, c * rescale
        low = _odd(a, b, c, low)
        high = 2.0 - low
        triples.append((a, b, c))
    stretched = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in triples[:7]]
    kept = (*stretched, *triples[7:])
    return (*kept, *[kept[-1]] * (steps - len(kept)))


def best_quintic(low: float, high: float) -> Triple:
    """Find the odd quintic that is nearest to 1 on an interval, in the largest deviation (Remez).

    Its error takes its extreme, with alternating sign, at four points: both ends and the two roots of the
    derivative. So: solve for coefficients and error at four guesses, move the inner two to the roots, repeat.

    Args:
        low: Lower end, above 0.
        high: Upper end, above ``low``.
    """
    if high - low < 5e-6 * high:  # the system turns singular; this is its limit
        return 1.875 / high, -1.25 / high**3, 0.375 / high**5
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    error, previous = 0.0, float("inf")
    triple: Triple = (0.0, 0.0, 0.0)
    while abs(previous - error) > 1e-15:
        previous = error
        rows = [[x, x**3, x**5, sign] for x, sign in zip([low, *inner, high], (1.0, -1.0, 1.0, -1.0))]
        system = torch.tensor(rows, dtype=torch.float64, device="cpu")
        a, b, c, error = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64, device="cpu")).tolist()
        triple = (a, b, c)
        root = (9 * b * b - 20 * a * c) ** 0.5
        inner = sorted(((-3 * b + sign * root) / (10 * c)) ** 0.5 for sign in (-1, 1))
    return triple


def _odd(a: float, b: float, c: float, x: float) -> float:
    return a * x + b * x**3 + c * x**5
