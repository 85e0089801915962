"""The two halves of the weights as state dicts, and the swap that shows the fp32 half in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .distributed.shards import full, is_sharded
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
def masters_shown(model: nn.Module | None, members: Sequence[Member], frozen: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let parameters hold their masters, and frozen ones an fp32 copy, for the length of a with block.

    Raises:
        NotImplementedError: Parameters are sharded and there is no model whose modules could show their masters.
    """
    shown = [(member.param, member.master) for member in members if not member.kept]
    shown += [(param, param.detach().float()) for param in frozen]
    shards = {id(param): value.detach() for param, value in shown if is_sharded(param)}
    if shards and model is None:
        raise NotImplementedError("masters of sharded parameters are shown in a model; construct the optimizer on it")
    saved = [(param, param.data) for param, _ in shown if not is_sharded(param)]
    try:
        for param, value in shown:
            if not is_sharded(param):
                param.data = value
        with _shards_shown(model, shards):
            yield
    finally:
        for param, value in saved:
            param.data = value


@contextmanager
def _shards_shown(model: nn.Module | None, shards: dict[int, torch.Tensor]) -> Iterator[None]:
    if model is None or not shards:
        yield
        return
    from .distributed.show import shards_shown  # brings FSDP2 along

    with shards_shown(model, shards):
        yield
