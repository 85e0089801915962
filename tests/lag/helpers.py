"""Optimizers that are driven by given gradients, so that masters go the same way whatever is served."""

from typing import Any

import torch
from torch import nn

from fcoptim import FairCastOptimizer, cast_, parameter_key, start_accumulator_
from fcoptim.cast import RULES as RULE_TABLE
from fcoptim.lag import DeadZone, Delay, Ema, Lag

RULES = tuple(RULE_TABLE)
LAGS = {
    "ema": lambda: Ema(5),
    "delay": lambda: Delay(3),
    "delay in bf16": lambda: Delay(3, dtype="bfloat16"),
    "dead zone": lambda: DeadZone(1.5),
}
LR = 0.25


class Two(nn.Module):
    """Two parameters of awkward shapes; one of them has elements on both sides of several powers of two."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.wide = nn.Parameter(torch.randn(7, 33, generator=generator).bfloat16().float())
        self.flat = nn.Parameter(2.0 ** torch.linspace(-9, 2, 50))


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """A drift of a fraction of an ulp, with noise as large on it; it depends on name and step alone."""
    generator = torch.Generator().manual_seed(parameter_key(step, name) >> 1)
    return 2e-3 * (1 + torch.randn(shape, generator=generator))


def step(opt: FairCastOptimizer, model: nn.Module, number: int, leave_out: tuple[str, ...] = ()) -> None:
    """One step by the gradients of that number; parameters in ``leave_out`` get none."""
    for name, param in model.named_parameters():
        param.grad = None if name in leave_out else gradient(name, param.shape, number)
    opt.step()
    opt.zero_grad()


def made(lag: Lag | None, rounding: str = "stochastic", **options: Any) -> tuple[Two, FairCastOptimizer]:
    """A model and SGD around it, which adds no rounding of its own to what a test computes by hand."""
    model = Two()
    arguments = {"lr": LR, **options}
    return model, FairCastOptimizer(model, torch.optim.SGD, rounding=rounding, lag=lag, **arguments)


def trajectory(steps: int) -> list[dict[str, torch.Tensor]]:
    """The masters after 0, 1, ... steps."""
    masters = {name: param.detach().clone() for name, param in Two().named_parameters()}
    out = [masters]
    for number in range(steps):
        masters = {n: m.add(gradient(n, m.shape, number), alpha=-LR) for n, m in masters.items()}
        out.append(masters)
    return out


class Caster:
    """The rounding rule of one parameter, applied to whatever it is given, cast after cast."""

    def __init__(self, name: str, shape: torch.Size, rounding: str) -> None:
        self.rounding, self.key, self.count = rounding, parameter_key(0, name), -1
        self.accumulator = start_accumulator_(torch.empty(shape, dtype=torch.int16), key=self.key)

    def __call__(self, target: torch.Tensor) -> torch.Tensor:
        self.count += 1
        served = torch.empty_like(target, dtype=torch.bfloat16)
        accumulator = self.accumulator if RULE_TABLE[self.rounding].accumulates else None
        cast_(served, target, rounding=self.rounding, key=self.key, count=self.count, error_feedback=accumulator)
        return served


def served(model: nn.Module) -> dict[str, torch.Tensor]:
    """The served weights, copied, by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def ulp(master: torch.Tensor) -> torch.Tensor:
    """The spacing of bf16 at each of these numbers, in float64."""
    return torch.exp2(torch.frexp(master.double().abs()).exponent.clamp(-125).double() - 8)
