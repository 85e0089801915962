"""Orthogonalise a batch of matrices: a pure function, out of place, apart from every optimizer.

A step of the iteration is ``X <- (a I + b G + c G^2) X`` with the Gram matrix ``G`` of the small side. Three
things make it cheaper than written down, none of which changes what it computes beyond rounding:

- Everything with the side of G is symmetric (all of it are polynomials of one G), so on a CPU large products are
  made in row panels that leave out what lies below the diagonal: (k + 1) / 2k of the work with k panels.
- Two steps can be joined on the small side: from G follow the first polynomial P, the Gram matrix P G P of what it
  would give, the second polynomial Q, and QP; X is multiplied once. It pays for long matrices. Longer chains would
  save more, but G's rounding hides singular values below its square root, and from the third step on they come
  out wrong in bf16; so each pair starts from a fresh Gram matrix, and the first step, where singular values are
  smallest, is never joined.
- Matrices are not transposed: for tall ones G is X^T X and multiplies from the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from ..devices import multiplies_bf16_fast
from .coefficients import NEWTON_SCHULZ, POLAR_EXPRESS, Coefficients, Triple, read_coefficients

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
AUTO = "auto"

# Polar Express allows no singular value above 1, so bf16's rounding of the normalised matrix needs room.
MARGINS = {NEWTON_SCHULZ: 1.0, POLAR_EXPRESS: 1.02}

# Measured (AVX-512 in bf16, AVX2 in fp32): below 384 panels cost more calls than they save, above 192 rows they run
# at full speed; more than 8 save nothing more.
_PANEL_ROWS = 192
_LEAST_PANELED = 384
_MOST_PANELS = 8

# On a CPU so many elements go through all steps together: 256 matrices of 64 x 64 take 53 ms at once, but 30 ms in
# eighths, which stay in the cache (AVX2, one core).
_CACHED_ELEMENTS = 2**17

# Joined steps take a few more calls and round a little more often, so small gains are left.
_LEAST_JOINED = 128
_JOIN_BELOW = 0.9


@dataclass(frozen=True)
class Plan:
    """How matrices of one shape are iterated.

    Attributes:
        side: Their smaller side.
        length: Their larger side.
        panels: Row panels of symmetric products; 1 for whole products of a whole batch.
        chains: How many steps are joined in each pass over X.
    """

    side: int
    length: int
    panels: int
    chains: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations in one matrix's products (a multiply-add is two)."""
        return _operations(self, (self.panels + 1) / (2 * self.panels) if self.panels > 1 else 1.0)


def _operations(plan: Plan, share: float) -> int:
    """Operations if symmetric products take this share of those of whole ones."""
    square = 2 * plan.side**3
    gram = 2 * plan.side**2 * plan.length
    total = 0.0
    for steps in plan.chains:
        # In a chain each step but the last makes two products for the next Gram matrix, and each but the first one
        # for the product of polynomials.
        squares = steps + 3 * (steps - 1)
        total += share * (gram + squares * square) + gram
    return round(total)


@lru_cache(maxsize=4096)
def make_plan(rows: int, cols: int, steps: int, symmetric: bool) -> Plan:
    """Choose the cheapest way to iterate a matrix, by its count of operations.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix.
        steps: Steps of the iteration.
        symmetric: Whether products may leave out the lower triangle (on a CPU).
    """
    side = min(rows, cols)
    panels = min(_MOST_PANELS, side // _PANEL_ROWS) if symmetric and side >= _LEAST_PANELED else 1
    plain, joined = _plans(rows, cols, steps, panels)
    pays = side >= _LEAST_JOINED and joined.flops < _JOIN_BELOW * plain.flops
    return joined if pays else plain


def _plans(rows: int, cols: int, steps: int, panels: int) -> tuple[Plan, Plan]:
    """A matrix iterated step by step, and with pairs of steps joined."""
    side, length = min(rows, cols), max(rows, cols)
    pairs, left = divmod(steps - 1, 2)
    plain = Plan(side, length, panels, (1,) * steps)
    return plain, Plan(side, length, panels, (1,) + (2,) * pairs + (1,) * left)


def floor_flops(rows: int, cols: int, steps: int) -> int:
    """The fewest operations of these products: symmetric ones at exactly half, steps joined where that is less."""
    return min(_operations(plan, 0.5) for plan in _plans(rows, cols, steps, 1))


def plain_flops(rows: int, cols: int, steps: int) -> int:
    """Operations of the iteration as it is written down: three products a step."""
    return Plan(min(rows, cols), max(rows, cols), 1, (1,) * steps).flops


def dtype_on(device: torch.device, name: str) -> torch.dtype:
    """The dtype that ``dtype=`` stands for on a device.

    Raises:
        ValueError: The name is not offered.
    """
    if name == AUTO:
        return torch.bfloat16 if multiplies_bf16_fast(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, (AUTO, *DTYPES)))}, got {name!r}")
    return DTYPES[name]


@torch.no_grad()
def orthogonalize(
    matrices: torch.Tensor,
    method: str = POLAR_EXPRESS,
    *,
    steps: int | None = None,
    coefficients: Sequence[object] | None = None,
    dtype: str = AUTO,
) -> torch.Tensor:
    """Bring the singular values of matrices near 1, keeping their singular vectors.

    The result approaches the polar factor U V^T of U S V^T. It does not depend on a matrix's scale. Zero matrices
    stay zero; a matrix with a non-finite element comes out as NaN and leaves the others alone.

    Args:
        matrices: Shape (rows, cols) or (batch, rows, cols), floating point; not written to.
        method: ``"polar_express"`` (default; Amsel et al., arXiv 2505.16932) or ``"newton_schulz"`` (Jordan et al.,
            "Muon: An optimizer for hidden layers in neural networks", 2024).
        steps: Steps of the iteration. Default 5.
        coefficients: A triple (a, b, c) or a sequence of triples in place of a named method.
        dtype: ``"bfloat16"`` or ``"float32"``, in which it is computed, or ``"auto"`` (default): fp32 on CPUs that
            have no fast bf16 products, else bf16.

    Returns:
        A new tensor of the same shape, in that dtype.

    Raises:
        ValueError: An option that is not offered, or a tensor that is no matrix.
    """
    if matrices.ndim not in (2, 3) or not matrices.is_floating_point():
        raise ValueError(
            "orthogonalize takes a floating-point tensor of shape (rows, cols) or (batch, rows, cols); got "
            f"{matrices.dtype} of shape {tuple(matrices.shape)}"
        )
    wanted = dtype_on(matrices.device, dtype)
    triples = read_coefficients(method, steps, coefficients)
    margin = MARGINS[method] if coefficients is None else 1.0
    batch = matrices if matrices.ndim == 3 else matrices[None]
    done = iterate(normalized(batch, wanted, margin), triples)
    return done if matrices.ndim == 3 else done[0]


def normalized(batch: torch.Tensor, dtype: torch.dtype, margin: float = 1.0) -> torch.Tensor:
    """Divide each matrix by its Frobenius norm (times a margin), so that no singular value is above 1.

    The norm is taken after a division by the largest magnitude, and summed in at least fp32: squares of 1e-20
    would vanish, squares of 1e20 overflow. A matrix whose largest magnitude is below the smallest normal number
    fades to zero.

    Args:
        batch: Shape (batch, rows, cols); not written to.
        dtype: Of the result.
        margin: At least 1.

    Returns:
        A new, contiguous tensor; zero matrices are zero.
    """
    out = torch.empty(batch.shape, dtype=dtype, device=batch.device)
    if batch.numel() == 0:
        return out
    wide = torch.promote_types(batch.dtype, torch.float32)
    # Two reductions are 20 times faster here than aminmax or the infinity norm, and need no copy of magnitudes.
    high, low = (reduce(batch, dim=(1, 2), keepdim=True) for reduce in (torch.amax, torch.amin))
    scale = torch.maximum(high, -low).to(wide).clamp_(min=torch.finfo(wide).tiny).reciprocal_()
    torch.mul(batch, scale, out=out)
    norm = torch.linalg.vector_norm(out, dim=(1, 2), keepdim=True, dtype=wide)
    # At least 0.99 for any matrix that is not zero, so the lower bound only keeps zeros finite. The second
    # multiplication starts from the input again: one rounding instead of two.
    return torch.mul(batch, scale / norm.mul_(margin).clamp_(min=0.5), out=out)


def iterate(batch: torch.Tensor, triples: Coefficients) -> torch.Tensor:
    """Run the iteration on normalised matrices.

    Args:
        batch: Shape (batch, rows, cols), singular values at most 1; not written to.
        triples: One (a, b, c) for each step.
    """
    rows, cols = batch.shape[1:]
    if batch.numel() == 0:
        return batch
    plan = make_plan(rows, cols, len(triples), batch.device.type == "cpu")
    if plan.panels == 1:
        whole = _Whole(rows > cols)
        held = max(1, _CACHED_ELEMENTS // (rows * cols)) if batch.device.type == "cpu" else len(batch)
        if len(batch) <= held:
            return _run(whole, batch, plan.chains, triples)
        done = torch.empty_like(batch)
        for sources, targets in zip(torch.split(batch, held), torch.split(done, held)):
            targets.copy_(_run(whole, sources, plan.chains, triples))
        return done
    panels = _Paneled(rows > cols, plan)
    # One by one, so that a matrix and its squares stay in the cache.
    if len(batch) == 1:
        return _run(panels, batch[0], plan.chains, triples)[None]
    done = torch.empty_like(batch)
    for source, target in zip(batch, done):
        target.copy_(_run(panels, source, plan.chains, triples))
    return done


class _Whole:
    """Products of a batch, each made whole."""

    def __init__(self, tall: bool) -> None:
        self.tall = tall

    def gram(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.mT, x) if self.tall else torch.bmm(x, x.mT)

    def symmetric(
        self, base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, b: float, c: float
    ) -> torch.Tensor:
        return torch.baddbmm(base, left, right, beta=b, alpha=c)

    def apply(self, p: torch.Tensor, x: torch.Tensor, a: float) -> torch.Tensor:
        left, right = (x, p) if self.tall else (p, x)
        return torch.baddbmm(x, left, right, beta=a)


class _Paneled:
    """Products of one matrix on a CPU; symmetric ones from the diagonal on, then mirrored."""

    def __init__(self, tall: bool, plan: Plan) -> None:
        self.tall = tall
        edges = [plan.side * i // plan.panels for i in range(plan.panels + 1)]
        self.panels = list(pairwise(edges))

    def gram(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (x.mT, x) if self.tall else (x, x.mT)
        out = x.new_empty(left.shape[0], left.shape[0])
        for start, stop in self.panels:
            torch.mm(left[start:stop], right[:, start:], out=out[start:stop, start:])
        return self._mirror(out)

    def symmetric(
        self, base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, b: float, c: float
    ) -> torch.Tensor:
        out = torch.empty_like(base)
        for start, stop in self.panels:
            panel = out[start:stop, start:]
            torch.addmm(base[start:stop, start:], left[start:stop], right[:, start:], beta=b, alpha=c, out=panel)
        return self._mirror(out)

    def _mirror(self, out: torch.Tensor) -> torch.Tensor:
        for start, stop in self.panels[:-1]:
            out[stop:, start:stop] = out[start:stop, stop:].mT
        return out

    def apply(self, p: torch.Tensor, x: torch.Tensor, a: float) -> torch.Tensor:
        left, right = (x, p) if self.tall else (p, x)
        return torch.addmm(x, left, right, beta=a)


def _run(ops: _Whole | _Paneled, x: torch.Tensor, chains: Sequence[int], triples: Coefficients) -> torch.Tensor:
    """Apply all polynomials, joined as the chains say."""
    first = 0
    for steps in chains:
        chain = triples[first : first + steps]
        x = _single(ops, x, chain[0]) if steps == 1 else _joined(ops, x, chain)
        first += steps
    return x


def _single(ops: _Whole | _Paneled, x: torch.Tensor, triple: Triple) -> torch.Tensor:
    a, b, c = triple
    gram = ops.gram(x)
    return ops.apply(ops.symmetric(gram, gram, gram, b, c), x, a)


def _joined(ops: _Whole | _Paneled, x: torch.Tensor, chain: Coefficients) -> torch.Tensor:
    """Apply several polynomials with one product of X, from the Gram matrices alone.

    Write P = a I + R for a step's polynomial. Then the product of all so far goes from F to P F = a F + R F, and the
    Gram matrix from G to P G P = a (P G) + (P G) R. The running product F is kept with its diagonal: to carry it
    as a multiple of I plus a rest would cancel, and lose precision where singular values are near 1.
    """
    gram = ops.gram(x)
    factor = gram
    for number, (a, b, c) in enumerate(chain):
        rest = ops.symmetric(gram, gram, gram, b, c)
        if number == 0:
            factor = rest.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = ops.symmetric(factor, rest, factor, a, 1.0)
        if number < len(chain) - 1:
            half = ops.symmetric(gram, rest, gram, a, 1.0)
            gram = ops.symmetric(half, half, rest, a, 1.0)
    return ops.apply(factor, x, 0.0)
