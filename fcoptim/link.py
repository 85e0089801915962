"""The wrapped optimizer: how it is made, and what passes to it before a step and back after it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .masters import GLOBAL, OWN_KEYS, Entry, Member, wrapped_part
from .naming import NamedGroup

OWN_OPTIONS = frozenset({"params", "param_names", "rounding", "seed", "lag"})

_GRAPH = (
    "it needs gradients with a graph to the weights it steps on, but the loss is computed on the served weights, not "
    "on the masters"
)
_REFUSED = {
    "Adahessian": _GRAPH,
    "AdaHessian": _GRAPH,
    "SophiaH": _GRAPH,
    "CPUOffloadOptimizer": "it keeps copies of the weights, which would be stepped instead of the masters",
}

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[..., torch.optim.Optimizer]


def make_wrapped(
    optimizer: OptimizerLike,
    groups: Sequence[NamedGroup],
    masters: dict[int, torch.Tensor],
    kwargs: dict[str, Any],
) -> torch.optim.Optimizer:
    """Build the wrapped optimizer on masters.

    Args:
        optimizer: A class or a callable that takes parameters or param groups.
        groups: The served parameters.
        masters: The master of each, by ``id`` of the served parameter.
        kwargs: Handed to ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is neither, or does not return a torch optimizer.
        ValueError: The optimizer is one that can't be wrapped; the message says why.
    """
    if not callable(optimizer):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer class, an instance, or a callable that takes parameters; "
            f"got {optimizer!r:.80}"
        )
    if isinstance(optimizer, type) and not issubclass(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer class; got {optimizer.__name__}")
    refuse_class(optimizer)
    params: Any = [{**group.options, "params": [masters[id(p)] for p in group.params]} for group in groups]
    if len(params) == 1 and not groups[0].options:
        params = params[0]["params"]
    made = optimizer(params, **kwargs)
    check_wrappable(made)
    return made


def refuse_class(optimizer: Any) -> None:
    """Refuse an optimizer class that is known not to work, before it is built.

    Raises:
        ValueError: It is one of those; the message says why.
    """
    reason = _REFUSED.get(getattr(optimizer, "__name__", ""))
    if reason is not None:
        raise ValueError(f"{optimizer.__name__} can't be wrapped: {reason}")
    if isinstance(optimizer, type):
        needed = [p.name for p in inspect.signature(optimizer).parameters.values() if p.default is p.empty]
        if {"optimizer", "base_optimizer"} & set(needed):
            raise ValueError(_nested(optimizer.__name__))
        if needed[:1] == ["model"]:
            raise ValueError(
                f"{optimizer.__name__} can't be wrapped: it takes a model, but is given masters, which are no module"
            )


def check_wrappable(made: Any) -> None:
    """Refuse an optimizer object that can't be wrapped.

    Raises:
        TypeError: It is no torch optimizer.
        ValueError: It holds another optimizer, is already wrapped, is differentiable, or keeps more than torch's state.
    """
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"the optimizer must be a torch.optim.Optimizer; got {type(made).__name__}")
    refuse_class(type(made))
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(made).values()):
        raise ValueError(_nested(type(made).__name__))
    beside = sorted(made.state_dict().keys() - {"state", "param_groups"})
    if beside:
        raise ValueError(
            f"{type(made).__name__} can't be wrapped: it keeps {', '.join(map(str, beside))} beside its state, which "
            "would be neither saved nor resumed"
        )
    hidden = [name for name, value in vars(made).items() if value is not made.state and _is_by_tensor(value)]
    if hidden:
        raise ValueError(
            f"{type(made).__name__} can't be wrapped: it keeps {', '.join(hidden)} by parameter outside its state, "
            "which would be neither saved nor resumed"
        )
    if any(group.get("differentiable") for group in made.param_groups):
        raise ValueError(
            f"{type(made).__name__} was built with differentiable=True, but a rounding has no gradient; leave it off"
        )


def _is_by_tensor(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value)


def _nested(name: str) -> str:
    return (
        f"{name} can't be wrapped: it holds a second optimizer, whose state would be neither saved nor resumed. "
        "Wrap the inner optimizer instead"
    )


class Link:
    """Passes options, parameters and state between our groups and the wrapped optimizer's.

    Attributes:
        wrapped: The wrapped optimizer. Its groups hold masters, its state is only valid during a step.
    """

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self.wrapped = wrapped
        self._seen: list[dict[str, Any]] = []
        self.remember()

    def remember(self) -> None:
        """Note the wrapped optimizer's options, to tell later what somebody else wrote into them."""
        self._seen = [_options(group) for group in self.wrapped.param_groups]

    def exchange_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Make both sides' options equal before a step.

        Ours win, except where the wrapped optimizer's were written since the last exchange and ours were not:
        a scheduler built on it before it was wrapped does that.
        """
        if len(groups) != len(self.wrapped.param_groups):
            raise RuntimeError(
                f"there are {len(groups)} param groups here but {len(self.wrapped.param_groups)} in "
                f"{type(self.wrapped).__name__}; add groups with add_param_group of FairCastOptimizer"
            )
        for group, inner, seen in zip(groups, self.wrapped.param_groups, self._seen):
            for key, value in _options(inner).items():
                ours_untouched = key not in group or _same(group[key], seen.get(key))
                if ours_untouched and not _same(value, seen.get(key)):
                    group[key] = value
            inner.update(_options(group))
        self.remember()

    def impose_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Make the wrapped optimizer's options ours, whatever was written into them."""
        for group, inner in zip(groups, self.wrapped.param_groups):
            inner.update(_options(group))
        self.remember()

    def return_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy back what a step wrote into the wrapped optimizer's options."""
        for group, inner in zip(groups, self.wrapped.param_groups):
            group.update(_options(inner))
        self.remember()

    def push(self, groups: Sequence[Sequence[Member]]) -> None:
        """Point the wrapped optimizer at the masters and state of these members, group by group."""
        state = self.wrapped.state
        state.clear()
        for members, inner in zip(groups, self.wrapped.param_groups):
            inner["params"][:] = [member.master for member in members]
            for member in members:
                part = wrapped_part(member.entry)
                if part:
                    state[member.master] = part
                state.update(member.entry.get(GLOBAL, {}))

    def pull(self, groups: Sequence[Sequence[Member]]) -> None:
        """Take the wrapped optimizer's state back into the members' entries."""
        state = self.wrapped.state
        members = [member for group in groups for member in group]
        for member in members:
            part: Entry = state.get(member.master) or {}
            for key in wrapped_part(member.entry).keys() - part.keys():
                del member.entry[key]
            clash = part.keys() & OWN_KEYS
            if clash:
                raise RuntimeError(
                    f"{type(self.wrapped).__name__} keeps state under {sorted(clash)}, names that fcoptim needs"
                )
            member.entry.update(part)
        loose = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        if loose and members:
            members[0].entry[GLOBAL] = loose

    def __getstate__(self) -> dict[str, Any]:
        """Keep every attribute of the wrapped optimizer; its own pickling drops all but state and groups."""
        attributes = {
            key: value for key, value in vars(self.wrapped).items() if key != "step" and not key.endswith("_hooks")
        }
        return {"class": type(self.wrapped), "attributes": attributes}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.wrapped = saved["class"].__new__(saved["class"])
        self.wrapped.__setstate__(saved["attributes"])
        self.remember()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OWN_OPTIONS}


def _same(a: Any, b: Any) -> bool:
    """Equal without asking a device: tensors are equal if they are the same object."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return bool(a == b)
