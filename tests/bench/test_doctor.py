"""Tests of `meshwright doctor`: each fault is reported with its rank or machine, and nothing else is.

One test runs it on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.bench.diagnosis import Facts, Requirements, judge
from meshwright.cli.main import main

VERSIONS = {"meshwright": "1", "torch": "2.13"}
WANTED = Requirements(1e9, 2e9, 100.0, 10.0, "runs/mine")


def world() -> list[Facts]:
    """Return the facts of four healthy ranks on two machines."""
    facts = []
    for rank in range(4):
        others = [other for other in (rank - 1, rank + 1) if 0 <= other < 4]
        links = {str(other): 9.0 if {rank, other} == {1, 2} else 90.0 for other in others}
        facts.append(Facts(
            rank, f"n{rank // 2}", "H100", 80e9, 79e9, 500e9, dict(VERSIONS), 0.001 * rank, True, 1e12,
            900.0 if rank % 2 == 0 else 0.0, "", links, [7, 7, 7], 0.1, "nccl", "eth0", "", 8,
        ))  # fmt: skip
    return facts


def test_nothing_is_off_in_a_healthy_world() -> None:
    assert [check for check in judge(world(), WANTED) if not check.ok] == []
    assert [check for check in judge(world()[:1], Requirements()) if not check.ok] == []


def test_the_network_s_interface_is_named() -> None:
    facts = world()
    text = next(check.text for check in judge(facts, WANTED) if check.name == "network")
    assert text == "nccl chooses by itself, eth0 leads to rank 0: name one by NCCL_SOCKET_IFNAME=eth0"
    for of_rank in facts:
        of_rank.backend, of_rank.named_interface = "gloo", "ib0"
    text = next(check.text for check in judge(facts, WANTED) if check.name == "network")
    assert text == "gloo uses ib0 (GLOO_SOCKET_IFNAME)"


def set_to(rank: int, **values: object) -> Callable[[list[Facts]], None]:
    """Return a function that sets some facts of a rank."""

    def change(facts: list[Facts]) -> None:
        for name, value in values.items():
            setattr(facts[rank], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (set_to(2, versions=VERSIONS | {"torch": "2.11"}), "versions", "rank 2 has torch 2.11, the others 2.13"),
        (set_to(3, device="A100"), "devices", "rank 3: A100, the others H100"),
        (set_to(1, device_free=20e9), "devices", "the device of rank 1 on n0 has only 18.6 GiB of 74.5 GiB free"),
        (set_to(2, cores=1), "cores", "rank 2 (n1) may use 1 core each: ask the scheduler for 4 or more"),
        (set_to(1, cores=0), "cores", "rank 1 (n0) may use less than one core each"),
        (set_to(3, device_bytes=1e9, device_free=1e9), "memory", "n1 has 954 MiB for a rank"),
        (set_to(0, disk_free=1e9), "disk", "runs/mine has 954 MiB free, and 3 checkpoints take 2.79 GiB"),
        (set_to(2, write_mb_s=3.0), "disk", "n1 writes 3 MB/s to runs/mine"),
        (set_to(3, sees_folder=False), "folder", "rank 3 (n1): runs/mine is not the folder that rank 0 sees"),
        (set_to(2, clock=-7.5), "clocks", "the clock of n1 is -7.5 s off rank 0's"),
        (set_to(2, port="no port can be opened (denied)"), "ports", "n1: no port can be opened (denied)"),
        (
            set_to(1, named_interface="=lo"),
            "network",
            "n0: NCCL_SOCKET_IFNAME==lo does not lead to the other machines: set NCCL_SOCKET_IFNAME=eth0",
        ),
        (set_to(0, links={"1": 20.0}), "links", "rank 0 to 1 (n0 to n0): 20 GB/s, the profile's 1e+02 GB/s"),
        (set_to(1, links={"0": 90.0, "2": 2.0}), "links", "rank 1 to 2 (n0 to n1): 2 GB/s, the profile's 10 GB/s"),
        (set_to(3, burn=[7, 8, 7]), "burn-in", "rank 3 on n1 computed wrongly in 1 of 3 rounds"),
        (set_to(1, round_s=0.2), "burn-in", "rank 1 on n0 takes 2.00 times the median"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_off_is_named(change: Callable[[list[Facts]], None], name: str, message: str) -> None:
    facts = world()
    change(facts)
    off = [check for check in judge(facts, WANTED) if not check.ok]
    assert [check.name for check in off] == [name] and message in off[0].text, off


def test_one_rank_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--nproc", "1", "--device", "cpu", "--seconds", "0.1", "--folder", str(tmp_path), "--json"]
    code = main(words)
    result = json.loads(capsys.readouterr().out)
    off = [check["name"] for check in result["checks"] if not check["ok"]]
    assert code == int(bool(off)) and off in ([], ["disk"]), "a busy disk may be slow"
    assert len(result["checks"]) == 11 and list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_two_ranks_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "gpt2-124m", "--nproc", "2", "--seconds", "0.5", "run.device=cpu", f"run.dir={tmp_path}"]
    code = main([*words, "train.precision=fp32"])
    stdout = capsys.readouterr().out
    assert code in (0, 1) and "a checkpoint of 1.39 GiB" in stdout and "GB/s at least within a machine" in stdout


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--seconds", "0"], "--seconds 0 must be"), (["--nproc", "0"], "--nproc 0"),
                        (["--cluster", "nowhere"], "nowhere")):  # fmt: skip
        assert main(["doctor", *words]) == 2 and message in capsys.readouterr().err
