"""What the checks of `faults` cost, by the benchmark that measures it, in the processor's time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
def test_checks_at_their_defaults_cost_less_than_a_hundredth_of_a_step() -> None:
    """With 1,024 ranks to watch, and steps of half a second, which are short. It takes the benchmark half a minute."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bad_steps"] > 0 and found["checksums"] > 0 and found["slow_ranks"] > 0 and found["total"] < 0.01
