"""Muon inside FairCastOptimizer."""

import functools

import pytest
import torch
from torch import nn

import fcoptim
from fcoptim import FairCastOptimizer, Muon
from fcoptim.muon import orthogonalize

from ..optimizer.helpers import saved
from .helpers import noise
from .test_routing import MATRICES, Transformer


def with_gradients(params, step):
    for number, param in enumerate(params):
        param.grad = noise(*param.shape, seed=1000 * step + number, dtype=param.dtype)


@pytest.mark.parametrize("given", ["class", "partial"])
@pytest.mark.parametrize("tied", [False, True])
def test_routes_a_whole_model(given, tied):
    """``FairCastOptimizer(model, fcoptim.Muon, lr=...)`` trains embedding, head and norms by AdamW unasked."""
    kind = functools.partial(Muon, adamw_lr=1e-4) if given == "partial" else Muon
    opt = FairCastOptimizer(Transformer(tied=tied), kind, lr=1e-3)
    found = {name: group["algorithm"] for group in opt.param_groups for name in group["param_names"]}
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == MATRICES
    assert found["embed.weight"] == "adamw"
    rates = {group["algorithm"]: group["lr"] for group in opt.param_groups}
    assert rates == {"muon": 1e-3, "adamw": 1e-4 if given == "partial" else 1e-3}


def test_routes_names_without_a_model():
    """(name, parameter) pairs and bare parameters are routed as Muon alone would."""
    model = Transformer()
    opt = FairCastOptimizer(model.named_parameters(), Muon, lr=1e-3, adamw=["embed*", "lm_head*", "pos*"])
    found = {n for group in opt.param_groups if group["algorithm"] == "muon" for n in group["param_names"]}
    assert found == MATRICES
    bare = FairCastOptimizer(list(nn.Linear(4, 3).parameters()), Muon, lr=1e-3)
    assert [group["algorithm"] for group in bare.param_groups] == ["muon", "adamw"]


@pytest.mark.parametrize("options", [{}, {"scale": "spectral", "orthogonalize": "newton_schulz", "nesterov": False}])
def test_nearest_equals_a_hand_loop(options):
    """Bit for bit: fp32 masters, the formula and torch's AdamW by hand, and a cast to bf16 after each step."""
    opt = FairCastOptimizer(Transformer(), Muon, rounding="nearest", lr=0.02, **options)
    served = {name: param for g in opt.param_groups for name, param in zip(g["param_names"], g["params"])}
    masters = {name: param.detach().clone() for name, param in Transformer().named_parameters()}
    buffers = {name: torch.zeros_like(masters[name]) for name in MATRICES}
    rest = {name: nn.Parameter(masters[name]) for name in masters if name not in MATRICES}
    adamw = torch.optim.AdamW(rest.values(), lr=0.02, weight_decay=0.1)
    for step in range(4):
        with_gradients(served.values(), step)
        gradients = {name: param.grad.float() for name, param in served.items()}
        opt.step()
        for name, buffer in buffers.items():
            rows, cols = masters[name].shape
            scale = max(1.0, rows / cols) ** 0.5 if "scale" in options else 0.2 * max(rows, cols) ** 0.5
            buffer.lerp_(gradients[name], 1 - 0.95)
            direction = buffer if "scale" in options else gradients[name].lerp(buffer, 0.95)
            update = orthogonalize(direction, options.get("orthogonalize", "polar_express"))
            masters[name].mul_(1 - 0.02 * 0.1).add_(update.float(), alpha=-0.02 * scale)
        for name, param in rest.items():
            param.grad = gradients[name]
        adamw.step()
        for name, param in served.items():
            assert torch.equal(param, masters[name].bfloat16()), (step, name)


def test_frozen_weights_keep_their_bits():
    """Field report 12: masters and served weights without gradients do not move under decay 0.1, momentum 0.9."""
    opt = FairCastOptimizer(Transformer(), Muon, lr=0.02, weight_decay=0.1, momentum=0.9)
    params = [param for group in opt.param_groups for param in group["params"]]
    for step in range(3):
        with_gradients(params, step)
        opt.step()
    before = {**{n: m.clone() for n, m in opt.named_masters()}, **dict(enumerate(p.detach().clone() for p in params))}
    for _ in range(10):
        opt.zero_grad()
        opt.step()
    after = {**dict(opt.named_masters()), **dict(enumerate(params))}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(master.grad is None for _, master in opt.named_masters())
    with_gradients(params, 3)
    opt.step()
    assert any(not torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_resumes_bit_for_bit(rounding):
    """Ten steps and ten after a file equal twenty; the scheduler reaches both parts on the way."""

    def made(weights=None):
        model = Transformer()
        if weights is not None:
            model.load_state_dict(weights)
        opt = FairCastOptimizer(model, Muon, lr=0.02, rounding=rounding, seed=3)
        return opt, torch.optim.lr_scheduler.StepLR(opt, 5, gamma=0.5)

    def steps(opt, scheduler, numbers):
        for step in numbers:
            with_gradients([param for group in opt.param_groups for param in group["params"]], step)
            opt.step()
            scheduler.step()

    straight, half = made(), made()
    steps(*straight, range(20))
    steps(*half, range(10))
    resumed = made(half[0].served_model.state_dict())
    resumed[0].load_state_dict(saved(half[0].state_dict()))
    resumed[1].load_state_dict(half[1].state_dict())
    steps(*resumed, range(10, 20))
    assert {group["lr"] for group in resumed[0].param_groups} == {0.02 * 0.5**4}
    pairs = zip(straight[0].named_masters(), resumed[0].named_masters(), strict=True)
    assert all(torch.equal(left, right) for (_, left), (_, right) in pairs)


def test_groups_are_added_to_both():
    opt = FairCastOptimizer(Transformer(), Muon, lr=0.02)
    added = nn.Linear(4, 6)
    opt.add_param_group({"params": [("extra.weight", added.weight)], "algorithm": "muon"})
    with_gradients([added.weight], 0)
    before = added.weight.detach().clone()
    opt.step()
    assert not torch.equal(added.weight, before) and added.weight.dtype is torch.bfloat16


def test_repr_names_the_parts():
    text = repr(FairCastOptimizer(Transformer(), Muon, lr=0.02))
    assert "algorithm: muon" in text and "algorithm: adamw" in text


def test_it_is_public():
    assert fcoptim.Muon is Muon and "Muon" in fcoptim.__all__
