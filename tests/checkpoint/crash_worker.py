"""Saves checkpoints and dies on the way, again and again: ``python -m tests.checkpoint.crash_worker FOLDER``.

Python tells audit hooks of every file that is opened, made, renamed or removed; at the chosen one a forked child kills
itself. In the middle of a file it is the system that kills who writes past a limit. Nothing of the package is replaced.

Leaves one folder for each death, ``FOLDER/HOW/NUMBER``, and ``FOLDER/HOW/died.json``: how each child ended.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fcoptim import save_checkpoint
from tests.optimizer.helpers import pair, train

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
HOWS = ("new", "keep", "overwrite", "bytes")


def hooked(folder: Path, at: int, seen: list[int]) -> None:
    """Die at the given event below a folder, counted from 0; a negative number only counts."""

    def hook(event: str, arguments: tuple) -> None:
        if event not in EVENTS or not any(isinstance(a, str | Path) and str(folder) in str(a) for a in arguments):
            return
        if seen[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    sys.addaudithook(hook)


def limited(limit: int) -> None:
    """Let the system kill who writes beyond so many bytes into one file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def save(folder: Path, opt, how: str) -> None:
    note = torch.ones(300)
    if how == "overwrite":
        save_checkpoint(folder / "step-2", opt, overwrite=True, note=note)
    else:
        save_checkpoint(folder / "step-3", opt, keep=1 if how == "keep" else None, note=note)


def in_child(work: Callable[[], int]) -> int:
    """Do something in a forked child; returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(folder: Path, opt, how: str, at: int) -> int:
    """Save in a child that dies at some event, or beyond some bytes; returns its end."""

    def work() -> int:
        seen = [0]
        if how == "bytes":
            limited(1 + 160 * at if at >= 0 else 1 << 30)
        else:
            hooked(folder, at, seen)
        save(folder, opt, how)
        return seen[0]

    return in_child(work)


def main(root: Path) -> None:
    """Die everywhere while the third step is saved over or beside the second."""
    torch.set_num_threads(1)
    model, opt = pair("error_feedback")
    train(opt, model, range(2))
    save_checkpoint(root / "step-2", opt)
    train(opt, model, range(2, 3))
    for how in HOWS:
        died: dict[str, int] = {}
        for number in range(-1, 40):
            folder = root / how / str(number)
            shutil.copytree(root / "step-2", folder / "step-2")
            died[str(number)] = die(folder, opt, how, number)
            if how != "bytes" and number + 1 >= died["-1"]:
                break
        (root / how / "died.json").write_text(json.dumps(died))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
