"""Muon's options: checked once, then spread over param groups as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .coefficients import POLAR_EXPRESS, Coefficients, read_coefficients
from .orthogonalize import AUTO, DTYPES

MUON = "muon"
ADAMW = "adamw"
SCALES = ("match_rms_adamw", "spectral")
MATRICES = ("auto", "flatten", "stack")

Split = int | tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """What ``Muon`` and ``Muon.param_groups`` take; documented at ``Muon``."""

    lr: float | torch.Tensor = 1e-3
    adamw_lr: float | torch.Tensor | None = None
    weight_decay: float = 0.1
    adamw_weight_decay: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    orthogonalize: str = POLAR_EXPRESS
    steps: int | None = None
    coefficients: Sequence[object] | None = None
    dtype: str = AUTO
    scale: str = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False
    split: Mapping[str, Split] = field(default_factory=dict)
    muon: Sequence[str] | str = ()
    adamw: Sequence[str] | str = ()

    def __post_init__(self) -> None:
        if not isinstance(self.split, Mapping):
            raise TypeError(
                f"split must map name patterns to a number of parts, like {{'*qkv*': 3}}; got {self.split!r}"
            )
        for parts in self.split.values():
            check_split(parts)
        check_group({"algorithm": MUON, **self.muon_group()})
        check_group({"algorithm": ADAMW, **self.adamw_group()})

    def muon_group(self) -> dict[str, Any]:
        """Options of a group that Muon trains."""
        triples = read_coefficients(self.orthogonalize, self.steps, self.coefficients)
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "orthogonalize": self.orthogonalize,
            "steps": len(triples),
            "coefficients": None if self.coefficients is None else triples,
            "dtype": self.dtype,
            "scale": self.scale,
            "maximize": self.maximize,
            "split": 1,
            "matrices": "auto",
            "transposed": False,
        }

    def adamw_group(self) -> dict[str, Any]:
        """Options of a group that AdamW trains."""
        return {
            "lr": self.lr if self.adamw_lr is None else self.adamw_lr,
            "weight_decay": self.weight_decay if self.adamw_weight_decay is None else self.adamw_weight_decay,
            "betas": tuple(self.betas) if isinstance(self.betas, list) else self.betas,
            "eps": self.eps,
            "maximize": self.maximize,
        }

    def group(self, algorithm: str) -> dict[str, Any]:
        """Options of a new group, its algorithm among them."""
        chosen = self.adamw_group() if algorithm == ADAMW else self.muon_group()
        return {"algorithm": algorithm, **chosen}

    @property
    def muon_patterns(self) -> list[str]:
        """Name patterns that are Muon's whatever their module."""
        return [self.muon] if isinstance(self.muon, str) else list(self.muon)

    @property
    def adamw_patterns(self) -> list[str]:
        """Name patterns that are AdamW's whatever their module."""
        return [self.adamw] if isinstance(self.adamw, str) else list(self.adamw)


def group_coefficients(group: dict[str, Any]) -> Coefficients:
    """The triples that a Muon group iterates with."""
    return read_coefficients(group["orthogonalize"], group["steps"], group["coefficients"])


def check_group(group: dict[str, Any]) -> None:
    """Check a group's options.

    Raises:
        ValueError: One has a value that is not offered.
    """
    algorithm = group.get("algorithm")
    check_algorithm(algorithm)
    _check_lr(group["lr"])
    decay = group["weight_decay"]
    _check(_is_number(decay) and decay >= 0, "weight_decay must be a number of at least 0", decay)
    if algorithm == ADAMW:
        betas, eps = group["betas"], group["eps"]
        two = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(map(_is_number, betas))
        _check(two and all(0 <= beta < 1 for beta in betas), "betas must be two numbers in [0, 1)", betas)
        _check(_is_number(eps) and eps >= 0, "eps must be a number of at least 0", eps)
        return
    momentum = group["momentum"]
    _check(_is_number(momentum) and 0 <= momentum < 1, "momentum must be a number in [0, 1)", momentum)
    _check_name("dtype", group["dtype"], (AUTO, *DTYPES))
    _check_name("scale", group["scale"], SCALES)
    _check_name("matrices", group["matrices"], MATRICES)
    check_split(group["split"])
    group_coefficients(group)


def check_algorithm(name: Any) -> None:
    """Check the name of a group's algorithm.

    Raises:
        ValueError: It is not offered.
    """
    _check_name("algorithm", name, (MUON, ADAMW))


def check_split(parts: Any) -> None:
    """Check one value of ``split``.

    Raises:
        ValueError: It is neither a number of parts nor a sequence of their sizes.
    """
    sizes = tuple(parts) if isinstance(parts, (tuple, list)) else (parts,)
    fine = bool(sizes) and all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    _check(fine, "split must be a number of equal parts, or a list of their sizes in rows", parts)


def _check_lr(lr: Any) -> None:
    if isinstance(lr, torch.Tensor):
        _check(lr.numel() == 1, "lr as a tensor must have one element", tuple(lr.shape))
        if lr.device.type != "cpu":
            return  # its value is read at the step anyway
    _check(_is_number(lr) and lr >= 0, "lr must be a finite number of at least 0", lr)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and bool(torch.isfinite(value))
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_name(option: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _check(fine: bool, rule: str, value: Any) -> None:
    if not fine:
        raise ValueError(f"{rule}, got {value!r}")
