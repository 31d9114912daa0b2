"""The cost of the checks of `faults` in processor time, as measured by their benchmark."""

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
    """The checks take less than 1 % of a short step of half a second with 1,024 ranks to watch. The benchmark runs for
    half a minute.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bad_steps"] > 0 and found["checksums"] > 0 and found["slow_ranks"] > 0 and found["total"] < 0.01
