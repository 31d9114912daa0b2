"""The harness of the suite, on Gloo: its cases are valid, a planted bug is found by the parameter's name, and the
failure of one case does not spoil the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from meshwright.config.rules import TRAINING_RULES, check
from tests.nccl import bodies
from tests.nccl.checks import check_exact
from tests.nccl.exact_cases import EXACT_CASES, Exact
from tests.nccl.fault_cases import FAULT_CASES
from tests.nccl.faulty import PLACES
from tests.nccl.lanes import Found, Lane, Shared, Verdict
from tests.nccl.processes import ROOT
from tests.nccl.runner import CHECKS, all_cases, batches, chosen, judge, line, table
from tests.nccl.same_cases import SAME_CASES
from tests.nccl.transports import TRANSPORTS
from tests.nccl.worlds import CaseFailed, World
from tests.parity.cases import cut, special
from tests.support.oracle import small_config

GLOO = TRANSPORTS["gloo"]
SMALL = Exact("layout", special("planted", cut(2, 1, 1), model__layers=1))


def test_every_case_is_valid_and_has_a_name_of_its_own() -> None:
    cases = all_cases()
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []
    assert all(type(case) in CHECKS for case in cases) and len(cases) >= 80
    for transport in TRANSPORTS.values():
        for case in EXACT_CASES:
            check(small_config(**case.sections(transport)), case.ranks, TRAINING_RULES)
            check(small_config(**case.alone(transport)), 1, TRAINING_RULES)
    for same in SAME_CASES:
        check(small_config(**same.sections), same.ranks, TRAINING_RULES)
    assert {case.plant.place for case in cases if hasattr(case, "plant")} == set(PLACES)


def test_shards_and_batches_hold_every_case_once() -> None:
    cases = all_cases()
    parts = [chosen(cases, [], (number, 3)) for number in (1, 2, 3)]
    assert Counter(case.name for part in parts for case in part) == Counter(case.name for case in cases)
    batched = [case for batch in batches(cases) for case in batch]
    assert Counter(case.name for case in batched) == Counter(case.name for case in cases)
    assert all(len({case.ranks for case in batch}) == 1 for batch in batches(cases))
    assert chosen(cases, [cases[3].name]) == [cases[3]], "a whole name is that case alone"


def test_the_page_on_communication_counts_the_cases() -> None:
    text = (ROOT / "docs" / "communication.md").read_text(encoding="utf-8")
    assert f"the suite: {len(all_cases())} cases" in text and f"compares {len(EXACT_CASES)} layouts" in text
    assert f"Further {len(SAME_CASES)} runs" in text and f"In {len(FAULT_CASES)} of them" in text


def test_it_needs_neither_pytest_nor_what_only_other_tests_need() -> None:
    """A machine with a GPU may have little installed apart from torch."""
    words = "pytest hypothesis peft transformers datasets tensorboard sentencepiece"
    source = (
        "import runpy, sys\n"
        f"for name in '{words}'.split():\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['tests.nccl', '--list']\n"
        "runpy.run_module('tests.nccl', run_name='__main__')\n"
    )
    # `make test-all SHARD=2/6` puts SHARD into the environment, and the suite reads it as well.
    env = {name: value for name, value in os.environ.items() if name != "SHARD"}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(all_cases()), done.stderr


def test_every_rank_is_a_host_of_its_own() -> None:
    envs = [TRANSPORTS["nccl"].environment(rank, 4, 1234) for rank in range(4)]
    assert len({env["NCCL_HOSTID"] for env in envs}) == 4
    assert {(env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) for env in envs} == {("0", "1")}
    assert not any(name.startswith("NCCL") for name in GLOO.environment(0, 4))


def test_a_dropped_sum_is_found_by_the_name_of_a_parameter() -> None:
    lane = Lane(GLOO, Shared())
    try:
        assert check_exact(lane, SMALL).complaints == []
        found = check_exact(lane, SMALL, bodies.dropped_sum)
    finally:
        lane.close()
    assert any("gradients: " in text and ".weight is off by" in text for text in found.complaints), found.complaints
    assert found.worst is not None and found.worst > 1e-3


def _fails(rank: int, world: int, how: str) -> int:
    if rank == 1 and how == "raises":
        raise ValueError("so it is")
    if rank == 1 and how == "dies":
        os._exit(7)
    if rank == 1 and how == "hangs":
        time.sleep(600)
    return rank


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "rank 1: .*so it is"), ("dies", "rank 1 died with exit code 7"),
     ("hangs", "no result within 3 s from ranks .*--- stack-1")],
)  # fmt: skip
def test_a_rank_that_fails_is_named(how: str, words: str) -> None:
    world = World(2, GLOO)
    try:
        assert world.run(_fails, "") == [0, 1]
        with pytest.raises(CaseFailed, match=f"(?s){words}"):
            # The first case has started the ranks, so this one need not wait for a start.
            world.run(_fails, how, patience=3.0 if how == "hangs" else 0.0)
    finally:
        world.close()


def test_a_failure_does_not_spoil_the_next_case(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(GLOO, Shared())

    def fails(lane: Lane, case: Any) -> Found:
        lane.world(2).run(_fails, "raises")
        return Found([])

    try:
        with monkeypatch.context() as patched:
            patched.setitem(CHECKS, Exact, fails)
            first = judge(lane, SMALL)
        assert not first.ok and "so it is" in first.note and "FAILED" in line(first)
        assert lane.world(2).run(_fails, "") == [0, 1]
    finally:
        lane.close()


def test_the_table_counts_what_passed() -> None:
    verdicts = [Verdict("a/1", 2, True, 1.0, 1e-12), Verdict("a/2", 4, False, 2.0), Verdict("b/1", 8, True, 3.0)]
    rows = [row.split() for row in table(verdicts).splitlines()]
    assert rows[1:] == [
        ["a", "2", "1", "2-4", "1.0e-12", "3"], ["b", "1", "1", "8", "3"], ["all", "3", "2", "2-8", "1.0e-12", "6"],
    ]  # fmt: skip
