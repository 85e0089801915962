"""Every script in ``examples/`` runs, in an empty folder, and prints what it says it does."""

import runpy

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from .tiny import EXAMPLES

PRINTS = {
    "trl_grpo": "tracked",
    "trainer_sft": "weights with masters",
    "accelerate_loop": "torch.bfloat16 weights served",
    "lightning_module": "8 steps",
    "exporter_loop": "of what was learned",
}


def test_each_example_is_run():
    """Here or, by its name, in another test."""
    tests = "".join(file.read_text() for file in EXAMPLES.parent.glob("tests/**/*.py"))
    assert [file.stem for file in EXAMPLES.glob("*.py") if file.stem not in tests] == []


@pytest.mark.parametrize("name", PRINTS)
def test_example(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")  # set by one of them, so put back afterwards
    torch.manual_seed(0)
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
    assert PRINTS[name] in capsys.readouterr().out
