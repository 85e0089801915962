"""Optimizers that a configuration file can name: torch's own signatures, with our options behind them."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, ClassVar

import torch
from torch import nn

from .muon import Muon
from .muon.options import ADAMW
from .naming import NamedGroup, Parameters, is_positional, named_groups
from .optimizer import FairCastOptimizer

_KEYWORDS = inspect.Parameter.KEYWORD_ONLY
_OWN = [p for p in inspect.signature(FairCastOptimizer).parameters.values() if p.kind is _KEYWORDS]


class _Configured(FairCastOptimizer):
    """Base of classes that know their wrapped optimizer; each gets the signature of that, and ours after it."""

    _wraps: ClassVar[type[torch.optim.Optimizer]]
    _extra: ClassVar[tuple[inspect.Parameter, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        theirs = list(inspect.signature(cls._wraps).parameters.values())
        cls.__signature__ = inspect.Signature([*theirs, *cls._extra, *_OWN])  # type: ignore[attr-defined]

    def __init__(self, params: Parameters, *args: Any, **kwargs: Any) -> None:
        own = {p.name: kwargs.pop(p.name) for p in _OWN if p.name in kwargs}
        bound = inspect.signature(self._wraps).bind(params, *args, **kwargs)
        options = {name: value for name, value in bound.arguments.items() if name != "params"}
        if "betas" in options:
            options["betas"] = tuple(options["betas"])  # a configuration file gives a list, a state dict keeps tuples
        super().__init__(params, self._wraps, **own, **options)


class FairCastAdamW(_Configured):
    """``FairCastOptimizer`` around ``torch.optim.AdamW``, for frameworks that build an optimizer from its name.

    They pass the model's parameters, so there is no ``served_model``, and names are positions unless
    ``(name, parameter)`` pairs are passed. A model is taken too.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, param groups, or a model.
        *args: As ``torch.optim.AdamW`` takes them; ``betas`` may be a list.
        **kwargs: The same by name, and ``rounding``, ``lag`` (also as a dict, ``{"kind": "ema", "steps": 100}``),
            ``seed``, ``storage``, ``keep_fp32``, ``on_nonfinite`` and ``process_group`` of ``FairCastOptimizer``.

    Raises:
        ValueError: As ``FairCastOptimizer`` and ``torch.optim.AdamW``.
        TypeError: An option that neither of them has.
    """

    _wraps = torch.optim.AdamW


class FairCastSGD(_Configured):
    """``FairCastOptimizer`` around ``torch.optim.SGD``, for frameworks that build an optimizer from its name.

    Args:
        params: Parameters, ``(name, parameter)`` pairs, param groups, or a model.
        *args: As ``torch.optim.SGD`` takes them.
        **kwargs: The same by name, and ``FairCastOptimizer``'s options, as in ``FairCastAdamW``.

    Raises:
        ValueError: As ``FairCastOptimizer`` and ``torch.optim.SGD``.
        TypeError: An option that neither of them has.
    """

    _wraps = torch.optim.SGD


class FairCastMuon(_Configured):
    """``FairCastOptimizer`` around fcoptim's ``Muon``, for frameworks that build an optimizer from its name.

    Which parameters are hidden matrices is read from a model's modules. Parameters without a model all go to Muon if
    they have two dimensions; ``vocab_size`` takes embedding and head out by their shape, ``adamw=`` by their names.

    Args:
        params: A model, ``(name, parameter)`` pairs, param groups, or parameters.
        *args: As ``fcoptim.Muon`` takes them.
        vocab_size: Matrices with this many rows or columns are trained by AdamW. Not with a model. Default None.
        **kwargs: Options of ``fcoptim.Muon`` by name, and ``FairCastOptimizer``'s, as in ``FairCastAdamW``.

    Raises:
        ValueError: As ``FairCastOptimizer`` and ``fcoptim.Muon``; or no matrix has ``vocab_size`` rows or columns.
        TypeError: An option that neither of them has.
    """

    _wraps = Muon
    _extra = (inspect.Parameter("vocab_size", _KEYWORDS, default=None, annotation="int | None"),)

    def __init__(self, params: Parameters, *args: Any, vocab_size: int | None = None, **kwargs: Any) -> None:
        if isinstance(params, nn.Module):
            if vocab_size is not None:
                raise ValueError("vocab_size is for parameters without a model; its modules say more, leave it out")
            super().__init__(params, *args, **kwargs)
            return
        groups = named_groups(params)
        tables = [] if vocab_size is None else _take_tables(groups, vocab_size)
        if not tables and not kwargs.get("adamw") and any("algorithm" not in g.options for g in groups):
            warnings.warn(_ALL_TO_MUON, stacklevel=2)
        super().__init__([_as_group(group) for group in groups] + tables, *args, **kwargs)


_ALL_TO_MUON = (
    "FairCastMuon was given parameters without a model, so the embedding and the output head can't be told from hidden "
    "matrices and are trained by Muon too. Pass vocab_size=, adamw= patterns with (name, parameter) pairs, or the model"
)


def _take_tables(groups: list[NamedGroup], vocab_size: int) -> list[dict[str, Any]]:
    """Take the matrices with so many rows or columns out of groups, into groups for AdamW."""
    tables = []
    for group in groups:
        is_table = [param.ndim == 2 and vocab_size in param.shape for param in group.params]
        if "algorithm" not in group.options and any(is_table):
            taken = NamedGroup(*_chosen(group, is_table), {**group.options, "algorithm": ADAMW})
            tables.append(_as_group(taken))
            group.names, group.params = _chosen(group, [not chosen for chosen in is_table])
    if not tables:
        raise ValueError(f"vocab_size={vocab_size}, but no matrix has that many rows or columns")
    groups[:] = [group for group in groups if group.params]
    return tables


def _chosen(group: NamedGroup, mask: list[bool]) -> tuple[list[str], list[torch.Tensor]]:
    names = [name for name, taken in zip(group.names, mask) if taken]
    return names, [param for param, taken in zip(group.params, mask) if taken]


def _as_group(group: NamedGroup) -> dict[str, Any]:
    """A param group, with names where they are more than positions."""
    pairs: list[Any] = [p if is_positional(name) else (name, p) for name, p in zip(group.names, group.params)]
    return {**group.options, "params": pairs}
