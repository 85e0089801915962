"""The model that weights are loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..optimizer import FairCastOptimizer
from . import naming
from .layout import CheckpointError


class Pair(NamedTuple):
    """A tensor of the model and the saved weight that belongs to it.

    Attributes:
        value: The model's.
        key: The name of the saved one.
    """

    value: torch.Tensor
    key: str


def named_values(opt: FairCastOptimizer) -> naming.Named:
    """All values of the model's state dict, and trained parameters that are not in it, by the folder's names."""
    model = opt._shared.model
    named = naming.entries(model) if model is not None else []
    present = {id(value) for _, value in named}
    return named + [(member.name, member.param) for member in opt._flat() if id(member.param) not in present]


def match(
    opt: FairCastOptimizer, weights: Mapping[str, torch.Tensor], tied: Mapping[str, str], source: object
) -> list[Pair]:
    """Find the saved weight of each tensor of the model; tensors with several names come once.

    Args:
        opt: The optimizer of the model.
        weights: Saved weights by name.
        tied: From names that were left out to those that stand for them.
        source: What the weights are from, for messages.

    Raises:
        CheckpointError: One is missing, left over, or of another shape.
    """
    names: dict[int, list[str]] = {}
    values: dict[int, torch.Tensor] = {}
    for name, value in named_values(opt):
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    pairs, used, missing = [], set(), []
    for number, together in names.items():
        keys = [key for name in together if (key := _key(name, weights, tied)) is not None]
        used.update(keys)
        if keys:
            pairs.append(Pair(values[number], keys[0]))
        else:
            missing.append(together[0])
    _refuse("it has no", missing, source)
    _refuse("the model has no", sorted(weights.keys() - used), source)
    for value, key in pairs:
        if weights[key].shape != value.shape:
            raise CheckpointError(
                f"{source} doesn't fit this model: {key!r} has shape {tuple(weights[key].shape)} in it, "
                f"{tuple(value.shape)} in the model"
            )
    return pairs


def _key(name: str, weights: Mapping[str, Any], tied: Mapping[str, str]) -> str | None:
    together = [name, tied.get(name), *(other for other, kept in tied.items() if kept in (name, tied.get(name)))]
    return next((key for key in together if key is not None and key in weights), None)


def _refuse(what: str, names: list[str], source: object) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"{source} belongs to another model: {what} {', '.join(map(repr, names[:3]))}{more}")
