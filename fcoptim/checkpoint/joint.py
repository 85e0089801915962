"""Saving by several ranks: whole files are dealt among them; each sharded tensor is gathered when its turn comes."""

from __future__ import annotations

import errno
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.shards import full, is_sharded
from . import folder
from .layout import EXTRA, CheckpointError, Record
from .plan import Plan
from .team import Team
from .tensorfile import Item, TensorFile, ordered, write_file
from .writing import check_space, deal, finish_plan, make_folders, progress, write_plan


def save_jointly(team: Team, target: Path, make: Callable[[], Plan], overwrite: bool, keep: int | None) -> None:
    """Save one checkpoint, by all ranks of a team; if one fails all raise, and nothing was changed.

    Args:
        team: The ranks. The first makes the folder, writes what exists once, and puts the folder in its place. Where
            nothing is sharded it writes all.
        target: Where the checkpoint is to be; all ranks have to see that folder.
        make: Checks this rank's optimizer and makes its plan.
        overwrite: As in ``save_checkpoint``.
        keep: As in ``save_checkpoint``.
    """
    plan = _agreed_plan(team, target, make, overwrite, keep)
    with ExitStack() as stack:

        def begin() -> str:
            if not team.first:
                return ""
            check_space(target.parent, plan.nbytes)
            partial = stack.enter_context(folder.new_folder(target, overwrite=overwrite))
            if plan.sharded:
                make_folders(partial, plan)
            return str(partial)

        partial = Path(team.together(begin)[0])
        records: dict[str, Record] = {}
        if plan.sharded:
            for answer in team.together(lambda: _write_share(team, partial, plan)):
                records.update(answer)

        def finish() -> None:
            if not team.first:
                return
            if plan.sharded:
                own = {file.name: write_file(partial, file, lambda _: None) for file in _extras(plan)}
                finish_plan(partial, plan, {**records, **own})
            else:
                write_plan(partial, plan, f"saving {target.name}")
            stack.close()  # puts the folder in its place
            if keep is not None:
                folder.rotate(target, keep)

        team.together(finish)


def _agreed_plan(team: Team, target: Path, make: Callable[[], Plan], overwrite: bool, keep: int | None) -> Plan:
    """This rank's plan, if all ranks have the same.

    Raises:
        CheckpointError: They don't.
    """
    plans = []

    def prepare() -> dict[str, Any]:
        plan = make()
        plans.append(plan)
        _check_meshes(team, plan)
        return {
            "path": str(target),
            "step": plan.step,
            "overwrite": overwrite,
            "keep": keep,
            "list of tensors": _digest(_shared(plan)),
        }

    answers = team.together(prepare)
    for rank, facts in enumerate(answers):
        for name, value in facts.items():
            if value != answers[0][name]:
                raise CheckpointError(
                    f"the ranks can't save together: rank {team.ranks[rank]} has another {name} than rank "
                    f"{team.ranks[0]} ({value!r:.120} and {answers[0][name]!r:.120}). Pass the same arguments on every "
                    "rank; where ranks train different models, pass process_group=those that share one"
                )
    return plans[0]


def _check_meshes(team: Team, plan: Plan) -> None:
    """Every rank of the team has to take part when a tensor is gathered.

    Raises:
        CheckpointError: This one is not part of a tensor's mesh.
    """
    for file in plan.tensors:
        for item in file.items:
            if is_sharded(item.tensor) and item.tensor.device_mesh.get_coordinate() is None:
                raise CheckpointError(
                    f"{item.key!r} is sharded over ranks {item.tensor.device_mesh.mesh.flatten().tolist()}, rank "
                    f"{dist.get_rank()} is not one of them; save on those ranks with process_group=their group"
                )


def _extras(plan: Plan) -> list[TensorFile]:
    """Files with the training's own tensors; those of the first rank are saved, and it alone has any."""
    return [file for file in plan.tensors if file.name.startswith(f"{EXTRA}/")]


def _shared(plan: Plan) -> list[TensorFile]:
    """The other files, the same on every rank."""
    return [file for file in plan.tensors if not file.name.startswith(f"{EXTRA}/")]


def _digest(files: Sequence[TensorFile]) -> str:
    what = [
        (file.name, [(item.key, tuple(item.tensor.shape), str(item.dtype)) for item in file.items]) for file in files
    ]
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _write_share(team: Team, partial: Path, plan: Plan) -> dict[str, Record]:
    """Gather all tensors together and write this rank's files meanwhile.

    Returns:
        Records of this rank's files.
    """
    if not partial.is_dir():
        raise FileNotFoundError(
            errno.ENOENT,
            "this rank doesn't see the folder that the first rank has made; save to a file system they share",
            str(partial),
        )
    files = _shared(plan)
    dealt: list[list[TensorFile]] = [[] for _ in team.ranks]
    for file, owner in zip(files, deal([file.nbytes for file in files], team.size)):
        dealt[owner].append(file)
    mine = dealt[team.rank]
    with progress(team.what, sum(file.nbytes for file in mine) if team.first else 0) as advance:
        writer = _Writer(lambda fetch: {file.name: write_file(partial, file, advance, fetch) for file in mine})
        try:
            for owner, item in _schedule(dealt):
                if owner == team.rank:
                    writer.wait_until_free()
                whole = _whole(team, owner, item)
                if owner == team.rank:
                    writer.give(whole.detach().to("cpu"))
                del whole
        finally:
            writer.end()
    return writer.result()


def _schedule(dealt: Sequence[Sequence[TensorFile]]) -> Iterator[tuple[int, Item]]:
    """Who writes what, in turns, so that all write at the same time; the same on every rank."""
    rows = [[item for file in files for item in ordered(file.items)] for files in dealt]
    for turn in zip_longest(*rows):
        for owner, item in enumerate(turn):
            if item is not None:
                yield owner, item


def _whole(team: Team, owner: int, item: Item) -> torch.Tensor:
    """A tensor as it is to be written: gathered if it is sharded, else the first rank's."""
    if is_sharded(item.tensor):
        return full(item.tensor.detach().to(item.dtype))
    return item.tensor if owner == 0 else team.from_first(item.tensor)


class _Writer:
    """Writes in a thread what is given to it, one tensor at a time. After an error it takes the rest and drops it.

    Args:
        work: Called in the thread with a function that gives the next tensor.
    """

    def __init__(self, work: Callable[[Callable[[Item], torch.Tensor]], dict[str, Record]]) -> None:
        self._free = threading.Semaphore(0)
        self._given: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._records: dict[str, Record] = {}
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(work,), name="fcoptim-save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Callable[[Item], torch.Tensor]], dict[str, Record]]) -> None:
        try:
            self._records = work(self._next)
        except BaseException as error:
            self._error = error
        while not self._ended:
            self._next_or_none()

    def _next_or_none(self) -> torch.Tensor | None:
        self._free.release()
        found = self._given.get()
        self._ended = found is None
        return found

    def _next(self, item: Item) -> torch.Tensor:
        found = self._next_or_none()
        if found is None:
            raise RuntimeError(f"the ranks stopped before {item.key!r} was gathered")
        return found

    def wait_until_free(self) -> None:
        """Wait until the last tensor is written, so that no more than one waits in memory."""
        self._free.acquire()

    def give(self, tensor: torch.Tensor) -> None:
        """Hand over the next tensor."""
        self._given.put(tensor)

    def end(self) -> None:
        """Say that nothing more comes, and wait for the thread."""
        self._given.put(None)
        self._thread.join()

    def result(self) -> dict[str, Record]:
        """The records of what was written; raises what went wrong."""
        if self._error is not None:
            raise self._error
        return self._records
