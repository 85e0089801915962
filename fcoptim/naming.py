"""Parameter names and parameter groups: from whatever a caller passes to named groups."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

Pair = tuple[str, torch.Tensor]
Parameters = nn.Module | Iterable[torch.Tensor] | Iterable[Pair] | Iterable[dict[str, Any]]


@dataclass
class NamedGroup:
    """Parameters with their names, and the options given with them.

    Attributes:
        names: Canonical names, one for each parameter.
        params: The parameters.
        options: What else the group's dict held.
    """

    names: list[str]
    params: list[torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def canonical_name(name: str) -> str:
    """Drop the prefixes that DDP, torch.compile and checkpoint wrappers put into parameter names.

    Args:
        name: For example ``"module._orig_mod.layers.0.weight"``.

    Returns:
        The name in the unwrapped model, for example ``"layers.0.weight"``. A submodule that the model itself
        calls ``module`` loses that part too; names stay unique unless two differ by nothing else.
    """
    parts = name.split(".")
    wrappers = {prefix[:-1] for prefix in _WRAPPER_PREFIXES}
    kept = [part for part in parts[:-1] if part not in wrappers]
    return ".".join([*kept, parts[-1]])


def is_positional(name: str) -> bool:
    """Tell a name made from a parameter's position from a name that was given."""
    return name.isdigit()


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name matches any of the fnmatch patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def named_groups(parameters: Parameters, first_position: int = 0) -> list[NamedGroup]:
    """Read a model, parameters, pairs or param groups into named groups.

    A model gives one group of its trainable parameters. A parameter listed twice is taken once, under its
    first name. Parameters without a name are called by their position.

    Args:
        parameters: As ``FairCastOptimizer`` takes them.
        first_position: The position that the first nameless parameter gets. Default 0.

    Raises:
        TypeError: Something in it is neither a parameter, a (name, parameter) pair, nor a group.
        ValueError: There is no parameter, one stands in two groups, or two share a name.
    """
    if isinstance(parameters, nn.Module):
        named = [(n, p) for n, p in parameters.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no parameter with requires_grad=True: there is nothing to train")
        entries: list[Any] = named
    elif isinstance(parameters, (torch.Tensor, str, Mapping)) or not isinstance(parameters, Iterable):
        raise TypeError(
            "pass a model, an iterable of parameters or of (name, parameter) pairs, or a list of param groups; "
            f"got {type(parameters).__name__}"
        )
    else:
        entries = list(parameters)
    if not entries:
        raise ValueError("got no parameters: the list (or generator, if it was used before) is empty")
    dicts: list[dict[str, Any]] = entries if isinstance(entries[0], dict) else [{"params": entries}]
    groups = []
    position = first_position
    for group in dicts:
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"every param group must be a dict with a 'params' entry; got {group!r:.100}")
        groups.append(_named_group(group, position))
        position += len(groups[-1].params)
    check_unique(groups)
    return groups


def _named_group(group: dict[str, Any], position: int) -> NamedGroup:
    """Read one param group; torch's own ``param_names`` entry counts as names."""
    params = group["params"]
    entries = [params] if isinstance(params, torch.Tensor) else list(params)
    given = group.get("param_names")
    if given is not None and len(given) == len(entries) and not any(isinstance(e, tuple) for e in entries):
        entries = list(zip(given, entries))
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    for entry in entries:
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"an optimizer takes tensors or (name, tensor) pairs; got {type(tensor).__name__} {tensor!r:.80}"
            )
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        names.append(canonical_name(name) if isinstance(name, str) else str(position + len(tensors)))
        tensors.append(tensor)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return NamedGroup(names, tensors, options)


def check_unique(groups: Sequence[NamedGroup]) -> None:
    """Refuse a parameter in two groups, and two parameters of one name (they would share their dither)."""
    owner: dict[int, int] = {}
    by_name: dict[str, torch.Tensor] = {}
    for number, group in enumerate(groups):
        for name, tensor in zip(group.names, group.params):
            if owner.setdefault(id(tensor), number) != number:
                raise ValueError(f"parameter {name!r} appears in more than one parameter group")
            if by_name.setdefault(name, tensor) is not tensor:
                raise ValueError(f"two different parameters are named {name!r}; names must be unique")


def name_by_model(groups: Sequence[NamedGroup], model: nn.Module, *, strict: bool = True) -> None:
    """Give the parameters of groups the names they have in a model, in place.

    Args:
        groups: What to name.
        model: Where to look.
        strict: Whether a parameter that is not the model's is an error; else it keeps its name.

    Raises:
        ValueError: A parameter is not the model's.
    """
    names = {id(p): canonical_name(n) for n, p in model.named_parameters()}
    for group in groups:
        for position, (name, tensor) in enumerate(zip(group.names, group.params)):
            if strict and id(tensor) not in names:
                raise ValueError(
                    f"parameter {name!r} of shape {tuple(tensor.shape)} does not belong to the model; build the "
                    "optimizer on model.parameters() of this very model"
                )
            group.names[position] = names.get(id(tensor), name)
    check_unique(groups)
