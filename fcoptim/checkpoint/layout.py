"""What a checkpoint folder holds, and its manifest.

::

    path/
      model.safetensors            served weights, as Hugging Face names them; sharded with an index if large
      config.json, tokenizer ...   where the model has them
      masters/                     the same in fp32
      optimizer/state.json         param groups, counts, rules, seeds, and where each tensor of the state lies
      optimizer/state-*.safetensors
      extra/extra.json, extra/extra-*.safetensors
      manifest.json                size and SHA-256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

FORMAT = "fcoptim checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model"
MASTERS = "masters"
OPTIMIZER = "optimizer"
EXTRA = "extra"
STATE = f"{OPTIMIZER}/state"
EXTRAS = f"{EXTRA}/extra"

Json = Any


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or doesn't fit; the message names what."""


@dataclass(frozen=True)
class Record:
    """What the manifest knows of one file.

    Attributes:
        size: In bytes.
        sha256: Hexadecimal.
    """

    size: int
    sha256: str


@dataclass
class Manifest:
    """``manifest.json``.

    Attributes:
        step: The training step.
        files: By path relative to the checkpoint, with forward slashes.
        created: When it was written, in UTC, ISO 8601.
        packages: Versions of what wrote it.
    """

    step: int
    files: dict[str, Record]
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    packages: dict[str, str] = field(default_factory=lambda: package_versions())

    def to_json(self) -> bytes:
        """The file's content, with a digest of itself, so that an edit shows."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "created": self.created,
            "packages": self.packages,
            "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(self.files.items())},
        }
        return to_json({**content, "digest": _digest(content)})


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to a checkpoint, where installed."""
    found = {"python": platform.python_version()}
    for name in ("fcoptim", "torch", "safetensors", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def to_json(value: Json) -> bytes:
    """JSON as it is written into a checkpoint."""
    return (json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def read_json(path: Path) -> Json:
    """Read a JSON file.

    Raises:
        CheckpointError: It is no JSON, or not there.
    """
    try:
        return json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, it is no JSON: {error}") from error


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``; the files it lists are not looked at.

    Raises:
        CheckpointError: It is damaged, edited, written by a newer fcoptim, or lists a path outside the folder.
    """
    path = folder / MANIFEST
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of fcoptim's")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, this fcoptim reads {FORMAT_VERSION}; install the fcoptim that "
            f"wrote it ({content.get('packages')})"
        )
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise CheckpointError(f"{path} was edited or damaged: its digest is not that of its content")
    try:
        files = {name: Record(int(r["size"]), str(r["sha256"])) for name, r in content["files"].items()}
        manifest = Manifest(int(content["step"]), files, content["created"], content["packages"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    for name in files:
        check_inside(name, path)
    return manifest


def check_inside(name: Any, source: Path) -> str:
    """Refuse a file name that would leave the checkpoint's folder.

    Args:
        name: Relative path with forward slashes.
        source: The file that says it.

    Raises:
        CheckpointError: It is absolute, has ``..`` in it, or is no plain path.
    """
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    plain = parts and not any(part == ".." or "\\" in part or "\0" in part or ":" in part for part in parts)
    if not plain or name.startswith("/"):
        raise CheckpointError(f"{source} names a file outside its folder, {name!r}; it was tampered with")
    return str(name)
