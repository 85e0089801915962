"""From a caller's arguments to named groups, masters and a wrapped optimizer; nothing of the model is changed here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from . import lag as lags
from .cast import get_rule
from .distributed.agreement import WEIGHTS, Group, bits_of, check_agreement
from .distributed.shards import is_sharded
from .link import Link, OptimizerLike, check_wrappable, make_wrapped
from .masters import Entry, check_convertible, new_entry, statistics_modules
from .naming import NamedGroup, Parameters, canonical_name, matches, name_by_model, named_groups

STORAGES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Plan:
    """What the constructor works from.

    Attributes:
        groups: Our param groups, with ``(name, parameter)`` pairs under ``"params"``.
        link: The wrapped optimizer, built on the masters.
        entries: State entries by canonical name; empty for parameters kept in fp32.
        kept: Canonical names of all parameters kept in fp32, frozen ones included.
    """

    groups: list[dict[str, Any]]
    link: Link
    entries: dict[str, Entry]
    kept: frozenset[str]


def check_options(rounding: str, seed: int, storage: str, on_nonfinite: str, allowed: Sequence[str]) -> None:
    """Check the constructor's plain options.

    Raises:
        ValueError: One has a value that is not offered.
        TypeError: The seed is no integer.
    """
    get_rule(rounding)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    if storage not in STORAGES:
        raise ValueError(f"storage must be 'bfloat16' or 'float32', got {storage!r}")
    if on_nonfinite not in allowed:
        raise ValueError(f"on_nonfinite must be one of {', '.join(map(repr, allowed))}, got {on_nonfinite!r}")


def choose_storage(model: nn.Module | None, groups: Iterable[NamedGroup], kept: frozenset[str], storage: str) -> str:
    """What the storage comes to where an engine has sharded parameters already, in a dtype that can't be changed.

    Args:
        model: The model, or None.
        groups: The parameters to train.
        kept: Names to serve in fp32.
        storage: What was asked for.

    Returns:
        ``"float32"`` where fp32 DTensors are found, else ``storage``.

    Raises:
        ValueError: A bf16 DTensor is to hold fp32.
    """
    named = [pair for group in groups for pair in zip(group.names, group.params)]
    if model is not None:
        named += [(canonical_name(name), param) for name, param in model.named_parameters()]
    found = {name: param.dtype for name, param in named if is_sharded(param) and param.is_floating_point()}
    for name, dtype in found.items():
        if dtype is torch.bfloat16 and (storage == "float32" or name in kept):
            what = "storage='float32'" if storage == "float32" else "keep_fp32"
            raise ValueError(
                f"parameter {name!r} is a bfloat16 DTensor, whose dtype can't be changed any more, but {what} asks for "
                "fp32; call model.float() before it is sharded"
            )
    return "float32" if any(dtype is torch.float32 for name, dtype in found.items() if name not in kept) else storage


def check_ranks(
    groups: Sequence[dict[str, Any]],
    masters: Sequence[torch.Tensor],
    wrapped: torch.optim.Optimizer,
    storage: str,
    group: Group,
) -> None:
    """Refuse to train where ranks would drift apart; see ``check_agreement``.

    Args:
        groups: Our param groups.
        masters: Their masters.
        wrapped: The wrapped optimizer.
        storage: The storage, as chosen.
        group: The ranks to compare with.
    """
    shapes = [(name, tuple(param.shape)) for own in groups for name, param in zip(own["param_names"], own["params"])]
    facts = {
        "another parameter list": shapes,
        "another rounding rule": [own["rounding"] for own in groups],
        "another seed": [own["seed"] for own in groups],
        "another lag": [own["lag"] for own in groups],
        "another storage": storage,
        "another optimizer": type(wrapped).__name__,
        "other options": [_comparable(own) for own in groups],
    }
    if group is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        facts[WEIGHTS] = bits_of(masters)
    check_agreement(facts, masters, group)


def _comparable(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options that say the same on every rank if they are the same."""
    plain = (bool, int, float, str, tuple, type(None))
    known = ("params", "param_names", "rounding", "seed", "lag")
    return {key: value for key, value in sorted(group.items()) if key not in known and isinstance(value, plain)}


def read_groups(parameters: Parameters, optimizer: OptimizerLike, kwargs: dict[str, Any]) -> list[NamedGroup]:
    """Find the parameters to train, in groups: the instance's, the class's own routing, or as they were given.

    Raises:
        ValueError: An instance comes with options, or was not built on these parameters.
    """
    model = parameters if isinstance(parameters, nn.Module) else None
    if isinstance(optimizer, torch.optim.Optimizer):
        if kwargs:
            raise ValueError(f"{sorted(kwargs)} can't be set on an optimizer that is already built; pass its class")
        groups = named_groups(optimizer.param_groups)
        if model is not None:
            name_by_model(groups, model)
        else:
            _name_by_parameters(groups, named_groups(parameters))
        return groups
    bound = optimizer.keywords if isinstance(optimizer, partial) else {}
    kind = optimizer.func if isinstance(optimizer, partial) else optimizer
    routing = getattr(kind, "param_groups", None) if isinstance(kind, type) else None
    if not callable(routing):
        return named_groups(parameters)
    groups = named_groups(routing(parameters, **{**bound, **kwargs}))
    if model is not None:
        name_by_model(groups, model)
    return groups


def _name_by_parameters(groups: Sequence[NamedGroup], given: Sequence[NamedGroup]) -> None:
    names = {id(p): name for group in given for name, p in zip(group.names, group.params)}
    held = {id(p) for group in groups for p in group.params}
    if names.keys() != held:
        raise ValueError("the optimizer instance was built on other parameters than those passed beside it")
    for group in groups:
        group.names[:] = [names[id(p)] for p in group.params]


def kept_names(
    model: nn.Module | None, groups: Iterable[NamedGroup], patterns: Sequence[str], bf16: bool
) -> frozenset[str]:
    """Names of the parameters to serve in fp32: those that match, and those beside fp32 running statistics.

    Raises:
        ValueError: A pattern matches no parameter.
    """
    names = [name for group in groups for name in group.names]
    if model is not None:
        names += [canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(f"keep_fp32 pattern {pattern!r} matches no parameter name; names look like {names[0]!r}")
    kept = {name for name in names if matches(name, patterns)}
    if bf16 and model is not None:
        kept |= {canonical_name(name) for name in statistics_modules(model)}
    return frozenset(kept)


def refuse_modules(model: nn.Module, bf16: bool) -> None:
    """Refuse models that break when their parameters change dtype and their buffers don't.

    Args:
        model: The model.
        bf16: Whether parameters get bf16 storage, else fp32.

    Raises:
        ValueError: A module computes with weights and buffers together, which would differ in dtype; or the model
            is under DDP already, whose buckets were made for fp32 gradients and would no longer reduce them.
    """
    for name, module in model.named_modules():
        if _is_fsdp1(module):
            raise ValueError(
                f"{name or 'the model'} is under FullyShardedDataParallel (FSDP1), which hides where a weight belongs; "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if bf16 and isinstance(module, DistributedDataParallel) and _trains_fp32(module):
            raise ValueError(
                "the model is under DistributedDataParallel already, with fp32 parameters; construct "
                "FairCastOptimizer first and DistributedDataParallel on its served_model then, or pass "
                "storage='float32'"
            )
        spectral = _spectral_buffer(module)
        if bf16 and spectral is not None and spectral.dtype is torch.float32:
            raise ValueError(
                f"{name or 'the model'} uses spectral_norm, which multiplies bf16 weights with its fp32 buffers and "
                "fails; pass storage='float32', where the weights keep fp32 storage and bf16 values"
            )
        statistics = module.running_mean if isinstance(module, nn.modules.batchnorm._NormBase) else None
        if not bf16 and any(b is not None and b.dtype is torch.bfloat16 for b in (spectral, statistics)):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has bf16 buffers that can't go with fp32 weights; "
                "with storage='float32' call model.float() first"
            )


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and whoever uses it has imported it
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _trains_fp32(model: nn.Module) -> bool:
    return any(param.dtype is torch.float32 for param in model.parameters() if param.requires_grad)


def _spectral_buffer(module: nn.Module) -> torch.Tensor | None:
    """A buffer that spectral_norm, old or new, multiplies with the module's weight, or None."""
    found = getattr(module, "_u", None) if isinstance(module, _SpectralNorm) else None
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            found = getattr(module, f"{hook.name}_u", None)
    return found


def make_plan(
    groups: list[NamedGroup],
    optimizer: OptimizerLike,
    kwargs: dict[str, Any],
    kept: frozenset[str],
    rounding: str,
    seed: int,
    lag: dict[str, Any] | None,
) -> Plan:
    """Make masters, wrap the optimizer around them, and write down our param groups.

    Args:
        groups: The parameters to train.
        optimizer: A class, a callable or an instance.
        kwargs: For the class or callable.
        kept: Names to serve in fp32.
        rounding: The rule of groups that don't choose one.
        seed: The seed of groups that don't choose one.
        lag: The lag of groups that don't choose one, as options.

    Raises:
        ValueError: The optimizer left parameters out, or mixed those of different rules in one group.
    """
    own: dict[str, dict[str, Any]] = {}
    entries: dict[str, Entry] = {}
    params: dict[str, torch.Tensor] = {}
    for group in groups:
        options = {
            "rounding": group.options.pop("rounding", rounding),
            "seed": group.options.pop("seed", seed),
            "lag": lags.as_options(group.options.pop("lag")) if "lag" in group.options else lag,
        }
        get_rule(options["rounding"])
        for name, param in zip(group.names, group.params):
            own[name], params[name] = options, param
            if name not in kept:
                check_convertible(name, param)
            entries[name] = {} if name in kept else new_entry(name, param, options["rounding"], options["seed"])
    masters = {id(params[name]): entry.get("master", params[name]) for name, entry in entries.items()}
    if isinstance(optimizer, torch.optim.Optimizer):
        wrapped = _take_over(optimizer, masters)
    else:
        wrapped = make_wrapped(optimizer, groups, masters, kwargs)
    names = {id(masters[id(param)]): name for name, param in params.items()}
    return Plan(_mirror(wrapped, names, params, own), Link(wrapped), entries, kept)


def _take_over(optimizer: torch.optim.Optimizer, masters: dict[int, torch.Tensor]) -> torch.optim.Optimizer:
    """Put masters in place of parameters in an optimizer that is already built; its state turns fp32."""
    check_wrappable(optimizer)
    for group in optimizer.param_groups:
        group["params"][:] = [masters[id(p)] for p in dict.fromkeys(group["params"])]
        group.pop("param_names", None)
    for param in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
        state = optimizer.state.pop(param)
        optimizer.state[masters[id(param)]] = {key: _widened(key, value) for key, value in state.items()}
    return optimizer


def _widened(key: str, value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floating and key != "step" else value


def _mirror(
    wrapped: torch.optim.Optimizer,
    names: dict[int, str],
    params: dict[str, torch.Tensor],
    own: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Our param groups: the wrapped optimizer's, over the served parameters, with rule, seed and lag."""
    mirrored = []
    left = set(params)
    for inner in wrapped.param_groups:
        if any(id(master) not in names for master in inner["params"]):
            raise ValueError(f"{type(wrapped).__name__} trains tensors it was not given; can't map them to parameters")
        members = [names[id(master)] for master in inner["params"]]
        left -= set(members)
        chosen = [own[name] for name in members]
        if any(options != chosen[0] for options in chosen):
            raise ValueError("the optimizer put parameters of different rounding, seed or lag into one param group")
        options = {key: value for key, value in inner.items() if key not in ("params", "param_names")}
        options.update(chosen[0] if chosen else {})
        # Names beside the pairs too: of an empty group torch would find none, and groups are named all or not at all.
        mirrored.append({**options, "param_names": members, "params": [(name, params[name]) for name in members]})
    if left:
        raise ValueError(
            f"the optimizer left out {len(left)} of the parameters it was given, for example {min(left)!r}; pass only "
            "those that it trains"
        )
    return mirrored


def plan_group(
    param_group: dict[str, Any],
    own: dict[str, Any],
    present: Sequence[dict[str, Any]],
    model: nn.Module | None,
    kept: frozenset[str],
) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]], dict[str, Entry]]:
    """Read one param group that is added to those present, and make its masters.

    Args:
        param_group: What the caller adds.
        own: Its rule, seed and lag.
        present: Our groups so far.
        model: The served model, for names.
        kept: Names to serve in fp32.

    Returns:
        The group's options for the wrapped optimizer, its ``(name, parameter)`` pairs, its state entries.

    Raises:
        ValueError: A parameter is trained already, or its name is taken.
    """
    if not isinstance(param_group, dict):
        raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
    get_rule(own["rounding"])
    group = named_groups([param_group], sum(len(g["params"]) for g in present))[0]
    if model is not None:
        name_by_model([group], model, strict=False)
    trained = {id(param) for other in present for param in other["params"]}
    names = {name for other in present for name in other["param_names"]}
    for name, param in zip(group.names, group.params):
        if id(param) in trained:
            raise ValueError(f"parameter {name!r} is trained already: some parameters appear in more than one group")
        if name in names:
            raise ValueError(f"another parameter is named {name!r}; pass (name, parameter) pairs with unique names")
        if name not in kept:
            check_convertible(name, param)
    pairs = list(zip(group.names, group.params))
    entries = {n: {} if n in kept else new_entry(n, p, own["rounding"], own["seed"]) for n, p in pairs}
    options = {key: value for key, value in group.options.items() if key not in own}
    return options, pairs, entries
