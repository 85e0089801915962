"""Explicit lags: which fp32 target is served, decided before and apart from how it is rounded to bf16.

    served_t = cast(target_t)        target_t = lag(master_0 .. master_t)

Time is a parameter's own: it counts the steps in which it had a gradient, as its casts do. What a lag remembers
lies in the parameter's state entry, under keys that tell which lag it belongs to:

- ``Ema``: ``"lag"``, the average (float32), and ``"lag_rest"``, what its last bits could not hold (bfloat16).
- ``Delay``: ``"lag"``, a ring of shape ``(steps + 1, *shape)``, and ``"lag_count"``, how often it was written.
- ``DeadZone``: ``"lag"``, which shares its memory with the served parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

LAG = "lag"
LAG_REST = "lag_rest"
LAG_COUNT = "lag_count"
LAG_KEYS = frozenset({LAG, LAG_REST, LAG_COUNT})

Entry = dict[str, Any]
Options = dict[str, Any]
_T = TypeVar("_T")

_CPU_CHUNK = 1 << 17  # what stays in a core's cache while several passes go over it
_GPU_CHUNK = 1 << 26
_EXPONENT = 0x7F800000
_SMALLEST_EXPONENT = 0x00800000


def _number(least: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}")
        return float(value)

    return check


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")
    return value


def _ring_dtype(name: str, value: Any) -> str:
    text = str(value).removeprefix("torch.")
    if text not in ("float32", "bfloat16"):
        raise ValueError(f"{name} must be 'float32' or 'bfloat16', got {value!r}")
    return text


class _Setting(Generic[_T]):
    """An attribute of a lag that lives in the plain dicts which param groups hold, so that it travels with them."""

    def __init__(self, check: Callable[[str, Any], _T]) -> None:
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, lag: Lag, owner: type | None = None) -> _T:
        return cast(_T, lag._options[0][self.name])

    def __set__(self, lag: Lag, value: _T) -> None:
        checked = self.check(self.name, value)
        for options in lag._options:
            options[self.name] = checked


class Lag:
    """What ``Ema``, ``Delay`` and ``DeadZone`` have in common.

    Settings can be changed at any time and take effect at the next step. An object handed to an optimizer stays
    live; ``opt.lag`` gives one that is.

    Attributes:
        pull: Strength of a decoupled pull of the master toward its lagged copy: before the lag is updated, each
            step does ``master += lr * pull * (lagged - master)``, for parameters that have a gradient.
    """

    kind: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]

    pull = _Setting(_number(0.0))

    def __init__(self, **settings: Any) -> None:
        self._options: Sequence[Options] = [{"kind": self.kind}]
        for name in self.settings:
            setattr(self, name, settings[name])

    @property
    def options(self) -> Options:
        """The settings as a plain dict; not a copy."""
        return self._options[0]

    @property
    def bytes_per_weight(self) -> int:
        """Memory that the lag adds, in bytes for each weight."""
        raise NotImplementedError

    def fits(self, entry: Entry) -> bool:
        """Whether what an entry remembers is this lag's, with its settings."""
        return kind_of(entry) == self.kind

    def start(self, entry: Entry, master: torch.Tensor, served: torch.Tensor) -> None:
        """Begin to remember, at the master as it is now.

        Args:
            entry: The parameter's state entry. What another lag left in it is dropped.
            master: float32.
            served: The served parameter, of the same shape, as it was last cast.
        """
        raise NotImplementedError

    def advance(self, entry: Entry, master: torch.Tensor) -> None:
        """Take in the master after a step."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lag) and self.options == other.options

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        named = [f"{name}={getattr(self, name)!r}" for name in self.settings]
        return f"{type(self).__name__}({', '.join(named)}, bytes_per_weight={self.bytes_per_weight})"


class Ema(Lag):
    """Serve an exponential moving average of the master.

    After each step ``average += (master - average) / steps``, from the master at the moment it is switched on. The
    average is float32; what an update is too small to add is carried in a second, bfloat16 word (compensated
    summation, Kahan 1965), so that slow averages don't stand still.

    Args:
        steps: Time constant in steps, at least 1 (where the average is the master). Under a constant drift the
            average comes to lie ``steps - 1`` steps behind.
        pull: See ``Lag``. Default 0.
    """

    kind = "ema"
    settings = ("steps", "pull")

    steps = _Setting(_number(1.0))

    def __init__(self, steps: float, pull: float = 0.0) -> None:
        super().__init__(steps=steps, pull=pull)

    @property
    def bytes_per_weight(self) -> int:
        """6: the average and its rest."""
        return 6

    def start(self, entry: Entry, master: torch.Tensor, served: torch.Tensor) -> None:
        """Begin at the master."""
        drop(entry)
        entry[LAG] = master.detach().clone()
        entry[LAG_REST] = torch.zeros_like(master, dtype=torch.bfloat16)

    def advance(self, entry: Entry, master: torch.Tensor) -> None:
        """Move the average by one step."""
        average, rest = entry[LAG], entry[LAG_REST]
        if self.steps == 1:
            average.copy_(master)
            rest.zero_()
            return
        for a, r, m in _chunks(average, rest, master):
            carried = r.float()
            move = (m - a).sub_(carried).div_(self.steps).add_(carried)
            moved = a + move
            r.copy_(move.sub_(moved - a))
            a.copy_(moved)


class Delay(Lag):
    """Serve the master of some steps ago; until there is one, that of the moment the lag is switched on.

    Args:
        steps: How many steps, 0 or more. When it is changed while training, what is remembered is kept as far as
            it reaches.
        pull: See ``Lag``. Default 0.
        dtype: What the ring of ``steps + 1`` copies holds: ``"float32"`` (default), masters, cast when their time
            has come; or ``"bfloat16"``, what the rounding rule made of each master when it was new, at half the
            memory. When it is changed while training, the delay starts anew.
    """

    kind = "delay"
    settings = ("steps", "pull", "dtype")

    steps = _Setting(_whole)
    dtype = _Setting(_ring_dtype)

    def __init__(self, steps: int, pull: float = 0.0, dtype: str | torch.dtype = "float32") -> None:
        super().__init__(steps=steps, pull=pull, dtype=dtype)

    @property
    def bytes_per_weight(self) -> int:
        """``steps + 1`` times the size of the ring's dtype."""
        return (self.steps + 1) * (4 if self.dtype == "float32" else 2)

    def fits(self, entry: Entry) -> bool:
        """Whether the entry has a ring of this length and dtype."""
        return self._has_ring(entry) and len(entry[LAG]) == self.steps + 1

    def _has_ring(self, entry: Entry) -> bool:
        return super().fits(entry) and str(entry[LAG].dtype) == f"torch.{self.dtype}"

    def start(self, entry: Entry, master: torch.Tensor, served: torch.Tensor) -> None:
        """Fill the ring with the master (with served weights if it is bfloat16), or with what an old ring knows."""
        length = self.steps + 1
        if self._has_ring(entry):
            old, count = entry[LAG], int(entry[LAG_COUNT])
            ages = [-place % length for place in range(length)]
            ring = torch.stack([old[(count - min(age, len(old) - 1)) % len(old)] for age in ages])
        else:
            source = master.detach() if self.dtype == "float32" else served.detach().to(torch.bfloat16)
            ring = torch.stack([source] * length)
        drop(entry)
        entry[LAG] = ring
        entry[LAG_COUNT] = torch.zeros((), dtype=torch.int64)

    def advance(self, entry: Entry, master: torch.Tensor) -> None:
        """Turn the ring by one place and, if it holds masters, write this one."""
        entry[LAG_COUNT].add_(1)
        if self.dtype == "float32":
            newest(entry).copy_(master)


class DeadZone(Lag):
    """Hold each served weight until the master is some ulps away from it, then cast the master anew.

    ``DeadZone(0.5)`` with ``rounding="nearest"`` is rounding to nearest and nothing else, bit for bit: the lag that
    is hidden in it, made explicit. No memory is added. The held weights are the served weights, so weights that
    something else has written over them can't be brought back: ``opt.recast_()`` casts such parameters afresh.

    Args:
        ulps: Distance, in ulps of the bf16 grid at the master, from which on a weight is cast; 0 or more.
        pull: See ``Lag``; the lagged copy is the served weight. Default 0.
    """

    kind = "dead_zone"
    settings = ("ulps", "pull")

    ulps = _Setting(_number(0.0))

    def __init__(self, ulps: float, pull: float = 0.0) -> None:
        super().__init__(ulps=ulps, pull=pull)

    @property
    def bytes_per_weight(self) -> int:
        """0: the served weights are what is remembered."""
        return 0

    def start(self, entry: Entry, master: torch.Tensor, served: torch.Tensor) -> None:
        """Begin with the weights as they are served."""
        drop(entry)
        entry[LAG] = served.detach()

    def advance(self, entry: Entry, master: torch.Tensor) -> None:
        """Nothing to take in: what is held is decided by the cast."""

    def merge(
        self,
        served: torch.Tensor,
        master: torch.Tensor,
        fresh: torch.Tensor,
        accumulators: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Write a fresh cast into the served weights where they are no longer held.

        A held zero takes the master's sign, as a cast would give it.

        Args:
            served: bfloat16, or float32 with bfloat16 values. Written.
            master: float32, of the same shape.
            fresh: The cast of ``master`` by the rounding rule, like ``served``.
            accumulators: Those of error feedback, and those that the fresh cast left behind; the first are
                written where weights are not held. Default None.
        """
        old, new = accumulators or (served, served)
        for s, m, f, o, n in _chunks(served, master, fresh, old, new):
            # 2**exponent is 128 ulps of a bf16 number. Infinities and NaNs are never held: no distance of theirs is
            # below a zone that is infinite.
            exponent = (m.view(torch.int32) & _EXPONENT).clamp_(min=_SMALLEST_EXPONENT)
            zone = exponent.view(torch.float32).mul_(self.ulps / 128)
            held = (m - s).abs_() < zone
            zero = torch.copysign(torch.zeros_like(m), m).to(s.dtype)
            s.copy_(torch.where(held, torch.where(s == 0, zero, s), f))
            if accumulators is not None:
                o.copy_(torch.where(held, o, n))


KINDS: dict[str, type[Lag]] = {kind.kind: kind for kind in (Ema, Delay, DeadZone)}


def as_options(lag: Lag | Mapping[str, Any] | None) -> Options | None:
    """Check a lag and give the plain dict that param groups hold.

    Args:
        lag: ``Ema``, ``Delay``, ``DeadZone``, their options as a dict, or None.

    Returns:
        The object's own dict (so that it stays live), a checked copy of a dict, or None.

    Raises:
        TypeError: It is something else, or a setting has the wrong type.
        ValueError: A setting is unknown or out of range.
    """
    if lag is None or isinstance(lag, Lag):
        return None if lag is None else lag.options
    if not isinstance(lag, Mapping):
        raise TypeError(f"lag must be None, fcoptim.lag.Ema(steps), Delay(steps) or DeadZone(ulps), got {lag!r}")
    settings = dict(lag)
    kind = KINDS.get(settings.pop("kind", ""))
    if kind is None:
        raise ValueError(f"the 'kind' of a lag must be one of {', '.join(map(repr, KINDS))}; got {dict(lag)!r}")
    unknown = settings.keys() - set(kind.settings)
    if unknown or kind.settings[0] not in settings:
        raise ValueError(f"lag {kind.kind!r} takes {', '.join(kind.settings)}; got {sorted(settings)}")
    return kind(**settings).options


def live(holders: Sequence[Options | None]) -> Lag | None:
    """Make a lag object that reads the first of these dicts and writes to all.

    Args:
        holders: The ``"lag"`` option of each param group.

    Raises:
        ValueError: The groups have different lags.
    """
    if any(options != holders[0] for options in holders):
        raise ValueError(
            "the param groups have lags of their own, so there is no one opt.lag; read and write "
            f"group['lag'] instead. They are {holders}"
        )
    options = [held for held in holders if held is not None]
    if not options:
        return None
    made = object.__new__(KINDS[options[0]["kind"]])
    made._options = options
    return made


def keep_live(old: Sequence[Mapping[str, Any]], new: Sequence[Options]) -> None:
    """Put loaded settings into the dicts of lag objects that a caller may hold, and those dicts into the new groups.

    Args:
        old: Param groups before a load.
        new: Param groups after it. Where the kind of lag is another, or groups that shared a lag no longer do, they
            keep dicts of their own.
    """
    shared: dict[int, list[tuple[Options, Options]]] = {}
    for before, after in zip(old, new):
        if before.get(LAG) is not None and after.get(LAG) is not None:
            shared.setdefault(id(before[LAG]), []).append((before[LAG], after))
    for pairs in shared.values():
        options, loaded = pairs[0][0], pairs[0][1][LAG]
        if loaded["kind"] == options["kind"] and all(after[LAG] == loaded for _, after in pairs):
            options.update(loaded)
            for _, after in pairs:
                after[LAG] = options


def of_group(group: Mapping[str, Any]) -> Lag | None:
    """The lag that a param group asks for, checked anew, since anybody can write into a group."""
    options = as_options(group.get(LAG))
    return None if options is None else live([options])


def kind_of(entry: Mapping[str, Any]) -> str | None:
    """Which lag an entry remembers for; None if there is none."""
    if LAG not in entry:
        return None
    if LAG_REST in entry:
        return Ema.kind
    return Delay.kind if LAG_COUNT in entry else DeadZone.kind


def drop(entry: Entry) -> None:
    """Forget."""
    for key in LAG_KEYS:
        entry.pop(key, None)


def newest(entry: Mapping[str, Any]) -> torch.Tensor:
    """The place of a delay's ring that belongs to the last step."""
    ring: torch.Tensor = entry[LAG]
    return ring[int(entry[LAG_COUNT]) % len(ring)]


def target(entry: Mapping[str, Any], master: torch.Tensor) -> torch.Tensor:
    """What the last cast was made from, as far as it is remembered; the master where there is no lag.

    Args:
        entry: The parameter's state entry. What it remembers decides, not what its group asks for from the next
            step on.
        master: float32.

    Returns:
        float32; or what is served, in its own dtype, for a dead zone and a ring of bfloat16.
    """
    kind = kind_of(entry)
    if kind is None:
        return master
    found: torch.Tensor = entry[LAG]
    if kind == Delay.kind:
        return found[(int(entry[LAG_COUNT]) + 1) % len(found)]
    return found


def check_saved(name: str, saved: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Check what a loaded entry remembers.

    Raises:
        ValueError: A part is missing, or has another shape or dtype.
    """
    kind = kind_of(saved)
    if kind is None:
        if LAG_KEYS & saved.keys():
            raise ValueError(f"the state dict has a part of a lag of parameter {name!r} but no 'lag' itself")
        return
    found = tuple(saved[LAG].shape[1:] if kind == Delay.kind else saved[LAG].shape)
    if found != tuple(shape):
        raise ValueError(f"lag of parameter {name!r} has shape {tuple(saved[LAG].shape)}, the parameter {tuple(shape)}")
    if kind == Ema.kind and saved[LAG].dtype is not torch.float32:
        raise ValueError(
            f"the average of parameter {name!r} was saved as {saved[LAG].dtype}: its low bits are gone, so the run "
            "can't be resumed exactly. Something cast the state dict; save it as it is"
        )


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Walk over tensors of one shape together, in flat pieces where all are contiguous."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    size = _CPU_CHUNK if tensors[0].device.type == "cpu" else _GPU_CHUNK
    yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors))
