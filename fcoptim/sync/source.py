"""Where a sender's weights come from: an optimizer, a module, a state dict, or a function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..distributed.shards import is_sharded
from ..optimizer import FairCastOptimizer, unwrap

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]]
Source = FairCastOptimizer | nn.Module | Mapping[str, Any] | Callable[[], NamedTensors]


class Item(NamedTuple):
    """One served tensor at this moment.

    Attributes:
        name: Its first name.
        aliases: Its other names.
        tensor: Its values.
        owner: The parameter that lives on between publications and whose version counter tells of writes; None
            where there is none. Buffers are not trusted: batch norm writes its statistics past the counter.
        sparse: Whether to look for single changed values.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    owner: torch.Tensor | None
    sparse: bool


class Reader:
    """Reads a source's tensors, each once, however many names it has.

    Args:
        source: As ``Sender`` takes it.

    Raises:
        TypeError: It is none of these.
    """

    def __init__(self, source: Source | Any) -> None:
        if not isinstance(source, (FairCastOptimizer, nn.Module, Mapping)) and not callable(source):
            source = unwrap(source)
        self._source: Source = source

    def read(self) -> tuple[Iterator[Item], bool]:
        """The items, and whether each tensor exists only while its turn lasts."""
        source = self._source
        if isinstance(source, FairCastOptimizer):
            return _of_optimizer(source)
        if isinstance(source, nn.Module):
            return _of_mapping(source.state_dict(keep_vars=True), live=True), False
        if isinstance(source, Mapping):
            return _of_mapping(source, live=True), False
        made = source()
        if isinstance(made, Mapping):
            return _of_mapping(made, live=False), False
        return _of_stream(made, frozenset()), True


def _of_optimizer(opt: FairCastOptimizer) -> tuple[Iterator[Item], bool]:
    if opt._shared.showing_masters:
        raise RuntimeError("publish() inside masters_as_weights(): the model shows no served weights; leave the block")
    params = {name: p for group in opt.param_groups for name, p in zip(group["param_names"], group["params"])}
    trained = {id(param) for param in params.values()}
    model = opt._shared.model
    owners: Mapping[str, Any] = params if model is None else model.state_dict(keep_vars=True)
    if any(is_sharded(owner) for owner in owners.values()):
        untrained = frozenset(name for name, owner in owners.items() if id(owner) not in trained)
        return _of_stream(opt.served_state_dict(full=True), untrained), True
    served = opt.served_state_dict()
    return (
        _item(names, served[names[0]], owner, id(owner) in trained) for names, owner in _by_memory(owners).values()
    ), False


def _of_stream(pairs: Iterable[tuple[str, Any]], untrained: frozenset[str]) -> Iterator[Item]:
    for name, tensor in pairs:
        if isinstance(tensor, torch.Tensor):
            yield _item([name], tensor, None, name not in untrained)


def _of_mapping(state: Mapping[str, Any], live: bool) -> Iterator[Item]:
    for names, tensor in _by_memory(state).values():
        trained = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        yield _item(names, tensor, tensor if live else None, trained)


def _item(names: Sequence[str], tensor: torch.Tensor, owner: torch.Tensor | None, trained: bool) -> Item:
    name = names[0]
    if is_sharded(tensor):
        raise TypeError(
            f"{name!r} is a DTensor, of which this rank holds a part. Pass the optimizer, or a function that returns "
            "opt.served_state_dict(full=True), and let all ranks iterate together"
        )
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values to send")
    owner = owner if isinstance(owner, nn.Parameter) else None
    return Item(name, tuple(names[1:]), tensor.detach(), owner, trained and tensor.dtype is torch.bfloat16)


def _by_memory(state: Mapping[str, Any]) -> dict[tuple[Any, ...], tuple[list[str], torch.Tensor]]:
    """Group the names of tensors that are the same elements of the same memory; what is no tensor is left out."""
    found: dict[tuple[Any, ...], tuple[list[str], torch.Tensor]] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        place = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        shared = value.numel() > 0 and not is_sharded(value) and not value.is_meta
        names, _ = found.setdefault(place if shared else (name,), ([], value))
        names.append(name)
    return found
