"""What a step keeps in memory: masters, served weights, one set of gradients, accumulators, the optimizer's state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import RULES

WORKER = Path(__file__).with_name("memory_worker.py")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limit on memory")


def steps_within(rounding: str, optimizer: str, allowance: int) -> subprocess.CompletedProcess:
    """Two steps on 25M weights with so many bytes beyond what has to be there."""
    command = [sys.executable, str(WORKER), rounding, optimizer, str(allowance)]
    # glibc gives freed tensors back at once below its usual, moving threshold; else its fragments are measured.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize(
    ("rounding", "optimizer"),
    [*((rule, "SGD") for rule in RULES), ("stochastic", "AdamW"), ("error_feedback", "AdamW")],
)
def test_peak_of_a_step(rounding, optimizer):
    """Beyond masters, served weights, gradients, accumulators and moments 32 MB are enough (64 are promised)."""
    done = steps_within(rounding, optimizer, 32 * MIB)
    assert done.returncode == 0 and done.stdout.strip() == "fits", done.stderr[-2000:]


def test_the_limit_is_one():
    """With 16 MB less than what has to be there the same run fails, so the limit above does bind."""
    done = steps_within("stochastic", "SGD", -16 * MIB)
    assert done.returncode != 0 and "memory" in done.stderr, done.stderr[-2000:]
