"""transformers' Trainer, TRL's SFTTrainer and GRPOTrainer, the real ones, with ``optimizers=(opt, None)``."""

import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM, TrainerCallback

from fcoptim import FairCastOptimizer, unwrap
from fcoptim.integrations.checks import check_setup
from fcoptim.integrations.transformers import FairCastCallback

from . import tiny
from .trainers import KINDS, assert_same_bits, lies_on_grid, pair, snapshot, trainer


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_trains(kind, bf16, storage, tmp_path):
    """The optimizer goes in as it is: masters move, served weights are their cast, the scheduler reaches the step."""
    model, opt = pair(storage)
    before = snapshot_of_masters(opt)
    run = trainer(kind, tmp_path, model, optimizers=(opt, None), bf16=bf16)
    run.train()
    assert unwrap(run.optimizer) is opt and run.model is model
    assert all(int(opt.state[p]["cast_count"]) == 3 for p in model.parameters())
    assert opt.wrapped.param_groups[0]["lr"] == pytest.approx(1e-3 / 3), "the rate of the last of three steps"
    assert opt.param_groups[0]["lr"] == 0.0, "linear decay has ended"
    for name, master in opt.named_masters():
        served = model.get_parameter(name)
        assert not torch.equal(master, before[name]), f"{name} has not moved"
        assert not lies_on_grid(master) and lies_on_grid(served)
        assert served.dtype is getattr(torch, storage)
        assert ((served.float() - master).abs() <= master.abs() * 2**-7).all()


def both_halves(opt):
    served = {name: p for group in opt.param_groups for name, p in zip(group["param_names"], group["params"])}
    return [(served[name], master) for name, master in opt.named_masters()]


def snapshot_of_masters(opt):
    return {name: master.clone() for name, master in opt.named_masters()}


@pytest.mark.parametrize("kind", KINDS)
def test_both_storages_and_autocast_serve_one_policy(kind, tmp_path):
    """Trap 17: the forward in either storage, under autocast, is bit-equal, so the first step's loss and moves are."""
    losses = []
    for storage in ("bfloat16", "float32"):
        model, opt = pair(storage)
        torch.manual_seed(0)
        run = trainer(kind, tmp_path, model, optimizers=(opt, None), bf16=True, max_steps=1)
        run.train()
        losses.append(next(entry["loss"] for entry in run.state.log_history if "loss" in entry))
    assert losses[0] == pytest.approx(losses[1], abs=2e-2 if kind != "GRPOTrainer" else 1e-6)


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_from_a_checkpoint(kind, rounding, storage, tmp_path):
    """Traps 1, 5, 8: two steps, a checkpoint, new objects, two more steps: bit for bit what four in a row give."""
    options = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "bf16": True}
    model, opt = pair(storage, rounding)
    trainer(kind, tmp_path / "whole", model, optimizers=(opt, None), **options).train()
    whole = snapshot(opt)

    model, opt = pair(storage, rounding)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    run = trainer(kind, tmp_path / "resumed", model, optimizers=(opt, None), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rewritten from the state")
        run.train(resume_from_checkpoint=True)
    assert_same_bits(whole, snapshot(opt))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluates_and_saves_what_it_serves(kind, storage, tmp_path):
    """``evaluate`` changes nothing; ``save_model`` writes the served weights, which load as bfloat16 without a loss."""
    model, opt = pair(storage)
    data = tiny.texts(8) if kind == "SFTTrainer" else tiny.prompts(8) if kind == "GRPOTrainer" else tiny.tokenized(8)
    run = trainer(
        kind,
        tmp_path,
        model,
        optimizers=(opt, None),
        bf16=True,
        eval_dataset=data,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    run.train()
    assert sum("eval_loss" in entry for entry in run.state.log_history) == 2, "at step 2 and at the end"
    before = snapshot(opt)
    run.evaluate()
    assert_same_bits(before, snapshot(opt))
    run.save_model(str(tmp_path / "saved"))
    served = opt.served_state_dict()
    for name, value in load_file(tmp_path / "saved" / "model.safetensors").items():
        assert torch.equal(value.to(torch.bfloat16), served[name]) and torch.equal(value.float(), served[name].float())
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(value, served[name]) for name, value in loaded.state_dict().items())


def test_trap_2_prepare_does_not_undo_what_was_loaded():
    """Traps 2 and 8: weights loaded before accelerate sends the optimizer's own state through its loader stay.

    Trainer resumes in that order. The next step says that they are not what the masters serve.
    """
    model, opt = pair()
    loaded = tiny.model(seed=1).bfloat16()
    model.load_state_dict(loaded.state_dict())
    opt.load_state_dict(opt.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    model(**{key: torch.ones(1, 4, dtype=torch.long) for key in ("input_ids", "labels")}).loss.backward()
    with pytest.raises(RuntimeError, match="adopt_served_"):
        opt.step()
    opt.adopt_served_()
    opt.step()


def test_trap_8_the_models_file_alone_is_resumed(tmp_path):
    """Trap 8: a checkpoint whose optimizer file is gone loads its weights; the step says what the masters are."""
    model, opt = pair()
    trainer(
        "Trainer", tmp_path, model, optimizers=(opt, None), max_steps=2, save_steps=2, save_strategy="steps"
    ).train()
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    model, opt = pair()
    run = trainer("Trainer", tmp_path, model, optimizers=(opt, None), max_steps=4)
    with pytest.raises(RuntimeError, match="adopt_served_"):
        run.train(resume_from_checkpoint=True)


def test_trap_8_the_models_file_is_from_elsewhere(tmp_path):
    """Trap 8: where weights and optimizer in a checkpoint don't belong together, the masters win, and it is said."""
    model, opt = pair()
    options = {"max_steps": 2, "save_steps": 2, "save_strategy": "steps"}
    trainer("Trainer", tmp_path, model, optimizers=(opt, None), **options).train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    save_file({k: v + 1 for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    model, opt = pair()
    run = trainer("Trainer", tmp_path, model, optimizers=(opt, None), max_steps=4)
    with pytest.warns(UserWarning, match="masters"):
        run.train(resume_from_checkpoint=True)
    assert all(lies_on_grid(p) and ((p.float() - m).abs() <= m.abs() * 2**-7).all() for p, m in both_halves(opt))


def test_weights_loaded_at_the_end_are_noticed(tmp_path):
    """``load_best_model_at_end`` writes other weights into the model: the next step says so, and how to go on."""
    model, opt = pair()
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = trainer(
        "Trainer",
        tmp_path,
        model,
        optimizers=(opt, None),
        eval_dataset=tiny.tokenized(8),
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        lr_scheduler_type="constant",
        **options,
    )
    run.train()
    model(**{key: torch.ones(1, 4, dtype=torch.long) for key in ("input_ids", "labels")}).loss.backward()
    with pytest.raises(RuntimeError, match="adopt_served_"):
        opt.step()
    opt.adopt_served_()
    opt.step()


class Switching(torch.optim.SGD):
    """An optimizer with two modes, as schedule-free ones are; it writes down what is called."""

    calls: list[str]

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr=lr)
        self.calls = []

    def train(self):
        self.calls.append("train")

    def eval(self):
        self.calls.append("eval")


def test_trap_11_modes_reach_the_wrapped_optimizer(tmp_path):
    """Trap 11: Trainer calls ``train()`` at every step and ``eval()`` at evaluation; both pass through."""
    model = tiny.model()
    opt = FairCastOptimizer(model, Switching)
    run = trainer("Trainer", tmp_path, model, optimizers=(opt, None), eval_dataset=tiny.tokenized(4), max_steps=2)
    run.train()
    assert opt.wrapped.calls.count("train") >= 2
    before = len(opt.wrapped.calls)
    run.evaluate()
    assert "eval" in opt.wrapped.calls[before:]


def test_trap_12_no_gradient_outlives_a_step(tmp_path):
    """Trap 12: Trainer clears gradients through the model, never through the optimizer; masters keep none."""
    held = []

    class Look(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            held.append([m.grad for group in opt.wrapped.param_groups for m in group["params"] if m.grad is not None])

    model, opt = pair()
    calls = []
    opt.zero_grad = lambda *args, **kwargs: calls.append(args)
    trainer("Trainer", tmp_path, model, optimizers=(opt, None), callbacks=[Look()]).train()
    assert held == [[], [], []] and not calls
    assert all(p.grad is None for p in model.parameters())


def test_trap_13_hooks_after_the_step_see_the_new_weights(tmp_path):
    """Trap 13: a hook behind accelerate's wrapper, put there through ``unwrap``, sees what the rollouts will get."""
    model, opt = pair()
    seen = []

    class Register(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            unwrap(optimizer).register_step_post_hook(lambda *_: seen.append(model.lm_head.weight.detach().clone()))

    class Served(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert torch.equal(seen[-1], opt.served_state_dict()["lm_head.weight"])

    trainer("GRPOTrainer", tmp_path, model, optimizers=(opt, None), callbacks=[Register(), Served()]).train()
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("clip", [1e-3, 0.0])
def test_trap_14_clipping_reaches_the_masters(clip, tmp_path):
    """Trap 14: ``max_grad_norm`` clips the served gradients in place; SGD's masters move by exactly that norm."""
    model = tiny.model()
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1.0)
    before = snapshot_of_masters(opt)
    run = trainer("Trainer", tmp_path, model, optimizers=(opt, None), max_steps=1, max_grad_norm=clip)
    run.train()
    norm = next(entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry) if clip else None
    moved = sum((m - before[name]).double().square().sum() for name, m in opt.named_masters()).sqrt().item()
    assert moved == pytest.approx(clip, rel=1e-2) if clip else moved > 0.1
    assert norm is None or norm > 0.1


def test_accumulates(tmp_path):
    """Micro-batches add up in fp32, and only the step casts: two of two rows are one of four."""
    runs = []
    for size, steps in ((4, 1), (2, 2)):
        model, opt = pair("float32")
        run = trainer(
            "Trainer",
            tmp_path,
            model,
            optimizers=(opt, None),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
        )
        run.train()
        assert all(int(opt.state[p]["cast_count"]) == 3 for p in model.parameters())
        runs.append(snapshot_of_masters(opt))
    for name, value in runs[0].items():
        assert torch.allclose(value, runs[1][name], atol=2e-4), name


def test_callback_logs(tmp_path):
    """The figures of each cast are in the trainer's history, at the step they belong to."""
    model, opt = pair()
    run = trainer("SFTTrainer", tmp_path, model, optimizers=(opt, None))
    FairCastCallback().attach(run)
    run.train()
    entries = [entry for entry in run.state.log_history if "fcoptim/changed" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    assert entries[-1]["fcoptim/changed"] == opt.cast_stats().changed > 0
    assert all(0 < entry["fcoptim/tracked"] < 2 and entry["fcoptim/lag"] >= 0 for entry in entries)


def test_no_fair_cast_at_all_is_refused(tmp_path):
    """A model left in fp32 under autocast, with the trainer's own AdamW, is what the callback is there to find."""
    run = trainer("Trainer", tmp_path, tiny.model(), bf16=True)
    FairCastCallback().attach(run)
    with pytest.raises(ValueError, match=r"trained by AdamW, not by a FairCastOptimizer.*each forward rounds"):
        run.train()


def test_another_models_optimizer_is_refused(tmp_path):
    """An optimizer built on a copy of the model would train that copy: refused before the first step."""
    _, opt = pair()
    run = trainer("Trainer", tmp_path, tiny.model(), optimizers=(opt, None))
    FairCastCallback().attach(run)
    with pytest.raises(ValueError, match=r"built on other parameters.*24 of its 24 are not the model's"):
        run.train()


def test_frozen_after_construction_is_refused():
    """Everything frozen after the optimizer was built: a run that would train nothing."""
    model, opt = pair()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"every parameter .* is frozen.*nothing is trained"):
        check_setup(model, opt)


def test_parameters_left_out_are_warned_of():
    """An optimizer on a part of the model, the rest not frozen: it may be meant, so it is said and goes on."""
    model = tiny.model()
    opt = FairCastOptimizer(model.model.layers[0].parameters(), torch.optim.SGD, lr=0.1)
    with pytest.warns(UserWarning, match=r"13 trainable parameters .* not in the FairCastOptimizer"):
        assert check_setup(model, opt) is opt


def test_kept_matrices_under_autocast_are_warned_of(tmp_path):
    """Trap 17: weights kept in fp32 are rounded to nearest by autocast: the lag that the optimizer removes is back."""
    model, opt = pair(keep_fp32=("*q_proj*", "*norm*"))
    run = trainer("Trainer", tmp_path, model, optimizers=(opt, None), bf16=True)
    FairCastCallback().attach(run)
    with pytest.warns(UserWarning, match=r"keep_fp32 keeps 2 matrices.*q_proj.*rounds to nearest"):
        run.train()
    model, opt = pair(keep_fp32=("*norm*",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_setup(model, opt, autocast=torch.bfloat16)


def test_float16_is_warned_of():
    model, opt = pair()
    with pytest.warns(UserWarning, match="bf16=True"):
        check_setup(model, opt, autocast=torch.float16)


def test_an_upcast_model_goes_on(tmp_path):
    """``model.float()`` after construction changes storage, not values: the run is that of ``storage="float32"``."""
    model, opt = pair("bfloat16")
    model.float()
    trainer("Trainer", tmp_path, model, optimizers=(opt, None), bf16=True).train()
    other_model, other = pair("float32")
    trainer("Trainer", tmp_path, other_model, optimizers=(other, None), bf16=True).train()
    assert_same_bits(snapshot(opt), snapshot(other))
    assert all(p.dtype is torch.float32 and lies_on_grid(p) for p in model.parameters())


def test_a_model_narrowed_between_steps_goes_on(tmp_path):
    """TRL's continuous batching calls ``model.to(torch.bfloat16)`` before each rollout: masters keep their bits."""
    model, opt = pair("float32")

    class Narrow(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            before = [p.float() for p in model.parameters()]
            model.to(torch.bfloat16)
            assert all(torch.equal(p.float(), value) for p, value in zip(model.parameters(), before))

    trainer("Trainer", tmp_path, model, optimizers=(opt, None), bf16=True, callbacks=[Narrow()]).train()
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    assert not any(lies_on_grid(master) for _, master in opt.named_masters())
    assert opt.cast_stats().changed > 0 and opt.cast_stats().error_rms < 1
