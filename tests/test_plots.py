"""Plots of runs: which logs are read, and what is drawn of them."""

import json

import pytest
from typer.testing import CliRunner

from fcoptim import plots
from fcoptim.cli import app


def write(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def demo_record(step: int) -> dict:
    rules = {"nearest": {"changed": 0.004, "tracked": 0.01 * step}, "dither": {"changed": 0.005, "tracked": None}}
    return {"kind": "step", "step": step, "reward": 0.1 * step, "rules": rules}


def test_the_demos_records(tmp_path):
    """Rules become curves of their own, called by the run's folder; a share that is not there is left out."""
    path = write(tmp_path / "mine" / "steps.jsonl", {"kind": "header"}, demo_record(1), demo_record(2), {"kind": "end"})
    run = plots.read_run(path)
    assert {curve.label for curve in run["changed"]} == {"mine: nearest", "mine: dither"}
    assert [(curve.label, curve.steps, curve.values) for curve in run["tracked"]] == [
        ("mine: nearest", [1, 2], [0.01, 0.02])
    ]
    assert run["reward"][0].values == [0.1, 0.2] and "lag" not in run


def test_a_meters_and_a_trainers_records(tmp_path):
    """Figures with LagMeter's prefix and a Trainer's names are found."""
    path = write(tmp_path / "log.jsonl", {"step": 5, "fcoptim/lag": 3.5, "fcoptim/tracked": 0.5, "rewards/mean": 1})
    run = plots.read_run(path)
    assert {name: (curve.label, curve.values) for name, (curve,) in run.items()} == {
        "lag": ("log", [3.5]),
        "tracked": ("log", [0.5]),
        "reward": ("log", [1.0]),
    }


def test_an_interrupted_run_is_read_up_to_its_last_whole_line(tmp_path):
    """Half a line at the end is a run that was stopped; elsewhere it is a fault."""
    path = write(tmp_path / "log.jsonl", {"step": 1, "lag": 2.0})
    path.write_text(path.read_text() + '{"step": 2, "la')
    assert plots.read_run(path)["lag"][0].steps == [1]
    path.write_text('{"step": 2, "la\n' + '{"step": 3, "lag": 1.0}\n')
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        plots.read_run(path)


@pytest.mark.parametrize(
    "text", ["", "{}\n", '{"step": 1}\n', '{"step": "x", "lag": 1}\n', "[1, 2]\n", '{"step": 1, "lag": NaN}\n']
)
def test_nothing_to_plot(tmp_path, text):
    """A log without steps, or without any of the measures."""
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no step with any of changed, tracked, lag, reward"):
        plots.read_run(path)


def test_the_command(tmp_path):
    """Several runs side by side: a picture, and a line for each curve."""
    a = write(tmp_path / "a" / "steps.jsonl", *(demo_record(step) for step in range(1, 9)))
    b = write(tmp_path / "b.jsonl", *({"step": step, "lag": float(step)} for step in range(1, 5)))
    out = tmp_path / "runs.png"
    result = CliRunner().invoke(app, ["plot", str(a), str(b), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "a: nearest" in result.output and "4 @ 4" in result.output and "▁" in result.output
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert plots.plot_runs([plots.read_run(a), plots.read_run(b)], out) == ["changed", "tracked", "lag", "reward"]


def test_a_missing_file(tmp_path):
    """One line, exit code 2."""
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "no.jsonl")])
    assert result.exit_code == 2 and "can't read" in result.output
