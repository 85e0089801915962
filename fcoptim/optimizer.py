"""FairCastOptimizer: any torch optimizer on fp32 masters, under a model whose weights are their unbiased cast."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import nn

from . import gradients, lagging, loading, setup
from . import lag as lags
from .cast import DEFAULT
from .distributed.agreement import Group
from .distributed.say import BF16_GRADIENTS, FP32_SHARDS, say_once
from .distributed.shards import is_sharded, mark_of
from .link import OWN_OPTIONS, Link, OptimizerLike
from .masters import (
    MASTER,
    Changes,
    Entry,
    Member,
    cast_members,
    freeze,
    new_entry,
    refit,
    replayed,
    same_bits,
    serve,
    widen_gradients,
    wrapped_part,
)
from .naming import Parameters, canonical_name
from .stats import CastStats, measure
from .stepping import Closure, every_lr_is_zero, run_step
from .watch import Watch
from .weights import Weights, master_state_dict, masters_shown, served_state_dict, served_stream


@dataclass
class _Shared:
    """All that changes outside ``state`` and ``param_groups``, in one object.

    Some frameworks call an optimizer's methods on a stand-in with another ``__dict__``; attributes set there
    would be lost.

    Attributes:
        link: The wrapped optimizer.
        model: The served model, or None where only parameters were passed.
        storage: dtype of the served parameters.
        kept: Names of the parameters served in fp32.
        on_nonfinite: What a step does about a non-finite gradient.
        captured: State entries by name, until the first step completes ``state``.
        watch: Knows which served weights are ours.
        changed: How many served values the last step changed, by parameter.
        skipped_steps: Steps left out for a non-finite gradient.
        showing_masters: Whether ``masters_as_weights`` is active.
    """

    link: Link
    model: nn.Module | None
    storage: torch.dtype
    kept: frozenset[str]
    on_nonfinite: str
    captured: dict[str, Entry]
    watch: Watch = field(default_factory=Watch)
    changed: Changes | None = None
    skipped_steps: int = 0
    showing_masters: bool = False


class FairCastOptimizer(torch.optim.Optimizer):
    """Wrap a torch optimizer so that the model it trains is the unbiased bf16 cast of fp32 masters.

    The model is converted in place and is from then on the *served* model: rollouts and loss run on it, each
    step updates the masters and casts them into it. It is a ``torch.optim.Optimizer``: schedulers, hooks,
    clipping and the checkpoints of the usual frameworks see served parameters in ``param_groups``, and
    masters, counts and accumulators in ``state``.

    Args:
        model: A float32 or bfloat16 model (its trainable parameters are trained, other floating ones rounded to
            nearest once), or parameters, ``(name, parameter)`` pairs or param groups. In groups, ``"rounding"``
            and ``"seed"`` choose a group's own.
        optimizer: A ``torch.optim.Optimizer`` class, a callable that takes parameters or param groups, or an
            instance built on these parameters (its groups, options and state are taken over).
        rounding: ``"nearest"``, ``"stochastic"``, ``"dither"`` (default) or ``"error_feedback"``.
        lag: ``fcoptim.lag.Ema``, ``Delay`` or ``DeadZone``: what is cast instead of the masters. Default None. It can
            be set and changed while training, as ``opt.lag``, and chosen by groups like ``"rounding"``.
        seed: Seed of the rounding; torch's own random state is not used. Default 0.
        storage: ``"bfloat16"`` (default), or ``"float32"``: parameters keep fp32 storage and hold bf16 values,
            for frameworks that insist on fp32 parameters.
        keep_fp32: Name patterns (fnmatch) of parameters to serve in fp32. Those of batch norm always are, as
            its kernels want fp32 weights beside fp32 running statistics.
        on_nonfinite: What a step does about an infinite or NaN gradient: ``"allow"`` (default, as torch),
            ``"skip"`` (nothing changes; counted in ``cast_stats``) or ``"raise"`` (nothing changes). With a
            closure, its first evaluation is looked at.
        process_group: With ``torch.distributed``, the ranks that train these parameters and are checked to agree on
            arguments and weights: ``"default"`` (all), a process group, or None for no check. All of them have to
            construct the optimizer together. Sharded parameters are checked over their mesh.
        **optimizer_kwargs: For the optimizer's class.

    Raises:
        ValueError: An option, a parameter or an optimizer that can't be used; the message says what to do.
        TypeError: Likewise for types and dtypes.
    """

    def __init__(
        self,
        model: Parameters,
        optimizer: OptimizerLike,
        *,
        rounding: str = DEFAULT,
        lag: lags.Lag | Mapping[str, Any] | None = None,
        seed: int = 0,
        storage: str = "bfloat16",
        keep_fp32: Sequence[str] | str = (),
        on_nonfinite: str = "allow",
        process_group: Group = "default",
        **optimizer_kwargs: Any,
    ) -> None:
        if isinstance(optimizer, FairCastOptimizer):
            raise ValueError("this optimizer is a FairCastOptimizer already; wrap the plain one")
        setup.check_options(rounding, seed, storage, on_nonfinite, gradients.ON_NONFINITE)
        module = model if isinstance(model, nn.Module) else None
        patterns = [keep_fp32] if isinstance(keep_fp32, str) else list(keep_fp32)
        groups = setup.read_groups(model, optimizer, optimizer_kwargs)
        kept = setup.kept_names(module, groups, patterns, storage == "bfloat16")
        asked, storage = storage, setup.choose_storage(module, groups, kept, storage)
        narrow = storage == "bfloat16"
        if module is not None:
            setup.refuse_modules(module, narrow)
        plan = setup.make_plan(groups, optimizer, optimizer_kwargs, kept, rounding, seed, lags.as_options(lag))
        wrapped = plan.link.wrapped
        own = {"rounding": rounding, "seed": seed, "lag": lags.as_options(lag)}
        super().__init__(plan.groups, {**wrapped.defaults, **own})
        self._shared = _Shared(plan.link, module, setup.STORAGES[storage], kept, on_nonfinite, plan.entries)
        self.register_state_dict_post_hook(_fill_in_captured)
        self._start(self._members())
        for param in self._frozen():
            freeze(param, self._shared.storage)
        masters = [member.master for member in self._flat()]
        setup.check_ranks(self.param_groups, masters, wrapped, storage, process_group)
        if asked != storage:
            say_once(FP32_SHARDS)
        elif narrow and any(not is_sharded(member.param) for member in self._flat()):
            say_once(BF16_GRADIENTS)

    # ------------------------------------------------------------- what is trained

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The wrapped optimizer. Its groups hold the masters; set options on this object's groups."""
        return self._shared.link.wrapped

    @property
    def served_model(self) -> nn.Module:
        """The model that was passed, whose parameters are the served weights.

        Raises:
            RuntimeError: Parameters were passed, not a model.
        """
        if self._shared.model is None:
            raise RuntimeError("there is no served_model: FairCastOptimizer was given parameters, not a model")
        return self._shared.model

    def _members(self) -> list[list[Member]]:
        """Read parameters and state as they are at this moment, group by group."""
        return [
            [
                Member(name, param, self._entry(name, param, group), group)
                for name, param in zip(group["param_names"], group["params"])
            ]
            for group in self.param_groups
        ]

    def _flat(self) -> list[Member]:
        return [member for group in self._members() for member in group]

    def _entry(self, name: str, param: torch.Tensor, group: dict[str, Any]) -> Entry:
        """A parameter's state entry; made from its weights where a framework has swapped the parameter."""
        entry: Entry | None = self.state.get(param)
        if entry:  # just to read a missing entry of torch's `state` leaves an empty one
            return entry
        captured = self._shared.captured
        if name not in captured:
            kept = name in self._shared.kept
            captured[name] = {} if kept else new_entry(name, param, group["rounding"], group["seed"])
        was_sharded = is_sharded(captured[name].get(MASTER))
        refit(captured[name], param)
        if is_sharded(param) and not was_sharded and param.dtype is not self._shared.storage:
            self._shared.storage = param.dtype
            say_once(FP32_SHARDS)
        return captured[name]

    def _frozen(self) -> list[torch.Tensor]:
        """Floating parameters of the model that are rounded but not trained."""
        if self._shared.model is None:
            return []
        trained = {id(param) for group in self.param_groups for param in group["params"]}
        return [
            param
            for name, param in self._shared.model.named_parameters()
            if id(param) not in trained and param.is_floating_point() and canonical_name(name) not in self._shared.kept
        ]

    def _start(self, groups: Sequence[Sequence[Member]]) -> None:
        """Convert and serve new members; a wrapped optimizer that comes with state completes ours at once."""
        members = [member for group in groups for member in group]
        self._shared.link.pull(self._members())
        serve(members, self._shared.storage)
        lagging.prepare(members)
        for member in members:
            widen_gradients(member.param)
        self._shared.watch.remember(members)
        if any(wrapped_part(member.entry) for member in members):
            self._complete_state(members)

    def _complete_state(self, members: Sequence[Member]) -> None:
        """Move captured entries into ``state``, now that the wrapped optimizer's part is there too."""
        for member in members:
            if member.entry:
                self.state[member.param] = member.entry
            self._shared.captured.pop(member.name, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train, as ``torch.optim.Optimizer.add_param_group``; they get masters at once.

        Args:
            param_group: ``"params"`` and options; ``"rounding"``, ``"seed"`` and ``"lag"`` choose the group's own.

        Raises:
            ValueError: A parameter is trained already, or a name is taken.
            TypeError: A parameter can't have a master.
        """
        if not hasattr(self, "_shared"):  # called by the base class's constructor
            super().add_param_group(param_group)
            return
        shared = self._shared
        own = {key: param_group.get(key, self.defaults[key]) for key in ("rounding", "seed")}
        given = "lag" in param_group
        own["lag"] = lags.as_options(param_group["lag"]) if given else self.param_groups[-1].get("lag")
        options, pairs, entries = setup.plan_group(param_group, own, self.param_groups, shared.model, shared.kept)
        self.wrapped.add_param_group({**options, "params": [entries[name].get(MASTER, p) for name, p in pairs]})
        inner = {key: value for key, value in self.wrapped.param_groups[-1].items() if key not in OWN_OPTIONS}
        super().add_param_group({**inner, **own, "param_names": [name for name, _ in pairs], "params": pairs})
        shared.captured.update(entries)
        shared.link.remember()
        members = self._members()[-1:]
        serve(members[0], shared.storage)
        lagging.prepare(members[0])
        for member in members[0]:
            widen_gradients(member.param)
        shared.watch.remember(members[0])

    # ------------------------------------------------------------- the lag

    @property
    def lag(self) -> lags.Lag | None:
        """The lag between masters and served weights, or None; ``opt.lag.steps = 50`` changes a setting.

        What is set here takes effect at the next step: a lag begins at the masters as they are then, and None lets
        every served weight become the cast of its master.

        Raises:
            ValueError: The param groups have lags of their own; read ``group["lag"]``.
        """
        return lags.live([group.get("lag") for group in self.param_groups])

    @lag.setter
    def lag(self, lag: lags.Lag | Mapping[str, Any] | None) -> None:
        self.defaults["lag"] = options = lags.as_options(lag)
        for group in self.param_groups:
            group["lag"] = options

    # ------------------------------------------------------------- stepping

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Step the masters with the served parameters' gradients, then cast them into the served weights.

        A parameter without a gradient is neither stepped nor cast again. Without any gradient nothing changes.

        Args:
            closure: Re-evaluates the loss on the served weights (gradients zeroed, backward done) and returns
                it. Optimizers that evaluate several times see served weights that show their trial masters.

        Returns:
            The closure's loss, or what the wrapped optimizer's step returns.

        Raises:
            RuntimeError: Served weights were written from outside, or ``masters_as_weights`` is active.
            FloatingPointError: A gradient is not finite and ``on_nonfinite="raise"``.
        """
        shared = self._shared
        if shared.showing_masters:
            raise RuntimeError("step() inside masters_as_weights(): leave the with block first")
        groups = self._members()
        members = [member for group in groups for member in group]
        shared.link.exchange_options(self.param_groups)
        # Distributed checkpoint steps with every lr at 0 after it has loaded the model: that moves and casts nothing.
        if not every_lr_is_zero(self.wrapped):
            self._check_served(members)
        for member in members:
            widen_gradients(member.param)
        outcome = run_step(shared.link, groups, closure, shared.on_nonfinite != "allow")
        if outcome.nonfinite:
            self._report_nonfinite(outcome.nonfinite)
        if not outcome.stepped:
            return outcome.loss
        shared.link.return_options(self.param_groups)
        self._complete_state(members)
        shared.watch.remember(outcome.cast)
        if outcome.changed is not None:
            shared.changed = outcome.changed
        # Autocast keeps bf16 copies of fp32 weights for the length of its context; they are stale now.
        torch.clear_autocast_cache()
        return outcome.loss

    def _report_nonfinite(self, names: Sequence[str]) -> None:
        if self._shared.on_nonfinite == "raise":
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise FloatingPointError(
                f"the gradient of {', '.join(map(repr, names[:3]))}{more} is not finite; the step changed nothing"
            )
        self._shared.skipped_steps += 1

    def _check_served(self, members: Sequence[Member]) -> None:
        written = self._shared.watch.foreign(members)
        if written:
            more = f" and {len(written) - 3} more" if len(written) > 3 else ""
            raise RuntimeError(
                f"the served weights of {', '.join(map(repr, written[:3]))}{more} were written from outside since the "
                "last cast, so the masters don't belong to them. Call opt.adopt_served_() to go on from the new "
                "weights (masters := served), or opt.recast_() to drop them (served := cast of the masters)"
            )
        rewritten = self._shared.watch.unconfirmed()
        if rewritten:
            warnings.warn(
                "when the optimizer's state was loaded, the model held other weights than that state serves, in "
                f"{len(rewritten)} parameters (for example {rewritten[0]!r}); they were rewritten from the state's "
                "masters",
                stacklevel=2,
            )

    @torch.no_grad()
    def adopt_served_(self) -> None:
        """Go on from weights written into the model: masters := served.

        Moments and accumulators stay as they are; lags begin anew.
        """
        members = self._flat()
        for member in members:
            member = member.local
            if not member.kept:
                member.master.copy_(member.param)
                lags.drop(member.entry)
        cast_members(members, advance=True)  # moves nothing that lies on the bf16 grid
        lagging.prepare(members)
        self._shared.watch.remember(members)

    def recast_(self) -> None:
        """Drop whatever was written into the model: served := the last cast of the masters, bit for bit.

        Weights that a dead zone held are gone where they were written over; such parameters are cast afresh.
        """
        members = self._flat()
        written = set(self._shared.watch.foreign(members))
        lagging.recast_held(member for member in members if member.name in written)
        self._restore_served(members)

    @torch.no_grad()
    def _restore_served(self, members: Sequence[Member]) -> list[str]:
        """Write the last cast again where it is not there; return the names of parameters that differed."""
        differed = []
        for member in members:
            if member.kept:
                continue
            member = member.local
            served = replayed(member)
            if not same_bits(served, member.param):
                differed.append(member.name)
                member.param.copy_(served)
            lagging.relink(member)
        self._shared.watch.remember(members)
        return differed

    def __getattr__(self, name: str) -> Any:
        """Offer ``train`` and ``eval`` where the wrapped optimizer has them (schedule-free ones), and no more.

        Passing everything through would forward flags such as ``_step_supports_amp_scaling`` that are not true
        of this class.
        """
        shared = self.__dict__.get("_shared")
        if name in ("train", "eval") and shared is not None and hasattr(shared.link.wrapped, name):
            return lambda: self._switch_mode(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def _switch_mode(self, mode: str) -> None:
        """Call the wrapped optimizer's ``train`` or ``eval``, and cast again if that moved the masters.

        With a lag nothing is cast: a step moves the lag, a switch does not.
        """
        shared, groups = self._shared, self._members()
        members = [member for group in groups for member in group]
        shared.link.exchange_options(self.param_groups)
        shared.link.push(groups)
        before = [mark_of(member.master) for member in members]
        getattr(shared.link.wrapped, mode)()
        shared.link.pull(groups)
        shared.link.return_options(self.param_groups)
        moved = [member for member, version in zip(members, before) if mark_of(member.master) != version]
        moved = [member for member in moved if lags.kind_of(member.entry) is None]
        cast_members(moved, advance=True)
        shared.watch.remember(moved)

    # ------------------------------------------------------------- the two halves of the weights

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's canonical name and fp32 master (the parameter itself where it is kept in fp32)."""
        for member in self._flat():
            yield member.name, member.master.detach()

    def master_state_dict(self) -> Weights:
        """The model's state dict with fp32 masters in place of served weights; nothing is copied.

        Returns:
            By name; where parameters were passed instead of a model, just theirs.
        """
        return master_state_dict(self._shared.model, self._flat())

    @overload
    def served_state_dict(self, *, full: Literal[False] = False) -> Weights: ...

    @overload
    def served_state_dict(self, *, full: Literal[True]) -> Iterator[tuple[str, torch.Tensor]]: ...

    def served_state_dict(self, *, full: bool = False) -> Weights | Iterator[tuple[str, torch.Tensor]]:
        """The model's state dict with served weights in bf16, for a rollout engine.

        Args:
            full: Whether to gather sharded parameters. Default False.

        Returns:
            By name. Nothing is copied, except where parameters have fp32 storage; sharded ones are DTensors. With
            ``full=True`` an iterator of names and full tensors, for ``engine.load_weights``: each is gathered, in
            bf16, when its turn comes, and only one exists at a time if the consumer keeps none. All ranks have to
            iterate together.
        """
        stream = served_stream if full else served_state_dict
        return stream(self._shared.model, self._flat(), self._frozen())

    @contextmanager
    def masters_as_weights(self) -> Iterator[None]:
        """Show the fp32 model: within the with block the model's parameters hold the masters themselves.

        For evaluation; ``step`` refuses to run inside. Frozen parameters are widened for as long. FSDP2 gathers
        masters layer by layer, without its mixed precision; all ranks have to compute together.
        """
        shared = self._shared
        if shared.showing_masters:
            raise RuntimeError("masters_as_weights() is active already")
        shared.showing_masters = True
        try:
            with masters_shown(shared.model, self._flat(), self._frozen()):
                yield
        finally:
            shared.showing_masters = False

    def cast_stats(self) -> CastStats:
        """Figures about the last cast, measured now from masters and served weights."""
        return measure(self._flat(), self._shared.changed, self._shared.skipped_steps)

    # ------------------------------------------------------------- saving and loading

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and write the served weights it belongs to, bit for bit.

        Parameters are matched by name where both sides have names. Tensors keep their dtype and are copied. A
        plain optimizer's state dict is taken too: masters stay what the current weights say, moments are loaded.
        If the model holds other weights than the loaded masters serve, the masters win. The next step warns of
        that, unless the model's own weights were loaded in between and are the same.

        Args:
            state_dict: From ``state_dict()``, or from the wrapped class's own.

        Raises:
            ValueError: Parameters, masters or accumulators are missing or of another shape. Nothing is changed.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        present = self._members()
        groups, entries = loading.read_state(self.param_groups, present, state_dict)
        # Weights that a framework has loaded into the model before it passes our own state through its loader
        # (accelerate's prepare does) are not ours to undo; the next step or load sees what they are.
        owned = loading.own_members(present, state_dict)
        ahead = set(self._shared.watch.foreign(owned))
        self._install(groups, entries)
        restored = [member for member in self._flat() if member.name not in ahead]
        self._shared.watch.note_rewritten(self._restore_served(restored))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _install(self, groups: list[dict[str, Any]], entries: dict[str, Entry]) -> None:
        """Put param groups, and state entries by name, in place of those that are here; weights are not served anew."""
        lags.keep_live(self.param_groups, groups)
        self.param_groups[:] = groups
        self.state.clear()
        self._shared.captured.clear()
        by_name = {name: param for group in groups for name, param in zip(group["param_names"], group["params"])}
        if loading.is_complete(entries.values()):
            self.state.update({by_name[name]: entry for name, entry in entries.items() if entry})
        else:
            self._shared.captured.update(entries)
        members = self._members()
        self._shared.link.impose_options(self.param_groups)
        self._shared.link.push(members)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_shared": self._shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self._optimizer_state_dict_post_hooks:
            self.register_state_dict_post_hook(_fill_in_captured)
        for member in self._flat():
            widen_gradients(member.param)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}({type(self.wrapped).__name__}, storage={str(self._shared.storage)[6:]}) ("]
        for number, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {number} ({len(group['params'])} parameters)")
            options = (key for key in sorted(group) if key not in ("params", "param_names"))
            lines += [f"    {key}: {group[key]}" for key in options]
        return "\n".join([*lines, ")"])


def _fill_in_captured(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Put what was captured at construction into a state dict taken before the first step."""
    assert isinstance(optimizer, FairCastOptimizer)
    for members, packed in zip(optimizer._members(), state_dict["param_groups"]):
        if packed.get("lag") is not None:
            packed["lag"] = dict(packed["lag"])  # a saved state must not follow a live lag
        for member, number in zip(members, packed["params"]):
            if member.entry and number not in state_dict["state"]:
                state_dict["state"][number] = dict(member.entry)


def unwrap(optimizer: Any) -> FairCastOptimizer:
    """Find the FairCastOptimizer inside what a framework has put around it (accelerate, Lightning).

    Args:
        optimizer: The framework's object, or a FairCastOptimizer.

    Raises:
        TypeError: There is none inside.
    """
    # Fabric's wrapper is an instance of our class too, with a __dict__ of its own: go in as far as it goes.
    found, seen = optimizer, set()
    while id(found) not in seen:
        seen.add(id(found))
        found = getattr(found, "optimizer", getattr(found, "_optimizer", found))
    if not isinstance(found, FairCastOptimizer):
        raise TypeError(f"there is no FairCastOptimizer inside {type(optimizer).__name__}")
    return found
