"""Showing other values in sharded parameters, of another dtype, for the length of a with block.

FSDP2 has no interface for that, so this puts other parameters into its own records of them and puts the records back
afterwards. It gathers and frees the shown values layer by layer as it does its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


@contextmanager
def shards_shown(model: nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let the modules of a model compute with other values; mixed precision is off as long.

    Args:
        model: What holds the parameters. No forward or backward pass may be under way.
        values: By ``id`` of a sharded parameter what it is to show, placed like it.

    Raises:
        NotImplementedError: This version of torch keeps FSDP2's records differently.
    """
    fsdp = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        states = list({id(state): state for state in (module._get_fsdp_state() for module in fsdp)}.values())
        records = [record for state in states for group in _groups(state) for record in group.fsdp_params]
        of_fsdp = {id(record.sharded_param) for record in records}
    except AttributeError as error:
        raise NotImplementedError(
            f"masters of FSDP2 parameters can't be shown with torch {torch.__version__}; load opt.master_state_dict() "
            "into an fp32 model instead"
        ) from error
    with ExitStack() as stack:
        for sharded in fsdp:
            sharded.reshard()
            stack.callback(sharded.reshard)
        if fsdp:
            _initialised(model, states)
        stack.enter_context(_policies_off(states))
        for record in records:
            if id(record.sharded_param) in values:
                stack.enter_context(_recorded(record, values[id(record.sharded_param)]))
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if id(param) in values and id(param) not in of_fsdp:
                    stack.enter_context(_registered(module, name, values[id(param)]))
        # Registered last, done first: everything is sharded when the records come back.
        for sharded in fsdp:
            stack.callback(sharded.reshard)
        yield


def _groups(state: Any) -> Sequence[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    found: Sequence[Any] = groups
    return found


def _initialised(model: nn.Module, states: Sequence[Any]) -> None:
    """Let FSDP2 do now what it does at the first forward pass, as that reads the parameters' dtypes."""
    if all(state._is_root is None for state in states):
        for module in model.modules():  # parents come before their children
            if isinstance(module, FSDPModule):
                module._get_fsdp_state()._lazy_init()


@contextmanager
def _policies_off(states: Sequence[Any]) -> Iterator[None]:
    before = [(state, "_mp_policy", state._mp_policy) for state in states]
    before += [(group, "mp_policy", group.mp_policy) for state in states for group in _groups(state)]
    try:
        for owner, name, _ in before:
            setattr(owner, name, MixedPrecisionPolicy())
        yield
    finally:
        for owner, name, policy in before:
            setattr(owner, name, policy)


@contextmanager
def _recorded(record: Any, value: torch.Tensor) -> Iterator[None]:
    """Put another parameter into one of FSDP2's records, with buffers of its own."""
    before = dict(vars(record))
    try:
        record._setattr_on_modules(nn.Parameter(value, requires_grad=False))
        record.reset_sharded_param()
        record.init_dtype_attrs(MixedPrecisionPolicy())
        record.all_gather_outputs = []
        vars(record).pop("_unsharded_param", None)
        yield
    finally:
        vars(record).clear()
        vars(record).update(before)
        record._setattr_on_modules(record.sharded_param)


@contextmanager
def _registered(module: nn.Module, name: str, value: torch.Tensor) -> Iterator[None]:
    before = module._parameters[name]
    module._parameters[name] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        module._parameters[name] = before
