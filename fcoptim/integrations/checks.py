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
            "cast of masters, and under mixed precision each forward rounds them to nearest. Pass "
            "optimizers=(opt, None), or use FairCastMixin"
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
    """Refuse an optimizer that trains other parameters than the model's trainable ones; warn if it leaves some out."""
    held = {id(p) for group in ours.param_groups for p in group["params"]}
    present = {id(p) for p in model.parameters()}
    trainable = [(canonical_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    left_out = [name for name, p in trainable if id(p) not in held]
    if not trainable:
        raise ValueError("every parameter of the model is frozen (requires_grad=False): nothing is trained")
    if held - present or len(left_out) == len(trainable):
        raise ValueError(
            f"the FairCastOptimizer was built on other parameters than are trained: {len(held - present)} of its "
            f"{len(held)} are not the model's, and {len(left_out)} trainable ones of the model (for example "
            f"{(left_out or [trainable[0][0]])[0]!r}) are not its own. Build it on the very model that the trainer "
            "trains; where the trainer makes that itself (a model given by name, adapters from peft_config), use "
            "FairCastMixin"
        )
    if left_out:
        warnings.warn(
            f"{len(left_out)} trainable parameters of the model (for example {left_out[0]!r}) are not in the "
            "FairCastOptimizer: they are not trained. Freeze them with requires_grad_(False), or pass them to it",
            stacklevel=4,
        )


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
