"""``fcoptim bench sync``: the figures it prints are those of real updates."""

import pytest
from typer.testing import CliRunner

from fcoptim.bench import sync
from fcoptim.cli import app

SHAPES = [(300, 100), (64,)]


def test_rows_are_what_the_rules_do():
    """Dither changes as many values at each step; stochastic and error feedback more and more; all are followed."""
    rows = {row.rule: row for row in sync.run(steps=6, lr=1e-5, shapes=SHAPES)}
    assert list(rows) == ["nearest", "stochastic", "dither", "error_feedback"]
    for row in rows.values():
        assert [len(column) for column in (row.changed, row.publish, row.apply)] == [6, 6, 6]
        for changed, int32, gaps, packed in zip(row.changed, *(row.nbytes[name] for name in ("int32", "gaps", "zlib"))):
            assert int32 == pytest.approx(6 * changed * 30_064, rel=0.05) and packed <= gaps <= int32
    assert rows["nearest"].changed[0] < 0.6 * rows["dither"].changed[0]
    assert rows["dither"].changed[5] < 1.5 * rows["dither"].changed[0]
    assert rows["stochastic"].changed[5] > 2.5 * rows["stochastic"].changed[0]


def test_dense_tensors_count_as_dense():
    import torch

    from fcoptim.sync import Sender

    state = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    sender = Sender(state, dense=False)
    sender.publish()
    state["w"].fill_(1)
    found = sync.sizes(sender.publish().delta, ["int32", "zlib"])
    assert found["int32"] == 2000 and found["zlib"] <= 2000


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--lr", "0"]])
def test_wrong_input(arguments):
    result = CliRunner().invoke(app, ["bench", "sync", *arguments])
    assert result.exit_code == 2 and "steps and lr must be positive" in result.stderr


def test_command(monkeypatch):
    monkeypatch.setattr(sync, "smollm2_shapes", lambda: SHAPES)
    result = CliRunner().invoke(app, ["bench", "sync", "--steps", "2"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert all(rule in result.output for rule in ("nearest", "stochastic", "dither", "error_feedback"))
