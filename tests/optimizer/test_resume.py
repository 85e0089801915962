"""State dicts: complete, exact, matched by name, and refused with a reason where they don't fit."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fcoptim import FairCastOptimizer

from .helpers import (
    ADAM,
    RULES,
    assert_same,
    assert_same_run,
    equal_bits,
    loss_on,
    mlp,
    normed,
    pair,
    saved,
    train,
    weights,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = (0, 1, 301)

pytestmark = pytest.mark.filterwarnings("error")


def combinations() -> list[dict]:
    """What is resumed in a fresh process: every rule, and the other storage."""
    return [{"rounding": rule, "storage": "bfloat16"} for rule in RULES] + [
        {"rounding": "error_feedback", "storage": "float32"},
        {"rounding": "stochastic", "storage": "float32"},
    ]


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory):
    """Straight runs saved at three steps, and what one fresh process makes of the files five steps later."""
    folder = tmp_path_factory.mktemp("resume")
    expected = {}
    for options in combinations():
        model, opt = pair(**options)
        for step in range(STEPS[-1] + 5):
            name = "-".join([*options.values(), str(step)])
            if step in STEPS:
                served = {key: value.clone() for key, value in model.state_dict().items()}
                file = {"options": options, "step": step, "model": served, "optimizer": opt.state_dict()}
                for with_model in (True, False):
                    torch.save({**file, "with_model": with_model}, folder / f"{name}-{with_model}.in")
                expected[name] = {"served": served}
            train(opt, model, range(step, step + 1))
            begun = "-".join([*options.values(), str(step - 4)])
            if begun in expected and "state" not in expected[begun]:
                expected[begun].update(weights=weights(opt), state=copy.deepcopy(opt.state_dict()))
    command = [sys.executable, "-m", "tests.optimizer.resume_worker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, expected


@pytest.mark.parametrize("with_model", [True, False], ids=["model-and-optimizer", "optimizer-alone"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", combinations(), ids=lambda options: "-".join(options.values()))
def test_resume_in_a_fresh_process(fresh_process, options, step, with_model):
    """Field report 5, 6: at step 0, 1 and 301 the served bits come back, and five steps on all is as if never left."""
    folder, expected = fresh_process
    name = "-".join([*options.values(), str(step)])
    found = torch.load(folder / f"{name}-{with_model}.out", weights_only=True)
    assert_same(expected[name]["served"], found["served"], "served")
    assert_same(expected[name]["weights"], found["weights"], "weights")
    assert_same(expected[name]["state"], found["state"], "state")


def test_masters_come_back(rounding):
    """Field report 5: fp32 masters are in the state, and are not rebuilt from the bf16 weights."""
    model, opt = pair(rounding)
    train(opt, model, range(10))
    other = mlp().bfloat16()
    other.load_state_dict(model.state_dict())
    fresh = FairCastOptimizer(other, torch.optim.AdamW, rounding=rounding, **ADAM)
    assert not all(equal_bits(a, b) for (_, a), (_, b) in zip(opt.named_masters(), fresh.named_masters()))
    fresh.load_state_dict(saved(opt.state_dict()))
    for (name, a), (_, b) in zip(opt.named_masters(), fresh.named_masters()):
        assert b.dtype is torch.float32 and equal_bits(a, b), name
    assert_same_run(opt, fresh)


def test_accumulators_are_saved():
    """Field report 6: error feedback resumes exactly; a state without its accumulators is refused, by name."""
    model, opt = pair("error_feedback")
    train(opt, model, range(10))
    file = saved(opt.state_dict())
    assert all(entry["error_feedback"].dtype is torch.int16 for entry in file["state"].values())
    resumed_model, resumed = pair("error_feedback")
    resumed.load_state_dict(copy.deepcopy(file))
    resumed_model.load_state_dict(model.state_dict())
    train(opt, model, range(10, 20))
    train(resumed, resumed_model, range(10, 20))
    assert_same_run(opt, resumed)
    del file["state"][2]["error_feedback"]
    before = weights(resumed)
    with pytest.raises(ValueError, match=r"no accumulators of parameter '2\.weight'.*Load a complete one"):
        resumed.load_state_dict(file)
    assert_same(before, weights(resumed))


def test_loading_keeps_dtypes(rounding):
    """Field report 7, trap 1: moments and masters come back in fp32 with every bit, ``step`` in its own dtype."""
    model, opt = pair(rounding)
    train(opt, model, range(2))
    state = opt.state_dict()
    for entry in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key].fill_(1 + 2**-20)
    fresh_model, fresh = pair(rounding)
    fresh_model.load_state_dict(model.state_dict())
    fresh.adopt_served_()
    fresh.load_state_dict(saved(state))
    for entry, original in zip(fresh.state.values(), opt.state.values()):
        assert set(entry) == set(original)
        for key, value in entry.items():
            assert value.dtype is original[key].dtype, key
        assert (entry["exp_avg"] == 1 + 2**-20).all() and entry["exp_avg"].dtype is torch.float32
        assert entry["step"].dtype is torch.float32 and entry["cast_count"].dtype is torch.int64


def test_layout_is_torchs(rounding):
    """Nothing outside ``state`` and ``param_groups``; one entry for each parameter, before and after steps."""
    model, opt = pair(rounding)
    for steps in (range(0), range(3)):
        train(opt, model, steps)
        state = opt.state_dict()
        assert set(state) == {"state", "param_groups"}
        assert set(state["state"]) == set(range(4))
        for entry in state["state"].values():
            assert entry["master"].dtype is torch.float32
            assert entry["cast_count"].shape == () and int(entry["cast_count"]) == len(steps)
            assert ("error_feedback" in entry) == (rounding == "error_feedback")
        (group,) = state["param_groups"]
        assert (group["rounding"], group["seed"], group["params"]) == (rounding, 0, [0, 1, 2, 3])
        assert group["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert set(saved(state)) == set(state)


def test_state_is_absent_until_it_is_complete():
    """Trap 4: masters without moments would keep distributed checkpoint from making the moments."""
    model, opt = pair()
    assert len(opt.state) == 0
    opt.load_state_dict(saved(opt.state_dict()))
    assert len(opt.state) == 0
    train(opt, model, range(1))
    assert all({"master", "cast_count", "exp_avg"} <= set(entry) for entry in opt.state.values())


def test_loading_aliases_nothing(rounding):
    """What is loaded is copied: later steps leave the caller's tensors alone, and the other way round."""
    model, opt = pair(rounding)
    train(opt, model, range(3))
    file = saved(opt.state_dict())
    kept = copy.deepcopy(file)
    fresh_model, fresh = pair(rounding)
    fresh_model.load_state_dict(model.state_dict())
    fresh.adopt_served_()
    fresh.load_state_dict(file)
    train(fresh, fresh_model, range(3, 5))
    assert_same(kept, file)
    before = weights(fresh)
    for entry in file["state"].values():
        for value in entry.values():
            value.zero_()
    assert_same(before, weights(fresh))


def test_loading_its_own_state_changes_nothing(rounding):
    """Trap 2: ``load_state_dict(state_dict())`` with the very same tensors, as accelerate does at every start."""
    model, opt = pair(rounding)
    twin_model, twin = pair(rounding)
    for steps in (range(0), range(0, 3), range(3, 5)):
        train(opt, model, steps)
        train(twin, twin_model, steps)
        before = weights(opt)
        opt.load_state_dict(opt.state_dict())
        assert_same(before, weights(opt))
    train(opt, model, range(5, 8))
    train(twin, twin_model, range(5, 8))
    assert_same_run(opt, twin)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32-run", "bf16-run"])
@pytest.mark.parametrize("after", [0, 2])
def test_plain_state_loads(rounding, bf16, after):
    """Field report 20: plain AdamW state: masters stay what the weights say, moments are kept, and training goes on."""
    plain_model = mlp().bfloat16() if bf16 else mlp()
    plain = torch.optim.AdamW(plain_model.parameters(), **ADAM)
    for step in range(3):
        plain.zero_grad()
        loss_on(plain_model, step).backward()
        plain.step()
    model, opt = pair(rounding)
    train(opt, model, range(after))
    before = weights(opt)
    opt.load_state_dict(saved(plain.state_dict()))
    assert_same(before, weights(opt))
    for entry, original in zip(opt.state.values(), plain.state.values()):
        assert entry["exp_avg"].dtype is torch.float32
        assert torch.equal(entry["exp_avg"], original["exp_avg"].float())
        assert int(entry["step"]) == 3 and int(entry["cast_count"]) == after
    train(opt, model, range(3, 5))
    assert {int(entry["step"]) for entry in opt.state.values()} == {5}
    assert opt.param_groups[0]["rounding"] == rounding


class Twins(nn.Module):
    """Two layers of one shape, registered in either order."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) - 2 * self.right(x)


def step_once(model: nn.Module, opt: FairCastOptimizer, dtype: torch.dtype = torch.bfloat16) -> None:
    opt.zero_grad()
    model(torch.ones(2, 4).to(dtype)).float().square().sum().backward()
    opt.step()


def test_state_follows_names(rounding):
    """Field report 22: layers registered in another order get their own masters, not each other's."""
    torch.manual_seed(0)
    model = Twins("left", "right")
    opt = FairCastOptimizer(model, torch.optim.AdamW, rounding=rounding, **ADAM)
    step_once(model, opt)
    other = Twins("right", "left")
    other.load_state_dict(model.state_dict())
    swapped = FairCastOptimizer(other, torch.optim.AdamW, rounding=rounding, **ADAM)
    swapped.load_state_dict(saved(opt.state_dict()))
    for _ in range(3):
        step_once(model, opt)
        step_once(other, swapped)
    assert_same(dict(opt.named_masters()), dict(swapped.named_masters()))
    assert_same(dict(model.state_dict()), dict(sorted(other.state_dict().items())))


def test_swapped_positions_are_told():
    """Field report 22: without names there are only positions; a warning says that the weights were others."""
    torch.manual_seed(0)
    model, other = Twins("left", "right"), Twins("right", "left")
    other.load_state_dict(model.state_dict())
    opt = FairCastOptimizer(model.parameters(), torch.optim.AdamW, **ADAM)
    swapped = FairCastOptimizer(other.parameters(), torch.optim.AdamW, **ADAM)
    swapped.load_state_dict(saved(opt.state_dict()))
    with pytest.warns(UserWarning, match="other weights than that state serves, in 4 parameters"):
        step_once(other, swapped)


def test_wrapper_prefixes_do_not_matter(rounding):
    """A state saved under torch.compile or DDP loads into the bare model, and dithers alike."""
    model = mlp()
    wrapped_model = nn.Module()
    wrapped_model.module = nn.Module()
    wrapped_model.module._orig_mod = mlp()
    opt = FairCastOptimizer(model, torch.optim.AdamW, rounding=rounding, **ADAM)
    inside = FairCastOptimizer(wrapped_model, torch.optim.AdamW, rounding=rounding, **ADAM)
    assert [name for name, _ in inside.named_masters()] == [name for name, _ in opt.named_masters()]
    train(inside, wrapped_model.module._orig_mod, range(4))
    train(opt, model, range(2))
    opt.load_state_dict(saved(inside.state_dict()))
    assert_same_run(opt, inside)


def broken(state: dict, kind: str) -> dict:
    """A state dict with one thing wrong."""
    state = copy.deepcopy(state)
    entries, group = state["state"], state["param_groups"][0]
    if kind == "no state":
        del state["state"]
    elif kind == "no groups":
        del state["param_groups"]
    elif kind == "no master":
        del entries[1]["master"]
    elif kind == "no count":
        del entries[1]["cast_count"]
    elif kind == "no entry":
        del entries[1]
    elif kind == "bf16 master":
        entries[1]["master"] = entries[1]["master"].bfloat16()
    elif kind == "shape":
        entries[1]["master"] = torch.zeros(3)
    elif kind == "rule":
        group["rounding"] = "bankers"
    elif kind == "missing name":
        for key in ("params", "param_names"):
            group[key] = group[key][1:]
    elif kind == "other names":
        group["param_names"] = ["a.weight", *group["param_names"][1:]]
    elif kind == "two groups":
        del group["param_names"]
        state["param_groups"] = [{**group, "params": [0, 1]}, {**group, "params": [2, 3]}]
    return state


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no state", r"no optimizer state dict: \['state'\] missing"),
        ("no groups", r"no optimizer state dict: \['param_groups'\] missing"),
        ("no master", r"no fp32 master of parameter '0\.bias'"),
        ("no count", r"no fp32 master of parameter '0\.bias'"),
        ("no entry", r"no fp32 master of parameter '0\.bias'.*the file is incomplete"),
        ("bf16 master", r"master of parameter '0\.bias' was saved as torch\.bfloat16.*save it as it is"),
        ("shape", r"master of parameter '0\.bias' has shape \(3,\), the parameter \(16,\)"),
        ("rule", r"rounding must be one of 'nearest', .*got 'bankers'"),
        ("missing name", r"1 are missing in it, for example '0\.weight'"),
        ("other names", r"1 are missing in it, for example '0\.weight'; 1 are unknown here, for example 'a\.weight'"),
        ("two groups", r"groups of \[2, 2\] parameters, this optimizer groups of \[4\]"),
    ],
)
def test_refused_states_change_nothing(kind, said):
    """A state that does not fit is refused with the reason, and leaves no trace."""
    model, opt = pair()
    train(opt, model, range(2))
    other_model, other = pair()
    train(other, other_model, range(5))
    before, options = weights(opt), copy.deepcopy(opt.param_groups)
    state = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=said):
        opt.load_state_dict(broken(other.state_dict(), kind))
    assert_same(before, weights(opt))
    assert_same(options, opt.param_groups)
    assert_same(state, opt.state_dict())
    train(opt, model, range(2, 4))


def test_regrouped_state_is_refused():
    """Names spread over other groups than those saved have no options to take."""
    _, opt = pair()
    other = mlp()
    groups = [{"params": list(other[0].named_parameters(prefix="0"))}, {"params": [*other[2].named_parameters("2")]}]
    split = FairCastOptimizer(groups, torch.optim.AdamW, **ADAM)
    with pytest.raises(ValueError, match=r"keeps in groups \[0, 1\]; build the optimizer with the same groups"):
        opt.load_state_dict(split.state_dict())


def test_weights_that_do_not_belong_are_told():
    """Trap 8: the optimizer resumed without its model: the masters win, and the next step says so, once."""
    model, opt = pair()
    train(opt, model, range(3))
    alone_model, alone = pair(seed=5)
    alone.load_state_dict(saved(opt.state_dict()))
    assert_same(dict(model.state_dict()), dict(alone_model.state_dict()))
    with pytest.warns(UserWarning, match=r"in 4 parameters .*rewritten from the state's masters"):
        train(alone, alone_model, range(3, 4))
    train(alone, alone_model, range(4, 5))


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_loading_both_warns_of_nothing(rounding, first):
    """Model and optimizer loaded in either order are a matching pair, and no warning says otherwise."""
    model, opt = pair(rounding)
    train(opt, model, range(3))
    other_model, other = pair(rounding, seed=5)
    if first == "optimizer":
        other.load_state_dict(saved(opt.state_dict()))
    other_model.load_state_dict(saved(model.state_dict()))
    if first == "model":
        other.load_state_dict(saved(opt.state_dict()))
    train(opt, model, range(3, 5))
    train(other, other_model, range(3, 5))
    assert_same_run(opt, other)


def test_options_travel(rounding):
    """Rule, seed and learning rate come from the file, and reach the wrapped optimizer at once."""
    model, fresh_model = mlp(), mlp()
    opt = FairCastOptimizer(model, torch.optim.AdamW, rounding=rounding, seed=7, **ADAM)
    fresh = FairCastOptimizer(fresh_model, torch.optim.AdamW, rounding="nearest", **ADAM)
    opt.param_groups[0]["lr"] = 0.25
    fresh.load_state_dict(saved(opt.state_dict()))
    fresh_model.load_state_dict(model.state_dict())
    assert (fresh.param_groups[0]["rounding"], fresh.param_groups[0]["seed"]) == (rounding, 7)
    assert fresh.param_groups[0]["lr"] == fresh.wrapped.param_groups[0]["lr"] == 0.25
    train(opt, model, range(3))
    train(fresh, fresh_model, range(3))
    assert_same_run(opt, fresh)


def test_adopted_before_the_first_step_resumes(rounding):
    """Weights adopted before any step are saved and loaded like others."""
    model, opt = pair(rounding)
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    opt.adopt_served_()
    fresh_model, fresh = pair(rounding)
    fresh.load_state_dict(saved(opt.state_dict()))
    fresh_model.load_state_dict(model.state_dict())
    train(opt, model, range(3))
    train(fresh, fresh_model, range(3))
    assert_same_run(opt, fresh)


def kept_norm(seed: int) -> tuple[nn.Module, FairCastOptimizer]:
    model = normed(seed)
    return model, FairCastOptimizer(model, torch.optim.AdamW, keep_fp32="1.*", **ADAM)


def test_kept_parameters_resume():
    """A parameter kept in fp32 is its own master: its weights are the model's to save, its moments ours."""
    model, opt = kept_norm(0)
    train(opt, model, range(3))
    fresh_model, fresh = kept_norm(3)
    fresh_model.load_state_dict(model.state_dict())
    fresh.adopt_served_()
    fresh.load_state_dict(saved(opt.state_dict()))
    train(opt, model, range(3, 6))
    train(fresh, fresh_model, range(3, 6))
    assert_same_run(opt, fresh)


def test_kept_parameters_differ_from_the_file():
    """A file written with another ``keep_fp32`` is refused with a hint."""
    model, opt = kept_norm(0)
    train(opt, model, range(1))
    fresh = FairCastOptimizer(normed(0), torch.optim.AdamW, **ADAM)
    with pytest.raises(ValueError, match="pass the same keep_fp32"):
        fresh.load_state_dict(saved(opt.state_dict()))
