"""Exporter: the fair cast of a state dict, for training that keeps its own fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .cast import DEFAULT, cast_, get_rule, parameter_key, start_accumulator_
from .distributed.shards import local, place_of
from .naming import canonical_name, matches

_FORMAT = 1


class Exporter:
    """Cast fp32 state dicts to bf16, call after call, by an unbiased rule.

    Use it where a loop writes ``{name: value.bfloat16() ...}`` for its rollout engine. Each call is one cast of
    every tensor; what the next call needs to know is in ``state_dict()``.

    Args:
        rounding: ``"nearest"``, ``"stochastic"``, ``"dither"`` (default) or ``"error_feedback"``.
        seed: Seed of the rounding. Default 0.
        keep_fp32: Name patterns (fnmatch) of entries to pass on in fp32, for example ``("*.running_*",)``.

    Raises:
        ValueError: There is no such rule.

    Examples:
        >>> export = Exporter(rounding="dither")
        >>> export({"weight": torch.zeros(2)})["weight"].dtype
        torch.bfloat16
    """

    def __init__(self, rounding: str = DEFAULT, seed: int = 0, *, keep_fp32: Sequence[str] | str = ()) -> None:
        get_rule(rounding)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        self.rounding = rounding
        self.seed = seed
        self.keep_fp32 = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
        self._casts: dict[str, int] = {}
        self._accumulators: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, state: Mapping[str, Any], out: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Cast the float32 tensors of a state dict.

        Args:
            state: By name. float32 tensors on any device are cast; bfloat16 and non-floating tensors and other
                values are passed on as they are. Two names of one tensor stay two names of one tensor. A DTensor
                gives a DTensor, whose bits don't depend on how it is sharded.
            out: bfloat16 tensors to write into instead of new ones, by name, for those names that it has.

        Returns:
            The same names with bfloat16 tensors.

        Raises:
            TypeError: A tensor is float64, float16 or another floating dtype.
            ValueError: ``out`` or an accumulator does not fit.
        """
        result = dict(state)
        first_name: dict[tuple[Any, ...], str] = {}
        aliases: dict[str, str] = {}
        for name, value in state.items():
            if not self._is_cast(name, value):
                continue
            part = local(value)
            memory = (value.device, part.data_ptr(), value.shape, part.stride())
            if part.numel() and memory in first_name:
                aliases[name] = first_name[memory]
            else:
                first_name[memory if part.numel() else (name,)] = name
        names = list(first_name.values())
        for name in names:
            target = None if out is None else out.get(name)
            result[name] = torch.empty_like(state[name], dtype=torch.bfloat16) if target is None else target
        self._cast([result[name] for name in names], [state[name] for name in names], names)
        result.update({name: result[original] for name, original in aliases.items()})
        return result

    def _is_cast(self, name: str, value: Any) -> bool:
        """Whether an entry is a float32 tensor to cast; refuses what has no bf16 cast here."""
        if not isinstance(value, torch.Tensor) or value.dtype is torch.bfloat16:
            return False
        if not value.is_floating_point() or matches(canonical_name(name), self.keep_fp32):
            return False
        if value.dtype is not torch.float32:
            raise TypeError(
                f"{name!r} is {value.dtype}; an Exporter casts float32 masters. Pass it as float32, or name it in "
                "keep_fp32 to hand it on as it is"
            )
        return True

    def _cast(self, served: list[torch.Tensor], masters: list[torch.Tensor], names: list[str]) -> None:
        keys = [parameter_key(self.seed, canonical_name(name)) for name in names]
        accumulators = None
        if get_rule(self.rounding).accumulates:
            accumulators = [self._accumulator(*item) for item in zip(names, masters, keys)]
        counts = [self._casts.get(name, 0) for name in names]
        cast_(
            [local(tensor) for tensor in served],
            [local(tensor) for tensor in masters],
            rounding=self.rounding,
            key=keys,
            count=counts,
            error_feedback=None if accumulators is None else [local(tensor) for tensor in accumulators],
            start=[place_of(tensor) for tensor in masters],
        )
        self._casts.update({name: count + 1 for name, count in zip(names, counts)})

    def _accumulator(self, name: str, master: torch.Tensor, key: int) -> torch.Tensor:
        found = self._accumulators.get(name)
        if found is None:
            found = torch.empty_like(master, dtype=torch.int16)
            start_accumulator_(local(found), key=key, start=place_of(master))
        elif found.shape != master.shape:
            raise ValueError(
                f"{name!r} had shape {tuple(found.shape)} at the last export and has {tuple(master.shape)} now; use "
                "another Exporter for another model"
            )
        found = self._accumulators[name] = found.to(master.device)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything the next export depends on: rule, seed, casts per name, accumulators (not copied)."""
        return {
            "format": _FORMAT,
            "rounding": self.rounding,
            "seed": self.seed,
            "casts": dict(self._casts),
            "error_feedback": dict(self._accumulators),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another Exporter stood; its rule and seed come along.

        Args:
            state_dict: From ``state_dict()``. Tensors are copied.

        Raises:
            ValueError: It is no Exporter's state, or lacks accumulators. Nothing is changed.
        """
        missing = {"format", "rounding", "seed", "casts", "error_feedback"} - state_dict.keys()
        if missing:
            raise ValueError(f"this is no Exporter's state dict: it lacks {sorted(missing)}")
        if state_dict["format"] != _FORMAT:
            raise ValueError(f"the Exporter state has format {state_dict['format']}; this version reads {_FORMAT}")
        rule = get_rule(state_dict["rounding"])
        lacking = state_dict["casts"].keys() - state_dict["error_feedback"].keys() if rule.accumulates else set()
        if lacking:
            raise ValueError(f"the state has no accumulators for {sorted(lacking)[:3]}; it can't be resumed exactly")
        self.rounding, self.seed = state_dict["rounding"], int(state_dict["seed"])
        self._casts = dict(state_dict["casts"])
        self._accumulators = {name: value.clone() for name, value in state_dict["error_feedback"].items()}
