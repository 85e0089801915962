"""A checkpoint, or any model folder of safetensors, opened for reading; tensors are memory-mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..cast import get_rule
from ..masters import ACCUMULATOR, MASTER, PLACED_KEYS, Entry, Member, replayed
from .layout import (
    EXTRAS,
    MANIFEST,
    MASTERS,
    OPTIMIZER,
    STATE,
    CheckpointError,
    Manifest,
    check_inside,
    read_json,
    read_manifest,
)
from .tensorfile import CHUNK, Advance, Reader, count_differing
from .values import Decoder
from .writing import deal, in_threads, progress

_SUFFIX = ".safetensors"
_PIECE = 1 << 18  # elements that are cast and compared at once: few enough to be small beside a tensor, in every thread
_WHOLE = ("model.safetensors.index.json", "model.safetensors")


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of some safetensors files, read-only.

    Args:
        files: The files.
        homes: Which file holds which tensor, as an index says; None to take what they hold.

    Raises:
        CheckpointError: A file is damaged, two hold the same tensor, or the index is wrong.
    """

    def __init__(self, files: list[Path], homes: Mapping[str, Path] | None = None) -> None:
        readers = {path: Reader(path) for path in files}
        self.metadata: dict[str, str] = {}
        self._homes: dict[str, Reader] = {}
        for path, reader in readers.items():
            self.metadata.update(reader.metadata)
            for key in reader.places:
                if key in self._homes:
                    raise CheckpointError(f"{path} and {self._homes[key].path} both hold a tensor {key!r}")
                self._homes[key] = reader
        for key, path in (homes or {}).items():
            if self._homes.get(key) is not readers[path]:
                raise CheckpointError(f"the index says that {path} holds {key!r}, but it doesn't")

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._homes[key].tensor(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def open_weights(folder: Path) -> Weights:
    """Open the weights of a model folder: by its index, else its one file, else all safetensors files in it.

    Args:
        folder: The folder, or a safetensors file.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: There are no weights in it, or they are damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder or file {folder}")
    if folder.is_file():
        return Weights([folder])
    index, whole = (folder / name for name in _WHOLE)
    if index.is_file():
        content = read_json(index)
        named = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{index} is damaged: it has no weight_map")
        homes = {key: folder / check_inside(name, index) for key, name in named.items()}
        return Weights(sorted(set(homes.values())), homes)
    files = [whole] if whole.is_file() else sorted(folder.glob(f"*{_SUFFIX}"))
    if not files:
        raise CheckpointError(f"there are no safetensors files in {folder}")
    return Weights(files)


@dataclass
class Saved:
    """One trained parameter as it was saved.

    Attributes:
        name: Its name in the optimizer.
        weight: Its name in the model folder.
        entry: Its state entry, with the master if it has one.
        group: The options of its param group.
    """

    name: str
    weight: str
    entry: Entry
    group: dict[str, Any]


class Opened:
    """A checkpoint on disk. Opening reads JSON and headers only.

    Args:
        folder: Its path.
        strict: Whether a checkpoint without a manifest is refused, when there are masters in it.

    Raises:
        CheckpointError: It is damaged in a way that shows at once.

    Attributes:
        manifest: None if there is no ``manifest.json``.
    """

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint folder {folder}")
        self.folder = folder
        self.manifest: Manifest | None = None
        if (folder / MANIFEST).exists():
            self.manifest = read_manifest(folder)
        elif strict and any((folder / name).exists() for name in (MASTERS, OPTIMIZER)):
            raise CheckpointError(
                f"{folder} has parts of a checkpoint but no {MANIFEST}: it was copied incompletely. Copy all of it, or "
                "pass strict=False to load what is there"
            )

    @property
    def has_state(self) -> bool:
        """Whether masters and optimizer state are there, or only a model."""
        return (self.folder / f"{STATE}.json").is_file()

    @cached_property
    def served(self) -> Weights:
        """The served weights."""
        return open_weights(self.folder)

    @cached_property
    def masters(self) -> Weights:
        """The fp32 weights."""
        return open_weights(self.folder / MASTERS)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The content of ``optimizer/state.json``, as it was written."""
        content = read_json(self.folder / f"{STATE}.json")
        if not isinstance(content, dict) or not {"groups", "state", "tied", "loose"} <= content.keys():
            raise CheckpointError(f"{self.folder / STATE}.json is damaged: parts of it are missing")
        return content

    @cached_property
    def state_decoder(self) -> Decoder:
        """Reads values of ``optimizer/state.json``."""
        return self._decoder(STATE)

    def extra(self) -> dict[str, Any]:
        """The training's own values, their tensors copied."""
        if not (self.folder / f"{EXTRAS}.json").is_file():
            return {}
        decoder = self._decoder(EXTRAS)
        content = decoder.decode(read_json(self.folder / f"{EXTRAS}.json"))
        return {key: copied(value) for key, value in content.items()}

    def _decoder(self, path: str) -> Decoder:
        stem = self.folder / path
        tensors = Weights(sorted(stem.parent.glob(f"{stem.name}*{_SUFFIX}")))
        return Decoder(tensors.__getitem__, f"{stem}.json")

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """Param groups: options, and ``"param_names"``."""
        try:
            groups = [
                {**self.state_decoder.decode(group["options"]), "param_names": list(group["param_names"])}
                for group in self.state["groups"]
            ]
            for group in groups:
                get_rule(group["rounding"])
                if type(group["seed"]) is not int:
                    raise TypeError(f"the seed {group['seed']!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.folder / STATE}.json is damaged: {error!r} in its groups") from error
        return groups

    def parameters(self) -> Iterator[Saved]:
        """Yield trained parameters one by one; their tensors are mapped, not read."""
        for group in self.groups:
            for name in group["param_names"]:
                try:
                    saved = self.state["state"][name]
                    entry = self.state_decoder.decode(saved["entry"])
                    if saved["cast"]:
                        entry[MASTER] = self.masters[saved["weight"]]
                    yield Saved(name, saved["weight"], entry, group)
                except (KeyError, TypeError) as error:
                    raise CheckpointError(
                        f"{self.folder} is incomplete: {error!r} is missing for parameter {name!r}"
                    ) from error

    # ------------------------------------------------------------- checks

    def damaged(self, hand: int = 0, hands: int = 1) -> list[str]:
        """Compare every file with the manifest; say of each that differs how.

        Args:
            hand: Which share of the files to look at. Default 0.
            hands: Into how many shares they are dealt. Default 1.
        """
        if self.manifest is None:
            return []
        found, whole = [], []
        owners = deal([record.size for record in self.manifest.files.values()], hands)
        for (name, record), owner in zip(self.manifest.files.items(), owners):
            if owner != hand:
                continue
            path = self.folder / name
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != record.size:
                found.append(f"{name} has {path.stat().st_size} bytes instead of {record.size}")
            else:
                whole.append(name)
        sizes = [self.manifest.files[name].size for name in whole]
        with progress(f"checking {self.folder.name}", sum(sizes)) as advance:
            sums = in_threads(lambda name: file_hash(self.folder / name, advance), whole, sizes)
        found += [
            f"{name} is not the file that was saved (its SHA-256 differs)"
            for name, found_sum in zip(whole, sums)
            if found_sum != self.manifest.files[name].sha256
        ]
        return found + (self._unlisted() if hand == 0 else [])

    def _unlisted(self) -> list[str]:
        """Weights that the manifest doesn't know: engines read every safetensors file of a folder, or its index."""
        assert self.manifest is not None
        files = [path for pattern in (f"*{_SUFFIX}", f"*{_SUFFIX}.index.json") for path in self.folder.rglob(pattern)]
        present = {path.relative_to(self.folder).as_posix() for path in files}
        return [f"{name} is not in the manifest" for name in sorted(present - self.manifest.files.keys())]

    def misaligned(self, hand: int = 0, hands: int = 1) -> list[str]:
        """Rebuild the served weights from masters and state; name those whose saved bits differ.

        Args:
            hand: Which share of the parameters to look at. Default 0.
            hands: Into how many shares they are dealt. Default 1.
        """
        found = [(saved, self.served.get(saved.weight)) for saved in self.parameters()]
        sizes = [0 if served is None else served.numel() for _, served in found]
        chosen = [number for number, owner in enumerate(deal(sizes, hands)) if owner == hand]
        found, sizes = [found[number] for number in chosen], [sizes[number] for number in chosen]
        wrong = in_threads(lambda pair: pair[1] is None or differing(pair[0], pair[1]) > 0, found, sizes)
        return [saved.weight for (saved, _), is_wrong in zip(found, wrong) if is_wrong]


def differing(saved: Saved, served: torch.Tensor) -> int:
    """How many served values are not those of the last cast, which is made anew, piece by piece.

    Raises:
        CheckpointError: A part of the state is missing or has the wrong form.
    """
    master = saved.entry.get(MASTER)
    if master is None:
        return 0
    if served.dtype is not torch.bfloat16 or served.shape != master.shape:
        return served.numel()
    flat = served.reshape(-1)
    shaped = {key: _rows(saved, key, value, master) for key, value in saved.entry.items() if key in PLACED_KEYS}
    count = 0
    try:
        for first in range(0, len(flat), _PIECE):
            here = slice(first, first + _PIECE)
            entry = {**saved.entry, **{key: rows[..., here] for key, rows in shaped.items()}}
            again = replayed(Member(saved.name, flat[here], entry, saved.group, first))
            count += count_differing(again, flat[here])
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"the state of parameter {saved.name!r} is damaged: {error}") from error
    return count


def _rows(saved: Saved, key: str, value: Any, master: torch.Tensor) -> torch.Tensor:
    """A tensor shaped like the master, or with one more dimension in front, with the master's dimensions as one."""
    if not isinstance(value, torch.Tensor) or value.shape[max(value.ndim - master.ndim, 0) :] != master.shape:
        raise CheckpointError(f"the state of parameter {saved.name!r} is damaged: {key} has another shape")
    if key == ACCUMULATOR and value.dtype is not torch.int16:
        raise CheckpointError(f"the state of parameter {saved.name!r} is damaged: {key} is {value.dtype}, not int16")
    return value.reshape(*value.shape[: value.ndim - master.ndim], -1)


def file_hash(path: Path, advance: Advance) -> str:
    """SHA-256 of a file, as hexadecimal."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            advance(count)
    return digest.hexdigest()


def copied(value: Any) -> Any:
    """The same value with copies of its tensors, which no longer need the file."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = copied(item)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value
