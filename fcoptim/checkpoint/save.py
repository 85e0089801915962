"""``save_checkpoint``."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..distributed.agreement import Group
from ..distributed.shards import is_sharded
from ..optimizer import FairCastOptimizer, unwrap
from . import folder
from .joint import save_jointly
from .layout import CheckpointError
from .plan import Plan, make_plan
from .target import named_values
from .team import Team
from .writing import check_space, write_plan

_pending: weakref.WeakKeyDictionary[FairCastOptimizer, Saving] = weakref.WeakKeyDictionary()


class Saving:
    """A checkpoint that is being written, or has been.

    Attributes:
        path: Where it is, or will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the writing has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is on the disk.

        Returns:
            Its path.

        Raises:
            OSError: It could not be written. The folder is as it was before.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _start(self, plan: Plan, overwrite: bool, keep: int | None) -> None:
        def work() -> None:
            try:
                _write(self.path, plan, overwrite, keep)
            except BaseException as error:
                self._error = error
                if not threading.main_thread().is_alive():
                    raise  # nobody is left to call wait(); let it be printed

        self._thread = threading.Thread(target=work, name="fcoptim-save")  # not a daemon: the process waits for it
        self._thread.start()


def save_checkpoint(
    path: str | os.PathLike[str],
    opt: FairCastOptimizer,
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    background: bool = False,
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    process_group: Group = "default",
    **extra: Any,
) -> Saving:
    """Save masters, served model, optimizer state and the training's own values as one folder, whole or not at all.

    The folder is a Hugging Face model of the served weights. It is written beside its place, flushed to the disk and
    renamed in one step. Tensors are written piece by piece; nothing is pickled.

    With ``torch.distributed`` every rank has to make the call. Sharded tensors are saved whole: each rank writes files
    of its own, and gathers one tensor at a time. Where nothing is sharded the first rank writes and the others wait.

    Args:
        path: The folder to create. The folder it lies in must exist, for all ranks the same.
        opt: The optimizer, or what a framework has put around it.
        step: The training step, for the manifest. Default: how often the most cast parameter was cast.
        keep: Afterwards remove the oldest checkpoints beside it whose names differ by their numbers alone
            (``step-000100``, ``step-000200``), so that this many stay. Default None: all stay.
        overwrite: Whether a checkpoint at this path is replaced, in one step (on Linux). Default False.
        background: Copy everything to host memory, return, and write in a thread. An error is raised by ``wait()`` of
            what is returned, or by the next save. Default False.
        tokenizer: A tokenizer or processor to save with the model. Default: the tokenizer files in the local folder
            that the model was loaded from.
        max_shard_bytes: Weights above this size are sharded, with an index. Default 5 GB.
        process_group: With ``torch.distributed``, the ranks that save together: ``"default"`` (all), a process group,
            or None for this process alone, which can't save sharded parameters.
        **extra: The training's own values, by name: numbers, strings, None, tensors, and lists, tuples and dicts of
            these (a scheduler's ``state_dict()``, random states). Those of the first rank are saved.

    Returns:
        What to wait for, if ``background``; else it is done.

    Raises:
        CheckpointError: A value can't be saved, or the ranks don't mean the same; the message names it.
        OSError: The disk is full, a folder is missing or may not be written, or the path exists. Nothing was changed.
        RuntimeError: Another rank has died.
        NotImplementedError: ``background`` with several processes, or sharded parameters with ``process_group=None``.
    """
    opt = unwrap(opt)
    target = folder.resolve(path)
    team = Team(process_group, f"saving checkpoint {target}")
    joint = team.size > 1 or (team.group is not None and any(is_sharded(value) for _, value in named_values(opt)))

    def make() -> Plan:
        _check_numbers(step, keep, max_shard_bytes)
        if keep is not None:
            folder.series(target)
        if joint and background:
            raise NotImplementedError(
                "background=True can't be used by several ranks together; leave it out, or use "
                "torch.distributed.checkpoint.async_save"
            )
        wait_for(opt)
        _check_ready(opt)
        if team.first:
            folder.check_target(target, overwrite)
        return make_plan(opt, step, extra if team.first else {}, tokenizer, max_shard_bytes, team.size)

    saving = Saving(target)
    if joint:
        with _told(target):
            save_jointly(team, target, make, overwrite, keep)
        return saving
    wait_for(opt)
    with _told(target):
        plan = make()
        _check_whole(plan)
        check_space(target.parent, plan.nbytes)
    if background:
        _pending[opt] = saving
        saving._start(plan.on_host(), overwrite, keep)
    else:
        _write(target, plan, overwrite, keep)
    return saving


def wait_for(opt: FairCastOptimizer, path: Path | None = None) -> None:
    """Wait for a background save of this optimizer, and raise its error; and for whoever else writes to a path."""
    saving = _pending.pop(opt, None)
    if saving is not None:
        saving.wait()
    for other in list(_pending.values()):
        if other.path == path:
            other.wait()


def _check_whole(plan: Plan) -> None:
    """Refuse sharded parameters where one process saves alone."""
    if plan.sharded:
        raise NotImplementedError(
            "parameters are sharded (DTensors), so all ranks have to save together: leave process_group out, and call "
            "save_checkpoint on every rank; or use torch.distributed.checkpoint"
        )


def _check_ready(opt: FairCastOptimizer) -> None:
    """Refuse to save two halves that don't agree."""
    if opt._shared.showing_masters:
        raise RuntimeError("save_checkpoint inside masters_as_weights(): leave the with block first")
    written = opt._shared.watch.foreign(opt._flat())
    if written:
        raise CheckpointError(
            f"the served weights of {', '.join(map(repr, written[:3]))} were written from outside since the last cast, "
            "so the masters don't belong to them. Call opt.adopt_served_() (masters := served) or opt.recast_() "
            "(served := cast of the masters) before saving"
        )


def _check_numbers(step: int | None, keep: int | None, max_shard_bytes: int) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1), ("max_shard_bytes", max_shard_bytes, 1)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            raise CheckpointError(f"{name} must be at least {least}, got {value}")


def _write(target: Path, plan: Plan, overwrite: bool, keep: int | None) -> None:
    with _told(target):
        with folder.new_folder(target, overwrite=overwrite) as partial:
            write_plan(partial, plan, f"saving {target.name}")
        if keep is not None:
            folder.rotate(target, keep)


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Say of an error of the system what was being done."""
    try:
        yield
    except OSError as error:
        reason = f"checkpoint {target} was not saved: {error.strerror or error}"
        raise OSError(error.errno, reason, error.filename) from error
