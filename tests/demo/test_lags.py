"""Explicit lags replayed on a sampled trajectory."""

import pytest
import torch

from fcoptim.demo.lags import LagsBeside, describe, plot_lags

ULP = 2.0**-7  # of bf16 in [1, 2)


def trajectory(steps: int, rate: float) -> LagsBeside:
    """Masters on the grid in [1, 2), each drifting at a rate of its own of about ``rate`` ulps a step."""
    generator = torch.Generator().manual_seed(0)
    start = (1.25 + 0.25 * torch.rand(1 << 13, generator=generator)).bfloat16().float()
    rates = rate * ULP * (0.5 + torch.rand(1 << 13, generator=generator))
    master = start.clone()
    lags = LagsBeside([("w", master)])
    for step in range(1, steps + 1):
        master.copy_(start + step * rates)
        lags.add()
    return lags


def test_the_dead_zone_is_round_to_nearest():
    """``DeadZone(0.5)`` with nearest has the tracked share and lag of round-to-nearest at every step, exactly."""
    nearest, zone, ema, delay = trajectory(40, 1 / 40).compare()
    assert (zone.tracked, zone.lag) == (nearest.tracked, nearest.lag)
    assert zone.label == "DeadZone(0.5), nearest"
    assert 0 < nearest.tracked[-1] < 1.2 and nearest.tracked[0] == 0
    assert ema.label.startswith("Ema(") and delay.label.startswith("Delay(")


def test_the_best_settings_are_the_best():
    """While nothing has crossed half an ulp, round-to-nearest serves nothing: so does a delay of the whole run."""
    nearest, _, ema, delay = trajectory(10, 1 / 100).compare()
    assert nearest.tracked == [0.0] * 10 and nearest.lag == list(range(1, 11))
    assert delay.label == "Delay(10), dither" and delay.tracked == pytest.approx([0.0] * 10, abs=0.2)
    assert float(ema.label[4:].split(")")[0]) > 500


def test_a_run_in_which_nothing_moves():
    """No displacement: every share is 1, every lag 0."""
    lags = LagsBeside([("w", torch.ones(64))])
    lags.add()
    for course in lags.compare():
        assert (course.tracked, course.lag) == ([1.0], [0.0])


def test_what_is_shown(tmp_path):
    """One line for each course, and a picture."""
    courses = trajectory(12, 1 / 20).compare()
    lines = describe(courses)
    assert len(lines) == 5 and "at most 0.000 from nearest's share" in lines[2]
    plot_lags(courses, tmp_path / "lags.png", title="a title")
    assert (tmp_path / "lags.png").read_bytes()[:4] == b"\x89PNG"
