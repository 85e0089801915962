"""The measures against values worked out by hand, and the copies against the optimizer's served model."""

import math

import pytest
import torch
from torch import nn

from fcoptim import FairCastOptimizer
from fcoptim.cast import RULES
from fcoptim.demo.openloop import OpenLoop, displacement_sums

ULP = 2.0**-7  # of bf16 in [1, 2)


class TestSums:
    def test_by_hand(self):
        start = [torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([[4.0]]).bfloat16()]
        masters = [torch.tensor([1.5, 2.0]), torch.tensor([[3.0]])]
        still = [tensor.clone() for tensor in start]
        moved = [torch.tensor([2.0, 3.0]).bfloat16(), torch.tensor([[3.5]]).bfloat16()]
        squares, products = displacement_sums(start, masters, [still, moved])
        assert squares == 0.5**2 + 1.0
        assert products == [0.0, 1.0 * 0.5 + 0.5 * 1.0]

    def test_long_tensors_and_strides(self):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(700, 1000, generator=generator).bfloat16()
        master = (start.float() + 1e-3 * torch.randn(1000, 700, generator=generator).t()).detach()
        served = master.bfloat16()
        squares, (product,) = displacement_sums([start], [master], [[served]])
        moved = master.double() - start.double()
        assert squares == pytest.approx(float((moved**2).sum()), rel=1e-12)
        assert product == pytest.approx(float((moved * (served.double() - start.double())).sum()), rel=1e-12)

    def test_tiny_displacements_are_not_lost(self):
        """A sum in fp32 would stop growing long before the end."""
        start = torch.ones(1 << 20).bfloat16()
        master = torch.full((1 << 20,), 1 + 2.0**-23)
        squares, _ = displacement_sums([start], [master], [])
        assert squares == 2.0**20 * 2.0**-46


def loop_of(values: torch.Tensor, **options) -> tuple[torch.Tensor, OpenLoop]:
    master = values.clone()
    return master, OpenLoop([("w", master)], seed=3, **options)


class TestOpenLoop:
    def test_a_quarter_ulp(self):
        """Nearest serves nothing of it; of the others a quarter of the weights move by one ulp, which is all of it."""
        master, loop = loop_of(torch.ones(1 << 16))
        master += ULP / 4
        loop.cast()
        distance, measures = loop.measure()
        assert distance == pytest.approx(256 * ULP / 4, rel=1e-6)
        assert (measures["nearest"].changed, measures["nearest"].tracked) == (0.0, 0.0)
        sigma = math.sqrt(0.25 * 0.75) / 256
        for rule in ("stochastic", "dither", "error_feedback"):
            assert abs(measures[rule].changed - 0.25) < 5 * sigma
            assert measures[rule].tracked == pytest.approx(4 * measures[rule].changed, rel=1e-9)

    def test_changes_of_a_second_cast_of_the_same_masters(self):
        """Only the rules that draw anew or accumulate change anything: dither's traffic is nearest's."""
        master, loop = loop_of(torch.ones(1 << 16))
        master += ULP / 4
        loop.cast()
        loop.cast()
        _, measures = loop.measure()
        assert measures["nearest"].changed == measures["dither"].changed == 0.0
        sigma = math.sqrt(0.375 * 0.625) / 256
        assert abs(measures["stochastic"].changed - 2 * 0.25 * 0.75) < 5 * sigma
        # An accumulator wraps in one cast of four: a weight leaves after it was up, and another goes up.
        assert abs(measures["error_feedback"].changed - 0.5) < 5 * sigma

    def test_a_whole_ulp_is_served_by_all(self):
        master, loop = loop_of(torch.ones(64))
        master += ULP
        loop.cast()
        _, measures = loop.measure()
        assert list(measures) == list(RULES)
        assert all((m.changed, m.tracked) == (1.0, 1.0) for m in measures.values())

    def test_nothing_moved_is_nan_not_one(self):
        _, loop = loop_of(torch.ones(8))
        loop.cast()
        distance, measures = loop.measure()
        assert distance == 0.0
        assert all(math.isnan(m.tracked) and m.changed == 0.0 for m in measures.values())

    def test_off_grid_masters_are_refused(self):
        with pytest.raises(ValueError, match="'w' does not start on the bf16 grid"):
            loop_of(torch.tensor([1.0 + ULP / 3]))

    @pytest.mark.parametrize("rounding", RULES)
    def test_a_copy_equals_the_served_model(self, rounding):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 60), nn.LayerNorm(60), nn.Linear(60, 5)).bfloat16()
        opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, rounding=rounding, seed=11)
        loop = OpenLoop(opt.named_masters(), seed=11)
        other = OpenLoop(opt.named_masters(), seed=12)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            opt.step()
            loop.cast()
            other.cast()
            assert loop.agrees(rounding, model.named_parameters())
        for rule in set(RULES) - {rounding}:
            assert not loop.agrees(rule, model.named_parameters())
        assert other.agrees(rounding, model.named_parameters()) == (rounding == "nearest")

    def test_disagreement_and_missing_names_are_seen(self):
        master, loop = loop_of(torch.ones(4))
        served = master.bfloat16()
        assert loop.agrees("nearest", [("w", served), ("frozen", served)])
        assert not loop.agrees("nearest", [("v", served)])
        served[2] += ULP
        assert not loop.agrees("nearest", [("w", served)])
