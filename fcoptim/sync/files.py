"""Updates as safetensors files, in the layout of TRL's delta weight sync.

A folder holds ``anchors/step_000010.safetensors``, which look like a checkpoint, and ``deltas/step_000011.safetensors``
with ``{name}.indices`` (int32) and ``{name}.values`` for each tensor that changed, and string metadata ``sparse``,
``model_version``, ``sparsity`` and ``changed_params`` (a JSON list). This is the layout of "Delta Weight Sync in TRL"
(huggingface.co/blog/delta-weight-sync, section 4.1; huggingface/trl#5417). What it has no place for stands beside it,
in the metadata ``fcoptim``: run, checksums, tied names, dense tensors of a delta, which have their plain names as keys.
Packed indices are uint8.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .checksum import to_hex
from .codec import ENCODINGS, unpack
from .update import SyncError, TensorUpdate, Update

FORMAT = "sparse_weight_patch"
ANCHORS, DELTAS = "anchors", "deltas"
_DIGEST = "fcoptim_digest"
_PATTERN = "step_{:06d}.safetensors"
Folder = str | os.PathLike[str]
_T = TypeVar("_T")


def file_of(folder: Folder, version: int, *, anchor: bool) -> Path:
    """Where a version's file lies."""
    return Path(folder) / (ANCHORS if anchor else DELTAS) / _PATTERN.format(version)


def versions(folder: Folder, *, anchors: bool) -> list[int]:
    """The versions that a folder holds, ascending."""
    found = (Path(folder) / (ANCHORS if anchors else DELTAS)).glob("step_*.safetensors")
    numbers = (path.name.removeprefix("step_").removesuffix(".safetensors") for path in found)
    return sorted(int(number) for number in numbers if number.isdigit())


def latest_version(folder: Folder) -> int:
    """The last version that a folder holds, as anchor or delta; -1 if it holds none."""
    return max([-1, *versions(folder, anchors=True), *versions(folder, anchors=False)])


def write_file(update: Update, folder: Folder) -> Path:
    """Write an update into its file; after a crash the file is whole or absent.

    Args:
        update: From a ``Sender``.
        folder: Made if it is not there.

    Returns:
        The file.

    Raises:
        SyncError: The version is there already, or two tensors would have the same key.
    """
    path = file_of(folder, update.version, anchor=update.is_anchor)
    if path.exists():
        raise SyncError(
            f"{path} exists already; pass first_version=fcoptim.sync.latest_version(folder) + 1 to the Sender, or "
            "another folder"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(_tensors(update), partial, metadata=_metadata(update))
        _sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync(path.parent)
    return path


def _sync(path: Path) -> None:
    """Have the disk hold it before anything that follows."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(update: Update) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for one in update.tensors:
        keys = [(one.name, one.values)]
        if one.indices is not None:
            written = one.indices if one.packed is None else one.packed
            keys = [(f"{one.name}.indices", written), (f"{one.name}.values", one.values)]
        for key, tensor in keys:
            if key in tensors or key == "__metadata__":
                raise SyncError(
                    f"the key {key!r} of tensor {one.name!r} is taken; rename the tensor, or use dense=True"
                )
            tensors[key] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensors


def _metadata(update: Update) -> dict[str, str]:
    sparse = [one.name for one in update.tensors if one.indices is not None]
    own = {
        "run": update.run,
        "base_version": update.base_version,
        "base": to_hex(update.base),
        "checksum": to_hex(update.checksum),
        "encoding": update.encoding,
        "dense": [one.name for one in update.tensors if one.indices is None],
        "shapes": {one.name: list(one.shape) for one in update.tensors if one.indices is not None},
        "tied": {one.name: list(one.aliases) for one in update.tensors if one.aliases},
    }
    said = {
        "format": FORMAT,
        "sparse": str(not update.is_anchor),
        "model_version": str(update.version),
        "sparsity": str(update.sparsity if not update.is_anchor else 0.0),
        "changed_params": json.dumps(sparse),
        "num_changed_params": str(len(update.tensors)),
        "total_changed_elements": str(update.changed),
        "total_elements": str(update.elements),
        "fcoptim": json.dumps(own),
    }
    return {**said, _DIGEST: _digest(said)}


def _digest(said: Mapping[str, str]) -> str:
    """What shows damage in metadata, of which the weights' checksum knows nothing."""
    return hashlib.blake2b(json.dumps(sorted(said.items())).encode(), digest_size=8).hexdigest()


def _own_metadata(file: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """All metadata, and what stands under ``fcoptim``."""
    said = dict(file.metadata())
    if said.pop(_DIGEST) != _digest(said):
        raise SyncError("its metadata is damaged")
    return said, json.loads(said["fcoptim"])


def read_file(path: str | os.PathLike[str]) -> Update:
    """Read an update; its checksum is compared when a ``Receiver`` applies it.

    Args:
        path: A file that ``write_file`` has written.

    Raises:
        SyncError: The file is damaged, or no such file of fcoptim's.
        FileNotFoundError: There is no file.
    """
    return _opened(path, _update)


def read_base_version(path: str | os.PathLike[str]) -> int | None:
    """The version that a file starts from, read from its header alone; None for an anchor."""
    return _opened(path, lambda file: _base_version(_own_metadata(file)[1]))


def _opened(path: str | os.PathLike[str], read: Callable[[Any], _T]) -> _T:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return read(file)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SyncError(f"{os.fspath(path)!r} is damaged or was not written by fcoptim: {error!r}") from error


def _base_version(own: Any) -> int | None:
    return None if own["base_version"] is None else int(own["base_version"])


def _update(file: Any) -> Update:
    said, own = _own_metadata(file)
    if own["encoding"] not in ENCODINGS:
        raise SyncError(f"the indices' encoding {own['encoding']!r} is unknown to this version")
    left = set(file.keys())
    tensors = []
    for name in [*json.loads(said["changed_params"]), *own["dense"]]:
        aliases = tuple(own["tied"].get(name, ()))
        if name in own["shapes"]:
            left -= {f"{name}.indices", f"{name}.values"}
            values, written = file.get_tensor(f"{name}.values"), file.get_tensor(f"{name}.indices")
            packed = None if own["encoding"] == "int32" else written
            indices = written if packed is None else unpack(packed, own["encoding"], values.numel())
            tensors.append(TensorUpdate(name, tuple(own["shapes"][name]), values, indices, packed, aliases))
        else:
            left.discard(name)
            values = file.get_tensor(name)
            tensors.append(TensorUpdate(name, tuple(values.shape), values, aliases=aliases))
    if left:
        raise SyncError(f"it has tensors that its metadata doesn't name, for example {min(left)!r}")
    return Update(
        version=int(said["model_version"]),
        base_version=_base_version(own),
        base=int(own["base"], 16),
        tensors=tensors,
        changed=int(said["total_changed_elements"]),
        run=own["run"],
        checksum=int(own["checksum"], 16),
        elements=int(said["total_elements"]),
        encoding=own["encoding"],
    )
