"""LagMeter: how far the served weights follow the masters, step by step, from a sample of their coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .distributed.census import Census
from .naming import canonical_name
from .optimizer import FairCastOptimizer, unwrap
from .sampling import Sample, Tensors

Source = nn.Module | Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]

_FORMAT = 1
_THINNING = 16  # one in so many coordinates has a history
_BLOCK = 16  # so many remembered steps are looked at together


class LagMeter:
    """Measure, after each step, how much of the masters' movement the served weights show, and how late.

    With ``D`` the masters' displacement since the meter's start, ``s`` the served weights' and ``D(t')`` that of an
    earlier step, all over the sampled coordinates, each weighted by how many weights it stands for:

    - ``tracked = <s, D> / <D, D>``: 1 where all is served. 1 as long as the masters have not moved.
    - ``tracked_recent``: the same of the displacements over the last ``window`` steps.
    - ``lag``: how many steps ago ``<D(t'), D> / <D, D>`` stood at ``tracked``, between steps interpolated; 0 where
      ``tracked`` is 1 or more. ``lag_capped`` is 1 where the remembered steps did not reach back that far; the lag
      then is the number of steps remembered.
    - ``changed``: share of served weights whose bits differ from those at the last update.
    - ``noise_to_weights = |served - master| / |master|`` and ``noise_to_displacement = |served - master| / |D|``
      (0 as long as the masters have not moved).

    Host memory is about ``40 * sample + 6 / 16 * sample * history`` bytes: 9 MB with the defaults.

    Args:
        optimizer: A FairCastOptimizer, also one that a framework has wrapped. Parameters that it serves in fp32
            have no lag and are left out.
        model: Instead of an optimizer, the served weights: a module, or tensors by name, or a function that returns
            them.
        masters: Beside ``model``, the fp32 masters, likewise. Names that only one side has are left out.
        sample: How many coordinates are watched, over all tensors. Default 65,536.
        history: How many steps are remembered. Default 256.
        window: Steps of ``tracked_recent``. Default 32.
        per_layer: Whether ``changed`` and ``tracked`` are also given for each layer. Default False.
        seed: Which coordinates. Default 0. torch's global random state is not used.
        prefix: Comes before each name. Default ``"fcoptim/"``.

    Raises:
        TypeError: Neither an optimizer nor model and masters are given, or both.
        ValueError: A number is out of range, or model and masters share no name.

    Examples:
        >>> model = torch.nn.Linear(4, 4)
        >>> meter = LagMeter(FairCastOptimizer(model, torch.optim.SGD, lr=0.1))
        >>> sorted(meter.update())[:2]
        ['fcoptim/changed', 'fcoptim/lag']
    """

    def __init__(
        self,
        optimizer: Any = None,
        *,
        model: Source | None = None,
        masters: Source | None = None,
        sample: int = 1 << 16,
        history: int = 256,
        window: int = 32,
        per_layer: bool = False,
        seed: int = 0,
        prefix: str = "fcoptim/",
    ) -> None:
        if (optimizer is None) == (model is None or masters is None):
            raise TypeError("LagMeter takes either an optimizer, or model= and masters= together")
        for name, value, least in (("sample", sample, 1), ("history", history, 1), ("window", window, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if window > history:
            raise ValueError(f"window must be at most history ({history}), got {window}")
        self._optimizer = None if optimizer is None else unwrap(optimizer)
        self._model, self._masters = model, masters
        self._size, self._length, self._window = sample, history, window
        self._per_layer, self._seed, self._prefix = per_layer, seed, prefix
        self.reset()

    def reset(self) -> None:
        """Start anew: displacements are counted from the weights as they are now."""
        masters, served = self._tensors()
        self._sample = Sample(masters, self._size, self._seed)
        self._thin = torch.arange(0, len(self._sample.weights), _THINNING)
        self._census = Census(masters.values())
        self._counted = self._weights_counted(masters)
        self._begin = self._sample.read(masters, torch.float32)
        self._first = self._sample.read(served, torch.bfloat16)
        self._last = self._first
        self._steps = 0
        self._past = torch.zeros(self._length + 1, len(self._thin))
        self._past_served = torch.zeros(self._length + 1, len(self._thin), dtype=torch.bfloat16)
        self._past[0] = self._begin[self._thin]
        self._past_served[0] = self._first[self._thin]

    def _weights_counted(self, masters: Tensors) -> torch.Tensor:
        """The coordinates' weights, 0 for those that another rank counts."""
        counted = torch.tensor([self._census.counts(tensor) for tensor in masters.values()], dtype=torch.float64)
        return self._sample.weights * counted[self._sample.layers]

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Masters and served weights by name, as they are at this moment."""
        if self._optimizer is not None:
            return _of_optimizer(self._optimizer)
        assert self._model is not None and self._masters is not None
        served, masters = _of_source(self._model), _of_source(self._masters)
        names = [name for name in masters if name in served and masters[name].is_floating_point()]
        if not names:
            raise ValueError(
                f"model and masters share no name; the model has {list(served)[:3]}, masters have {list(masters)[:3]}"
            )
        for name in names:
            if masters[name].shape != served[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(masters[name].shape)} in masters and {tuple(served[name].shape)} in "
                    "the model"
                )
        return {name: masters[name] for name in names}, {name: served[name] for name in names}

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Measure; call it once after each optimizer step.

        Returns:
            Names and figures, none of them NaN while masters and served weights are finite.

        Raises:
            ValueError: A watched tensor is gone or has another size; call ``reset()``.
        """
        masters, served = self._tensors()
        now = self._sample.read(masters, torch.float32)
        shown = self._sample.read(served, torch.bfloat16)
        self._steps += 1
        place = self._steps % len(self._past)
        self._past[place] = now[self._thin]
        self._past_served[place] = shown[self._thin]
        figures = self._overall(now, shown)
        if self._per_layer:
            figures.update(self._by_layer(now, shown))
        self._last = shown
        return {f"{self._prefix}{name}": value for name, value in figures.items()}

    def _overall(self, now: torch.Tensor, shown: torch.Tensor) -> dict[str, float]:
        weights, master = self._counted, now.double()
        moved, served_moved = master - self._begin.double(), shown.double() - self._first.double()
        noise = shown.double() - master
        differs = (shown.view(torch.int16) != self._last.view(torch.int16)).double()
        terms = (torch.ones_like(weights), differs, moved**2, moved * served_moved, noise**2, master**2)
        sums = self._census.total(torch.stack([(weights * term).sum() for term in terms]))
        count, changed, squares, product, noise_squares, master_squares = sums.tolist()
        tracked = product / squares if squares > 0 else 1.0
        lag, capped = self._lag(tracked)
        return {
            "changed": changed / max(count, 1.0),
            "tracked": tracked,
            "tracked_recent": self._tracked_recent(),
            "lag": lag,
            "lag_capped": float(capped),
            "noise_to_weights": math.sqrt(noise_squares / master_squares) if master_squares > 0 else 0.0,
            "noise_to_displacement": math.sqrt(noise_squares / squares) if squares > 0 else 0.0,
        }

    def _ages(self) -> torch.Tensor:
        """Positions of the remembered steps, the newest first."""
        kept = min(self._steps, self._length)
        return (self._steps - torch.arange(kept + 1)) % len(self._past)

    def _lag(self, tracked: float) -> tuple[float, bool]:
        """How many steps ago the masters stood where the served weights project now, and whether that is a bound."""
        if tracked >= 1:
            return 0.0, False
        ages, begin = self._ages(), self._begin[self._thin].double()
        weighted = self._counted[self._thin] * (self._past[ages[0]].double() - begin)
        behind: list[float] = []
        for some in torch.split(ages, _BLOCK):  # from the newest on, as far as needed
            behind += self._census.total((self._past[some].double() - begin) @ weighted).tolist()
            for age in range(max(1, len(behind) - len(some)), len(behind)):
                newer, older = behind[age - 1], behind[age]
                if older <= tracked * behind[0]:
                    gap = newer - older
                    return age - ((tracked * behind[0] - older) / gap if gap > 0 else 0.0), False
        return float(len(behind) - 1), self._steps > self._length

    def _tracked_recent(self) -> float:
        ages = self._ages()
        place = ages[min(self._window, len(ages) - 1)]
        weights = self._counted[self._thin]
        moved = (self._past[ages[0]] - self._past[place]).double()
        served_moved = (self._past_served[ages[0]].double() - self._past_served[place].double()) * moved
        squares, product = self._census.total(
            torch.stack([(weights * moved**2).sum(), (weights * served_moved).sum()])
        ).tolist()
        return product / squares if squares > 0 else 1.0

    def _by_layer(self, now: torch.Tensor, shown: torch.Tensor) -> dict[str, float]:
        layers = [_layer_of(name) for name in self._sample.names]
        names = list(dict.fromkeys(layers))
        segment = torch.tensor([names.index(layer) for layer in layers])[self._sample.layers]
        moved = now.double() - self._begin.double()
        differs = (shown.view(torch.int16) != self._last.view(torch.int16)).double()
        served_moved = shown.double() - self._first.double()
        terms = torch.stack([torch.ones_like(moved), differs, moved**2, moved * served_moved]) * self._counted
        sums = torch.zeros(4, len(names), dtype=torch.float64).index_add_(1, segment, terms)
        found: dict[str, float] = {}
        for name, (count, changed, squares, product) in zip(names, self._census.total(sums).T.tolist()):
            found[f"{name}/changed"] = changed / max(count, 1.0)
            found[f"{name}/tracked"] = product / squares if squares > 0 else 1.0
        return found

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on, for a checkpoint; tensors are not copied."""
        tensors = {name: getattr(self, f"_{name}") for name in _TENSORS}
        return {"format": _FORMAT, "names": list(self._sample.names), "sizes": list(self._sample.sizes)} | {
            "steps": self._steps,
            "seed": self._seed,
            "settings": [self._size, self._length],
            **tensors,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another meter of the same model stood.

        Args:
            state_dict: From ``state_dict()`` of a meter with the same ``sample``, ``history`` and ``seed``. Tensors
                are copied.

        Raises:
            ValueError: It is of another model or of other settings. Nothing is changed.
        """
        own = self.state_dict()
        for key in ("format", "names", "sizes", "seed", "settings"):
            if key not in state_dict:
                raise ValueError(f"this is no LagMeter's state dict: it lacks {key!r}")
            if state_dict[key] != own[key]:
                raise ValueError(f"the state is of a meter with other {key}; build this one alike, or start without it")
        self._steps = int(state_dict["steps"])
        for name in _TENSORS:
            setattr(self, f"_{name}", state_dict[name].clone())


_TENSORS = ("begin", "first", "last", "past", "past_served")


def _of_optimizer(opt: FairCastOptimizer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    members = [member for member in opt._flat() if not member.kept]
    masters = {member.name: member.master.detach() for member in members}
    return masters, {member.name: member.param.detach() for member in members}


def _of_source(source: Source) -> dict[str, torch.Tensor]:
    if isinstance(source, nn.Module):
        found: Mapping[str, torch.Tensor] = dict(source.named_parameters())
    else:
        found = source() if callable(source) else source
    return {canonical_name(name): tensor for name, tensor in found.items()}


def _layer_of(name: str) -> str:
    """A parameter's layer: its name up to and with the first number, or else its first part."""
    parts = name.split(".")
    end = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: end + 1])
