"""Lags inside the optimizer: switched, saved, resumed, copied, and left alone where nothing is stepped."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fcoptim import FairCastOptimizer
from fcoptim.lag import DeadZone, Delay, Ema, kind_of
from tests.optimizer.helpers import assert_same_run, bits, equal_bits, mlp, saved, train, weights

from .helpers import LAGS, LR, RULES, Caster, gradient, made, served, step


def same(a: dict, b: dict) -> bool:
    return all(equal_bits(a[name], b[name]) for name in a)


def resumed(model, opt, lag=None, rounding="stochastic", **options):
    """A second run from what a file holds of the first."""
    state = saved(opt.state_dict())
    model2, opt2 = made(lag, rounding, **options)
    model2.load_state_dict({name: value.to(model2.flat.dtype) for name, value in model.state_dict().items()})
    opt2.load_state_dict(state)
    return model2, opt2


# ------------------------------------------------------------- served is a function of what is saved


def test_resume_is_exact(lag, rounding, storage):
    """Every lag and rule: a run that is saved and resumed at step 5 equals the one that was not, bit for bit."""
    model, opt = made(lag, rounding, storage=storage)
    for number in range(5):
        step(opt, model, number)
    model2, opt2 = resumed(model, opt, None, rounding, storage=storage)
    assert opt2.lag == lag
    assert_same_run(opt, opt2)
    for number in range(5, 12):
        step(opt, model, number)
        step(opt2, model2, number)
    assert_same_run(opt, opt2)


def test_load_writes_the_served_weights(lag, rounding, storage):
    """A state loaded into a model that holds other weights: they come back bit for bit, from the state alone."""
    model, opt = made(lag, rounding, storage=storage)
    for number in range(5):
        step(opt, model, number)
    expected = served(model)
    model2, opt2 = made(None, storage=storage)
    opt2.load_state_dict(saved(opt.state_dict()))
    assert same(served(model2), expected)


@pytest.mark.parametrize("before", [None, *LAGS])
@pytest.mark.parametrize("after", [None, *LAGS, "a longer delay"])
def test_resume_is_exact_between_a_switch_and_its_step(before, after, rounding):
    """A lag takes over at the next step, so until then a state still says what was served, whatever was switched."""
    lag = {None: lambda: None, "a longer delay": lambda: Delay(6), **LAGS}[after]
    model, opt = made(LAGS[before]() if before else None, rounding)
    for number in range(4):
        step(opt, model, number)
    now = served(model)
    opt.lag = lag()
    assert same(served(model), now)
    model2, opt2 = resumed(model, opt, rounding=rounding)
    assert same(served(model2), now)
    for number in range(4, 9):
        step(opt, model, number)
        step(opt2, model2, number)
    assert_same_run(opt, opt2)


def test_recast_brings_back_what_was_served(rounding, storage):
    """Weights written over are noticed and undone, where the lag remembers apart from the weights."""
    for lag in (Ema(5), Delay(3), Delay(3, dtype="bfloat16")):
        model, opt = made(lag, rounding, storage=storage)
        for number in range(5):
            step(opt, model, number)
        expected = served(model)
        with torch.no_grad():
            model.wide.add_(1)
        with pytest.raises(RuntimeError, match="'wide'"):
            step(opt, model, 5)
        opt.recast_()
        assert same(served(model), expected)
        step(opt, model, 5)


def test_recast_of_a_dead_zone_is_fresh(rounding, storage):
    """Held weights that are written over are gone: noticed all the same, and cast afresh; others are left alone."""
    model, opt = made(DeadZone(2), rounding, storage=storage)
    for number in range(5):
        step(opt, model, number)
    expected = served(model)
    with torch.no_grad():
        model.wide.add_(1)
    with pytest.raises(RuntimeError, match="'wide'"):
        step(opt, model, 5)
    opt.recast_()
    assert equal_bits(model.flat.detach(), expected["flat"])
    master = dict(opt.named_masters())["wide"]
    assert ((model.wide.double() - master.double()).abs() <= 2.0**-7 * master.abs()).all()
    for number in range(5, 9):
        step(opt, model, number)


def test_writing_the_same_bits_is_no_error(lag):
    model, opt = made(lag)
    for number in range(5):
        step(opt, model, number)
    with torch.no_grad():
        model.wide.copy_(model.wide.clone())
    step(opt, model, 5)


def test_adopt_goes_on_from_new_weights(lag, rounding):
    """Masters, lagged copies and served weights are the adopted weights; a zero gradient then moves nothing."""
    model, opt = made(lag, rounding)
    for number in range(5):
        step(opt, model, number)
    with torch.no_grad():
        model.wide.add_(1)
    adopted = served(model)
    opt.adopt_served_()
    assert same(served(model), adopted)
    for _ in range(5):
        for param in model.parameters():
            param.grad = torch.zeros(param.shape)
        opt.step()
    assert same(served(model), adopted)
    assert all(torch.equal(master, adopted[name].float()) for name, master in opt.named_masters())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_alone(lag, rounding, way):
    """A copy of model and optimizer does what the original does, and shares no memory with it."""
    model, opt = made(lag, rounding)
    for number in range(4):
        step(opt, model, number)
    pair = (model, opt)
    model2, opt2 = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    here = weights(opt)
    for number in range(4, 8):
        step(opt2, model2, number)
    assert same(here, weights(opt))
    for number in range(4, 8):
        step(opt, model, number)
    assert_same_run(opt, opt2)
    opt2.lag.pull = 1.0
    assert opt.lag.pull == 0


def test_dead_zone_adds_no_memory():
    """Its state entry is the served weight: from the start, after steps, after a load."""
    model, opt = made(DeadZone(1))
    for number in range(2):
        step(opt, model, number)
        assert all(opt.state[p]["lag"].data_ptr() == p.data_ptr() for p in model.parameters())
    model2, opt2 = resumed(model, opt)
    assert all(opt2.state[p]["lag"].data_ptr() == p.data_ptr() for p in model2.parameters())


@pytest.mark.parametrize("steps, dtype, size", [(0, "float32", 4), (9, "float32", 40), (9, torch.bfloat16, 20)])
def test_delay_states_its_memory(steps, dtype, size):
    """The repr says how many bytes a weight costs, and that is what lies in the state, once for each parameter."""
    lag = Delay(steps, dtype=dtype)
    assert f"bytes_per_weight={size}" in repr(lag)
    model, opt = made(lag)
    step(opt, model, 0)
    assert f"bytes_per_weight={size}" in repr(opt.lag)
    for param in model.parameters():
        ring = opt.state[param]["lag"]
        assert ring.untyped_storage().nbytes() == size * param.numel()


@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (), (0, 3)])
def test_layouts_and_sizes_make_no_difference(lag, rounding, shape):
    """Weights in channels_last memory, of no dimension and of no element: the same bits as in plain memory."""
    runs = []
    for memory in (torch.contiguous_format, torch.channels_last):
        if len(shape) != 4 and memory is torch.channels_last:
            continue
        value = torch.linspace(0.1, 1, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape)
        param = nn.Parameter(value.contiguous(memory_format=memory))
        opt = FairCastOptimizer([("w", param)], torch.optim.SGD, lr=LR, rounding=rounding, lag=lag)
        for number in range(6):
            param.grad = gradient("w", param.shape, number)
            opt.step()
        state = saved(opt.state_dict())
        again = nn.Parameter(param.detach().clone())
        opt2 = FairCastOptimizer([("w", again)], torch.optim.SGD, lr=LR)
        opt2.load_state_dict(state)
        assert equal_bits(again.detach(), param.detach())
        runs.append(param.detach().contiguous())
    assert all(equal_bits(runs[0], other) for other in runs[1:])


def test_tied_weights_have_one_ring():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1, lag=Delay(4))
    model[0].weight.grad = torch.ones(6, 6)
    opt.step()
    assert len(opt.state) == 1
    assert model[1].weight is model[0].weight


# ------------------------------------------------------------- switching


def test_turning_off_lands_on_the_master(lag, rounding):
    """At the next step every served weight is the rule's cast of its master, also where there is no gradient."""
    model, opt = made(lag, rounding)
    for number in range(6):
        step(opt, model, number)
    opt.lag = None
    step(opt, model, 6, leave_out=("wide",))
    for name, master in opt.named_masters():
        param = dict(model.named_parameters())[name]
        assert kind_of(opt.state[param]) is None
        caster = Caster(name, master.shape, rounding)
        if rounding == "error_feedback":
            after = opt.state[param]["error_feedback"].to(torch.int64)
            low = master.view(torch.int32).to(torch.int64) & 0xFFFF
            caster.accumulator = (((after - low + 2**15) & 0xFFFF) - 2**15).to(torch.int16)
        caster.count = int(opt.state[param]["cast_count"]) - 1
        assert equal_bits(param.detach(), caster(master)), name
    still = served(model)
    step(opt, model, 7, leave_out=("wide",))
    assert equal_bits(model.wide.detach(), still["wide"])


def test_switched_on_it_starts_at_the_master():
    """The average begins at the master as it is before the next step, not at the one that the step makes."""
    model, opt = made(None)
    for number in range(5):
        step(opt, model, number)
    opt.lag = Ema(4)
    start = {name: master.clone() for name, master in opt.named_masters()}
    step(opt, model, 5)
    for name, master in opt.named_masters():
        average = opt.state[dict(model.named_parameters())[name]]["lag"]
        assert torch.allclose(average, torch.lerp(start[name], master, 0.25), rtol=1e-6, atol=0)


def test_settings_take_effect_at_the_next_step():
    model, opt = made(Ema(4))
    step(opt, model, 0)
    opt.lag.steps = 50
    average = opt.state[model.wide]["lag"].clone()
    step(opt, model, 1)
    master = dict(opt.named_masters())["wide"]
    assert torch.allclose(opt.state[model.wide]["lag"], torch.lerp(average, master, 0.02), rtol=1e-6, atol=0)
    assert opt.param_groups[0]["lag"] == {"kind": "ema", "steps": 50.0, "pull": 0.0}


def test_the_object_passed_stays_live():
    """A caller's own object changes the run too, also after a load; a saved state does not follow it."""
    lag = Ema(4)
    _, opt = made(lag)
    before = opt.state_dict()
    opt.load_state_dict(opt.state_dict())
    lag.steps = 9
    assert opt.lag.steps == 9
    assert before["param_groups"][0]["lag"]["steps"] == 4
    opt.load_state_dict(before)
    assert lag.steps == 4


def test_groups_choose_their_own():
    """A group's lag is its own; with different ones there is no one ``opt.lag``, and setting it sets all."""
    model = mlp()
    groups = [
        {"params": list(model[0].named_parameters()), "lag": Delay(2)},
        {"params": [(f"2.{n}", p) for n, p in model[2].named_parameters()]},
    ]
    opt = FairCastOptimizer(groups, torch.optim.SGD, lr=0.1, lag=Ema(3))
    train(opt, model, range(2))
    assert kind_of(opt.state[model[0].weight]) == "delay"
    assert kind_of(opt.state[model[2].weight]) == "ema"
    with pytest.raises(ValueError, match="lags of their own"):
        _ = opt.lag
    opt.lag = None
    assert opt.lag is None
    train(opt, model, range(2, 3))
    assert not any("lag" in entry for entry in opt.state.values())


def test_added_group_gets_the_lag():
    model = mlp()
    opt = FairCastOptimizer(model[0], torch.optim.SGD, lr=0.1, lag=Ema(3))
    opt.lag.steps = 7
    opt.add_param_group({"params": list(model[2].parameters())})
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lag": {"kind": "dead_zone", "ulps": 2}})
    assert [group["lag"]["kind"] for group in opt.param_groups] == ["ema", "ema", "dead_zone"]
    assert opt.param_groups[1]["lag"]["steps"] == 7


def test_parameters_kept_in_fp32_have_no_lag(lag):
    """They are their own masters: there is nothing between master and served that could lag."""
    model = mlp()
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1, lag=lag, keep_fp32="*.bias")
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    opt.step()
    assert "lag" not in opt.state.get(model[0].bias, {})
    assert "lag" in opt.state[model[0].weight]


# ------------------------------------------------------------- steps that don't happen


def test_a_parameter_without_a_gradient_stands_still(lag, rounding):
    """Neither served weight nor lag moves: a lag counts a parameter's own steps, as its casts do."""
    model, opt = made(lag, rounding)
    for number in range(4):
        step(opt, model, number)
    before = copy.deepcopy(opt.state[model.wide]), served(model)["wide"]
    for number in range(4, 8):
        step(opt, model, number, leave_out=("wide",))
    assert equal_bits(model.wide.detach(), before[1])
    assert all(torch.equal(bits(opt.state[model.wide][k]), bits(v)) for k, v in before[0].items() if v is not None)


@pytest.mark.parametrize("case", ["no gradient", "lr zero", "skipped"])
def test_steps_that_change_nothing(lag, rounding, case):
    """No gradient at all, every lr zero, a step left out for a NaN: masters, lag and served weights stay."""
    model, opt = made(lag, rounding, on_nonfinite="skip")
    for number in range(4):
        step(opt, model, number)
    before, state = weights(opt), copy.deepcopy(opt.state_dict()["state"])
    opt.lag = None if case == "no gradient" else opt.lag
    for param in model.parameters():
        fill = float("nan") if case == "skipped" else 1.0
        param.grad = None if case == "no gradient" else torch.full(param.shape, fill)
    opt.param_groups[0]["lr"] = 0.0 if case == "lr zero" else LR
    opt.step()
    assert same(before, weights(opt))
    after = opt.state_dict()["state"]
    assert all(
        torch.equal(bits(after[i][k]), bits(v)) for i, entry in state.items() for k, v in entry.items() if v is not None
    )


# ------------------------------------------------------------- closures


class Twice(torch.optim.SGD):
    """Moves by three times the step, evaluates again, goes back and takes the step."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        start, grads = [p.clone() for p in params], [p.grad.clone() for p in params]
        for p, g in zip(params, grads):
            p.add_(g, alpha=-3 * LR)
        with torch.enable_grad():
            closure()
        for p, s, g in zip(params, start, grads):
            p.copy_(s).add_(g, alpha=-LR)
        return loss


def test_a_closure_called_twice_moves_the_lag_once(lag):
    """The first evaluation is on the served weights, the second on what would be served for the trial masters."""
    seen: list[dict] = []
    rounding = "nearest"  # has no count, so that casts of trials leave no trace
    model, opt = made(lag, rounding)
    model2 = type(model)()
    twice = FairCastOptimizer(
        model2, Twice, lr=LR, rounding=rounding, lag=LAGS[next(k for k in LAGS if LAGS[k]() == lag)]()
    )
    for number in range(6):
        trial = copy.deepcopy((model2, twice))
        for name, param in trial[0].named_parameters():
            param.grad = 3 * gradient(name, param.shape, number)
        trial[1].wrapped.__class__ = torch.optim.SGD
        trial[1].step()
        seen.clear()

        def closure(number=number):
            seen.append(served(model2))
            for name, param in model2.named_parameters():
                param.grad = gradient(name, param.shape, number)
            return torch.zeros(())

        before = served(model2)
        twice.step(closure)
        step(opt, model, number)
        assert same(seen[0], before)
        assert same(seen[1], served(trial[0]))
        assert same(weights(opt), weights(twice)), number
        assert all(
            torch.equal(bits(opt.state[a]["lag"]), bits(twice.state[b]["lag"]))
            for a, b in zip(model.parameters(), model2.parameters())
        )


def test_lbfgs_goes_down_under_a_dead_zone():
    """A real optimizer with many evaluations in a step: the loss on the served weights falls, and resume is exact."""
    model = mlp()
    opt = FairCastOptimizer(model, torch.optim.LBFGS, lr=0.5, max_iter=5, lag=DeadZone(1))
    x, y = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.ones(32, 4)

    def closure():
        opt.zero_grad()
        loss = (model(x.bfloat16()).float() - y).square().mean()
        loss.backward()
        return loss

    losses = [opt.step(closure).item() for _ in range(4)]
    assert losses[-1] < losses[0] / 4
    model2 = mlp()
    opt2 = FairCastOptimizer(model2, torch.optim.LBFGS, lr=0.5, max_iter=5)
    model2.load_state_dict(model.state_dict())
    opt2.load_state_dict(saved(opt.state_dict()))
    assert_same_run(opt, opt2)


# ------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    "make, kind, words",
    [
        (lambda: Ema(0.5), ValueError, "steps must be finite and at least 1, got 0.5"),
        (lambda: Ema(float("nan")), ValueError, "steps must be finite"),
        (lambda: Ema("100"), TypeError, "steps must be a number, got '100'"),
        (lambda: Delay(-1), ValueError, "steps must be at least 0, got -1"),
        (lambda: Delay(2.5), TypeError, "steps must be a whole number, got 2.5"),
        (lambda: Delay(2, dtype="float16"), ValueError, "dtype must be 'float32' or 'bfloat16', got 'float16'"),
        (lambda: DeadZone(-1), ValueError, "ulps must be finite and at least 0, got -1"),
        (lambda: Ema(2, pull=-1), ValueError, "pull must be finite and at least 0, got -1"),
        (lambda: made(100), TypeError, "lag must be None, .* got 100"),
        (lambda: made({"kind": "slow"}), ValueError, "'kind' of a lag must be one of 'ema', 'delay', 'dead_zone'"),
        (lambda: made({"kind": "ema", "ulps": 1}), ValueError, "lag 'ema' takes steps, pull; got"),
    ],
)
def test_wrong_settings_are_named(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_wrong_setting_changes_nothing(lag):
    _, opt = made(lag)
    before = dict(opt.param_groups[0]["lag"])
    with pytest.raises(ValueError):
        opt.lag.pull = -1
    with pytest.raises(TypeError):
        opt.lag = 5
    assert opt.param_groups[0]["lag"] == before


def test_a_pull_that_overshoots_is_refused(lag):
    """Before anything has moved."""
    lag.pull = 1.01 / LR
    model, opt = made(lag)
    before = weights(opt)
    with pytest.raises(ValueError, match="lr x pull must be at most 1"):
        step(opt, model, 0)
    assert same(before, weights(opt))


@pytest.mark.parametrize("damage", ["shape", "dtype", "lost"])
def test_damaged_lags_are_refused(damage):
    """A state whose average was cut, cast or dropped is named, and nothing is changed."""
    model, opt = made(Ema(5))
    step(opt, model, 0)
    state = saved(opt.state_dict())
    entry = state["state"][1]
    if damage == "shape":
        entry["lag"] = entry["lag"][:-1]
    elif damage == "dtype":
        entry["lag"] = entry["lag"].bfloat16()
    else:
        del entry["lag"]
    before = weights(opt)
    with pytest.raises(ValueError, match="'flat'"):
        opt.load_state_dict(state)
    assert same(before, weights(opt))


# ------------------------------------------------------------- tools


@pytest.mark.parametrize("key", LAGS)
def test_distributed_checkpoint_carries_it(key, tmp_path):
    """torch.distributed.checkpoint's state dict functions, into a fresh model and optimizer with the same lag."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, opt = made(LAGS[key](), "error_feedback")
    for number in range(5):
        step(opt, model, number)
    dcp.save({"opt": get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path)
    model2, opt2 = made(LAGS[key](), "error_feedback")
    state = {"opt": get_optimizer_state_dict(model2, opt2)}
    dcp.load(state, checkpoint_id=tmp_path)
    model2.load_state_dict(model.state_dict())
    set_optimizer_state_dict(model2, opt2, state["opt"])
    for number in range(5, 9):
        step(opt, model, number)
        step(opt2, model2, number)
    assert same(weights(opt), weights(opt2))


def test_every_rule_and_lag_is_covered():
    """The fixtures above are the whole table."""
    from fcoptim.cast import RULES as TABLE
    from fcoptim.lag import KINDS

    assert set(RULES) == set(TABLE)
    assert {make().kind for make in LAGS.values()} == set(KINDS)
