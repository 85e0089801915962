"""A thread pool for kernels that let the interpreter's lock go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")


def run_shares(work: Callable[[_T], None], shares: Sequence[_T]) -> None:
    """Call ``work`` on every share at once, the first in this thread, and return when all are done.

    Any number of threads may call this at a time. A forked child gets a pool of its own.

    Args:
        work: What to do. It must let go of the interpreter's lock to gain anything.
        shares: What to do it on, one for each thread.
    """
    pending: list[Future[None]] = []
    try:
        for share in shares[1:]:
            pending.append(_pool(os.getpid(), len(shares) - 1).submit(work, share))
    except RuntimeError:
        # The interpreter is shutting down and starts no thread any more (or the system has none to give).
        for share in shares[1 + len(pending) :]:
            work(share)
    try:
        for share in shares[:1]:
            work(share)
    finally:
        # Even if interrupted, don't leave threads behind that write to memory which the caller may free.
        wait(pending)
    for future in pending:
        future.result()


@lru_cache(maxsize=4)
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Return this process's pool; threads don't survive a fork, hence the process number."""
    return ThreadPoolExecutor(workers, thread_name_prefix="fcoptim-cast")
