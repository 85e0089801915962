"""Plots of runs: which logs are read, and what is drawn of them."""

import json

import pytest
from typer.testing import CliRunner

from fcoptim import plots
from fcoptim.cli import app
from fcoptim.reports import _spark


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
    path.write_bytes(b'{"step": 3, "lag": 1.0}\n{"step": 4, "text": "\xe2\x80')  # within a character
    assert plots.read_run(path)["lag"][0].steps == [3]


def test_text_in_a_log_may_hold_any_character(tmp_path):
    """A completion that was logged unescaped with a separator of Unicode's does not end a line of the log."""
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "lag": 1.0, "text": "a\u2028b\x85c"}, ensure_ascii=False) for step in (1, 2)]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert plots.read_run(path)["lag"][0].steps == [1, 2]


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


@pytest.mark.parametrize(
    ("measures", "panels"),
    [(["lag"], 1), (["changed", "lag"], 2), (["changed", "tracked", "reward"], 3), (list(plots.MEASURES), 4)],
)
def test_a_panel_for_each_measure(tmp_path, monkeypatch, measures, panels):
    """As many visible panels as measures, in each a line for every run, with its values."""
    made, new_figure = [], plots.new_figure
    monkeypatch.setattr(plots, "new_figure", lambda *size: made.append(new_figure(*size)) or made[-1])
    runs = []
    for name in ("a", "b"):
        records = ({"step": step, **dict.fromkeys(measures, step / 4)} for step in range(1, 5))
        runs.append(plots.read_run(write(tmp_path / f"{name}.jsonl", *records)))
    assert plots.plot_runs(runs, tmp_path / "runs.png") == measures
    shown = [axes for axes in made[0].axes if axes.get_visible()]
    assert len(shown) == panels
    for axes in shown:
        lines = axes.get_lines()
        assert [line.get_label() for line in lines] == ["a", "b"]
        assert all(list(line.get_ydata()) == [0.25, 0.5, 0.75, 1.0] for line in lines)
    assert (shown[0].get_yscale() == "log") == (measures[0] == "changed")
    assert (tmp_path / "runs.png").stat().st_size > 5000


def test_runs_of_one_name_are_told_apart(tmp_path):
    """Logs that are called alike in folders of their own are labelled by their paths."""
    paths = [tmp_path / name / "log.jsonl" for name in ("one", "two")]
    for path in paths:
        write(path, {"step": 1, "lag": 1.0})
    words = ["plot", *map(str, paths), "--out", str(tmp_path / "runs.png")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert all(str(path) in result.output for path in paths)


@pytest.mark.parametrize("count", [1, 2, 10, 24, 25, 500])
def test_the_course_goes_from_first_to_last(count):
    """The line of blocks spans the whole run, however short or long."""
    course = _spark([float(value) for value in range(count)])
    assert len(course) == min(24, count) and course == "".join(sorted(course))
    assert course[0] == "▁" and (count == 1 or course[-1] == "█")


def test_a_missing_file(tmp_path):
    """One line, exit code 2."""
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "no.jsonl")])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not result.stdout
    assert result.stderr.startswith("error: can't read") and "no.jsonl" in result.stderr
