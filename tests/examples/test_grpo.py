"""examples/grpo.py: what it optimises, what it logs, and that it goes on where it stopped."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

OPTIONS = {
    "task": "addition",
    "lr": 1e-3,
    "steps": 4,
    "prompts": 2,
    "group": 4,
    "max_new_tokens": 3,
    "eval_prompts": 8,
}


@pytest.fixture
def config(base, tmp_path):
    import grpo

    return grpo.Config(model=base, out=str(tmp_path / "run"), **OPTIONS)


@pytest.fixture(autouse=True)
def half_the_time_right(monkeypatch):
    """An untrained model answers no sum: an answer counts as right if it begins with an even digit."""
    import small

    def rewards(self, answers, entries):
        return [[float(answer[:1] in tuple("02468")) for answer in group] for group in answers]

    monkeypatch.setattr(small.OneAnswer, "rewards", rewards)


def logged(records):
    return [{key: value for key, value in record.items() if key not in ("seconds", "out")} for record in records]


VARIANTS = {
    "plain": {},
    "fp32": {"rounding": "fp32"},
    "lag": {"rounding": "nearest", "lag": "ema:3"},
    "delay": {"rounding": "dither", "lag": "delay:2"},
    "dead zone": {"rounding": "nearest", "lag": "dead_zone:0.5"},
    "muon": {"optimizer": "muon", "rounding": "error_feedback"},
    "kl": {"beta": 0.1},
    "stale": {"stale": 2},
    "reused": {"epochs": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_train(config, variant):
    import grpo

    records = grpo.train(dataclasses.replace(config, **VARIANTS[variant]), quiet=True)
    assert [r["kind"] for r in records] == ["header", "eval", *["step"] * 4, "eval", "end"]
    assert any(step["groups_with_signal"] for step in records if step["kind"] == "step")
    assert [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()] == records
    first, last = (r for r in records if r["kind"] == "eval")
    assert first["served"] == first["master"] and first["kl"] == 0
    assert (last["kl"] == 0) == (variant == "fp32")
    steps = [r for r in records if r["kind"] == "step"]
    assert ("lag" in steps[0]) == (variant != "fp32")
    if variant == "kl":
        assert steps[0]["kl_reference"] == pytest.approx(0, abs=1e-6) and steps[-1]["kl_reference"] > 0


def test_stopped_run_goes_on_bit_for_bit(config, tmp_path, monkeypatch):
    import grpo

    whole = grpo.train(dataclasses.replace(config, steps=5, save_every=2), quiet=True)
    parts = dataclasses.replace(config, steps=5, save_every=2, out=str(tmp_path / "parts"))
    step, left = grpo.Run.step, [3]

    def dies(run):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return step(run)

    with monkeypatch.context() as patch:
        patch.setattr(grpo.Run, "step", dies)
        with pytest.raises(KeyboardInterrupt):
            grpo.train(parts, quiet=True)
    with (tmp_path / "parts" / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # killed in the middle of a line
    assert logged(grpo.train(parts, quiet=True)) == logged(whole)
    assert logged(grpo.train(parts, quiet=True)) == logged(whole)  # finished: nothing is run again


def test_gradient_is_that_of_the_plain_formula(config, monkeypatch):
    """One batch drawn from the served weights: the loss, written out token by token, in fp32 arithmetic."""
    import grpo

    monkeypatch.setattr(grpo, "multiplies_bf16_fast", lambda device: False)
    run = grpo.Run(dataclasses.replace(config, beta=0.5))
    run.reference.float().lm_head.weight.data.mul_(1.5)
    batch = run.draw()
    loss, _ = run.backward(batch)
    found = run.policy.lm_head.weight.grad.clone()
    run.policy.zero_grad()
    total, tokens = 0.0, batch.rollout.completion_mask.sum()
    for row in range(2):
        prompt = batch.rollout.prompt[row][batch.rollout.prompt_mask[row]]
        for column in range(4):
            mask = batch.rollout.completion_mask[row, column]
            ids = torch.cat([prompt, batch.rollout.completion[row, column][mask]])[None]
            log_p, log_r = (
                model(ids)
                .logits[0, len(prompt) - 1 : -1]
                .float()
                .log_softmax(-1)[range(mask.sum()), ids[0, len(prompt) :]]
                for model in (run.policy, run.reference)
            )
            gap = log_r.detach() - log_p
            surrogate = (log_p - log_p.detach()).exp() * batch.advantages[row, column]
            total = total - (surrogate - 0.5 * (gap.exp() - gap - 1)).sum() / tokens
    total.backward()
    assert loss == pytest.approx(float(total.detach()), abs=1e-5)
    torch.testing.assert_close(found, run.policy.lm_head.weight.grad, rtol=1e-3, atol=1e-6)


def test_clipping_stops_the_gradient_of_what_has_moved_far(config):
    import grpo

    run = grpo.Run(dataclasses.replace(config, stale=2))
    batch = run.draw()
    batch.advantages[:] = 1.0
    batch.old -= 1.0  # every ratio is e, beyond the clip
    run.backward(batch)
    assert run.policy.lm_head.weight.grad.abs().max() == 0


def test_training_prompts_are_not_held_out(base):
    import prompts
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(base)
    options = {"task": "addition", "options": '{"digits": 1}', "shots": 0, "held_out": 8}
    small_task = prompts.Prompts(words, seed=0, **options)
    with pytest.raises(ValueError, match="hold out fewer"):  # all 100 sums of two digits are held out
        small_task.take(1)
    few = prompts.Prompts(words, seed=0, **{**options, "options": "{}"})
    taken = few.take(300)
    assert not {entry["question"] for entry in taken} & few._known
    again = prompts.Prompts(words, seed=0, **{**options, "options": "{}"})
    again.take(100)
    resumed = prompts.Prompts(words, seed=0, **{**options, "options": "{}"})
    resumed.drawn = again.drawn
    assert resumed.take(50) == taken[100:150]


def test_reasoning_gym_tasks_are_scored_by_sampling(base):
    """The rewards are the dataset's own; the same weights score the same twice."""
    import prompts
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    made = prompts.Prompts(words, task="coin_flip", options="{}", shots=1, held_out=3, seed=0)
    one, two = (made.score(model, samples=2, max_new_tokens=2) for _ in range(2))
    assert one == two and set(one) == {"sampled", "greedy"}


WRONG = {
    "rounding": ({"rounding": "up"}, "--rounding is one of"),
    "optimizer": ({"optimizer": "lion"}, "adamw or muon"),
    "lag": ({"lag": "ema"}, "KIND:NUMBER"),
    "group": ({"group": 1}, "--group"),
    "steps": ({"steps": 0}, "at least 1"),
    "save": ({"stale": 2, "save_every": 3}, "multiple"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused(config, wrong):
    import grpo

    options, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        grpo.train(dataclasses.replace(config, **options), quiet=True)


def test_log_of_a_killed_run_keeps_whole_lines_only(tmp_path):
    import runlog

    log = runlog.RunLog(tmp_path / "log.jsonl", {"lr": 0.1})
    log.restart(0)
    for step in (1, 2, 3):
        log.write("step", step)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "end"}')  # without its newline: it may be half a line
    again = runlog.RunLog(tmp_path / "log.jsonl", {"lr": 0.1})
    assert not again.finished and len(again.records) == 4
    again.restart(2)
    assert runlog.RunLog(tmp_path / "log.jsonl", {"lr": 0.1}).records == log.records[:3]


def test_folder_of_another_run_is_refused(config):
    import grpo

    grpo.train(dataclasses.replace(config, steps=1), quiet=True)
    with pytest.raises(ValueError, match="other options"):
        grpo.train(config, quiet=True)
