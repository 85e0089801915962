"""The torchrun example of the docs, and the benchmark, as a user starts them."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fcoptim import FairCastOptimizer
from fcoptim.bench import distributed as bench

ROOT = Path(__file__).resolve().parents[2]


def digests(command: list[str], **environment: str) -> list[str]:
    """What the example prints of the served weights, run by a command."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"served (\w+)", done.stdout)


def straight(steps: int) -> list[str]:
    """The digests of a run of one process without a checkpoint, by the example's own functions."""
    names = runpy.run_path(str(ROOT / "examples" / "distributed.py"))
    model = names["sharded_model"]("cpu")
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, storage="float32")
    digests = []
    for step in range(steps):
        names["train_step"](model, opt, step, "cpu")
        digests.append(names["digest"](opt))
    return digests


def test_example_goes_on_with_other_ranks(ranks, tmp_path):
    """2 processes of torchrun, then 1 alone from their checkpoint: the digests are those of one straight run."""
    example = [str(ROOT / "examples" / "distributed.py"), "--checkpoint", str(tmp_path / "checkpoint")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found = digests([*torchrun, *example, "--steps=2"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found += digests([*example, "--steps=1"], **alone)
    assert len(found) == 3
    assert found == ranks(1, straight, 3)[0]


def measured():
    return [bench._measure(setup, 32, 2, "stochastic", 1) for setup in bench.SETUPS]


def test_nothing_of_ours_is_communicated(ranks):
    """A step adds not one byte to what the plain optimizer communicates; construction and statistics some."""
    for rows in ranks(2, measured):
        for row in rows:
            assert row.fair == row.plain
            assert (row.plain > 0) == ("Muon" in row.setup)
            assert 0 < row.construction <= 2 * 128 and row.stats <= 64
            assert row.engine >= 2 * 3 * 33 * 32  # bf16 gradients of all weights, at least


@pytest.mark.parametrize(
    ("option", "said"), [("--ranks=0", "must be positive"), ("--rounding=up", "rounding must be one")]
)
def test_wrong_input_of_the_command(option, said):
    from fcoptim.cli import app

    result = CliRunner().invoke(app, ["bench", "distributed", option])
    assert result.exit_code == 2
    assert said in result.output


def test_the_command_prints_a_table():
    """One rank is enough to see that processes are started and their figures come back."""
    from fcoptim.cli import app

    result = CliRunner().invoke(app, ["bench", "distributed", "--ranks=1", "--width=16", "--layers=1", "--steps=1"])
    assert result.exit_code == 0, result.output
    assert all(setup in result.output for setup in bench.SETUPS)
