"""``fcoptim audit`` and ``fcoptim diff``, as commands and as functions."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fcoptim import CheckpointError, save_checkpoint
from fcoptim.bench import checkpoint as bench
from fcoptim.checkpoint.audit import audit, compare
from fcoptim.checkpoint.difference import diff
from fcoptim.checkpoint.report import _size
from fcoptim.cli import app
from tests.optimizer.helpers import RULES, assert_same_run, pair, train

from .helpers import mixed_loss, mixed_pair, names, saved_run
from .test_resume import LAGS


def command(*words: object) -> tuple[int, str]:
    """Run ``fcoptim`` and return its exit code and what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, result.output


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("rounding", RULES)
def test_audit_of_a_good_one(tmp_path, rounding, lag):
    """Whole, and every served bit is the cast of its master, under every rule and lag."""
    model, opt = mixed_pair(rounding=rounding, lag=LAGS[lag])
    train(opt, model, range(4), mixed_loss)
    save_checkpoint(tmp_path / "a", opt)
    report = audit(tmp_path / "a")
    assert report.ok and report.step == 4 and not report.problems
    rules = {row.name: row.rule for row in report.rows}
    assert rules["norm.weight"] == "kept in fp32" and rules["embed.weight"] == rounding
    assert rules["frozen.weight"] == rules["seen"] == "not trained"
    assert set(rules) == set(load_file(tmp_path / "a" / "model.safetensors"))
    assert all(row.differing == 0 for row in report.rows)
    if lag == "none":
        # All below one ulp, up to a master that has crossed a power of two under error feedback.
        assert max(row.fit.largest for row in report.rows if row.fit) < (2 if rounding == "error_feedback" else 1)


def test_audit_command(tmp_path):
    """Exit code 0 with a verdict; 1 with the files and tensors that are wrong."""
    _, opt = saved_run(tmp_path / "a")
    code, out = command("audit", tmp_path / "a")
    assert code == 0 and "verdict: whole, and the served weights are the cast of the masters" in out
    assert all(name in out for name, _ in opt.named_masters()) and "step 3" in out and "stochastic" in out
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    tensors["2.weight"].view(torch.int16)[0, :3] ^= 1
    save_file(tensors, path)
    code, out = command("audit", tmp_path / "a")
    assert code == 1 and "verdict: damaged" in out
    assert "problem: model.safetensors" in out
    assert "problem: 2.weight: 3 of 64 served values are not what the saved state serves" in out


@pytest.mark.parametrize("name", ["manifest.json", "optimizer/state.json", "masters/model.safetensors"])
def test_audit_of_what_cannot_be_read(tmp_path, name):
    """A report and exit code 1, whatever is broken."""
    saved_run(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(b"{")
    code, out = command("audit", tmp_path / "a")
    assert code == 1 and "problem: " in out and name in out and "verdict: damaged" in out


def test_audit_of_no_checkpoint(tmp_path):
    """A plain model folder is told how to be compared; wrong usage ends with code 2."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    code, out = command("audit", tmp_path)
    assert code == 1 and "pass --served and --masters" in out
    for words in (
        [],
        [tmp_path / "no"],
        ["--served", tmp_path],
        [tmp_path, "--served", tmp_path, "--masters", tmp_path],
        [tmp_path, "--start", tmp_path],
    ):
        code, out = command("audit", *words)
        assert code == 2 and "error: " in out, words


def test_any_two_folders(tmp_path):
    """How much of the movement is served: all by unbiased rules, little by nearest; the worst tensors are named."""
    torch.manual_seed(0)
    start = {name: torch.randn(300, 200).bfloat16() for name in ("x", "y")}
    masters = {name: value.float() + 1e-3 * value.float().abs() for name, value in start.items()}
    generator = torch.Generator().manual_seed(1)
    noise = {
        name: (value.view(torch.int32) + torch.randint(0, 1 << 16, value.shape, generator=generator).int())
        for name, value in masters.items()
    }
    fair = {name: (value & -65536).view(torch.float32).bfloat16() for name, value in noise.items()}
    near = {name: value.bfloat16() for name, value in masters.items()}
    near["y"] = fair["y"]
    for name, tensors in (("start", start), ("masters", masters), ("fair", fair), ("near", near)):
        (tmp_path / name).mkdir()
        save_file({**tensors, "ids": torch.arange(3)}, tmp_path / name / "model.safetensors")
    fits = compare(tmp_path / "near", tmp_path / "masters", tmp_path / "start")
    assert set(fits) == {"x", "y"}
    assert fits["x"].nearest_share == 1 and fits["x"].largest <= 0.5
    assert fits["y"].nearest_share < 0.9 and 0.5 < fits["y"].largest < 1
    # A movement below half an ulp is not served by nearest. The other's share is a mean of draws with a standard
    # error below ulp / movement / sqrt(n), an ulp being 2**-7 of a weight at most.
    assert fits["x"].tracked == 0
    assert abs(fits["y"].tracked - 1) < 5 * 2**-7 / 1e-3 / 60_000**0.5
    code, out = command(
        "audit", "--served", tmp_path / "near", "--masters", tmp_path / "masters", "--start", tmp_path / "start"
    )
    assert code == 0 and "movement served" in out and "100.00%" in out
    assert "largest RMS errors: y (" in out and "verdict: within one ulp everywhere, not rounded to nearest" in out
    code, out = command("audit", "--served", tmp_path / "start", "--masters", tmp_path / "start")
    assert code == 0 and "verdict: rounded to nearest" in out
    code, out = command("audit", "--served", tmp_path / "start", "--masters", tmp_path / "fair" / "model.safetensors")
    assert code == 0


def test_far_away_and_not_finite(tmp_path):
    """Other weights altogether, and infinities, are counted, not averaged in."""
    a = torch.tensor([1.0, 2.0, float("inf"), float("nan")]).bfloat16()
    b = torch.tensor([1.0, 3.0, float("inf"), float("nan")])
    save_file({"w": a, "only a": a.clone()}, tmp_path / "a.safetensors")
    save_file({"w": b}, tmp_path / "b.safetensors")
    fit = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["w"]
    assert (fit.elements, fit.nearest, fit.nonfinite) == (4, 3, 2)
    assert fit.largest == 64 and fit.mean == -32 and fit.rms == (64**2 / 2) ** 0.5
    code, out = command("audit", "--served", tmp_path / "a.safetensors", "--masters", tmp_path / "b.safetensors")
    assert code == 0 and "further than one ulp away" in out and "only one side has them: only a" in out


def test_what_cannot_be_compared(tmp_path):
    """Named."""
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(3)}, tmp_path / "b.safetensors")
    save_file({"v": torch.ones(3)}, tmp_path / "c.safetensors")
    for function, other, said in (
        (compare, "b", r"'w' has shapes \(2,\) and \(3,\)"),
        (compare, "c", "no floating tensor in common"),
        (diff, "b", r"'w' is torch.float32 of shape \(2,\)"),
    ):
        with pytest.raises(CheckpointError, match=said):
            function(tmp_path / "a.safetensors", tmp_path / f"{other}.safetensors")
    assert command("diff", tmp_path / "a.safetensors", tmp_path / "c.safetensors")[0] == 2
    assert command("diff", tmp_path / "a.safetensors", tmp_path / "none")[0] == 2


def test_diff(tmp_path):
    """Counts by bits, per tensor and in all; the weight of a sparse patch is that of indices and values."""
    a = {"w": torch.zeros(100, 10).bfloat16(), "v": torch.ones(7), "ids": torch.arange(4)}
    b = {name: value.clone() for name, value in a.items()}
    b["w"][3, :5] = -0.0
    b["v"][2] = float("nan")
    save_file(a, tmp_path / "a.safetensors")
    save_file({**b, "more": torch.ones(1)}, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {name: change.changed for name, change in found.tensors.items()} == {"w": 5, "v": 1, "ids": 0}
    assert (found.tensors["w"].share, found.tensors["w"].dense, found.tensors["w"].sparse) == (0.005, 2000, 30)
    assert (found.total.elements, found.total.changed, found.total.sparse) == (1011, 6, 38)
    assert (found.only_a, found.only_b, found.equal) == ([], ["more"], False)
    assert 10 < found.tensors["w"].packed < 30
    code, out = command("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert code == 1 and "0.5000%" in out and "only in" in out and "more" in out
    code, out = command("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert code == 0 and "0.0000%" in out


def test_diff_of_two_checkpoints(tmp_path):
    """The served weights are compared; sharded or not makes no difference."""
    model, opt = pair("stochastic")
    save_checkpoint(tmp_path / "a", opt)
    save_checkpoint(tmp_path / "b", opt, max_shard_bytes=100)
    assert diff(tmp_path / "a", tmp_path / "b").equal
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(opt, model, range(1))
    save_checkpoint(tmp_path / "c", opt)
    found = diff(tmp_path / "a", tmp_path / "c")
    for name, value in model.state_dict().items():
        assert found.tensors[name].changed == int((value.view(torch.int16) != before[name].view(torch.int16)).sum())
    assert found.total.changed > 0
    shutil.rmtree(tmp_path / "a")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_230_000, "1.23 MB"), (5 * 10**13, "5e+04 GB")]
)
def test_sizes(count, text):
    assert _size(count) == text


def test_bench(tmp_path):
    """What it times saves and loads the same run: masters, moments and served weights agree."""
    saves, ours = bench.Saves(1_000_000, tmp_path), bench.Loads(1_000_000, tmp_path)
    saves.save_torch_synced()
    saves.save()
    ours.load()
    assert_same_run(saves.opt, ours.opt)
    torchs = bench.Loads(1_000_000, tmp_path)
    torchs.load_torch()
    assert_same_run(saves.opt, torchs.opt)
    assert bench.time_load(next(reversed(bench.LOADS)), 1_000_000, tmp_path) > 0
    saves.clear()
    assert names(tmp_path) == []


def test_bench_refuses(tmp_path):
    """Wrong sizes and folders end with one line and code 2."""
    assert command("bench", "checkpoint", "--megabytes", 0)[0] == 2
    assert command("bench", "checkpoint", "--folder", tmp_path / "none")[0] == 2
