"""The order of tests: slow files first if several workers share them, or at random for `pytest --shuffle SEED`.

The random order shuffles the files, and the tests within each file. It changes no seeds of random numbers: a test draws
the same numbers in every order.
"""

from __future__ import annotations

import random

import pytest

# The files that take longest, the slowest first, measured by `pytest --cpu=FILE` plus the waits of tests that hang on
# purpose. A worker takes whole files, so a slow file that begins last would leave the other workers idle.
SLOWEST = (
    "tests/parity/test_layouts.py",
    "tests/plan/test_communication.py",
    "tests/dryrun/test_dryrun.py",
    "tests/comm/test_watchdog.py",
    "tests/checkpoint/test_resume.py",
    "tests/comm/test_lost_ranks.py",
    "tests/spec/test_communicators.py",
    "tests/engine/test_copied_heads.py",
    "tests/plan/test_target.py",
    "tests/parity/test_planted_bugs.py",
    "tests/interop/test_hf.py",
    "tests/checkpoint/test_commands.py",
    "tests/infer/test_generate.py",
    "tests/engine/test_compression.py",
    "tests/engine/test_adaptive.py",
    "tests/engine/test_precision.py",
    "tests/nn/test_fused_layouts.py",
    "tests/comm/test_compile.py",
    "tests/engine/test_compressed_checkpoints.py",
    "tests/cli/test_bad_input.py",
    "tests/models/test_planned.py",
    "tests/engine/test_frozen.py",
    "tests/cli/test_everyday.py",
    "tests/run/test_pretrain.py",
    "tests/plan/test_one_answer.py",
    "tests/parity/test_one_process.py",
    "tests/plan/test_memory.py",
    "tests/comm/test_redistribute.py",
    "tests/engine/test_reducers.py",
    "tests/launch/test_launch.py",
    "tests/plan/test_published.py",
    "tests/parity/test_capacity.py",
    "tests/comm/test_dying.py",
    "tests/parity/test_adapters.py",
    "tests/tune/test_adapter_files.py",
    "tests/parity/test_grids.py",
    "tests/faults/test_bad_steps.py",
    "tests/run/test_watched.py",
)


def slowest_first(items: list[pytest.Item]) -> None:
    """Reorder the items in place. The files that are not in SLOWEST follow in the order of their collection."""
    place = {name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(SLOWEST)))


def seed_of(text: str) -> int:
    """Return the given number, or draw one for the word `random`."""
    if text == "random":
        return random.SystemRandom().randrange(1, 1_000_000)
    if not text.isdecimal():
        raise pytest.UsageError(f"--shuffle {text}: give a number, or the word random")
    return int(text)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Reorder the items in place. Every worker of a run computes the same order from the seed."""
    dice = random.Random(seed)
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    files = list(by_file.values())
    dice.shuffle(files)
    for file in files:
        dice.shuffle(file)
    items[:] = [item for file in files for item in file]
