"""One step of Muon's groups and one of AdamW's, on parameters that have gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from ..distributed.shards import is_sharded, local
from . import sharded
from .options import ADAMW, group_coefficients
from .orthogonalize import MARGINS, dtype_on, iterate, normalized
from .routing import is_stack, matrix_shape

MOMENTUM = "momentum_buffer"

# Matrices that go through the iteration together hold at most this many elements (a larger one goes alone), so
# that what a step needs beside parameters and state stays below 64 MB: 4 bytes for the update in fp32 and 2 to 4
# for each of X, its successor and the squares of its small side.
BATCH_ELEMENTS = 2**21


class Piece(NamedTuple):
    """One matrix, or one stack of matrices, as a part of a parameter.

    Attributes:
        param: View of the parameter.
        grad: View of its gradient.
        momentum: View of its momentum buffer.
        matrices: How many matrices it is.
        turned: Whether it is transposed before it is orthogonalised.
    """

    param: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    matrices: int
    turned: bool

    def slot(self, batch: torch.Tensor, start: int) -> torch.Tensor:
        """A view of the matrices from ``start`` on in a batch, in this piece's own shape."""
        chosen = batch[start : start + self.matrices]
        return (chosen.mT if self.turned else chosen).view(self.param.shape)


def scale_of(rows: int, cols: int, name: str) -> float:
    """The factor that an orthogonal update of a matrix is multiplied by, beside the learning rate.

    Args:
        rows: Output features.
        cols: Input features.
        name: ``"match_rms_adamw"``: 0.2 sqrt(max(rows, cols)), an update of root mean square 0.2, as AdamW's usually
            is (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982). ``"spectral"``:
            sqrt(max(1, rows / cols)) (Jordan et al., 2024).
    """
    return 0.2 * math.sqrt(max(rows, cols)) if name == "match_rms_adamw" else math.sqrt(max(1.0, rows / cols))


def split_sizes(shape: Sequence[int], group: dict[str, Any]) -> tuple[int, list[int]]:
    """Where a parameter is cut into the parts that are orthogonalised apart.

    Args:
        shape: The parameter's shape.
        group: Its param group.

    Returns:
        The dimension of the matrices' rows (output features), and the size of each part in it.

    Raises:
        ValueError: The rows can't be cut like this.
    """
    stack = is_stack(len(shape), group["matrices"])
    dim = len(shape) - 1 if group["transposed"] else len(shape) - 2 if stack else 0
    parts, rows = group["split"], shape[dim]
    sizes = [rows // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(sizes) != rows:
        raise ValueError(
            f"split={parts!r} does not divide the {rows} output rows of a parameter of shape {tuple(shape)}"
        )
    return dim, sizes


def cut(param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> Iterator[Piece]:
    """Cut a parameter into pieces: where ``split`` says so, and stacks into what one batch holds."""
    trio = [param, grad, momentum]
    parts = [trio]
    if group["split"] != 1:
        dim, sizes = split_sizes(param.shape, group)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [[tensor.narrow(dim, start, size) for tensor in trio] for start, size in zip(starts, sizes)]
    for part in parts:
        rows, cols = matrix_shape(part[0].shape, group["matrices"])
        # On an accelerator fewer, larger batches win; on a CPU transposed copies cost more than they bring.
        turned = rows > cols and param.device.type != "cpu"
        if not is_stack(param.ndim, group["matrices"]):
            yield Piece(part[0], part[1], part[2], 1, turned)
            continue
        held = max(1, BATCH_ELEMENTS // max(1, part[0][0].numel()))
        for p, g, m in zip(*(torch.split(tensor, held) for tensor in part)):
            yield Piece(p, g, m, p.numel() // (rows * cols), turned)


def batches(pieces: Sequence[Piece], group: dict[str, Any]) -> Iterator[tuple[tuple[int, int], float, list[Piece]]]:
    """Sort pieces into batches of one shape and scale that are small enough.

    Yields:
        Rows and columns of the batch, its scale, and its pieces.
    """
    alike: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        rows, cols = matrix_shape(piece.param.shape, group["matrices"])
        scale = scale_of(*((cols, rows) if group["transposed"] else (rows, cols)), group["scale"])
        shape = (cols, rows) if piece.turned else (rows, cols)
        kind = (shape, scale, piece.param.device, piece.param.dtype, piece.momentum.dtype)
        alike.setdefault(kind, []).append(piece)
    for (shape, scale, *_), members in alike.items():
        chosen: list[Piece] = []
        held = 0
        for piece in members:
            if chosen and held + piece.param.numel() > BATCH_ELEMENTS:
                yield shape, scale, chosen
                chosen, held = [], 0
            chosen.append(piece)
            held += piece.param.numel()
        yield shape, scale, chosen


def muon_step(group: dict[str, Any], params: Sequence[torch.Tensor], state: dict[Any, Any]) -> None:
    """Step parameters that all have gradients: momentum, orthogonalisation, decoupled decay, update.

    Args:
        group: Their param group.
        params: The parameters.
        state: The optimizer's state; momentum buffers are made where they are missing.
    """
    pieces: list[Piece] = []
    shards: list[sharded.Shard] = []
    for param in params:
        grad = param.grad
        if grad is None or param.numel() == 0:
            continue
        entry = state[param]
        if MOMENTUM not in entry:
            entry[MOMENTUM] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum = entry[MOMENTUM]
        grad = grad.to(momentum.dtype)
        if not is_sharded(param):
            pieces.extend(cut(param, grad, momentum, group))
        elif not sharded.is_whole_here(param, group["matrices"]):
            direction = sharded.directions(local(grad), local(momentum), group)
            shards.append(sharded.Shard(param, direction, *_parts(param.shape, group)))
        elif local(param).numel() > 0:
            pieces.extend(cut(local(param), local(grad), local(momentum), group))
    for shape, scale, chosen in batches(pieces, group):
        _update(chosen, shape, scale, group)
    if shards:
        dtype = dtype_on(shards[0].direction.device, group["dtype"])
        sharded.step_shards(shards, {**group, "dtype": str(dtype).removeprefix("torch.")}, orthogonalized)


def _parts(shape: Sequence[int], group: dict[str, Any]) -> tuple[int, list[sharded.Part]]:
    """The dimension of a parameter's rows, and which of them are a matrix of their own, with what scale."""
    dim, sizes = split_sizes(shape, group)
    scales = []
    for size in sizes:
        rows, cols = matrix_shape([size if d == dim else full for d, full in enumerate(shape)], group["matrices"])
        scales.append(scale_of(*((cols, rows) if group["transposed"] else (rows, cols)), group["scale"]))
    return dim, sharded.parts_of(sizes, scales)


def orthogonalized(direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A parameter's whole update, without its scale, in the dtype of the iteration."""
    out = torch.empty_like(direction, dtype=dtype_on(direction.device, group["dtype"]))
    for shape, _, pieces in batches(list(cut(out, direction, direction, group)), group):
        starts = [0, *accumulate(piece.matrices for piece in pieces)]
        batch = torch.empty((starts[-1], *shape), dtype=direction.dtype, device=direction.device)
        for piece, start in zip(pieces, starts):
            piece.slot(batch, start).copy_(piece.grad)
        updates = _iterated([batch], group)
        for piece, start in zip(pieces, starts):
            piece.param.copy_(piece.slot(updates, start))
    return out


def _iterated(matrices: list[torch.Tensor], group: dict[str, Any]) -> torch.Tensor:
    """Orthogonalise the one batch in a list, which is taken out of it so that its memory is free in time."""
    margin = MARGINS[group["orthogonalize"]] if group["coefficients"] is None else 1.0
    dtype = dtype_on(matrices[0].device, group["dtype"])
    ready = [normalized(matrices.pop(), dtype, margin)]
    return iterate(ready.pop(), group_coefficients(group))


def _update(pieces: Sequence[Piece], shape: tuple[int, int], scale: float, group: dict[str, Any]) -> None:
    """Step one batch of pieces."""
    params = [piece.param for piece in pieces]
    starts = [0, *accumulate(piece.matrices for piece in pieces)]
    updates = _iterated([_directions(pieces, starts, shape, group)], group).to(params[0].dtype)
    lr = float(group["lr"])
    if group["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_add_(params, [p.slot(updates, s) for p, s in zip(pieces, starts)], alpha=-lr * scale)


def _directions(
    pieces: Sequence[Piece], starts: Sequence[int], shape: tuple[int, int], group: dict[str, Any]
) -> torch.Tensor:
    """Move the momentum buffers on and return what is to be orthogonalised, as a new batch."""
    first = pieces[0].momentum
    batch = torch.empty((starts[-1], *shape), dtype=first.dtype, device=first.device)
    slots = [piece.slot(batch, start) for piece, start in zip(pieces, starts)]
    momenta = [piece.momentum for piece in pieces]
    grads = [piece.grad for piece in pieces]
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
    if group["nesterov"]:
        torch._foreach_copy_(slots, grads)
        torch._foreach_lerp_(slots, momenta, group["momentum"])
    else:
        torch._foreach_copy_(slots, momenta)
    return batch


def adamw_step(group: dict[str, Any], params: Sequence[torch.Tensor], state: dict[Any, Any]) -> None:
    """Step parameters that all have gradients as ``torch.optim.AdamW`` does, by torch's own function.

    Args:
        group: Their param group.
        params: The parameters.
        state: The optimizer's state; ``step``, ``exp_avg`` and ``exp_avg_sq`` are made where they are missing.
    """
    for param in params:
        entry = state[param]
        if "exp_avg" not in entry:
            entry["step"] = torch.zeros((), dtype=torch.float32)
            entry["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            entry["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    entries = [state[param] for param in params]
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        [param.grad for param in params if param.grad is not None],
        [entry["exp_avg"] for entry in entries],
        [entry["exp_avg_sq"] for entry in entries],
        [],
        [entry["step"] for entry in entries],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def check_gradients(params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
    """Refuse gradients that can't be used, before anything has changed.

    Raises:
        RuntimeError: One is sparse or complex.
    """
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            name = "AdamW" if group["algorithm"] == ADAMW else "Muon"
            raise RuntimeError(
                f"{name} does not support sparse gradients (shape {tuple(param.shape)}); build the embedding with "
                "sparse=False, or train it with torch.optim.SparseAdam"
            )
        if grad.is_complex():
            raise RuntimeError(f"Muon does not support complex gradients (shape {tuple(param.shape)})")
