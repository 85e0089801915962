"""The training loop: rollouts and loss on the served model, one optimizer step, then the casts beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import FairCastOptimizer
from ..cast import get_rule
from ..devices import multiplies_bf16_fast
from . import grpo
from .lags import LagsBeside
from .openloop import OpenLoop
from .task import Task

# Chosen by measurement, see docs/demo.md: the stock model scores about 0.2 here in answers of 8 tokens, and its
# scorer pays for right leading digits, so that hardly a group holds equal rewards only.
DEFAULT_TASK = "coin_flip"


@dataclass(frozen=True)
class Settings:
    """What a run does.

    Attributes:
        task: A dataset of ``reasoning-gym``.
        task_options: Options of that dataset.
        steps: Optimizer steps.
        lr: AdamW's learning rate.
        rounding: The rule that the trained model is served by.
        seed: Seed of the rounding, the sampling and the task.
        prompts: Prompts in each step.
        group: Completions for each prompt.
        max_new_tokens: Longest completion.
        shots: Solved examples in each prompt.
        temperature: Of the sampling, and of the probabilities in the loss.
        out: Folder for the results.
    """

    task: str = DEFAULT_TASK
    task_options: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    lr: float = 1e-6
    rounding: str = "stochastic"
    seed: int = 0
    prompts: int = 4
    group: int = 8
    max_new_tokens: int = 12
    shots: int = 2
    temperature: float = 1.0
    out: Path = Path("runs/demo")

    def check(self) -> None:
        """Refuse values that make no run.

        Raises:
            ValueError: The message names the value.
        """
        get_rule(self.rounding)
        least = {"steps": 1, "prompts": 1, "group": 2, "max_new_tokens": 1, "shots": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                why = "; a group of one has no advantage over itself" if name == "group" else ""
                raise ValueError(f"{name} must be at least {bound}; got {getattr(self, name)}{why}")
        for name in ("lr", "temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number; got {value}")


Phase = Callable[[str], None]


class _Clock:
    """Times the phases of a step and announces each."""

    def __init__(self, announce: Phase) -> None:
        self._announce = announce
        self._name = ""
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def start(self, name: str) -> None:
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] = round(now - self._since, 3)
        self._name, self._since = name, now
        if name:
            self._announce(name)


def fast_storage() -> str:
    """Choose how the served weights are held: CPUs without AVX-512 multiply bf16 matrices some 10 times slower.

    Either way the weights have the same bf16 values; in fp32 storage the arithmetic on them is fp32.
    """
    return "bfloat16" if multiplies_bf16_fast("cpu") else "float32"


class Trainer:
    """A policy, its optimizer, the task and the casts beside it.

    Args:
        model: bf16 causal language model; converted in place to the served model.
        tokenizer: Its tokenizer, with a chat template and an end-of-turn token.
        task: Where questions and rewards come from.
        settings: Checked settings.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Any, task: Task, settings: Settings) -> None:
        self.tokenizer, self.task, self.settings = tokenizer, task, settings
        self.opt = FairCastOptimizer(
            model,
            torch.optim.AdamW,
            lr=settings.lr,
            rounding=settings.rounding,
            seed=settings.seed,
            storage=fast_storage(),
        )
        self.policy = self.opt.served_model
        self.loop = OpenLoop(self.opt.named_masters(), seed=settings.seed)
        self.lags = LagsBeside(self.opt.named_masters())
        self._generator = torch.Generator().manual_seed(settings.seed)

    def steps(self, announce: Phase = lambda phase: None) -> Iterator[dict[str, Any]]:
        """Train; yield a record after each step.

        Args:
            announce: Called with the name of each phase as it begins.
        """
        for step in range(1, self.settings.steps + 1):
            yield self._step(step, announce)

    def _step(self, step: int, announce: Phase) -> dict[str, Any]:
        settings, clock = self.settings, _Clock(announce)
        clock.start("rollout")
        rollout, rewards = self._rollout(step)
        advantage = grpo.advantages(rewards)
        clock.start("loss")
        loss = grpo.policy_gradient(self.policy, rollout, advantage, temperature=settings.temperature)
        clock.start("step")
        self.opt.step()
        self.opt.zero_grad()
        clock.start("casts")
        self.loop.cast()
        self.lags.add()
        clock.start("measures")
        displacement, measures = self.loop.measure()
        served = ((name, param.detach().bfloat16()) for name, param in self.policy.named_parameters())
        agrees = self.loop.agrees(settings.rounding, served)
        clock.start("")
        return {
            "kind": "step",
            "step": step,
            "loss": loss,
            "reward": float(rewards.mean()),
            "solved": float((rewards >= 1).double().mean()),
            "groups": len(rewards),
            "groups_with_signal": int(advantage.any(1).sum()),
            "completion_tokens": int(rollout.completion_mask.sum()),
            "master_displacement_l2": displacement,
            "rules": {
                rule: {"changed": m.changed, "tracked": None if math.isnan(m.tracked) else m.tracked}
                for rule, m in measures.items()
            },
            "served_equals_its_copy": agrees,
            "seconds": clock.seconds,
        }

    def _rollout(self, step: int) -> tuple[grpo.Rollout, torch.Tensor]:
        """Sample completions for this step's questions and score them."""
        settings = self.settings
        entries = self.task.entries((step - 1) * settings.prompts, settings.prompts)
        prompts = [self._encode(self.task.chat(entry)) for entry in entries]
        rollout = grpo.sample(
            self.policy,
            prompts,
            group=settings.group,
            max_new_tokens=settings.max_new_tokens,
            end=self.tokenizer.eos_token_id,
            generator=self._generator,
            temperature=settings.temperature,
        )
        answers = [
            [self.tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in zip(group, masks)]
            for group, masks in zip(rollout.completion, rollout.completion_mask)
        ]
        return rollout, torch.tensor(self.task.rewards(answers, entries), dtype=torch.float64)

    def _encode(self, chat: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
