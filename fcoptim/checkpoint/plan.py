"""What a checkpoint will hold, file by file, before any of it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..distributed.shards import is_sharded
from ..masters import COUNT, MASTER, Member
from ..optimizer import FairCastOptimizer
from . import naming
from .huggingface import model_files
from .layout import EXTRAS, FORMAT_VERSION, MASTERS, MODEL, STATE, CheckpointError, to_json
from .target import named_values
from .tensorfile import CODES, Item, TensorFile
from .values import Encoder

GROUP_KEYS = ("params", "param_names")
# The optimizer's state is cut into so many files, within these sizes, to be hashed and written by several threads.
_STATE_FILES = 8
_STATE_FILE_BYTES = (1 << 26, 1 << 30)


@dataclass
class Plan:
    """Files to write.

    Attributes:
        step: The training step.
        tensors: Those with tensors.
        texts: Contents of the others, by path.
    """

    step: int
    tensors: list[TensorFile]
    texts: dict[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all files but headers and manifest."""
        return sum(file.nbytes for file in self.tensors) + sum(len(text) for text in self.texts.values())

    def on_host(self) -> Plan:
        """A copy in host memory, which later steps leave alone."""
        copied = [TensorFile(f.name, [item.on_host() for item in f.items], f.metadata) for f in self.tensors]
        return Plan(self.step, copied, self.texts)

    @property
    def sharded(self) -> bool:
        """Whether a tensor lies in parts on several ranks."""
        return any(is_sharded(item.tensor) for file in self.tensors for item in file.items)


@dataclass
class Weights:
    """A model's weights as they lie in a folder.

    Attributes:
        served: Each once, as it is served.
        masters: The same in fp32.
        tied: From names left out to those kept.
        key_of: The folder's name of each trained parameter, by its name in the optimizer.
        loose: Values of the model's state dict that are no tensors.
    """

    served: list[Item]
    masters: list[Item]
    tied: dict[str, str]
    key_of: dict[str, str]
    loose: dict[str, Any]


def make_plan(
    opt: FairCastOptimizer,
    step: int | None,
    extra: Mapping[str, Any],
    tokenizer: Any,
    max_shard_bytes: int,
    writers: int = 1,
) -> Plan:
    """Decide what is written for an optimizer and its model.

    Sharded tensors are planned whole; nothing is gathered for it.

    Args:
        opt: The optimizer.
        step: The training step; None for the largest number of casts of a parameter.
        extra: The training's own values.
        tokenizer: See ``model_files``.
        max_shard_bytes: Largest file of weights, if no single tensor is larger.
        writers: How many ranks are to find files to write, where tensors are sharded. Default 1.

    Raises:
        CheckpointError: A value can't be saved; all of them are named.
    """
    members = opt._flat()
    weights = read_weights(opt, members)
    _check_state_shards(members)
    state = Encoder("the optimizer's state", sharded=True)
    content = _state(opt, members, weights, state)
    state.check()
    extras = Encoder("extra")
    encoded = {key: extras.encode(value, key) for key, value in extra.items()}
    extras.check()
    counts = [int(member.entry[COUNT]) for member in members if not member.kept]
    texts = {f"{STATE}.json": to_json(content), f"{EXTRAS}.json": to_json(encoded)}
    tensors = []
    model = naming.bare(opt._shared.model) if opt._shared.model is not None else None
    if not any(is_sharded(item.tensor) for item in weights.served):
        writers = 1
    for prefix, items, dtype in (("", weights.served, "bfloat16"), (f"{MASTERS}/", weights.masters, "float32")):
        share = max(sum(item.nbytes for item in items) // writers, _STATE_FILE_BYTES[0])
        files, index = _model_shards(
            prefix, items, weights.tied, min(max_shard_bytes, share) if writers > 1 else max_shard_bytes
        )
        tensors += files
        texts.update(index)
        texts.update({f"{prefix}{name}": text for name, text in model_files(model, tokenizer, dtype).items()})
    for path, encoder in ((STATE, state), (EXTRAS, extras)):
        items = [Item(key, tensor.detach(), tensor.dtype) for key, tensor in encoder.tensors.items()]
        limit = sum(item.nbytes for item in items) // max(_STATE_FILES, writers)
        tensors += _numbered(path, split(items, min(max(limit, _STATE_FILE_BYTES[0]), _STATE_FILE_BYTES[1])))
    return Plan(max(counts, default=0) if step is None else step, tensors, texts)


def read_weights(opt: FairCastOptimizer, members: Sequence[Member]) -> Weights:
    """Sort a model's state dict into served weights and masters.

    Raises:
        CheckpointError: A tensor can't be saved.
    """
    model = opt._shared.model
    named = named_values(opt)
    loose = {name: value for name, value in named if not isinstance(value, torch.Tensor)}
    tensors = [pair for pair in named if pair[0] not in loose]
    kept, tied = naming.untied(naming.bare(model) if model is not None else None, tensors)
    masters = {id(member.param): member.master for member in members}
    narrow = {id(member.param) for member in members if not member.kept} | {id(param) for param in opt._frozen()}
    out = Weights([], [], tied, {}, loose)
    for name, value in kept:
        _check_savable(name, value)
        is_narrow = id(value) in narrow
        master: Any = masters.get(id(value), value)
        out.served.append(Item(name, value, torch.bfloat16 if is_narrow else value.dtype))
        out.masters.append(Item(name, master, torch.float32 if is_narrow else master.dtype))
    keys = {id(value): name for name, value in kept}
    out.key_of = {member.name: keys[id(member.param)] for member in members}
    return out


def _check_state_shards(members: Iterable[Member]) -> None:
    """Refuse state of sharded parameters that could not be cut again when it is loaded.

    Raises:
        CheckpointError: A tensor is not shaped like its parameter, or with one more dimension in front.
    """
    for member in members:
        for key, value in member.entry.items() if is_sharded(member.param) else ():
            if isinstance(value, torch.Tensor) and value.ndim and not cut_like(value, member.param):
                raise CheckpointError(
                    f"{key} of the sharded parameter {member.name!r} has shape {tuple(value.shape)}, not the "
                    f"parameter's {tuple(member.param.shape)}, so it belongs to this sharding alone; save with "
                    "torch.distributed.checkpoint"
                )


def cut_like(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a tensor is cut as its parameter is: of its shape, or with one more dimension in front."""
    return value.ndim - param.ndim in (0, 1) and value.shape[value.ndim - param.ndim :] == param.shape


def _check_savable(name: str, value: torch.Tensor) -> None:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.dtype not in CODES:
        raise CheckpointError(
            f"{name!r} of the model can't be saved: it is {value.dtype} of layout {value.layout} on {value.device}"
        )


def _state(opt: FairCastOptimizer, members: Sequence[Member], weights: Weights, encoder: Encoder) -> dict[str, Any]:
    """The content of ``optimizer/state.json``; tensors go to the encoder."""
    packed = opt.state_dict()
    groups, state = [], {}
    for number, group in enumerate(packed["param_groups"]):
        options = {key: value for key, value in group.items() if key not in GROUP_KEYS}
        encoded = encoder.encode(options, f"param_groups.{number}")
        groups.append({"param_names": list(group["param_names"]), "options": encoded})
    entries = {
        name: packed["state"].get(place, {})
        for group in packed["param_groups"]
        for name, place in zip(group["param_names"], group["params"])
    }
    for member in members:
        entry = dict(entries[member.name])
        cast = entry.pop(MASTER, None) is not None
        encoded = encoder.encode(entry, member.name)
        state[member.name] = {"weight": weights.key_of[member.name], "cast": cast, "entry": encoded}
    return {
        "format_version": FORMAT_VERSION,
        "optimizer": type(opt.wrapped).__name__,
        "storage": str(opt._shared.storage).removeprefix("torch."),
        "groups": groups,
        "state": state,
        "tied": weights.tied,
        "loose": encoder.encode(weights.loose, "model"),
    }


def split(items: Iterable[Item], limit: int) -> list[list[Item]]:
    """Fill shards in order, each with ``limit`` bytes at most unless a single tensor is larger."""
    shards: list[list[Item]] = [[]]
    held = 0
    for item in items:
        if shards[-1] and held + item.nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += item.nbytes
    return shards


def _numbered(path: str, shards: Sequence[Sequence[Item]]) -> list[TensorFile]:
    """Files of one folder's tensors, numbered if there are several; none if there is nothing."""
    total = len(shards)
    names = [path] if total == 1 else [f"{path}-{number + 1:05d}-of-{total:05d}" for number in range(total)]
    return [TensorFile(f"{name}.safetensors", list(shard)) for name, shard in zip(names, shards) if shard]


def _model_shards(
    prefix: str, items: Sequence[Item], tied: Mapping[str, str], limit: int
) -> tuple[list[TensorFile], dict[str, bytes]]:
    """A model's files, as transformers names them, and the index if there are several."""
    files = _numbered(f"{prefix}{MODEL}", split(items, limit))
    for file in files:
        here = {item.key for item in file.items}
        # What safetensors.torch.load_model reads; transformers wants the format.
        file.metadata = {"format": "pt", **{name: kept for name, kept in tied.items() if kept in here}}
    if len(files) == 1:
        return files, {}
    homes = {item.key: file.name.removeprefix(prefix) for file in files for item in file.items}
    index = {"metadata": {"total_size": sum(file.nbytes for file in files)}, "weight_map": homes}
    return files, {f"{prefix}{MODEL}.safetensors.index.json": to_json(index)}
