"""LagMeter on trajectories whose lag is known, on real steps, and on models that are not fcoptim's."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fcoptim import FairCastOptimizer, LagMeter, cast_, parameter_key
from fcoptim.lag import Delay, Ema
from fcoptim.sampling import Sample
from tests.optimizer.helpers import UNBIASED, assert_same, mlp, saved, train

ULP = 2.0**-7  # of bf16 in [1, 2)


class Drift:
    """Masters in [1, 2) that drift by the same at every step, and what a function of the step serves of them."""

    def __init__(self, rate: float, serve: Callable[[list[torch.Tensor]], torch.Tensor], size: int = 1 << 14) -> None:
        start = 1.25 + 0.5 * torch.rand(size, generator=torch.Generator().manual_seed(0))
        self.path = [start.bfloat16().float()]
        self.rate, self.serve = rate, serve
        self.served = serve(self.path)

    def step(self) -> None:
        self.path.append(self.path[0] + self.rate * len(self.path))
        self.served = self.serve(self.path)

    def meter(self, **options) -> LagMeter:
        return LagMeter(
            model=lambda: {"w": self.served},
            masters=lambda: {"w": self.path[-1]},
            prefix="",
            **{"sample": 8192, **options},
        )


def run(drift: Drift, steps: int, **options) -> dict[str, float]:
    meter = drift.meter(**options)
    for _ in range(steps):
        drift.step()
        figures = meter.update()
    return figures


def dithered(master: torch.Tensor) -> torch.Tensor:
    """A fair cast, so that what is late is late by its delay alone."""
    out = torch.empty_like(master, dtype=torch.bfloat16)
    cast_(out, master, rounding="dither", key=parameter_key(0, "w"), count=0)
    return out


@pytest.mark.parametrize("delay", [0, 1, 5, 20, 60])
def test_a_known_delay(delay):
    """Weights served ``delay`` steps late under a constant drift: the meter reads that delay within one step."""
    steps, size = 100, 1 << 16
    drift = Drift(ULP / 2, lambda path: dithered(path[max(0, len(path) - 1 - delay)]), size)
    figures = run(drift, steps, sample=size)
    # The served mean is off by at most ulp / 2 / sqrt(size) per sigma, and a step is half an ulp.
    noise = 5 / math.sqrt(size)
    assert figures["lag"] == pytest.approx(delay, abs=noise)
    assert figures["tracked"] == pytest.approx(1 - delay / steps, abs=noise)
    assert figures["lag_capped"] == 0


def test_nearest_lags_by_half_an_ulp_over_the_drift():
    """Round-to-nearest on a constant drift of 80 steps an ulp serves nothing for 40 steps, then jumps, and so on."""
    drift = Drift(ULP / 80, lambda path: path[-1].bfloat16())
    meter, lags = drift.meter(), []
    for step in range(1, 201):
        drift.step()
        figures = meter.update()
        lags.append(figures["lag"])
        served = math.floor(step / 80 + 0.5) * 80
        assert step % 80 == 40 or figures["lag"] == pytest.approx(max(0, step - served), abs=1)
    assert max(lags) == pytest.approx(40, abs=1)


def test_nearest_on_drifts_of_many_rates():
    """Each weight jumps at its own time: tracked share and lag are those of the sum over weights, by hand."""
    generator = torch.Generator().manual_seed(1)
    rates = ULP / 80 * (0.5 + torch.rand(1 << 14, generator=generator))
    drift = Drift(0.0, lambda path: path[-1].bfloat16())
    meter = drift.meter()
    for step in range(1, 31):
        drift.path.append(drift.path[0] + rates * step)
        drift.served = drift.path[-1].bfloat16()
        figures = meter.update()
    # <s, D> by hand: each weight serves round(step * rate / ulp) ulps.
    moved = rates.double() * 30
    served = (moved / ULP).round() * ULP
    tracked = float((served * moved).sum() / (moved * moved).sum())
    assert 0.02 < tracked < 0.9
    assert figures["tracked"] == pytest.approx(tracked, abs=0.02)
    assert figures["lag"] == pytest.approx(30 * (1 - tracked), abs=0.6)


@pytest.mark.parametrize("rounding", UNBIASED)
def test_unbiased_rules_have_no_lag(rounding):
    """A real optimizer under an unbiased rule: tracked is 1 within five sigma of the rounding noise."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1e-4, rounding=rounding)
    meter = LagMeter(opt, sample=1 << 20)
    for _ in range(20):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
        figures = meter.update()
    # The noise of a weight is at most half an ulp of 1/16; the displacement 2e-3; both casts are noisy.
    sigma = 2 * 2.0**-12 / math.sqrt(12) / 2e-3 / 256
    assert abs(figures["fcoptim/tracked"] - 1) < 5 * sigma
    assert figures["fcoptim/lag"] < 5 * sigma * 20 + 1e-9
    assert 0 < figures["fcoptim/changed"] <= 1


@pytest.mark.parametrize(("lag", "late"), [(Ema(10), 9), (Delay(10), 10), (None, 0)])
def test_explicit_lags_are_read(lag, late):
    """An optimizer with an explicit lag, on a constant drift that it has settled into, shows that lag."""
    model = nn.Linear(256, 256, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=ULP, rounding="dither", lag=lag)
    meter = LagMeter(opt, prefix="")
    for _ in range(100):
        model.weight.grad = -torch.ones(256, 256)
        opt.step()
        figures = meter.update()
    assert figures["lag"] == pytest.approx(late, abs=0.1)


def test_nothing_moves():
    """No displacement, an empty tensor, an all-zero model: every figure is a finite number."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(5)), "empty": nn.Parameter(torch.zeros(0, 3))})
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1)
    meter = LagMeter(opt, per_layer=True, prefix="")
    for figures in (meter.update(), meter.update()):
        assert all(math.isfinite(value) for value in figures.values())
        assert (figures["tracked"], figures["lag"], figures["changed"]) == (1.0, 0.0, 0.0)


def test_the_history_has_an_end():
    """A lag longer than what is remembered is given as a bound, and said to be one."""
    figures = run(Drift(ULP / 1000, lambda path: path[0].bfloat16()), 30, history=10, window=5)
    assert (figures["lag"], figures["lag_capped"]) == (10.0, 1.0)
    figures = run(Drift(ULP / 1000, lambda path: path[0].bfloat16()), 10, history=10, window=5)
    assert (figures["lag"], figures["lag_capped"]) == (10.0, 0.0)


def test_tracked_recent_looks_at_the_window_only():
    """Weights that were frozen and are served fairly since: the whole displacement lags, the recent one doesn't."""

    def serve(path: list[torch.Tensor]) -> torch.Tensor:
        return (path[0] + max(0, len(path) - 1 - 40) * ULP).bfloat16()

    figures = run(Drift(ULP, serve), 60, window=16)
    assert figures["tracked_recent"] == pytest.approx(1.0, abs=0.02)
    assert figures["tracked"] == pytest.approx(20 / 60, abs=0.02)


def test_figures_of_layers():
    """Per layer: one that lags and one that doesn't are told apart."""
    masters = {"blocks.0.w": torch.full((512,), 1.5), "blocks.1.w": torch.full((512,), 1.5), "head": torch.ones(8)}
    served = {name: value.bfloat16() for name, value in masters.items()}
    meter = LagMeter(model=lambda: served, masters=lambda: masters, per_layer=True, prefix="")
    for name in ("blocks.0.w", "blocks.1.w"):
        masters[name] = masters[name] + ULP
    served["blocks.1.w"] = masters["blocks.1.w"].bfloat16()
    figures = meter.update()
    assert figures["blocks.0/tracked"] == 0 and figures["blocks.0/changed"] == 0
    assert figures["blocks.1/tracked"] == 1 and figures["blocks.1/changed"] == 1
    assert figures["tracked"] == pytest.approx(0.5) and figures["head/tracked"] == 1.0


def test_the_sample_stands_for_the_whole():
    """The sampled share of a known pattern is within five sigma, weights add up, and each index is in range."""
    tensors = {"big": torch.zeros(300, 1000), "small": torch.zeros(3), "one": torch.zeros(()), "none": torch.zeros(0)}
    tensors["big"].view(-1)[: 300_000 // 5] = 1
    sample = Sample(tensors, 4096, seed=3)
    assert float(sample.weights.sum()) == pytest.approx(300_004)
    values = sample.read(tensors, torch.float32).double()
    assert float((values * sample.weights).sum() / 300_004) == pytest.approx(0.2, abs=5 * 0.4 / 64)
    strided = {**tensors, "big": tensors["big"].t().contiguous().t()}
    assert torch.equal(sample.read(strided, torch.float32).double(), values)


def test_watching_changes_nothing():
    """A meter neither writes weights nor draws from torch's random state."""
    models = [mlp(), mlp()]
    opts = [FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3) for model in models]
    state = torch.get_rng_state()
    meter = LagMeter(opts[0])
    assert torch.equal(state, torch.get_rng_state())
    for step in range(3):
        for model, opt in zip(models, opts):
            train(opt, model, range(step, step + 1))
        meter.update()
    assert_same(opts[0].state_dict(), opts[1].state_dict())


def test_it_resumes():
    """A meter saved and loaded goes on with the same figures; one of another model is refused."""
    drift = Drift(ULP / 50, lambda path: path[-1].bfloat16())
    meter, other = drift.meter(history=20, window=4), drift.meter(history=20, window=4)
    for _ in range(15):
        drift.step()
        meter.update()
    other.load_state_dict(saved(meter.state_dict()))
    for _ in range(15):
        drift.step()
        assert meter.update() == other.update()
    with pytest.raises(ValueError, match="other settings"):
        drift.meter(history=21, window=4).load_state_dict(meter.state_dict())
    with pytest.raises(ValueError, match="lacks 'format'"):
        other.load_state_dict({})


def test_parameters_kept_in_fp32_are_left_out():
    """What is served in fp32 has no lag to measure."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1, keep_fp32="1.*")
    meter = LagMeter(opt, per_layer=True, prefix="")
    assert {name.split("/")[0] for name in meter.update() if "/" in name} == {"0"}


def test_a_model_that_keeps_its_own_masters():
    """Neither side needs fcoptim: two modules, or modules under a wrapper's prefix, are matched by name."""
    fp32, wrapped = mlp(), nn.Module()
    wrapped.module = mlp().bfloat16()
    meter = LagMeter(model=wrapped, masters=fp32, prefix="")
    with torch.no_grad():
        for param in fp32.parameters():
            param.add_(1.0)
    assert meter.update()["tracked"] == 0.0
    wrapped.module.load_state_dict(fp32.state_dict())
    assert meter.update()["tracked"] == pytest.approx(1.0, abs=0.01)


def test_wrong_arguments():
    """What is wrong is said with its value."""
    model, opt = mlp(), FairCastOptimizer(mlp(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="either an optimizer, or model= and masters="):
        LagMeter()
    with pytest.raises(TypeError, match="either an optimizer, or model= and masters="):
        LagMeter(opt, model=model, masters=model)
    with pytest.raises(ValueError, match=r"sample must be .* got 0"):
        LagMeter(opt, sample=0)
    with pytest.raises(ValueError, match=r"window must be at most history \(8\), got 9"):
        LagMeter(opt, history=8, window=9)
    with pytest.raises(ValueError, match="share no name"):
        LagMeter(model=model, masters={"other": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'0\.weight' has shape \(2,\) in masters and \(16, 8\)"):
        LagMeter(model=model, masters={"0.weight": torch.zeros(2)})
    masters = dict(model.named_parameters())
    meter = LagMeter(model=model, masters=lambda: masters)
    del masters["0.weight"]
    with pytest.raises(ValueError, match=r"'0\.weight' was sampled but is gone; call reset"):
        meter.update()
