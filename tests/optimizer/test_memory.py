"""What a step keeps in memory: masters, served weights, one set of gradients, accumulators, the optimizer's state."""

import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import RULES

WORKER = Path(__file__).with_name("memory_worker.py")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limit on memory")


def steps_within(rounding: str, optimizer: str, allowance: int) -> subprocess.CompletedProcess:
    """Two steps on 50M weights with so many bytes beyond what has to be there."""
    command = [sys.executable, str(WORKER), rounding, optimizer, str(allowance)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("rounding", "optimizer"),
    [*((rule, "SGD") for rule in RULES), ("stochastic", "AdamW"), ("error_feedback", "AdamW")],
)
def test_peak_of_a_step(rounding, optimizer):
    """64 MB beyond masters, served weights, gradients, accumulators and moments are enough for building and steps."""
    done = steps_within(rounding, optimizer, 64 * MIB)
    assert done.returncode == 0 and done.stdout.strip() == "fits", done.stderr[-2000:]


def test_the_limit_is_one():
    """With 32 MB less than what has to be there the same run fails, so the limit above does bind."""
    done = steps_within("stochastic", "SGD", -32 * MIB)
    assert done.returncode != 0 and "memory" in done.stderr, done.stderr[-2000:]
