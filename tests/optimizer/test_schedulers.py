"""Learning-rate schedulers, hooks and the other things that code expects of a torch optimizer."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

from fcoptim import FairCastOptimizer

from . import zoo
from .helpers import ADAM, assert_same, assert_same_run, equal_bits, mlp, pair, saved, train, weights

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 8
ARGUMENTS = {
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 5]},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"total_iters": 4},
    "ExponentialLR": {"gamma": 0.8},
    "PolynomialLR": {"total_iters": 5, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 1e9},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 2},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": STEPS + 1},
    "SWALR": {"swa_lr": 1e-4, "anneal_epochs": 3},
}


def discover() -> list[type]:
    """Every scheduler that torch offers."""
    found = [*vars(lr_scheduler).values(), *vars(swa_utils).values()]
    classes = {c for c in found if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)}
    return sorted(classes - {lr_scheduler.LRScheduler, lr_scheduler._LRScheduler}, key=lambda c: c.__name__)


def build(cls: type, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """A scheduler with arguments that change something at nearly every step."""
    if cls is lr_scheduler.SequentialLR:
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, gamma=0.5)]
        return cls(optimizer, schedulers=parts, milestones=[3])
    if cls is lr_scheduler.ChainedScheduler:
        parts = [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, gamma=0.9)]
        return cls(parts, optimizer=optimizer)
    return cls(optimizer, **ARGUMENTS[cls.__name__])


def advance(scheduler: lr_scheduler.LRScheduler) -> None:
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def case_of(kind: str) -> zoo.Case:
    """SGD with momentum, AdamW, or AdamW with its learning rate in a tensor."""
    if kind == "SGD":
        return zoo.Case("torch.optim", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    rate = torch.tensor(1e-2) if kind == "tensor lr" else 1e-2
    return zoo.Case("torch.optim", torch.optim.AdamW, {"lr": rate})


def options_of(case: zoo.Case) -> zoo.Case:
    """The case with a learning rate of its own, as schedulers write into a tensor in place."""
    options = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in case.options.items()}
    return zoo.Case(case.library, case.cls, options)


def test_every_scheduler_is_known():
    names = {cls.__name__ for cls in discover()}
    assert len(names) >= 16
    assert names - set(ARGUMENTS) == {"SequentialLR", "ChainedScheduler"}, "give new schedulers their arguments above"


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "tensor lr"])
@pytest.mark.parametrize("cls", discover(), ids=lambda cls: cls.__name__)
def test_masters_follow_the_schedule(cls, kind):
    """Field report 8: masters move as under plain torch with the same scheduler, and no warning is raised."""
    case = case_of(kind)
    by_hand = zoo.ByHand(options_of(case), mlp())
    model = mlp()
    opt = FairCastOptimizer(model, case.cls, rounding="nearest", **options_of(case).options)
    ours, plain = build(cls, opt), build(cls, by_hand.optimizer)
    rates = set()
    for step in range(STEPS):
        zoo.drive(case, opt, model, range(step, step + 1))
        by_hand.step(step)
        advance(ours)
        advance(plain)
        rates.add(float(opt.param_groups[0]["lr"]))
        assert_same(
            options(by_hand.optimizer), {k: v for k, v in options(opt).items() if k not in ("rounding", "seed", "lag")}
        )
    for (name, master), expected in zip(opt.named_masters(), by_hand.masters):
        assert equal_bits(master, expected), name
    assert len(rates) > 1 and ours.get_last_lr() == plain.get_last_lr()


def options(opt: torch.optim.Optimizer) -> dict:
    return {key: value for key, value in opt.param_groups[0].items() if key not in ("params", "param_names")}


def test_momentum_cycles_reach_the_masters():
    """Field report 8: OneCycleLR and CyclicLR turn momentum and betas; the wrapped optimizer sees them."""
    for optimizer, key in ((torch.optim.SGD, "momentum"), (torch.optim.AdamW, "betas")):
        model = mlp()
        chosen = {"momentum": 0.9} if key == "momentum" else {}
        opt = FairCastOptimizer(model, optimizer, lr=1e-3, **chosen)
        scheduler = lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=5)
        seen = set()
        for step in range(4):
            train(opt, model, range(step, step + 1))
            assert opt.wrapped.param_groups[0][key] == opt.param_groups[0][key]
            seen.add(opt.wrapped.param_groups[0][key])
            scheduler.step()
        assert len(seen) > 2


@pytest.mark.parametrize("cls", discover(), ids=lambda cls: cls.__name__)
def test_schedules_resume(cls):
    """Optimizer and scheduler saved together go on as if never left."""
    model, opt = pair()
    scheduler = build(cls, opt)
    for step in range(4):
        train(opt, model, range(step, step + 1))
        advance(scheduler)
    other_model, other = pair()
    resumed = build(cls, other)
    other.load_state_dict(saved(opt.state_dict()))
    other_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for step in range(4, STEPS):
        for each, each_model, each_scheduler in ((opt, model, scheduler), (other, other_model, resumed)):
            train(each, each_model, range(step, step + 1))
            advance(each_scheduler)
    assert_same_run(opt, other)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_scheduler_built_before_wrapping(tensor_lr, rounding):
    """Field report 9: a scheduler on the plain instance still reaches the step after wrapping, and after a load."""
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0) if tensor_lr else 1.0)
    scheduler = lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    opt = FairCastOptimizer(model, plain, rounding=rounding)
    for step in range(4):
        before = {name: master.clone() for name, master in opt.named_masters()}
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
        for name, master in opt.named_masters():
            assert torch.allclose(before[name] - master, torch.tensor(0.5**step), rtol=1e-5, atol=1e-6), (name, step)
        scheduler.step()
        assert float(plain.param_groups[0]["lr"]) == 0.5 ** (step + 1)


def test_scheduler_built_before_wrapping_and_a_load():
    """Field report 9: after a load the old scheduler goes on from the loaded learning rate."""
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(plain, gamma=0.5)
    opt = FairCastOptimizer(model, plain)
    state = opt.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    opt.load_state_dict(saved(state))
    train(opt, model, range(1))
    scheduler.step()
    train(opt, model, range(1))
    assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.0625


def test_both_sides_written():
    """Options set on our groups win over what somebody writes into the wrapped optimizer at the same time."""
    model, opt = pair()
    opt.param_groups[0]["lr"] = 0.5
    opt.wrapped.param_groups[0]["lr"] = 0.25
    train(opt, model, range(1))
    assert opt.param_groups[0]["lr"] == opt.wrapped.param_groups[0]["lr"] == 0.5
    opt.wrapped.param_groups[0]["lr"] = 0.25
    train(opt, model, range(1))
    assert opt.param_groups[0]["lr"] == opt.wrapped.param_groups[0]["lr"] == 0.25


def test_options_written_by_the_step_come_back():
    """An optimizer that changes its own options during a step (D-Adaptation does) shows them in our groups."""

    class Halving(torch.optim.SGD):
        def step(self, closure=None):
            out = super().step(closure)
            for group in self.param_groups:
                group["lr"] *= 0.5
            return out

    model, opt = pair(optimizer=Halving, lr=1.0)
    train(opt, model, range(3))
    assert opt.param_groups[0]["lr"] == opt.wrapped.param_groups[0]["lr"] == 0.125


def test_it_is_a_torch_optimizer():
    """Field report 8: isinstance, ``defaults``, ``repr``, real groups."""
    _, opt = pair()
    assert isinstance(opt, torch.optim.Optimizer) and isinstance(opt.wrapped, torch.optim.AdamW)
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **ADAM)
    assert opt.defaults == {**plain.defaults, "rounding": "stochastic", "seed": 0, "lag": None}
    text = repr(opt)
    for part in ("FairCastOptimizer(AdamW, storage=bfloat16)", "Parameter Group 0 (4 parameters)", "lr: 0.001"):
        assert part in text
    assert "rounding: stochastic" in text
    assert isinstance(opt.param_groups, list) and type(opt.param_groups[0]) is dict


def test_step_hooks():
    """Field report 8, trap 13: hooks run once a step; those after it see the new served weights."""
    model, opt = pair()
    served, calls = {}, []
    opt.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre"))

    def after(optimizer, args, kwargs):
        calls.append("post")
        served.update({name: p.detach().clone() for name, p in model.named_parameters()})

    opt.register_step_post_hook(after)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(opt, model, range(2))
    assert calls == ["pre", "post"] * 2
    for name, param in model.named_parameters():
        assert equal_bits(served[name], param.detach()) and not torch.equal(before[name], param)


def test_global_step_hooks():
    """Hooks for all optimizers see ours and the wrapped one, each once."""
    seen = []
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(type(o)))
    try:
        model, opt = pair()
        train(opt, model, range(1))
    finally:
        handle.remove()
    assert seen == [torch.optim.AdamW, FairCastOptimizer]


def test_state_dict_hooks(rounding):
    """Field report 8: state-dict and load hooks run, in torch's order, and may replace what passes through."""
    model, opt = pair(rounding)
    train(opt, model, range(1))
    calls = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("save pre"))
    opt.register_state_dict_post_hook(lambda o, state: calls.append("save post"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    state = opt.state_dict()
    assert state["note"] == 1
    opt.register_load_state_dict_pre_hook(lambda o, given: calls.append("load pre"))
    opt.register_load_state_dict_pre_hook(lambda o, given: {**given, "param_groups": doubled(given["param_groups"])})
    opt.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    before = weights(opt)
    opt.load_state_dict(state)
    assert calls == ["save pre", "save post", "load pre", "load post"]
    assert opt.param_groups[0]["lr"] == 2e-3
    assert_same(before, weights(opt))


def doubled(groups: list[dict]) -> list[dict]:
    return [{**group, "lr": 2 * group["lr"]} for group in groups]


def test_zero_grad():
    """``set_to_none`` is in the signature and does what it says."""
    model, opt = pair()
    assert "set_to_none" in inspect.signature(opt.zero_grad).parameters
    model(torch.ones(1, 8).bfloat16()).sum().backward()
    opt.zero_grad(set_to_none=False)
    assert all(float(p.grad.abs().sum()) == 0.0 for p in model.parameters())
    opt.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


def test_step_returns_what_the_wrapped_one_returns():
    """Field report 30: the closure's loss, or None."""
    model, opt = pair(optimizer=torch.optim.SGD, lr=0.1)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(1, 8).bfloat16()).float().square().sum()
        loss.backward()
        return loss.detach()

    loss = opt.step(closure)
    assert isinstance(loss, torch.Tensor) and math.isfinite(float(loss))
    assert float(opt.step(closure)) < float(loss)
    closure()
    assert opt.step() is None
