"""Writing a plan into a folder: several files at a time, hashed on the way."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from .layout import MANIFEST, Manifest, Record
from .plan import Plan
from .tensorfile import Advance, new_file, write_all, write_file

PROGRESS_BYTES = 1_000_000_000
_MOST_THREADS = 16
_WAITING_THREADS = 2  # while some wait for the disk, others compute
_T = TypeVar("_T")
_R = TypeVar("_R")


def write_plan(folder: Path, plan: Plan, what: str) -> Manifest:
    """Write all files of a plan, each flushed to the disk, the manifest last.

    Args:
        folder: An empty folder.
        plan: What to write.
        what: What the progress bar calls it.

    Returns:
        The manifest.
    """
    make_folders(folder, plan)
    with progress(what, plan.nbytes) as advance:
        records = in_threads(
            lambda file: write_file(folder, file, advance), plan.tensors, [file.nbytes for file in plan.tensors]
        )
    return finish_plan(folder, plan, {file.name: record for file, record in zip(plan.tensors, records)})


def make_folders(folder: Path, plan: Plan) -> None:
    """Make the folders that the files of a plan lie in."""
    for name in [*plan.texts, *(file.name for file in plan.tensors)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)


def finish_plan(folder: Path, plan: Plan, records: Mapping[str, Record]) -> Manifest:
    """Write the small files, and the manifest last.

    Args:
        folder: Where the tensors' files lie already.
        plan: What is written.
        records: Of the tensors' files.

    Returns:
        The manifest.
    """
    manifest = Manifest(plan.step, dict(records))
    for name, text in plan.texts.items():
        manifest.files[name] = write_text(folder / name, text)
    write_text(folder / MANIFEST, manifest.to_json())
    return manifest


def write_text(path: Path, text: bytes) -> Record:
    """Write a small file and have the disk hold it."""
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(text))
        os.fsync(descriptor)
    return Record(len(text), hashlib.sha256(text).hexdigest())


def check_space(parent: Path, needed: int) -> None:
    """Refuse what the disk has no room for, before anything is written.

    Raises:
        OSError: There is less free space than needed.
    """
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"the checkpoint needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free", str(parent)
        )


def in_threads(work: Callable[[_T], _R], jobs: Sequence[_T], sizes: Iterable[int]) -> list[_R]:
    """Do all jobs, the largest first, in a few more threads than there are cores for this process.

    Args:
        work: Lets go of the interpreter's lock where it takes long.
        jobs: What to do.
        sizes: Of each job.

    Returns:
        What each gave, in the order of the jobs. If one raises, those that have not begun are dropped.
    """
    order = [number for _, number in sorted(zip(sizes, range(len(jobs))), reverse=True)]
    threads = min(_cores() + _WAITING_THREADS, len(jobs), _MOST_THREADS)
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="fcoptim-files")
    try:
        futures = {number: pool.submit(work, jobs[number]) for number in order}
        return [futures[number].result() for number in range(len(jobs))]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def deal(sizes: Sequence[int], hands: int) -> list[int]:
    """Share jobs among hands, the largest first, each to who has least.

    Returns:
        The hand of each job; the same everywhere for the same arguments.
    """
    held, owners = [0] * hands, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = held.index(min(held))
        held[owners[number]] += sizes[number]
    return owners


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Show a progress bar above 1 GB, on a terminal only.

    Args:
        what: What is done.
        total: Bytes.

    Yields:
        A function to tell how many bytes more are done; any thread may call it.
    """
    if total <= PROGRESS_BYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
