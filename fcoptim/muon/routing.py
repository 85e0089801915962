"""Which parameters are hidden matrices, for Muon, and which are AdamW's: from a model, or from bare parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..naming import canonical_name, matches
from .options import ADAMW, MUON, Options, Split

# Names of modules at the top of a model that map hidden states to its output. A number in the path before them
# means that they stand inside a repeated block, where "output" is a hidden layer.
_HEADS = frozenset(
    {"lm_head", "head", "heads", "output", "output_layer", "out_head", "embed_out", "unembed", "classifier", "score"}
    | {"fc", "logits", "cls", "qa_outputs", "v_head", "value_head", "reward_head", "policy_head", "prediction_head"}
)
# What a bare nn.Parameter is called when it is a table of vectors or an elementwise gain.
_VECTORS = ("token", "bias", "scale", "gamma", "_log")


@dataclass
class _Owned:
    """A parameter with all names and modules it stands under; more than one if it is tied."""

    param: torch.Tensor
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)


@dataclass(frozen=True)
class _Route:
    """The options by which parameters are put into groups."""

    algorithm: str
    split: Split = 1
    matrices: str = "auto"
    transposed: bool = False

    def options(self) -> dict[str, Any]:
        if self.algorithm == ADAMW:
            return {}
        return {"split": self.split, "matrices": self.matrices, "transposed": self.transposed}


def model_param_groups(model: Any, lr: float | torch.Tensor = 1e-3, **options: Any) -> list[dict[str, Any]]:
    """Put a model's trainable parameters into param groups for ``Muon``, by module type and name.

    Muon gets the weights of linear and convolution layers and other matrices and stacks of matrices. AdamW gets:

    - vectors: biases, norms, anything with less than two dimensions or a side of 1;
    - embeddings: by module type, or where a part of the name contains "embed" or is "wte" or "wpe";
    - the output head: what shares its weight with an embedding, what ``get_output_embeddings()`` returns, a
      module called "lm_head", "head", "classifier" and the like outside repeated blocks, or, where none of
      these is found, the last linear layer if it is outside repeated blocks;
    - parameters of norm layers, and bare parameters called "...token", "pos...", "...bias", "...scale", "..._log".

    Convolutions are flattened to (out, rest); transformers' ``Conv1D``, which stores (in, out), is transposed.

    Args:
        model: The model. Parameters, ``(name, parameter)`` pairs and groups are taken too: without modules to go by,
            all with two and more dimensions are Muon's unless a pattern says otherwise.
        lr: Learning rate of Muon's groups.
        **options: The other keyword arguments of ``Muon``; ``muon=`` and ``adamw=`` patterns override the rules
            above, ``split=`` marks fused matrices.

    Returns:
        Groups with ``(name, parameter)`` pairs and all options, Muon's first. Either algorithm's may be absent.

    Raises:
        ValueError: Nothing is trainable, a pattern matches nothing or contradicts another, or asks for Muon on a
            vector.
    """
    chosen = Options(lr=lr, **options)
    if not isinstance(model, nn.Module):
        return route_given(model, chosen)
    owned = _owned(model)
    if not owned:
        raise ValueError("the model has no parameter with requires_grad=True: there is nothing to train")
    _check_patterns(chosen, [name for item in owned for name in item.names])
    heads = _heads(model, owned)
    routes = [(item.names[0], item.param, _route_owned(item, heads, chosen)) for item in owned]
    _check_splits(chosen, [name for name, _, route in routes if route.algorithm == MUON])
    return _group(routes, chosen)


def route_given(params: Any, options: Options) -> list[dict[str, Any]]:
    """Turn what an optimizer's constructor is given into complete param groups.

    Groups that name their algorithm are completed; of the others, tensors with two and more dimensions go to
    Muon and the rest to AdamW, in groups of their own, unless a pattern matches their name.

    Args:
        params: Tensors, ``(name, tensor)`` pairs, or groups of them; or a model, which is routed by its modules.
        options: Options that groups do not set themselves.

    Raises:
        TypeError: A single tensor, or something else that is no parameter.
        ValueError: There is none, or a pattern can't be applied.
    """
    if isinstance(params, nn.Module):
        return model_param_groups(params, **vars(options))
    if isinstance(params, (torch.Tensor, str, Mapping)) or not isinstance(params, Iterable):
        what = "a single tensor" if isinstance(params, torch.Tensor) else type(params).__name__
        raise TypeError(f"params must be a model, or a list of tensors, (name, tensor) pairs or dicts; got {what}")
    entries = list(params)
    if not entries:
        raise ValueError("Muon got an empty parameter list (or a generator that was used before)")
    groups: list[dict[str, Any]] = entries if isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"every param group must be a dict with a 'params' entry; got {group!r:.100}")
    if all("algorithm" in group for group in groups):
        return [{**options.group(group["algorithm"]), **group} for group in groups]
    named = [name for group in groups for name, _ in _pairs(group) if name is not None]
    if not named and (options.split or options.muon_patterns or options.adamw_patterns):
        raise ValueError(
            "split, muon and adamw go by parameter names, but the parameters have none: pass a model, or "
            "(name, parameter) pairs, or set 'split' and 'algorithm' in a param group"
        )
    _check_patterns(options, named)
    routed: list[dict[str, Any]] = []
    for group in groups:
        if "algorithm" in group:
            routed.append({**options.group(group["algorithm"]), **group})
            continue
        routes = [(name, tensor, _route_bare(name, tensor, options)) for name, tensor in _pairs(group)]
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        routed += [{**complete, **own} for complete in _group(routes, options)]
    return routed


def _pairs(group: dict[str, Any]) -> list[tuple[str | None, torch.Tensor]]:
    """A group's parameters with their names, or None where they have no names."""
    given = group["params"]
    if isinstance(given, set):
        raise TypeError("parameters must have an order that stays; pass a list in place of a set")
    entries = [given] if isinstance(given, torch.Tensor) else list(given)
    group["params"] = entries  # a generator can be read once only
    pairs: list[tuple[str | None, torch.Tensor]] = []
    for entry in entries:
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Muon takes tensors or (name, tensor) pairs; got {type(tensor).__name__} {tensor!r:.80}")
        pairs.append((name, tensor))
    return pairs


def _group(routes: Iterable[tuple[str | None, torch.Tensor, _Route]], options: Options) -> list[dict[str, Any]]:
    """One group for each route, Muon's first, parameters in the order given."""
    members: dict[_Route, list[Any]] = {}
    for name, tensor, route in routes:
        members.setdefault(route, []).append(tensor if name is None else (name, tensor))
    order = sorted(members, key=lambda route: route.algorithm != MUON)
    return [{**options.group(r.algorithm), **r.options(), "params": members[r]} for r in order]


def _owned(model: nn.Module) -> list[_Owned]:
    """Trainable parameters with all the places where they are used, in the order of registration."""
    found: dict[int, _Owned] = {}
    for prefix, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.requires_grad:
                item = found.setdefault(id(param), _Owned(param))
                item.names.append(canonical_name(f"{prefix}.{leaf}" if prefix else leaf))
                item.modules.append(module)
    return list(found.values())


def _route_owned(item: _Owned, heads: set[int], options: Options) -> _Route:
    param = item.param
    flat = any(isinstance(module, nn.modules.conv._ConvNd) for module in item.modules)
    matrices = "flatten" if flat else "auto"
    # transformers' Conv1D, told by its name so that transformers need not be imported, is a linear layer.
    transposed = any(type(module).__name__ == "Conv1D" and param.ndim == 2 for module in item.modules)
    forced = _forced(item.names, param, options)
    if forced is None:
        vector = param.ndim < 2 or min(matrix_shape(param.shape, matrices)) == 1
        forced = ADAMW if vector or any(map(_is_table, item.names, item.modules)) else MUON
        if any(id(module) in heads for module in item.modules):
            forced = ADAMW
    if forced == ADAMW:
        return _Route(ADAMW)
    return _Route(MUON, _split_of(item.names, options), matrices, transposed)


def _route_bare(name: str | None, tensor: torch.Tensor, options: Options) -> _Route:
    names = [] if name is None else [canonical_name(name)]
    forced = _forced(names, tensor, options) or (MUON if tensor.ndim >= 2 else ADAMW)
    return _Route(MUON, _split_of(names, options)) if forced == MUON else _Route(ADAMW)


def matrix_shape(shape: Sequence[int], matrices: str) -> tuple[int, int]:
    """Rows and columns of the matrix, or of each matrix of a stack, that a tensor of two or more dimensions holds.

    Args:
        shape: The tensor's shape.
        matrices: ``"flatten"`` (first dimension against the rest), ``"stack"`` (leading dimensions are a batch) or
            ``"auto"`` (three dimensions are a stack, others are flattened).
    """
    if is_stack(len(shape), matrices):
        return shape[-2], shape[-1]
    rest = 1
    for size in shape[1:]:
        rest *= size
    return shape[0], rest


def is_stack(ndim: int, matrices: str) -> bool:
    """Whether a tensor of so many dimensions is a batch of matrices."""
    return ndim > 2 and (matrices == "stack" or (matrices == "auto" and ndim == 3))


def _is_table(name: str, module: nn.Module) -> bool:
    """Whether a parameter is no map between hidden states: an embedding, a norm, a bare table or gain."""
    kind = type(module).__name__.lower()
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "embedding" in kind or "norm" in kind:
        return True
    parts = name.lower().split(".")
    if any("embed" in part or part in ("wte", "wpe") for part in parts):
        return True
    leaf = parts[-1]
    return leaf.startswith("pos") or any(word in leaf for word in _VECTORS)


def _heads(model: nn.Module, owned: Sequence[_Owned]) -> set[int]:
    """The modules that map hidden states to the model's output, by ``id``."""
    tied = [m for item in owned if len(item.modules) > 1 for m in item.modules]
    heads = {id(module) for module in tied if isinstance(module, nn.Linear)} if _has_embedding(tied) else set()
    getter = getattr(model, "get_output_embeddings", None)
    if callable(getter):
        with suppress(NotImplementedError, AttributeError):  # transformers' models without a head raise either
            heads.add(id(getter()))
    last: tuple[str, nn.Module] | None = None
    for name, module in model.named_modules():
        parts = canonical_name(f"{name}.weight").split(".")[:-1]
        outer = parts[: next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))]
        if any(part in _HEADS for part in outer):
            heads.update(id(inner) for inner in module.modules())
        if isinstance(module, nn.Linear):
            last = name, module
    heads.discard(id(None))
    if not heads and last is not None and last[0] and not any(part.isdigit() for part in last[0].split(".")[:-1]):
        heads.add(id(last[1]))
    return heads


def _has_embedding(modules: Iterable[nn.Module]) -> bool:
    return any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules)


def _forced(names: Sequence[str], param: torch.Tensor, options: Options) -> str | None:
    """The algorithm that the patterns ask for, if any."""
    to_muon = any(matches(name, options.muon_patterns) for name in names)
    to_adamw = any(matches(name, options.adamw_patterns) for name in names)
    if to_muon and to_adamw:
        raise ValueError(f"parameter {names[0]!r} matches a pattern of muon= and one of adamw=")
    if to_muon and param.ndim < 2:
        raise ValueError(
            f"muon= matches {names[0]!r}, a vector of shape {tuple(param.shape)}, which is no matrix; narrow the "
            "pattern"
        )
    return MUON if to_muon else ADAMW if to_adamw else None


def _split_of(names: Sequence[str], options: Options) -> Split:
    for pattern, parts in options.split.items():
        if any(matches(name, [pattern]) for name in names):
            return parts if isinstance(parts, int) else tuple(parts)
    return 1


def _check_patterns(options: Options, names: Sequence[str]) -> None:
    given = {"muon": options.muon_patterns, "adamw": options.adamw_patterns, "split": list(options.split)}
    for option, patterns in given.items():
        for pattern in patterns:
            if not any(matches(canonical_name(name), [pattern]) for name in names):
                example = f"; names look like {names[0]!r}" if names else ""
                raise ValueError(f"{option} pattern {pattern!r} matches no parameter{example}")


def _check_splits(options: Options, muon_names: Sequence[str]) -> None:
    for pattern in options.split:
        if not any(matches(name, [pattern]) for name in muon_names):
            raise ValueError(f"split pattern {pattern!r} matches only parameters that AdamW trains; see muon=")
