"""Beginning from weights alone: they become the masters, and the served weights their first cast."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import lag as lags
from .. import lagging
from ..distributed.shards import local, part_of
from ..masters import ACCUMULATOR, COUNT, serve, wrapped_part
from ..optimizer import FairCastOptimizer
from .target import match


@torch.no_grad()
def start_from(
    opt: FairCastOptimizer, weights: Mapping[str, torch.Tensor], tied: Mapping[str, str], source: object
) -> None:
    """Put an optimizer and its model where they would be had they been built on these weights.

    Args:
        opt: The optimizer. Its moments are dropped; masters keep every bit of fp32 weights.
        weights: By the model's names.
        tied: From names that may be missing in ``weights`` to those that stand for them.
        source: What the weights are from, for messages.

    Raises:
        CheckpointError: A weight is missing, left over, or of another shape. Nothing was changed.
    """
    pairs = match(opt, weights, tied, source)
    members = opt._flat()
    cast = {id(member.param): member for member in members if not member.kept}
    frozen = {id(param) for param in opt._frozen()}
    for value, key in pairs:
        if id(value) in cast:
            local(cast[id(value)].master).copy_(part_of(weights[key], value))
        else:
            given = part_of(weights[key], value).to(value.device)
            local(value).copy_(given.to(torch.bfloat16) if id(value) in frozen else given)
    _restart(opt)


def _restart(opt: FairCastOptimizer) -> None:
    """Forget moments, counts, accumulators and lags, and serve the masters for the first time."""
    members = opt._flat()
    for member in members:
        for key in [*wrapped_part(member.entry), ACCUMULATOR]:
            member.entry.pop(key, None)
        lags.drop(member.entry)
        if not member.kept:
            member.entry[COUNT].zero_()
    opt._shared.captured.update({member.name: member.entry for member in members})
    opt.state.clear()
    opt._shared.link.push(opt._members())
    serve(members, opt._shared.storage)
    lagging.prepare(members)
    opt._shared.watch.remember(members)
