"""Set-ups that run but defeat the purpose: found before training starts, and explained."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..naming import canonical_name
from ..optimizer import FairCastOptimizer, unwrap


def find(optimizer: Any) -> FairCastOptimizer | None:
    """The FairCastOptimizer inside what a framework has put around it, or None."""
    try:
        return unwrap(optimizer)
    except TypeError:
        return None


def check_setup(model: nn.Module, optimizer: Any, *, autocast: torch.dtype | None = None) -> FairCastOptimizer:
    """Look for mistakes that let a run go on with weights that are not the fair cast of masters.

    Args:
        model: The model that is trained, as the framework holds it.
        optimizer: Its optimizer, also inside a framework's wrapper.
        autocast: The dtype that the framework's mixed precision computes in, or None.

    Returns:
        The FairCastOptimizer.

    Raises:
        ValueError: There is none, or it trains other parameters than the model's.

    Warns:
        UserWarning: Mixed precision rounds weights once more.
    """
    ours = find(optimizer)
    if ours is None:
        raise ValueError(
            f"the model is trained by {_inner(optimizer)}, not by a FairCastOptimizer: its weights are not the fair "
            "cast of masters, and under mixed precision each forward rounds them to nearest. Pass optimizers=(opt, None), "
            "or use FairCastMixin"
        )
    _check_parameters(model, ours)
    if autocast is torch.float16:
        warnings.warn(
            "mixed precision is float16, but served weights are bfloat16 values: those below 6.1e-5 lose bits in "
            "float16, and the rollout engine's policy is not the one that is trained. Use bf16=True",
            stacklevel=3,
        )
    if autocast is torch.bfloat16:
        _warn_of_kept(model, ours)
    return ours


def _inner(optimizer: Any) -> str:
    inner = getattr(optimizer, "optimizer", optimizer)
    return type(inner).__name__


def _check_parameters(model: nn.Module, ours: FairCastOptimizer) -> None:
    """Refuse an optimizer that trains other parameters than the model's trainable ones."""
    held = {id(p): p for group in ours.param_groups for p in group["params"]}
    present = {id(p) for p in model.parameters()}
    named = {canonical_name(n): p for n, p in model.named_parameters()}
    forgotten = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    strangers = [p for key, p in held.items() if key not in present]
    if forgotten or strangers:
        what = (
            f"{len(forgotten)} trainable parameters of the model (for example {forgotten[0]!r}) are not among its"
            if forgotten
            else f"{len(strangers)} of its parameters are not the model's, but"
        )
        raise ValueError(
            f"the FairCastOptimizer was built on other parameters than are trained: {what} {len(held)} parameters. "
            "Build it on the very model that the trainer trains; where the trainer makes that itself (a model given by "
            "name, adapters from peft_config), use FairCastMixin"
        )
    if not any(p.requires_grad for p in held.values()):
        raise ValueError("every parameter of the FairCastOptimizer is frozen (requires_grad=False): nothing is trained")


def _warn_of_kept(model: nn.Module, ours: FairCastOptimizer) -> None:
    """Warn of weights kept in fp32 that autocast would round to nearest."""
    kept = {id(m.param) for m in ours._flat() if m.kept}
    rounded = (nn.Linear, nn.modules.conv._ConvNd)
    names = [
        canonical_name(f"{prefix}.weight")
        for prefix, module in model.named_modules()
        if isinstance(module, rounded) and id(module.weight) in kept
    ]
    if names:
        warnings.warn(
            f"keep_fp32 keeps {len(names)} matrices in fp32 (for example {names[0]!r}), which bfloat16 autocast rounds "
            "to nearest at every forward: they lag as if there were no fair cast. Leave them out of keep_fp32",
            stacklevel=4,
        )
