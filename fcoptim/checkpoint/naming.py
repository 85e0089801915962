"""Under which names weights lie in a model folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Put into the names of inner modules; around a whole model they are taken off as modules.
_INNER = ("_orig_mod.", "_checkpoint_wrapped_module.")

Named = list[tuple[str, Any]]


def bare(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def entries(model: nn.Module) -> Named:
    """What ``state_dict()`` of the bare model holds, as the objects they are, by the names of the folder."""
    return [(file_name(name), value) for name, value in bare(model).state_dict(keep_vars=True).items()]


def file_name(name: str) -> str:
    """A state-dict name without the parts that wrappers of inner modules put into it."""
    for part in _INNER:
        name = name.replace(part, "")
    return name


def untied(model: nn.Module | None, named: Iterable[tuple[str, torch.Tensor]]) -> tuple[Named, dict[str, str]]:
    """Leave each tensor one name: the one that transformers keeps, else the first.

    Args:
        model: May say which of its names are ties.
        named: Names and tensors; tied ones are one object.

    Returns:
        Names and tensors, and a dict from the names left out to those kept.
    """
    said = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    kept: Named = []
    tied: dict[str, str] = {}
    for number, together in names.items():
        best = next((name for name in together if name not in said), together[0])
        kept.append((best, tensors[number]))
        tied.update({name: best for name in together if name != best})
    return kept, tied
