"""Pairs of processes that save together while one of them dies: ``python -m tests.distributed.kill_worker FOLDER``.

The system kills who writes beyond some bytes into one file, or the process kills itself at an event of the file system.
Leaves ``FOLDER/NAME`` for each pair, and ``FOLDER/found.json``: how both ended and what the survivor raised.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DTensors need it; here once for all children
import torch.distributed as dist

from fcoptim import FairCastOptimizer, save_checkpoint
from tests.checkpoint.crash_worker import hooked, limited

from . import setups

# Who dies, and where: beyond so many bytes in one file, or at the n-th event.
PAIRS = {
    "rank 0 in a file": (0, "bytes", 600),
    "rank 1 in a file": (1, "bytes", 600),
    "rank 0 between files": (0, "event", 9),
    "rank 1 between files": (1, "event", 1),
}
RAISED = 7


def child(folder: Path, rank: int, dying: int, how: str, at: int) -> int:
    """Save step 2 together, then step 3 with a rank that dies; returns RAISED if that raised here."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    _, opt = setups.built("fsdp", "error_feedback", weight_decay=0.01)
    setups.step_with_gradients(opt, range(2))
    save_checkpoint(folder / "step-2", opt)
    setups.step_with_gradients(opt, range(2, 3))
    if rank == dying:
        if how == "bytes":
            limited(at)
        else:
            hooked(folder / ".fcoptim-partial-", at, [0])
    try:
        save_checkpoint(folder / "step-3", opt)
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
        return RAISED
    return 0


def fork(folder: Path, rank: int, *case: object) -> int:
    """Start one rank; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            code = child(folder, rank, *case)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def main(root: Path) -> None:
    """Let every pair save, one after the other."""
    torch.set_num_threads(1)
    warm = FairCastOptimizer(setups.model(), torch.optim.AdamW, rounding="error_feedback")
    setups.step_with_gradients(warm, range(1))  # what is imported and compiled on first use, for all children
    found = {}
    for name, (dying, how, at) in PAIRS.items():
        folder = root / name
        folder.mkdir()
        pids = [fork(folder, rank, dying, how, at) for rank in range(2)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        error = (folder / "error").read_text() if (folder / "error").exists() else ""
        for extra in ("store", "error"):
            (folder / extra).unlink(missing_ok=True)
        found[name] = (ends[dying], ends[1 - dying], error)
    (root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
