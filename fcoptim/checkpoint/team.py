"""The ranks that save or load one checkpoint together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..distributed.agreement import Group, chosen_group, device_of
from .layout import CheckpointError

_T = TypeVar("_T")
# What an error is raised as on the other ranks; the first that fits.
_KINDS = (CheckpointError, NotImplementedError, RuntimeError, TypeError, ValueError)


class _Failure(NamedTuple):
    """An error, as it travels to the other ranks."""

    kind: int | None
    text: str
    errno: int | None = None
    filename: str | None = None


class Team:
    """Ranks that do one thing together; one alone where there is no process group.

    Args:
        group: As ``FairCastOptimizer`` takes it: ``"default"``, a process group, or None for this process alone.
        what: What they do, for messages.

    Raises:
        ValueError: ``group`` is something else, or this rank is not in it.

    Attributes:
        group: The process group, or None.
        ranks: Global ranks of the team.
        rank: Which of them this is.
    """

    def __init__(self, group: Group, what: str) -> None:
        self.group = chosen_group(group)
        self.what = what
        self.ranks, self.rank = [0], 0
        if self.group is not None:
            self.rank = dist.get_rank(self.group)
            if self.rank < 0:
                raise ValueError(f"{what}: this rank ({dist.get_rank()}) is not in the process_group it was given")
            self.ranks = dist.get_process_group_ranks(self.group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes what exists once."""
        return self.rank == 0

    def together(self, work: Callable[[], _T]) -> list[_T]:
        """Let every rank do its work, and wait for all.

        Args:
            work: May differ from rank to rank. What it returns is sent to all.

        Returns:
            What each returned, by rank.

        Raises:
            Exception: That of the lowest rank that failed, the same on every rank.
            RuntimeError: A rank has died.
        """
        if self.size == 1:
            return [work()]
        result, failure, own = None, None, None
        try:
            result = work()
        except Exception as error:
            own, failure = error, _packed(error)
        answers: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(answers, (result, failure), group=self.group)
        except Exception as error:
            raise RuntimeError(
                f"{self.what}: another rank can't be reached; it has died, or was never here (every rank has to make "
                "this call)"
            ) from (own or error)
        failed = {rank: failure for rank, (_, failure) in enumerate(answers) if failure is not None}
        if failed:
            raise self._unpacked(failed) from own
        return [result for result, _ in answers]

    def _unpacked(self, failed: dict[int, _Failure]) -> Exception:
        rank, first = next(iter(failed.items()))
        alike = len(failed) == self.size and len(set(failed.values())) == 1
        text = first.text if alike else f"on rank {self.ranks[rank]}: {first.text}"
        if first.kind is None:
            return OSError(first.errno, text, first.filename)
        return _KINDS[first.kind](text)

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rank's tensor, on every rank; of the shape and dtype of ours."""
        if self.group is None or self.size == 1:
            return tensor
        device = device_of(self.group)
        raw = tensor.detach().to(device, copy=True).contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(raw, src=self.ranks[0], group=self.group)
        return raw.view(tensor.dtype).reshape(tensor.shape)


def _packed(error: Exception) -> _Failure:
    if isinstance(error, OSError) and error.errno is not None:
        name = None if error.filename is None else str(error.filename)
        return _Failure(None, str(error.strerror), error.errno, name)
    kind = next((number for number, kind in enumerate(_KINDS) if isinstance(error, kind)), None)
    if kind is None:
        return _Failure(_KINDS.index(RuntimeError), f"{type(error).__name__}: {error}")
    return _Failure(kind, str(error))
