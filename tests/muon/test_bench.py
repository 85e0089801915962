"""``fcoptim bench muon`` on matrices small enough for a test."""

import math

import pytest
import torch
from typer.testing import CliRunner

from fcoptim.bench import muon as bench
from fcoptim.cli import app

SMALL = bench.Workload("small", [(12, 12), (8, 24), (24, 8), (12, 12), (8, 24), (24, 8)], 2)


def test_the_fp32_loop_is_torchs_step():
    """Three steps of the loop that ours is compared with are torch's, within bf16."""
    ours, theirs = (bench.make_params(SMALL.shapes, "cpu") for _ in range(2))
    starts = [param.detach().clone() for param in ours]
    loop, reference = bench.LoopMuon(ours, 0.02), torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        loop.step()
        reference.step()
    for param, expected, start in zip(ours, theirs, starts):
        assert (param - expected).norm() < 0.03 * (expected - start).norm()


@pytest.mark.parametrize("fast", [False, True])
def test_rows(fast, monkeypatch):
    """Torch's own optimizer is the unit; without fast bf16 it is timed on a part. Operations go by the shapes."""
    monkeypatch.setattr(bench, "multiplies_bf16_fast", lambda device: fast)
    rows = {row.name: row for row in bench.measure(SMALL, "cpu", 2)}
    torchs = next(row for name, row in rows.items() if name.startswith(bench.TORCH))
    assert torchs.over_torch == 1.0 and rows[bench.LOOP].over_loop == 1.0
    assert ("1/2 x 2" in torchs.name) is not fast
    assert ("newton_schulz, bfloat16" in rows) is fast
    assert torchs.flops == 2 * 5 * (6 * 12**3 + 2 * (4 * 8**2 * 24 + 2 * 8**3))
    assert all(row.best <= row.seconds and row.floor <= row.flops for row in rows.values())
    assert rows["newton_schulz, float32"].difference < 0.03
    assert math.isnan(rows["polar_express (default)"].difference)


def test_smollm2_has_210_hidden_matrices():
    shapes = bench.smollm2_matrices(30)
    assert len(shapes) == 210
    assert sum(rows * cols for rows, cols in shapes) == 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)


@pytest.mark.parametrize("option", ["--layers", "--threads", "--rounds"])
def test_wrong_numbers(option):
    result = CliRunner().invoke(app, ["bench", "muon", option, "0"])
    assert result.exit_code == 2 and "must be positive" in result.output
