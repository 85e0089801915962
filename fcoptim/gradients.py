"""Gradients: from the served parameters to the masters for the length of a step, and the check for non-finite ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .distributed.census import Census
from .distributed.shards import local
from .masters import Member

ON_NONFINITE = ("allow", "skip", "raise")


def hand_over(members: Iterable[Member]) -> list[Member]:
    """Let each master see its parameter's gradient, in fp32; without a copy where it is fp32 already.

    Args:
        members: All members of the step.

    Returns:
        Those that have a gradient. The others' masters have none.
    """
    moving = []
    for member in members:
        grad = member.param.grad
        if grad is not None:
            moving.append(member)
        if not member.kept:
            member.master.grad = None if grad is None else grad.to(torch.float32)
    return moving


def release(members: Iterable[Member]) -> None:
    """Drop the masters' gradients, so that none outlives a step or goes stale."""
    for member in members:
        if not member.kept:
            member.master.grad = None


def nonfinite(members: Sequence[Member]) -> list[str]:
    """Name the parameters whose gradient holds an infinity or a NaN.

    The largest magnitude of each gradient is taken in one pass without a temporary, and all are looked at
    together, so a GPU is waited for once. Of sharded parameters every rank learns what any rank finds.

    Args:
        members: Members with or without a gradient.
    """
    norms, names = [], []
    for member in members:
        grad = member.param.grad
        if grad is None:
            continue
        values = grad.coalesce().values() if grad.is_sparse else local(grad.detach())
        largest = values.new_zeros(()) if not values.numel() else torch.linalg.vector_norm(values, ord=float("inf"))
        norms.append(largest.float().reshape(()))
        names.append(member.name)
    if not norms:
        return []
    bad = ~torch.isfinite(torch.stack([norm.to(norms[0].device) for norm in norms]))
    found = Census(member.param for member in members).largest(bad.to(torch.int32))
    return [name for name, is_bad in zip(names, found.tolist()) if is_bad]
