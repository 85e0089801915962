"""Muon: orthogonalised momentum for hidden matrices, AdamW for the rest, in one torch optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .coefficients import POLAR_EXPRESS
from .options import ADAMW, MUON, Options, Split, check_algorithm, check_group
from .orthogonalize import AUTO
from .routing import model_param_groups, route_given
from .update import adamw_step, check_gradients, muon_step, split_sizes


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for everything else: one optimizer, one scheduler, one state dict.

    Each matrix moves against the orthogonalised momentum of its gradient (Jordan et al., "Muon: An optimizer for
    hidden layers in neural networks", 2024), with decoupled weight decay::

        B <- momentum B + (1 - momentum) G
        U <- (1 - momentum) G + momentum B      (nesterov; else U = B)
        W <- (1 - lr weight_decay) W - lr scale orthogonalize(U)

    Which parameters are hidden matrices is read from a model's modules by ``Muon.param_groups(model, ...)``; the
    groups carry ``"algorithm"``: ``"muon"`` or ``"adamw"``. In bare parameters all with two and more dimensions
    go to Muon, so embeddings and heads too. Parameters without a gradient are left alone.

    Args:
        params: Groups from ``Muon.param_groups``, a model (routed the same way), tensors, ``(name, tensor)``
            pairs, or groups of them. A group may set every option, and ``"algorithm"``.
        lr: Learning rate. With the default scale, start from AdamW's. Default 1e-3. A number or a tensor.
        adamw_lr: Learning rate of AdamW's groups. Default: ``lr``.
        weight_decay: Decoupled weight decay, times the learning rate at each step. Default 0.1.
        adamw_weight_decay: That of AdamW's groups. Default: ``weight_decay``.
        momentum: Decay of the momentum, in [0, 1). Default 0.95.
        nesterov: Whether the gradient is mixed in once more. Default True.
        orthogonalize: ``"polar_express"`` (default; arXiv 2505.16932) or ``"newton_schulz"`` (Jordan et al.).
        steps: Steps of the orthogonalisation. Default 5.
        coefficients: A triple (a, b, c), or one for each step, in place of a named method.
        dtype: ``"bfloat16"`` or ``"float32"``, in which matrices are orthogonalised, or ``"auto"`` (default): fp32 on
            CPUs that have no fast bf16 products, else bf16.
        scale: ``"match_rms_adamw"`` (default): 0.2 sqrt(max(rows, cols)), updates as large as AdamW's usual ones
            (arXiv 2502.16982); or ``"spectral"``: sqrt(max(1, rows / cols)).
        betas: AdamW's decay rates. Default (0.9, 0.999).
        eps: AdamW's epsilon. Default 1e-8.
        maximize: Whether to go up instead of down. Default False.
        split: By name pattern (fnmatch), into how many equal blocks of output rows a fused matrix is cut, or their
            sizes: ``{"*qkv*": 3}``. Each block is orthogonalised and scaled as a matrix of its own.
        muon: Name patterns of parameters that Muon trains whatever their module.
        adamw: Name patterns of parameters that AdamW trains whatever their module.

    Raises:
        ValueError: An option, a group or a parameter that can't be used; the message says what to do.
        TypeError: Likewise for types.
    """

    # On the class, the function that makes groups from a model; on an instance torch sets the list of groups.
    param_groups: Any = staticmethod(model_param_groups)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        *,
        adamw_lr: float | torch.Tensor | None = None,
        weight_decay: float = 0.1,
        adamw_weight_decay: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        orthogonalize: str = POLAR_EXPRESS,
        steps: int | None = None,
        coefficients: Sequence[object] | None = None,
        dtype: str = AUTO,
        scale: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        split: Mapping[str, Split] | None = None,
        muon: Sequence[str] | str = (),
        adamw: Sequence[str] | str = (),
    ) -> None:
        self._options = Options(
            lr=lr,
            adamw_lr=adamw_lr,
            weight_decay=weight_decay,
            adamw_weight_decay=adamw_weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            orthogonalize=orthogonalize,
            steps=steps,
            coefficients=coefficients,
            dtype=dtype,
            scale=scale,
            betas=betas,
            eps=eps,
            maximize=maximize,
            split={} if split is None else split,
            muon=muon,
            adamw=adamw,
        )
        super().__init__(route_given(params, self._options), self._options.muon_group())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train.

        Args:
            param_group: ``"params"`` and options. Without ``"algorithm"`` tensors of two and more dimensions go to
                Muon and the others to AdamW; a group that mixes them is added as two.

        Raises:
            ValueError: An option that is not offered, a vector for Muon, rows that can't be split as asked.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        plain = Options(**{**vars(self._options), "split": {}, "muon": (), "adamw": ()})
        added = [param_group] if "algorithm" in param_group else route_given([param_group], plain)
        ready = []
        for group in added:
            check_algorithm(group["algorithm"])
            complete = {**plain.group(group["algorithm"]), **group, "params": _listed(group["params"])}
            check_group(complete)
            for param in complete["params"]:
                _check_param(param[1] if isinstance(param, tuple) else param, complete)
            ready.append(complete)
        for complete in ready:
            super().add_param_group(complete)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: A gradient is sparse or complex; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for group, params in work:
            check_gradients(params, group)
        for group, params in work:
            if params:
                (adamw_step if group["algorithm"] == ADAMW else muon_step)(group, params, self.state)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state.get("param_groups", []):
            if "algorithm" not in group:
                raise ValueError(
                    "this state dict is not one of fcoptim.Muon: a param group has no 'algorithm'. Start with fresh "
                    "state, or set 'algorithm' to 'muon' or 'adamw' in each of its param groups"
                )
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self._options.group(group["algorithm"]).items():
                group.setdefault(key, value)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            total = sum(param.numel() for param in group["params"])
            lines.append(
                f"Parameter Group {number}: {group['algorithm']}, {len(group['params'])} parameters, {total:,} values"
            )
            keys = self._options.group(group["algorithm"]).keys() - {"algorithm"}
            lines.append("    " + ", ".join(f"{key}={group[key]!r}" for key in sorted(keys)))
            lines += [f"    {line}" for line in _summary(group)]
        return "\n".join([*lines, ")"])


def _listed(params: Any) -> Any:
    """Parameters as a list; a set stays one, for torch to refuse."""
    return [params] if isinstance(params, torch.Tensor) else params if isinstance(params, set) else list(params)


def _check_param(param: Any, group: dict[str, Any]) -> None:
    """Refuse a parameter that its group's algorithm can't train; what is no tensor is torch's to refuse."""
    if not isinstance(param, torch.Tensor):
        return
    shape = tuple(param.shape)
    if param.is_complex():
        raise ValueError(f"Muon does not support complex parameters (shape {shape}, {param.dtype})")
    if group["algorithm"] == MUON:
        if param.ndim < 2:
            raise ValueError(
                f"a parameter of shape {shape} is no matrix; put it into a group with 'algorithm': 'adamw'"
            )
        split_sizes(shape, group)


def _summary(group: dict[str, Any]) -> list[str]:
    """A group's parameters, those that differ by a number in their name or not at all in one line."""
    names = group.get("param_names") or [""] * len(group["params"])
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, param in zip(names, group["params"]):
        kind = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), tuple(param.shape))
        counts[kind] = counts.get(kind, 0) + 1
    return [
        f"{name or 'unnamed'} {' x '.join(map(str, shape)) or 'scalar'}" + (f", {count} of them" if count > 1 else "")
        for (name, shape), count in counts.items()
    ]
