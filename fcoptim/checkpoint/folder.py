"""Folders that appear whole or not at all: written beside their place, then renamed in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .layout import MANIFEST, CheckpointError, read_manifest

PARTIAL = ".fcoptim-partial-"
_LOCK = ".lock"
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2


def resolve(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint, without ``..``; links are not followed.

    Raises:
        CheckpointError: It is empty or the root.
    """
    text = os.fspath(path)
    found = Path(os.path.abspath(text))
    if not text or not found.name:
        raise CheckpointError(f"a checkpoint needs a path with a name, got {text!r}")
    return found


def check_target(target: Path, overwrite: bool) -> None:
    """See that a checkpoint can be put there, before anything is written.

    Raises:
        FileNotFoundError: The folder it is to lie in does not exist.
        NotADirectoryError: That is a file.
        FileExistsError: There is something already, and it is not to be (or must not be) overwritten.
    """
    parent = target.parent
    if not parent.exists():
        raise FileNotFoundError(
            errno.ENOENT, "the folder for the checkpoint does not exist; create it first", str(parent)
        )
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "the checkpoint is to lie in this, but it is a file", str(parent))
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(
            errno.EEXIST,
            "this exists already; save under another name (with keep=3 only the last three are kept), or pass "
            "overwrite=True to replace a checkpoint",
            str(target),
        )
    if target.is_symlink() or not (target / MANIFEST).is_file():
        raise FileExistsError(errno.EEXIST, "this exists and is no checkpoint of fcoptim's; won't replace", str(target))


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a folder to write into, and put it in its place at the end of the with block.

    Leftovers of writers that died are removed first. If the block raises, nothing is left.

    Args:
        target: Where it is to be. See ``check_target``.
        overwrite: Whether a checkpoint there is replaced, in one step.
    """
    check_target(target, overwrite)
    clean(target.parent)
    with _claimed(target.parent) as partial:
        partial.mkdir()
        yield partial
        _sync_folders(partial)
        _publish(partial, target, overwrite)
        sync(target.parent)


def remove(folder: Path) -> None:
    """Remove a folder such that it is there whole, or not under its name."""
    with _claimed(folder.parent) as partial:
        os.rename(folder, partial)


def clean(parent: Path) -> None:
    """Remove what writers in this folder that are no longer alive have left."""
    stems = {entry.name.removesuffix(_LOCK) for entry in os.scandir(parent) if entry.name.startswith(PARTIAL)}
    for stem in stems:
        partial = parent / stem
        lock = None
        with suppress(OSError):  # another user's, which we can't remove
            lock = _lock(parent / f"{stem}{_LOCK}")
        if lock is not None:
            shutil.rmtree(partial, ignore_errors=True)
            _unlock(lock, parent / f"{stem}{_LOCK}")


def rotate(target: Path, keep: int) -> list[Path]:
    """Remove the oldest checkpoints of a series, those beside it whose names differ by numbers alone.

    Args:
        target: The one just saved, which stays in any case.
        keep: How many stay.

    Returns:
        What was removed.
    """
    pattern = series(target)
    found = []
    for path in target.parent.iterdir():
        if path == target or not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        with suppress(CheckpointError):  # what has no manifest of ours is not ours to remove
            found.append((read_manifest(path).created, path))
    doomed = [path for _, path in sorted(found)[: max(len(found) - (keep - 1), 0)]]
    for path in doomed:
        remove(path)
    return doomed


def series(target: Path) -> re.Pattern[str]:
    """A pattern of the names that differ from this one by their numbers alone.

    Raises:
        CheckpointError: There is no number in it.
    """
    parts = re.split(r"\d+", target.name)
    if len(parts) < 2:
        raise CheckpointError(
            f"keep= removes older checkpoints whose names differ by a number, but {target.name!r} has none; name it, "
            "for example, step-000100"
        )
    return re.compile(r"\d+".join(map(re.escape, parts)))


def sync(path: Path) -> None:
    """Have the disk hold a folder's entries before anything that follows."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folders(folder: Path) -> None:
    for inside, _, _ in os.walk(folder, topdown=False):
        sync(Path(inside))


def _publish(partial: Path, target: Path, overwrite: bool) -> None:
    if overwrite and target.exists():
        _exchange(partial, target)
        return
    try:
        os.rename(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "somebody else has created this meanwhile", str(target)) from error
        raise


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders in one step; Python has no call for it.

    Raises:
        OSError: The system or the file system can't.
    """
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    call = getattr(library, "renameat2", None)
    here = -100  # AT_FDCWD: paths are absolute
    if call is not None and call(here, os.fsencode(a), here, os.fsencode(b), _EXCHANGE) == 0:
        return
    number = ctypes.get_errno() if call is not None else errno.ENOSYS
    raise OSError(
        number,
        f"can't replace a checkpoint in one step here ({os.strerror(number)}); save under another name, with keep=1",
        str(b),
    )


@contextmanager
def _claimed(parent: Path) -> Iterator[Path]:
    """Claim a name for a folder that is removed at the end if it is still there; a lock says that we are alive."""
    partial = parent / f"{PARTIAL}{secrets.token_hex(6)}"
    path = parent / f"{partial.name}{_LOCK}"
    lock = _lock(path)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _unlock(lock, path)


def _lock(path: Path) -> int | None:
    """Lock a file, creating it, or return None if it is taken. The system frees it when the process ends."""
    if sys.platform == "win32":
        return None
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # somebody cleaned up between the two looks; take a new file
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def _unlock(descriptor: int | None, path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
    if descriptor is not None:
        os.close(descriptor)
