"""The command line: thin, and clear about what is wrong."""

import importlib.util
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fcoptim import __version__
from fcoptim.cli import app, parse_options

runner = CliRunner()


def fails(*arguments: str) -> str:
    """Run a command that must end with code 2 and one line; return the line."""
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    return result.stderr


def test_version():
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0 and result.output.startswith(f"fcoptim {__version__}, torch ")


def test_help_names_every_command():
    text = runner.invoke(app, ["--help"]).output
    assert all(name in text for name in ("demo", "bench", "version"))
    options = runner.invoke(app, ["demo", "--help"], env={"COLUMNS": "200"}).output
    for option in ("--lr", "--steps", "--task", "--rounding", "--seed", "--out"):
        assert option in options


def test_commands_import_on_use_only():
    heavy = ["transformers", "matplotlib", "reasoning_gym", "numba", "rich.live"]
    code = f"import fcoptim.cli, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


class TestDemoErrors:
    @pytest.fixture(autouse=True)
    def extra(self):
        pytest.importorskip("reasoning_gym")

    def test_unknown_task(self):
        assert "no dataset 'spel_backward'; close matches: spell_backward" in fails("demo", "--task", "spel_backward")

    def test_unknown_rule(self):
        assert "got 'up'" in fails("demo", "--rounding", "up")

    def test_bad_number(self):
        assert "steps must be at least 1; got 0" in fails("demo", "--steps", "0")

    def test_bad_option(self):
        assert "key=value" in fails("demo", "--task-option", "max_word_len")

    def test_refused_option(self):
        assert "refused 'chain_sum'" in fails("demo", "--task", "chain_sum", "--task-option", "nothing=1")

    @pytest.mark.parametrize("module", ["matplotlib", "reasoning_gym"])
    def test_missing_extra(self, monkeypatch, module):
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else found(name, *a))
        line = fails("demo")
        assert module in line and 'pip install "fcoptim[demo]"' in line


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    from fcoptim.demo import run as run_module

    seen = []
    monkeypatch.setattr(run_module, "run", lambda settings: seen.append(settings) or 130)
    arguments = "--task chain_sum --task-option max_terms=2 --steps 3 --lr 3e-6 --rounding dither --seed 9 --group 5"
    result = runner.invoke(app, ["demo", *arguments.split(), "--out", str(tmp_path / "x")])
    assert result.exit_code == 130, "the run's own code is handed on"
    (settings,) = seen
    assert (settings.task, settings.task_options) == ("chain_sum", {"max_terms": 2})
    assert (settings.steps, settings.lr, settings.rounding, settings.seed) == (3, 3e-6, "dither", 9)
    assert (settings.group, settings.out) == (5, tmp_path / "x")


def test_demo_defaults_are_those_of_the_settings(monkeypatch):
    from fcoptim.demo import run as run_module
    from fcoptim.demo.train import Settings

    seen = []
    monkeypatch.setattr(run_module, "run", lambda settings: seen.append(settings) or 0)
    assert runner.invoke(app, ["demo"]).exit_code == 0
    assert seen == [Settings()]


def test_options_are_read_as_json_or_text():
    pairs = ["a=2", "b=true", "c=word", "d=[1, 2]", "e=x=y"]
    assert parse_options(pairs) == {"a": 2, "b": True, "c": "word", "d": [1, 2], "e": "x=y"}


class TestBench:
    def test_alone_it_runs_the_cast(self, monkeypatch):
        from fcoptim.bench import cast

        seen = []
        monkeypatch.setattr(cast, "main", lambda *arguments: seen.append(arguments))
        assert runner.invoke(app, ["bench"]).exit_code == 0
        assert runner.invoke(app, ["bench", "cast", "--elements", "1000", "--threads", "1"]).exit_code == 0
        assert seen == [(64 << 20, None, "cpu"), (1000, 1, "cpu")]

    def test_wrong_input(self):
        assert "must be positive; got 0" in fails("bench", "cast", "--elements", "0")
