"""Muon as a torch optimizer: state dicts, copies, schedulers, learning rates as tensors, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fcoptim import Muon

from ..optimizer.helpers import saved
from .helpers import noise


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def train(net, opt, steps, scheduler=None):
    for step in steps:
        opt.zero_grad()
        (net(noise(12, 6, seed=step)) - noise(12, 3, seed=step)).square().mean().backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("saves_at", [0, 1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "scale": "spectral", "steps": 3}, {"coefficients": (3, -4, 2)}]
)
def test_state_dict_round_trip(options, saves_at):
    """Through a file that is read with weights_only=True; the continuation is equal bit for bit."""
    straight, first, second = model(), model(), model()
    train(straight, Muon(straight, lr=0.02, **options), range(6))
    opt = Muon(first, lr=0.02, **options)
    train(first, opt, range(saves_at))
    second.load_state_dict(first.state_dict())
    resumed = Muon(second, lr=0.5)  # options come from the state
    resumed.load_state_dict(saved(opt.state_dict()))
    train(second, resumed, range(saves_at, 6))
    assert same(second, straight)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_go_on_alike(copied):
    net = model()
    opt = Muon(net, lr=0.02, split={"2.weight": 2})
    train(net, opt, range(2))
    other, second = copied((net, opt))
    before = [param.detach().clone() for param in net.parameters()]
    train(other, second, range(2, 4))
    assert all(torch.equal(param, old) for param, old in zip(net.parameters(), before))
    train(net, opt, range(2, 4))
    assert same(net, other)
    second.add_param_group({"params": [("more", nn.Parameter(noise(3, 4)))]})
    assert second.param_groups[-1]["algorithm"] == "muon"


def test_older_state_without_an_option():
    """Options that a saved group does not have yet are filled in from the optimizer's own."""
    net = model()
    opt = Muon(net, lr=0.02, scale="spectral")
    state = opt.state_dict()
    for group in state["param_groups"]:
        group.pop("split", None)
    opt.load_state_dict(state)
    assert opt.param_groups[0]["split"] == 1
    train(net, opt, range(1))


def test_state_of_another_optimizer_is_refused():
    net = model()
    opt = Muon(net, lr=0.02)
    groups = [group["params"] for group in opt.param_groups]
    theirs = torch.optim.AdamW([{"params": params} for params in groups])
    with pytest.raises(ValueError, match=r"not one of fcoptim\.Muon: a param group has no 'algorithm'"):
        opt.load_state_dict(theirs.state_dict())
    assert opt.param_groups[0]["algorithm"] == "muon"
    train(net, opt, range(1))


SCHEDULERS = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step),
    "OneCycleLR": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.2], total_steps=5),
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_reach_both_parts(name):
    """One scheduler drives Muon's and AdamW's groups, each from its own rate."""
    net = model()
    opt = Muon(net, lr=0.5, adamw_lr=0.25)
    scheduler = SCHEDULERS[name](opt)
    started = [group["lr"] for group in opt.param_groups]
    train(net, opt, range(3), scheduler)
    assert all(group["lr"] != start for group, start in zip(opt.param_groups, started))
    if name == "StepLR":
        assert [group["lr"] for group in opt.param_groups] == [0.0625, 0.03125]


def test_a_rate_of_zero_stops_both_parts():
    net, untouched = model(), model()
    opt = Muon(net, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0)
    train(net, opt, range(2), scheduler)
    assert same(net, untouched)


def test_rates_as_tensors():
    """Tensors, changed in place, mean what numbers mean."""
    left, right = model(), model()
    tensors = Muon(left, lr=torch.tensor(0.02), adamw_lr=torch.tensor(0.01))
    numbers = Muon(right, lr=0.02, adamw_lr=0.01)
    for step in range(3):
        train(left, tensors, [step])
        train(right, numbers, [step])
        for group, other in zip(tensors.param_groups, numbers.param_groups):
            group["lr"].mul_(0.5)
            other["lr"] *= 0.5
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left.parameters(), right.parameters()))


def test_step_hooks_and_defaults():
    opt = Muon(model(), lr=0.02)
    calls = []
    opt.register_step_post_hook(lambda *arguments: calls.append(1))
    opt.step()
    assert calls == [1] and opt.defaults["lr"] == 0.02 and isinstance(opt, torch.optim.Optimizer)


def test_empty_parameters_and_no_gradients():
    params = [nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(4, 0)), nn.Parameter(noise(3, 4))]
    opt = Muon(params, lr=0.1)
    opt.step()
    for param in params:
        param.grad = torch.zeros_like(param)
    opt.step()
    assert torch.allclose(params[2], 0.99 * noise(3, 4))


def test_sparse_gradients_are_refused_before_anything_changes():
    """The message names a way out; neither part of the optimizer has stepped."""
    table = nn.Embedding(10, 4, sparse=True)
    linear = nn.Linear(4, 3, bias=False)
    opt = Muon([linear.weight, table.weight], lr=0.1)
    linear(table(torch.tensor([1, 2]))).sum().backward()
    before = linear.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*sparse=False"):
        opt.step()
    assert torch.equal(linear.weight, before) and not opt.state


WRONG = [
    ({"lr": -1.0}, "lr must be a finite number of at least 0, got -1.0"),
    ({"lr": float("nan")}, "lr must .* got nan"),
    ({"lr": "fast"}, "lr must .* got 'fast'"),
    ({"lr": torch.ones(2)}, "lr as a tensor must have one element, got \\(2,\\)"),
    ({"adamw_lr": -0.5}, "got -0.5"),
    ({"weight_decay": -0.1}, "weight_decay must be a number of at least 0, got -0.1"),
    ({"adamw_weight_decay": -0.1}, "got -0.1"),
    ({"momentum": 1.0}, "momentum must be a number in \\[0, 1\\), got 1.0"),
    ({"betas": (0.9, 1.0)}, "betas must be two numbers in \\[0, 1\\), got \\(0.9, 1.0\\)"),
    ({"betas": 0.9}, "betas must be .* got 0.9"),
    ({"eps": -1e-8}, "eps must be a number of at least 0, got -1e-08"),
    ({"scale": "rms"}, "scale must be one of 'match_rms_adamw', 'spectral', got 'rms'"),
    ({"dtype": "float16"}, "dtype must be one of 'auto', 'bfloat16', 'float32', got 'float16'"),
    ({"orthogonalize": "svd"}, "orthogonalize must be one of .* got 'svd'"),
    ({"steps": 0}, "steps must be an integer from 1 to 100, got 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_options(options, message):
    """Each is refused at construction, with the value in the message; in a param group too."""
    with pytest.raises(ValueError, match=message):
        Muon(model(), **{"lr": 0.1, **options})
    with pytest.raises(ValueError, match=message):
        Muon.param_groups(model(), **{"lr": 0.1, **options})
    if not any(key.startswith("adamw_") or key in ("betas", "eps") for key in options):
        with pytest.raises(ValueError, match=message):
            Muon([{"params": [nn.Parameter(noise(3, 4))], "algorithm": "muon", **options}], lr=0.1)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (nn.Parameter(noise(3, 4)), TypeError, "got a single tensor"),
        ("weights", TypeError, "got str"),
        (3, TypeError, "got int"),
        ([3], TypeError, "takes tensors or \\(name, tensor\\) pairs; got int 3"),
        ([{"lr": 0.1}], TypeError, "every param group must be a dict with a 'params' entry"),
        ([{"params": {nn.Parameter(noise(3, 4))}}], TypeError, "pass a list in place of a set"),
        ([nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))], ValueError, "complex parameters"),
        ([{"params": [nn.Parameter(noise(3))], "algorithm": "muon"}], ValueError, "is no matrix; put it into a group"),
        (
            [{"params": [nn.Parameter(noise(3, 4))], "algorithm": "sgd"}],
            ValueError,
            "algorithm must be one of 'muon', 'adamw', got 'sgd'",
        ),
    ],
)
def test_wrong_parameters(params, error, message):
    with pytest.raises(error, match=message):
        Muon(params, lr=0.1)


def test_split_must_be_a_mapping():
    with pytest.raises(TypeError, match="split must map name patterns to a number of parts"):
        Muon(model(), split=3)
