from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_kernel_equals_reference_under_the_interpreter() -> None:
    """Run ``gpu_interpreted.py`` in a process whose Triton interprets; this process's Triton stays as it is."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cast/gpu_interpreted.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 40, done.stdout[-2000:]
    assert not re.search(r"skipped|failed|error|xfailed", done.stdout.splitlines()[-1]), done.stdout[-2000:]
