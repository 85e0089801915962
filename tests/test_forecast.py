"""The forecast: what it reads, what it simulates, and what it says."""

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fcoptim import forecast
from fcoptim.cli import app


def every_bf16() -> torch.Tensor:
    """All finite bf16 numbers."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return numbers[torch.isfinite(numbers)]


def test_the_spacing_is_the_distance_to_the_next_number():
    """For every positive finite bf16 number, counted by its exponent field."""
    numbers = every_bf16()
    positive = numbers[numbers > 0].sort().values.double()
    positive = torch.cat([torch.zeros(1, dtype=torch.float64), positive])
    gaps = positive[1:] - positive[:-1]
    exponent = (positive[:-1].float().view(torch.int32) >> 23) & 0xFF
    assert torch.equal(forecast.spacing()[exponent], gaps)


def test_weights_are_counted_by_their_exponent():
    """Every bf16 number lies on the grid; the same plus a bit of fp32 lies between."""
    numbers = every_bf16()
    grid = forecast.grid_of(numbers)
    assert grid.weights == len(numbers) and int(grid.between.sum()) == 0
    assert int(grid.on_grid[0]) == 256 and set(grid.on_grid[1:255].tolist()) == {256} and int(grid.on_grid[255]) == 0
    above = torch.tensor([1.0, -3.0]).view(torch.int32).add(1).view(torch.float32)
    assert forecast.grid_of(above).between.nonzero().flatten().tolist() == [127, 128]
    zeros_and_subnormals = torch.tensor([0, -(2**31), 1 << 16, 1, 2**23 - 1], dtype=torch.int32).view(torch.float32)
    grid = forecast.grid_of(zeros_and_subnormals)
    assert (int(grid.on_grid[0]), int(grid.between[0]), grid.weights) == (3, 2, 5)


@pytest.mark.parametrize("signal", [0.0, 0.5])
def test_the_simulation_is_adamw(signal):
    """The same gradients through torch.optim.AdamW (no decay, no epsilon) lead to the same displacements."""
    steps = 12
    path = forecast.simulate(steps, beta1=0.8, beta2=0.95, signal=signal)
    weight = torch.nn.Parameter(torch.zeros(path.shape[1], dtype=torch.float64))
    opt = torch.optim.AdamW([weight], lr=1.0, betas=(0.8, 0.95), eps=0.0, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        weight.grad = signal + torch.randn(path.shape[1], generator=generator, dtype=torch.float64)
        opt.step()
        assert torch.allclose(-weight.detach(), path[step], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-7, 1e-6, 1e-5, 1e-4, 1e-2])
def test_the_share_is_that_of_real_rounding(scale):
    """Against weights that are really moved and really rounded: equal but for powers of two that are crossed."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(1 << 12, generator=generator) * 0.03).bfloat16()
    moved = torch.randn(512, generator=generator).double() * scale
    masters = weights[:, None].double() + moved
    served = masters.float().bfloat16().double() - weights[:, None].double()
    expected = float((served * moved).sum() / (moved * moved).sum() / len(weights))
    assert forecast.tracked_share(forecast.grid_of(weights), moved) == pytest.approx(expected, rel=0.01)


def test_a_constant_drift_lags_by_half_an_ulp():
    """Weights of one binade, one learning rate a step: nothing is served until half an ulp, so the lag is the step."""
    grid = forecast.grid_of(torch.full((8,), 1.5))
    path = torch.arange(200, dtype=torch.float64)[:, None].expand(-1, 4)
    lr = 2.0**-7 / 100
    for step, late in ((10, 10), (49, 49), (60, 0), (140, 40)):
        outlook = forecast.look_ahead("w", grid, path, lr, [step])
        assert outlook.lag[0] == pytest.approx(late, abs=1e-6)
        assert outlook.steps_to_move == pytest.approx(50)


def test_no_lag_where_all_is_served():
    """At a share of 1 or more the lag is 0 as LagMeter's is, also on a path that stands still or turns back."""
    for points in ([0.0, 1.0, 2.0], [0.0, 1.0, 1.0], [0.0, 1.0, 2.0, 1.5]):
        path = torch.tensor(points, dtype=torch.float64)[:, None]
        assert forecast.lag_of(path, len(points) - 1, 1.0) == 0.0
        assert forecast.lag_of(path, len(points) - 1, 1.4) == 0.0
    assert forecast.lag_of(path, 3, 0.75) == pytest.approx(1 + 7 / 8)  # 9/8 lies between steps 1 and 2


def test_weights_between_grid_points_are_served_on_average():
    """An fp32 model that was never rounded: round-to-nearest tracks it."""
    weights = torch.rand(1 << 12, generator=torch.Generator().manual_seed(0)) + 1.0
    grid = forecast.grid_of(weights)
    assert forecast.tracked_share(grid, torch.full((4,), 1e-6, dtype=torch.float64)) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_files_and_folders_are_read(tmp_path, dtype):
    """One file or several in a folder; layers of one kind form a group; integers and empty tensors don't count."""
    one = {"layers.0.w": torch.ones(4, 4, dtype=dtype), "layers.1.w": torch.ones(4, 4, dtype=dtype)}
    save_file({**one, "ids": torch.arange(3), "none": torch.zeros(0, dtype=dtype)}, tmp_path / "a.safetensors")
    save_file({"head.weight": torch.full((5,), 0.5, dtype=dtype)}, tmp_path / "b.safetensors")
    grids = forecast.read_grids(tmp_path)
    assert {name: grid.weights for name, grid in grids.items()} == {"layers.*.w": 32, "head.weight": 5}
    assert list(forecast.read_grids(tmp_path / "b.safetensors")) == ["head.weight"]


def run(*words: str):
    return CliRunner().invoke(app, ["forecast", *words])


def fails(*words: str) -> str:
    """Run the command, which must end with code 2 and one line; return the line."""
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ") and not result.stdout
    return result.stderr


def test_the_command(tmp_path):
    """A table, a picture and a verdict."""
    weights = (torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.03).bfloat16()
    save_file({"blocks.0.w": weights}, tmp_path / "model.safetensors")
    result = run(str(tmp_path), "--lr", "1e-6", "--steps", "30", "--out", str(tmp_path / "f.png"))
    assert result.exit_code == 0, result.output
    assert "blocks.*.w" in result.output and "Verdict: at lr 1e-06 round-to-nearest will serve" in result.output
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_on_fp32_weights(tmp_path):
    """Weights that were never rounded are said to be, and are forecast to be served."""
    weights = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 1.0
    save_file({"w": weights}, tmp_path / "model.safetensors")
    result = run(str(tmp_path), "--steps", "1", "--out", str(tmp_path / "f.png"))
    assert result.exit_code == 0, result.output
    assert "100% of the weights lie between bf16 numbers" in result.output
    assert "will serve 100% of what 1 steps have learned and lag 0 steps behind" in result.output


def test_a_larger_rate_lags_less():
    """The forecast share served grows with the learning rate, up to all of it."""
    weights = (torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.03).bfloat16()
    path = forecast.simulate(60, beta1=0.9, beta2=0.999, signal=0.3)
    shares = [forecast.tracked_share(forecast.grid_of(weights), path[60] * lr) for lr in (1e-7, 1e-6, 1e-4)]
    assert shares[0] < 0.1 < shares[1] < 0.9 and shares[2] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "0"], "lr is out of range: 0"),
        (["--lr", "inf"], "lr is out of range: inf"),
        (["--lr", "nan"], "lr is out of range: nan"),
        (["--beta1", "1"], "beta1 is out of range"),
        (["--beta2", "-0.1"], "beta2 is out of range"),
        (["--signal", "-1"], "signal is out of range"),
        (["--signal", "inf"], "signal is out of range"),
        (["--steps", "0"], "steps is out of range"),
        (["--steps", "10001"], "steps is out of range: 10001"),
    ],
)
def test_wrong_numbers(tmp_path, words, said):
    """One line, exit code 2."""
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    assert said in fails(str(tmp_path), *words)


def test_wrong_files(tmp_path):
    """A missing path, an empty folder, a broken file, a file without weights: said by name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    save_file({"ids": torch.arange(3)}, tmp_path / "ids.safetensors")
    for name, said in (
        ("missing", "no safetensors file"),
        ("empty", "no safetensors file"),
        ("broken.safetensors", "no readable safetensors"),
        ("ids.safetensors", "holds no floating weights"),
    ):
        line = fails(str(tmp_path / name))
        assert said in line and name in line
