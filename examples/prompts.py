"""Prompts of a verifiable task for ``examples/grpo.py``: training ones in a seed's order, held-out ones, and scores."""

import json
import random
from typing import Any

import small
import torch

from fcoptim import FairCastOptimizer
from fcoptim.demo import grpo
from fcoptim.demo.task import Task

TASK_SIZE = 1 << 22  # entries are made when they are asked for


class Prompts:
    """A task's held-out entries, and its training entries, none of which asks what a held-out one asks.

    Args:
        tokenizer: With a chat template and an end-of-turn token.
        task: A dataset of reasoning-gym, or a task of ``examples/small.py``.
        options: The task's own options, as JSON.
        shots: Solved examples in each prompt of reasoning-gym.
        held_out: How many entries are held out. Those of ``examples/small.py`` hold out more: what their base models
            were not trained on either.
        seed: Of the training entries' order.
    """

    def __init__(self, tokenizer: Any, *, task: str, options: str, shots: int, held_out: int, seed: int) -> None:
        chosen = json.loads(options)
        self.task: Any
        if task in small.TASKS:
            self.task = small.TASKS[task](**chosen)
            kept = max(held_out, small.HELD_OUT)
        else:
            self.task = Task(task, size=TASK_SIZE, shots=shots, options=chosen)
            kept = held_out
        self._tokenizer, self._seed, self._kept = tokenizer, seed, kept
        self.end: int = tokenizer.eos_token_id
        entries = self.task.entries(0, kept)
        self.held_out = entries[:held_out]
        self._known = {entry["question"] for entry in entries}
        self.drawn = 0  # set it to go on where another run stood

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next training entries.

        Raises:
            ValueError: Hardly any of the task's questions is not held out.
        """
        taken: list[dict[str, Any]] = []
        first = self.drawn
        while len(taken) < count:
            self.drawn += 1
            if self.drawn - first > 100 * (len(taken) + 10):
                raise ValueError(
                    f"the task has hardly more questions than the {len(self._known)} held out: hold out fewer"
                )
            index = random.Random(f"{self._seed}/{self.drawn}").randrange(self._kept, TASK_SIZE)
            entry = self.task.entries(index, 1)[0]
            if entry["question"] not in self._known:
                taken.append(entry)
        return taken

    def tokens(self, entries: list[dict[str, Any]]) -> list[list[int]]:
        """The prompts of entries as token ids."""
        chats = [self.task.chat(entry) for entry in entries]
        texts = [self._tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
        return self.encode(texts)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Texts as token ids."""
        return [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    def rewards(self, rollout: grpo.Rollout, entries: list[dict[str, Any]]) -> torch.Tensor:
        """Score the completions of entries; float64 of shape ``(prompts, group)``."""
        answers = [
            [self._tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in zip(group, masks)]
            for group, masks in zip(rollout.completion, rollout.completion_mask)
        ]
        return torch.tensor(self.task.rewards(answers, entries), dtype=torch.float64)

    def score(self, policy: Any, *, samples: int, max_new_tokens: int) -> dict[str, float]:
        """Mean reward of a policy on the held-out entries, by sampling at temperature 1 and greedily.

        Where one answer is right, as in ``examples/small.py``, both are exact: computed from the answer's chance.

        Args:
            policy: As it is served.
            samples: Completions for each prompt. The generator is the same at each call.
            max_new_tokens: Where a completion is cut off.
        """
        if isinstance(self.task, small.OneAnswer):
            return dict(zip(("sampled", "greedy"), small.solved(policy, self.encode, self.held_out)))
        generator = torch.Generator(policy.device).manual_seed(0)
        settings: Any = {
            "max_new_tokens": max_new_tokens,
            "end": self.end,
            "generator": generator,
        }
        means = {}
        for name, group, temperature in (("sampled", samples, 1.0), ("greedy", 1, 1e-4)):
            rewards = []
            for first in range(0, len(self.held_out), 16):
                some = self.held_out[first : first + 16]
                rollout = grpo.sample(policy, self.tokens(some), group=group, temperature=temperature, **settings)
                rewards.append(self.rewards(rollout, some).mean(1))
            means[name] = float(torch.cat(rewards).mean())
        return means


class Evaluation:
    """Held-out rewards of a policy and of its masters, and the KL divergence between the two.

    KL(served, master) is averaged over the tokens of completions that the policy gives at the start.

    Args:
        prompts: The task's.
        policy: The served model, as it is at the start.
        samples: Completions for each held-out prompt.
        max_new_tokens: Where a completion is cut off.
    """

    def __init__(self, prompts: Prompts, policy: Any, *, samples: int, max_new_tokens: int) -> None:
        self._prompts, self._policy = prompts, policy
        self._settings: Any = {"samples": samples, "max_new_tokens": max_new_tokens}
        count = max(16, min(512, 12_000_000 // (policy.config.vocab_size * max_new_tokens)))  # 100 MB of logits
        self._probe = grpo.sample(
            policy,
            prompts.tokens(prompts.held_out[:count]),
            group=1,
            max_new_tokens=max_new_tokens,
            end=prompts.end,
            generator=torch.Generator(policy.device).manual_seed(0),
        )

    def start(self) -> dict[str, Any]:
        """What ``compare`` gives before the first step, when the masters are what is served."""
        scores = self._prompts.score(self._policy, **self._settings)
        return {"served": scores, "master": scores, "kl": 0.0}

    @torch.no_grad()
    def compare(self, opt: FairCastOptimizer) -> dict[str, Any]:
        """Measure the served weights, then the masters in their place."""
        served, served_chances = self._measure()
        with opt.masters_as_weights():
            master, master_chances = self._measure()
        each = (served_chances.exp() * (served_chances - master_chances)).sum(-1)
        kl = each[self._probe.completion_mask.flatten(0, 1)].mean()
        return {"served": served, "master": master, "kl": float(kl)}

    def _measure(self) -> tuple[dict[str, float], torch.Tensor]:
        log_chances = grpo.completion_logits(self._policy, self._probe).double().log_softmax(-1)
        return self._prompts.score(self._policy, **self._settings), log_chances
