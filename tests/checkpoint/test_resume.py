"""Save and load: bit-exact for every rule, lag and optimizer, in a fresh process, with parameters reordered."""

import random
import warnings
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

import fcoptim
from fcoptim import CheckpointError, FairCastOptimizer, load_checkpoint, save_checkpoint
from tests.optimizer.helpers import (
    ADAM,
    RULES,
    assert_same,
    assert_same_run,
    equal_bits,
    loss_on,
    mlp,
    pair,
    saved,
    train,
    weights,
)
from tests.optimizer.zoo import Case, base_case, drive

from .helpers import Mixed, mixed_loss, mixed_pair, resumes, run_python, saved_run

pytestmark = pytest.mark.filterwarnings("error")


def quietly(work):
    """Do something of torch's that warns of what is none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


LAGS = {
    "none": None,
    "ema": fcoptim.lag.Ema(3),
    "delay": fcoptim.lag.Delay(2),
    "delay-bf16": fcoptim.lag.Delay(2, dtype="bfloat16"),
    "dead-zone": fcoptim.lag.DeadZone(0.7),
}


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_resume(tmp_path, rounding, storage, steps):
    """Field report 5, 6: everything comes back, before the first step and after; training goes on bit for bit."""
    model, opt = mixed_pair(rounding=rounding, storage=storage)
    train(opt, model, range(steps), mixed_loss)
    save_checkpoint(tmp_path / "a", opt)
    fresh = mixed_pair(seed=7, rounding="nearest", storage=storage)
    resumes(tmp_path / "a", model, opt, fresh, steps, mixed_loss)


@pytest.mark.parametrize("lag", LAGS)
def test_resume_with_a_lag(tmp_path, rounding, lag):
    """What lags remember is in the checkpoint."""
    model, opt = pair(rounding, lag=LAGS[lag])
    train(opt, model, range(5))
    save_checkpoint(tmp_path / "a", opt)
    resumes(tmp_path / "a", model, opt, pair(rounding, seed=3, lag=LAGS[lag]), 5, loss_on)


def test_resume_after_a_lag_was_changed(tmp_path):
    """A lag switched off and not yet forgotten is saved as it stands."""
    model, opt = pair("stochastic", lag=fcoptim.lag.Ema(5))
    train(opt, model, range(4))
    opt.lag = None
    save_checkpoint(tmp_path / "a", opt)
    resumes(tmp_path / "a", model, opt, pair(seed=3), 4, loss_on)


def optimizers() -> list[Case]:
    """Every optimizer of torch.optim that can be wrapped, and one that keeps state outside parameters."""
    classes = [
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    ]
    return [base_case("torch.optim", cls) for cls in classes]


@pytest.mark.parametrize("case", optimizers(), ids=str)
def test_every_optimizer(tmp_path, case):
    """The state of any optimizer comes back, whatever it holds."""
    model = case.model()
    opt = FairCastOptimizer(model, case.cls, **case.options)
    drive(case, opt, model, range(4))
    save_checkpoint(tmp_path / "a", opt)
    other_model = case.model()
    other = FairCastOptimizer(other_model, case.cls, **case.options)
    load_checkpoint(tmp_path / "a", other)
    assert_same_run(opt, other)
    drive(case, opt, model, range(4, 6))
    drive(case, other, other_model, range(4, 6))
    assert_same_run(opt, other)


@pytest.mark.parametrize("name", ["FairCastAdamW", "FairCastMuon", "FairCastSGD"])
def test_configured_optimizers(tmp_path, name):
    """Ours with several groups, each with options of its own."""
    model, other_model = mlp(), mlp(3)
    opt, other = (getattr(fcoptim, name)(m, lr=1e-3) for m in (model, other_model))
    train(opt, model, range(3))
    save_checkpoint(tmp_path / "a", opt)
    resumes(tmp_path / "a", model, opt, (other_model, other), 3, loss_on)


def test_loading_keeps_dtypes(tmp_path, rounding):
    """Field report 7: moments come back in fp32 with every bit, ``step`` in its own dtype."""
    model, opt = pair(rounding)
    train(opt, model, range(2))
    for entry in opt.state.values():
        entry["exp_avg"].fill_(1 + 2**-20)
    save_checkpoint(tmp_path / "a", opt)
    _, other = pair(rounding, seed=3)
    load_checkpoint(tmp_path / "a", other)
    for entry, original in zip(other.state.values(), opt.state.values()):
        assert {key: value.dtype for key, value in entry.items()} == {k: v.dtype for k, v in original.items()}
        assert (entry["exp_avg"] == 1 + 2**-20).all() and entry["exp_avg"].dtype is torch.float32


def test_masters_are_fp32_and_accumulators_are_needed(tmp_path):
    """Field report 5, 6: masters are not rebuilt from bf16; error feedback without accumulators is refused."""
    model, opt = saved_run(tmp_path / "a", rounding="error_feedback")
    other_model = mlp().bfloat16()
    other_model.load_state_dict(model.state_dict())
    other = FairCastOptimizer(other_model, torch.optim.AdamW, rounding="error_feedback", **ADAM)
    assert not all(equal_bits(a, b) for (_, a), (_, b) in zip(opt.named_masters(), other.named_masters()))
    load_checkpoint(tmp_path / "a", other)
    assert_same_run(opt, other)
    for entry in opt.state.values():
        del entry["error_feedback"]
    save_checkpoint(tmp_path / "b", opt)
    before = weights(other)
    with pytest.raises(CheckpointError, match=r"no accumulators of parameter '0\.weight'.*Load a complete one"):
        load_checkpoint(tmp_path / "b", other)
    assert_same(before, weights(other))


def test_nothing_is_pickled(tmp_path):
    """Field report 27: JSON and safetensors only, so that loading runs nothing."""
    model, opt = mixed_pair()
    train(opt, model, range(2), mixed_loss)
    save_checkpoint(tmp_path / "a", opt, generator=torch.get_rng_state(), note="x")
    kinds = {path.suffix for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}
    _, other = mixed_pair(seed=2)
    load_checkpoint(tmp_path / "a", other)
    assert_same(saved(opt.state_dict()), saved(other.state_dict()))


def test_random_state_is_left_alone(tmp_path):
    """Field report 28: torch's and Python's random states are as before."""
    _, opt = saved_run(tmp_path / "a")
    before, python = torch.get_rng_state(), random.getstate()
    save_checkpoint(tmp_path / "b", opt)
    load_checkpoint(tmp_path / "b", opt)
    assert torch.equal(before, torch.get_rng_state()) and python == random.getstate()


def swapped() -> Mixed:
    """A ``Mixed`` that registers its modules in another order; tied names keep theirs, as the first keys the hash."""
    model = Mixed(5)
    modules = dict(reversed(model._modules.items()))
    model._modules = {"embed": modules.pop("embed"), **modules}
    return model


def test_parameters_are_matched_by_name(tmp_path, rounding):
    """Field report 22: registered in another order, each parameter gets its own master, moments and served bits."""
    model, opt = mixed_pair(rounding=rounding)
    train(opt, model, range(3), mixed_loss)
    save_checkpoint(tmp_path / "a", opt)
    other_model = swapped()
    other = FairCastOptimizer(other_model, torch.optim.AdamW, keep_fp32="norm.*", rounding=rounding, **ADAM)
    load_checkpoint(tmp_path / "a", other)
    train(opt, model, range(3, 6), mixed_loss)
    train(other, other_model, range(3, 6), mixed_loss)
    assert_same(weights(opt), weights(other))
    assert_same(dict(model.state_dict()), {name: other_model.state_dict()[name] for name in model.state_dict()})


def test_fresh_process_and_thread_counts(tmp_path):
    """Saved here, resumed in another process with other threads: the same bits five steps on."""
    expected = {}
    for rounding in RULES:
        for lag in ("none", "ema", "dead-zone"):
            name = f"{rounding}-{lag}"
            model, opt = pair(rounding, lag=LAGS[lag])
            train(opt, model, range(7))
            save_checkpoint(tmp_path / name, opt, options={"rounding": rounding})
            train(opt, model, range(7, 12))
            expected[name] = {**weights(opt), **{f"model {k}": v for k, v in model.state_dict().items()}}
    done = run_python("tests.checkpoint.resume_worker", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, tensors in expected.items():
        found = torch.load(tmp_path / f"{name}.out", weights_only=True)
        assert_same(tensors, found, name)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "DataParallel"])
def test_wrappers_leave_no_trace_in_names(tmp_path, wrap):
    """A checkpoint of a wrapped model loads into a plain one, and the other way round."""
    plain_model, plain = pair()
    model = mlp(3)
    opt = FairCastOptimizer(quietly(lambda: wrap(model)), torch.optim.AdamW, **ADAM)
    train(opt, model, range(2))
    save_checkpoint(tmp_path / "a", opt)
    load_checkpoint(tmp_path / "a", plain)
    assert_same(dict(model.state_dict()), dict(plain_model.state_dict()))
    train(plain, plain_model, range(2, 4))
    save_checkpoint(tmp_path / "b", plain)
    load_checkpoint(tmp_path / "b", opt)
    assert_same(dict(model.state_dict()), dict(plain_model.state_dict()))


def test_without_a_model(tmp_path, rounding):
    """An optimizer over bare parameters saves and resumes them."""
    models = [mlp(), mlp(4)]
    opt, other = (FairCastOptimizer(m.parameters(), torch.optim.AdamW, rounding=rounding, **ADAM) for m in models)
    train(opt, models[0], range(3))
    save_checkpoint(tmp_path / "a", opt)
    resumes(tmp_path / "a", models[0], opt, (models[1], other), 3, loss_on)


class Extra(nn.Linear):
    """A module with extra state in its state dict."""

    history: tuple = ()

    def get_extra_state(self):
        return {"history": self.history}

    def set_extra_state(self, state):
        self.history = state["history"]


def test_extra_state_of_modules(tmp_path):
    """What modules add to a state dict beside tensors comes back."""
    model, other_model = Extra(4, 4), Extra(4, 4)
    opt, other = (FairCastOptimizer(m, torch.optim.SGD, lr=0.1) for m in (model, other_model))
    model.history = (1, 2.5, "x")
    save_checkpoint(tmp_path / "a", opt)
    load_checkpoint(tmp_path / "a", other)
    assert other_model.history == (1, 2.5, "x")


# ------------------------------------------------------------- extras


def test_extras_come_back(tmp_path):
    """Numbers, texts, tensors and nestings of them, with their types."""
    _, opt = pair()
    extra = {
        "epoch": 3,
        "loss": float("inf"),
        "best": -0.0,
        "note": "näh\n\ud800",
        "nothing": None,
        "flags": [True, False],
        "random": random.getstate(),
        "rng": torch.get_rng_state(),
        "nested": {"a": (1, [2, {"b": torch.arange(3, dtype=torch.int16)}]), "$odd": {1: "x", (2, 3): None}},
        "counts": Counter({"x": 2}),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "bf16": torch.tensor([[1.5]], dtype=torch.bfloat16),
        "nan": torch.tensor(float("nan")),
        "dtype": torch.float16,
    }
    save_checkpoint(tmp_path / "a", opt, step=41, **extra)
    found = load_checkpoint(tmp_path / "a", opt)
    assert found.pop("step") == 41
    note, counts = found.pop("note"), found.pop("counts")
    assert (note, counts, type(counts)) == (extra.pop("note"), extra.pop("counts"), Counter)
    assert_same(extra, found)


def schedulers(opt) -> list:
    """Some whose state dicts hold more than numbers."""
    s = torch.optim.lr_scheduler
    return [
        s.MultiStepLR(opt, [2, 2, 5]),
        s.SequentialLR(opt, [s.ConstantLR(opt), s.ExponentialLR(opt, 0.9)], [2]),
        s.OneCycleLR(opt, 0.1, total_steps=20, cycle_momentum=False),
        s.ReduceLROnPlateau(opt),
        s.LambdaLR(opt, lambda step: 0.5**step),
    ]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_schedulers_come_back(tmp_path, number):
    """A scheduler's state dict is a plain extra."""
    runs = []
    for seed in (0, 1):
        model, opt = pair(seed=seed)
        runs.append((model, opt, schedulers(opt)[number]))

    def go(model, opt, scheduler, steps):
        for step in steps:
            train(opt, model, range(step, step + 1))
            scheduler.step(1.0) if number == 3 else scheduler.step()

    go(*runs[0], range(3))
    save_checkpoint(tmp_path / "a", runs[0][1], scheduler=runs[0][2].state_dict())
    runs[1][2].load_state_dict(load_checkpoint(tmp_path / "a", runs[1][1])["scheduler"])
    for run in runs:
        go(*run, range(3, 8))
    assert_same_run(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: object(), r"extra holds .*bad\.x\.0 \(builtins\.object\)"),
        (lambda: quietly(lambda: torch.eye(2).to_sparse()), r"bad\.x\.0 \(a tensor of layout torch\.sparse_coo"),
        (lambda: torch.zeros(2, dtype=torch.complex128), r"bad\.x\.0 \(a tensor of torch\.complex128\)"),
        (lambda: {1, 2}, r"bad\.x\.0 \(builtins\.set\)"),
        (lambda: torch.zeros(2, device="meta"), r"bad\.x\.0 \(a tensor of layout torch\.strided on meta\)"),
        (lambda: print, r"bad\.x\.0 \(builtins\.builtin_function_or_method\)"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, value, said):
    """In extras and in the wrapped optimizer's state; nothing is written."""
    model, opt = pair()
    train(opt, model, range(1))
    with pytest.raises(CheckpointError, match=said):
        save_checkpoint(tmp_path / "a", opt, bad={"x": [value()]})
    next(iter(opt.state.values()))["odd"] = value()
    with pytest.raises(CheckpointError, match=r"the optimizer's state holds .*0\.weight\.odd"):
        save_checkpoint(tmp_path / "a", opt)
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------- what is refused


def test_halves_that_disagree_are_not_saved(tmp_path):
    """Weights written into the model since the last cast belong to no master."""
    model, opt = pair()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    with pytest.raises(CheckpointError, match=r"'0\.weight' were written from outside.*adopt_served_.*recast_"):
        save_checkpoint(tmp_path / "a", opt)
    opt.adopt_served_()
    save_checkpoint(tmp_path / "a", opt)
    with opt.masters_as_weights(), pytest.raises(RuntimeError, match="inside masters_as_weights"):
        save_checkpoint(tmp_path / "b", opt)
    with opt.masters_as_weights(), pytest.raises(RuntimeError, match="inside masters_as_weights"):
        load_checkpoint(tmp_path / "a", opt)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)), r"'2\.weight' has shape \(4, 16\)"),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh()), r"2 are unknown here, for example '2\.bias', '2\.weight'"),
        (lambda: nn.Sequential(*mlp(), nn.Linear(4, 4)), r"2 are missing in it, for example '3\.bias', '3\.weight'"),
        (lambda: nn.Sequential(*mlp(), nn.BatchNorm1d(4, affine=False)), r"it has no '3\.running_mean', .* and 0"),
    ],
)
def test_other_models_are_refused(tmp_path, build, said):
    """By name and shape, with nothing changed."""
    saved_run(tmp_path / "a")
    model = build()
    opt = FairCastOptimizer(model, torch.optim.AdamW, **ADAM)
    before, state = weights(opt), opt.state_dict()
    with pytest.raises(CheckpointError, match=said.removesuffix(" and 0")):
        load_checkpoint(tmp_path / "a", opt)
    assert_same(before, weights(opt))
    assert_same(state, opt.state_dict())


def test_other_keep_fp32_is_refused(tmp_path):
    """Both ways round."""
    _, opt = mixed_pair()
    save_checkpoint(tmp_path / "a", opt)
    other = FairCastOptimizer(Mixed(), torch.optim.AdamW, **ADAM)
    with pytest.raises(CheckpointError, match=r"'norm\.weight'.*pass the same keep_fp32"):
        load_checkpoint(tmp_path / "a", other)
    save_checkpoint(tmp_path / "b", other)
    with pytest.raises(CheckpointError, match=r"'norm\.weight'.*pass the same keep_fp32"):
        load_checkpoint(tmp_path / "b", opt)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"step": -1}, ValueError, "step must be at least 0, got -1"),
        ({"step": 1.5}, TypeError, r"step must be a whole number, got 1\.5"),
        ({"keep": 0}, ValueError, "keep must be at least 1, got 0"),
        ({"keep": 2}, ValueError, r"whose names differ by a number, but 'a' has none"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(tmp_path, options, error, said):
    """Each is named with its value."""
    _, opt = pair()
    with pytest.raises(error, match=said):
        save_checkpoint(tmp_path / "a", opt, **options)
    assert not any(tmp_path.iterdir())
    with pytest.raises(TypeError, match="no FairCastOptimizer inside AdamW"):
        save_checkpoint(tmp_path / "a", torch.optim.AdamW(mlp().parameters()))


# ------------------------------------------------------------- in the background


def test_background_saves_the_moment_of_the_call(tmp_path, rounding):
    """Steps taken while it writes leave it alone; a next save and a load wait for it."""
    model, opt = pair(rounding)
    train(opt, model, range(3))
    before, state = weights(opt), saved(opt.state_dict())
    saving = save_checkpoint(tmp_path / "a", opt, background=True, note=torch.ones(2))
    train(opt, model, range(3, 6))
    assert saving.wait() == tmp_path / "a" and saving.done
    _, other = pair(rounding, seed=3)
    load_checkpoint(tmp_path / "a", other)
    assert_same(before, weights(other))
    assert_same(state, saved(other.state_dict()))
    save_checkpoint(tmp_path / "b", opt, background=True)
    save_checkpoint(tmp_path / "c", opt, background=True)
    load_checkpoint(tmp_path / "c", other)
    assert_same_run(opt, other)


def test_background_errors_surface(tmp_path):
    """At the next save, or at ``wait()``, once; what is wrong at once is raised at once."""
    _, opt = pair()
    with pytest.raises(FileNotFoundError, match="create it first"):
        save_checkpoint(tmp_path / "no" / "a", opt, background=True)
    blocked = tmp_path / "a"
    for surface in ("wait", "save"):
        saving = fcoptim.checkpoint.Saving(blocked)
        blocked.mkdir()
        (blocked / "mine").touch()
        plan = fcoptim.checkpoint.plan.make_plan(opt, None, {}, None, 10**9).on_host()
        fcoptim.checkpoint.save._pending[opt] = saving
        saving._start(plan, False, None)
        with pytest.raises(FileExistsError, match=r"checkpoint .*a was not saved"):
            saving.wait() if surface == "wait" else save_checkpoint(tmp_path / "b", opt)
        (blocked / "mine").unlink()
        blocked.rmdir()
        save_checkpoint(tmp_path / f"after-{surface}", opt)
