"""One step: gradients to the masters, the wrapped optimizer's own step, and the cast of what moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import gradients, lagging
from .distributed.shards import mark_of
from .link import Link
from .masters import Changes, Member

Closure = Callable[[], Any]


@dataclass
class Outcome:
    """What a step did.

    Attributes:
        loss: What the closure or the wrapped optimizer returned.
        stepped: Whether anything was stepped at all.
        nonfinite: Names of parameters for whose gradients the step was left out.
        cast: The members that were cast.
        changed: How many served values that changed, by parameter.
    """

    loss: Any = None
    stepped: bool = False
    nonfinite: Sequence[str] = ()
    cast: Sequence[Member] = ()
    changed: Changes | None = None


class _Abandoned(Exception):
    """Raised inside a step that is to change nothing."""

    def __init__(self, loss: Any, nonfinite: Sequence[str] = ()) -> None:
        super().__init__("nothing to step")
        self.loss = loss
        self.nonfinite = nonfinite


class _Evaluation:
    """The user's closure as the wrapped optimizer calls it: on served weights that show its trial masters."""

    def __init__(self, closure: Closure | None, members: Sequence[Member], check_finite: bool, idle: bool) -> None:
        self.closure = closure
        self.members = members
        self.check_finite = check_finite
        self.idle = idle
        self.trials = lagging.Trials()
        self.moving: dict[int, Member] = {}
        self.evaluated = False
        self._before = [mark_of(member.master) for member in members] if closure is not None else []

    def __call__(self) -> Any:
        loss = None
        if self.closure is not None:
            if not self.evaluated:
                self._note_early()
            if self.moving:
                self.trials.cast(self.moving.values())
            with torch.enable_grad():
                loss = self.closure()
        moving = gradients.hand_over(self.members)
        if not self.evaluated:
            self._admit(moving, loss)
        self.evaluated = True
        self.moving.update({id(member.param): member for member in moving})
        return loss

    def _note_early(self) -> None:
        """Find masters that moved before the first evaluation, as schedule-free optimizers move them."""
        pairs = zip(self.members, self._before)
        early = [member for member, mark in pairs if mark_of(member.master) != mark]
        self.moving.update({id(member.param): member for member in early})

    def _admit(self, moving: Sequence[Member], loss: Any) -> None:
        """Stop before anything has changed if there is no gradient, or one that must not be used."""
        names = gradients.nonfinite(moving) if self.check_finite else []
        if self.moving and names:
            raise RuntimeError(
                f"gradients of {', '.join(names[:3])} are not finite, but the optimizer moved the masters before it "
                'asked for them, so on_nonfinite can\'t leave the step out; load a checkpoint, or use "allow"'
            )
        if names or not (moving or self.moving):
            raise _Abandoned(loss, names)
        if not self.idle:
            lagging.check_pull(moving)
            lagging.prepare(moving)


def run_step(link: Link, groups: Sequence[Sequence[Member]], closure: Closure | None, check_finite: bool) -> Outcome:
    """Run one step of the wrapped optimizer on the masters and cast those that moved.

    Args:
        link: The wrapped optimizer, its options already exchanged.
        groups: All members, group by group.
        closure: Re-evaluates the loss on the served weights, or None.
        check_finite: Whether to leave the step out if a gradient is infinite or NaN.

    Returns:
        What was done. Where ``stepped`` is False, nothing was changed.
    """
    members = [member for group in groups for member in group]
    link.push(groups)
    evaluation = _Evaluation(closure, members, check_finite, every_lr_is_zero(link.wrapped))
    try:
        if closure is None:
            evaluation()
            loss = link.wrapped.step()
        else:
            loss = link.wrapped.step(evaluation)
    except _Abandoned as stop:
        return Outcome(loss=stop.loss, nonfinite=stop.nonfinite)
    finally:
        gradients.release(members)
    link.pull(groups)
    # Distributed checkpoint fills an optimizer's state by a step with every lr at 0: a cast would draw new
    # bits although no master moved.
    moving = list(evaluation.moving.values())
    evaluation.trials.rewind(moving)
    if every_lr_is_zero(link.wrapped):
        return Outcome(loss=loss, stepped=True)
    lagging.pull_masters(moving)
    # A lag that was switched off ends here for every parameter, also for those that have no gradient.
    moved = moving + lagging.stale(member for member in members if id(member.param) not in evaluation.moving)
    changed = lagging.advance_and_cast(moved, count_changes=True)
    return Outcome(loss=loss, stepped=True, cast=moved, changed=changed)


def every_lr_is_zero(wrapped: torch.optim.Optimizer) -> bool:
    """Tell without waiting for a device; a tensor elsewhere counts as not zero."""
    rates = [group.get("lr") for group in wrapped.param_groups]
    on_host = [rate for rate in rates if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu"]
    return len(on_host) == len(rates) and all(rate is not None and float(rate) == 0.0 for rate in rates)
