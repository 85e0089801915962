"""The two halves of the weights as state dicts, and the swap that shows the fp32 half in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .distributed.shards import full, is_sharded, local
from .masters import Member

Weights = dict[str, torch.Tensor]


def master_state_dict(model: nn.Module | None, members: Sequence[Member]) -> Weights:
    """The model's state dict with fp32 masters in place of served weights; nothing is copied."""
    if model is None:
        return {member.name: member.master.detach() for member in members}
    masters = {id(member.param): member.master.detach() for member in members}
    return {name: masters.get(id(value), value) for name, value in _named_values(model)}


def served_state_dict(model: nn.Module | None, members: Sequence[Member], frozen: Sequence[torch.Tensor]) -> Weights:
    """The model's state dict with served weights in bf16.

    Nothing is copied, except where parameters have fp32 storage: their values, which lie on the bf16 grid, are
    written to bf16 tensors, one for each parameter however many names it has.
    """
    narrow = {id(member.param): member.param for member in members if not member.kept}
    narrow.update({id(param): param for param in frozen})
    memo = {key: param.detach().to(torch.bfloat16) for key, param in narrow.items()}
    if model is None:
        return {member.name: memo.get(id(member.param), member.param.detach()) for member in members}
    return {name: memo.get(id(value), value) for name, value in _named_values(model)}


def served_stream(
    model: nn.Module | None, members: Sequence[Member], frozen: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``served_state_dict`` holds, with each sharded tensor gathered when its turn comes."""
    narrow = {id(member.param) for member in members if not member.kept} | {id(param) for param in frozen}
    named = ((member.name, member.param) for member in members) if model is None else _named_values(model)
    for name, value in named:
        served = value.detach().to(torch.bfloat16) if id(value) in narrow else value.detach()
        yield name, full(served)


def _named_values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries of ``model.state_dict()``: parameters and buffers as the objects they are, under saved names."""
    yield from model.state_dict(keep_vars=True).items()


@contextmanager
def masters_shown(members: Sequence[Member], frozen: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let parameters hold their masters, and frozen ones an fp32 copy, for the length of a with block.

    The memory of sharded parameters belongs to the engine that gathers them, so masters are copied into it.

    Raises:
        NotImplementedError: A sharded parameter has bf16 storage.
    """
    shown = [(member.param, member.master) for member in members if not member.kept]
    for param, _ in shown:
        if is_sharded(param) and param.dtype is not torch.float32:
            raise NotImplementedError(
                "bfloat16 DTensors can't show fp32 masters: what shards them gathers bf16. Shard fp32 parameters, "
                "whose storage is then 'float32', or load opt.master_state_dict() into an fp32 model"
            )
    shown += [(param, param.detach().float()) for param in frozen if not is_sharded(param)]
    saved = [(param, local(param).clone() if is_sharded(param) else param.data) for param, _ in shown]
    try:
        for param, value in shown:
            _show(param, local(value))
        yield
    finally:
        for param, value in saved:
            _show(param, value)


@torch.no_grad()
def _show(param: torch.Tensor, value: torch.Tensor) -> None:
    if is_sharded(param):
        local(param).copy_(value)
    else:
        param.data = value
