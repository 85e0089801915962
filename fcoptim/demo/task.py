"""Verifiable tasks from ``reasoning-gym``: prompts as chats, rewards from the dataset's own scorer."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from .model import need

SYSTEM = "Reply with the answer only."


def task_names() -> list[str]:
    """List the names that ``reasoning-gym`` registers.

    Raises:
        MissingExtra: It is not installed.
    """
    need("reasoning_gym")
    factory: Any = importlib.import_module("reasoning_gym.factory")
    return sorted(factory.DATASETS)


def check_task(name: str) -> None:
    """Refuse a name that is no dataset of ``reasoning-gym``.

    Raises:
        ValueError: The message lists the closest names.
    """
    names = task_names()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.4) or [n for n in names if name in n]
        hint = f"close matches: {', '.join(close)}" if close else f"there are {', '.join(names)}"
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {hint}")


class Task:
    """A stream of questions with solved examples before each, and a score for each answer.

    The first entries of the dataset serve as examples; they stand in every prompt as finished turns and are
    never asked.

    Args:
        name: A dataset of ``reasoning-gym``.
        size: How many questions there will be.
        seed: Seed of the dataset. Default 0.
        shots: Solved examples in each prompt. Default 2.
        options: Further options of the dataset. Default none.

    Raises:
        ValueError: The dataset or an option is unknown, or the dataset refuses its options.
        MissingExtra: ``reasoning-gym`` is not installed.
    """

    def __init__(
        self, name: str, *, size: int, seed: int = 0, shots: int = 2, options: Mapping[str, Any] | None = None
    ) -> None:
        check_task(name)
        if shots < 0:
            raise ValueError(f"shots must be >= 0; got {shots}")
        self.name, self.shots = name, shots
        gym: Any = importlib.import_module("reasoning_gym")
        config = {"size": size + shots, "seed": seed, **(options or {})}
        try:
            self._data = gym.create_dataset(name, **config)
            self._examples = [self._data[index] for index in range(shots)]
        except Exception as error:
            raise ValueError(f"reasoning-gym refused {name!r} with {config}: {error!r}") from error

    def entries(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return the questions ``first <= i < first + count``, as the dataset gives them."""
        return [self._data[self.shots + index] for index in range(first, first + count)]

    def chat(self, entry: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages that ask an entry's question, solved examples first."""
        messages = [{"role": "system", "content": SYSTEM}]
        for example in self._examples:
            messages.append({"role": "user", "content": str(example["question"])})
            messages.append({"role": "assistant", "content": str(example["answer"])})
        return [*messages, {"role": "user", "content": str(entry["question"])}]

    def reward(self, answer: str, entry: dict[str, Any]) -> float:
        """Score an answer by the dataset's own ``score_answer``; an answer that it stumbles over scores 0."""
        try:
            return float(self._data.score_answer(answer.strip(), entry))
        except Exception:
            return 0.0

    def rewards(self, answers: Sequence[Sequence[str]], entries: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Score a group of answers for each entry."""
        return [[self.reward(answer, entry) for answer in group] for group, entry in zip(answers, entries)]
