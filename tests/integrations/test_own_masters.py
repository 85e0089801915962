"""The Exporter where engines with their own masters cast for rollouts, on the example's stand-ins of those places."""

import sys

import pytest
import torch
from torch import nn

from fcoptim import Exporter

from .tiny import EXAMPLES

sys.path.insert(0, str(EXAMPLES))

import exporter_loop


@pytest.fixture(scope="module")
def run():
    return exporter_loop.train(steps=20, lr=2e-6)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["state dict", "streamed", "into a model"])
def test_trap_18_what_was_learned_is_served(run, place):
    """Trap 18: at each place the rollouts follow the masters; round-to-nearest serves a small part after 20 steps."""
    model, start, policies = run
    assert exporter_loop.tracked(model, start, policies[place]) == pytest.approx(1.0, abs=five_sigma(model, start))
    assert exporter_loop.tracked(model, start, policies[3]) < 0.35


def five_sigma(model: nn.Module, start: dict[str, torch.Tensor]) -> float:
    """The bound on a tracked share whose every weight errs by at most half an ulp's deviation, independently."""
    moved = {name: value - start[name] for name, value in model.state_dict().items()}
    scale = sum(d.double().square().sum() for d in moved.values())
    ulps = {name: torch.ldexp(torch.ones_like(v), torch.frexp(v).exponent - 8).double() for name, v in start.items()}
    variance = sum((d.double().square() * ulps[name].square() / 4).sum() for name, d in moved.items())
    return float(5 * variance.sqrt() / scale)


def test_streaming_is_the_state_dict(run):
    """One tensor at a time or all together: the same bits, as they depend on names and counts alone."""
    model, _, _ = run
    whole, parts = Exporter("stochastic"), Exporter("stochastic")
    for _ in range(3):
        expected = exporter_loop.from_state_dict(whole, model)
        for name, value in exporter_loop.streamed(parts, model):
            assert torch.equal(value, expected[name])


def test_shards_resume(run):
    """Megatron's slices: the export goes on from its saved state, also for slices that start inside a parameter."""
    model, _, _ = run
    masters = {"0.weight[0:100]": model[0].weight.detach().view(-1)[:100]}
    masters |= {"0.weight[100:32768]": model[0].weight.detach().view(-1)[100:]}
    plain, resumed = Exporter("error_feedback", seed=2), Exporter("nearest")
    one, two = (nn.Sequential(nn.Linear(64, 512)).bfloat16() for _ in range(2))
    for _ in range(3):
        exporter_loop.into_model(plain, masters, one)
    resumed.load_state_dict(plain.state_dict())
    exporter_loop.into_model(plain, masters, one)
    exporter_loop.into_model(resumed, masters, two)
    assert torch.equal(one[0].weight, two[0].weight)


class ZeroEngine:
    """A stand-in for DeepSpeed ZeRO: fp32 masters inside, rounded to nearest into the module that computes."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.module = module
        self._masters = {name: p.detach().float().clone().requires_grad_() for name, p in module.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=lr)

    def step(self) -> None:
        for name, param in self.module.named_parameters():
            self._masters[name].grad, param.grad = param.grad.float(), None
        self._optimizer.step()
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                param.copy_(self._masters[name])

    def full_fp32(self, name: str) -> torch.Tensor:
        """As ``deepspeed.utils.safe_get_full_fp32_param(param)``."""
        return self._masters[name].detach()


def test_trap_18_zero_rounds_inside(run):
    """Trap 18: ZeRO's module itself stays behind, whatever is exported; only the rollouts can be served fair."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).bfloat16()
    start = {name: p.detach().float().clone() for name, p in module.named_parameters()}
    engine, export = ZeroEngine(module, lr=2e-6), Exporter("dither")
    for _ in range(20):
        x = torch.randn(32, 64)
        (module(x.bfloat16()).float() - x[:, :8].sign()).square().mean().backward()
        engine.step()
        rollout = {name: export({name: engine.full_fp32(name)})[name] for name, _ in module.named_parameters()}
    masters = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    masters.load_state_dict({name: engine.full_fp32(name) for name in start})
    assert exporter_loop.tracked(masters, start, rollout) == pytest.approx(1.0, abs=five_sigma(masters, start))
    assert exporter_loop.tracked(masters, start, module.state_dict()) < 0.35
