"""Two and three launchers as nodes, which are killed, cut off and started again.

They have separate networks where this machine allows it. Runs are compared in float64 with one undisturbed process,
from which only the order of sums differs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import lines, steps
from tests.support.commands import ended
from tests.support.waiting import HANG_S, until

pytestmark = pytest.mark.wide

# The random numbers of dropout depend on the layout.
DROPOUTS = ("model.dropout=0", "model.attention_dropout=0", "model.embedding_dropout=0")
MODEL = (*DROPOUTS, "train.precision=fp64", "optimizer.lr=1e-4", "train.global_batch=16", "run.eval_every=0")
WORDS = (*MODEL, "faults.elastic=true", "faults.lost_after=6s")


class Node:
    """One launcher with its ranks and keeper at an address, in the network name space `space` if one is given."""

    def __init__(self, folder: Path, address: str, nodes: str, words: tuple[str, ...], space: str = "") -> None:
        self.folder, self.space = folder, space
        (folder / address).mkdir(exist_ok=True)
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / address)}
        within = ["ip", "netns", "exec", space] if space else []
        command = [*within, sys.executable, "-m", "meshwright", "train", "config.yaml", "--nproc", "2"]
        self.said = (folder / f"{address}.log").open("a+")
        self.process = subprocess.Popen(
            [*command, "--nodes", nodes, "--address", address, *WORDS, *words], cwd=folder, env=env,
            stdout=self.said, stderr=self.said, text=True, start_new_session=True,
        )  # fmt: skip

    def kill(self) -> None:
        """Kill all processes at once, as if the machine had died."""
        pids = [self.process.pid]
        while pids:
            found = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", ",".join(map(str, pids))], capture_output=True, text=True, check=False
            )
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            pids = [int(pid) for pid in found.stdout.split()]
        self.process.wait()

    def end(self) -> tuple[int, str]:
        code = self.process.wait(HANG_S)
        self.said.seek(0)
        return code, self.said.read()


@pytest.fixture
def start_node(folder: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def starting(address: str, *words: str, nodes: str = "1:2", space: str = "") -> Node:
        made.append(Node(folder, address, nodes, words, space))
        return made[-1]

    yield starting
    for node in made:
        if node.process.poll() is None:
            node.kill()


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two name spaces with a cable between them: 10.99.0.1 and 10.99.0.2."""
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    made = not os.geteuid() and shutil.which("ip") and subprocess.run(["ip", "netns", "add", names[0]], check=False)
    if not made or made.returncode:
        pytest.skip("network name spaces can't be made here")
    ip("netns", "add", names[1])
    ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
    for number, name in enumerate(names):
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"10.99.0.{number + 1}/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")
    yield names
    for name in names:
        ip("netns", "del", name)


def world(run: Path) -> int:
    found = [e["world"] for e in lines(run / "events.jsonl") if e["kind"] in ("start", "resume")]
    return found[-1] if found else 0


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run / "events.jsonl") if event["kind"] == kind]


def assert_undisturbed(folder: Path, start: Any, *words: str) -> None:
    """Assert that each step occurs once, with the losses of one process up to the order of sums."""
    done = steps(folder / "run")
    assert done == list(range(1, len(done) + 1))
    plain = start(*MODEL, *words, f"train.steps={len(done)}", "checkpoint.every=0", "run.dir=straight")
    assert ended(plain)[0] == 0
    ours, theirs = ([line["loss"] for line in lines(folder / run / "metrics.jsonl")] for run in ("run", "straight"))
    assert ours == pytest.approx(theirs, rel=1e-9)


def test_a_node_is_killed_and_comes_back(folder: Path, start_node: Any, start: Any, spaces: tuple[str, str]) -> None:
    """The older node, which leads, is killed. No checkpoint is on disk, so all is loaded from memory. After the node
    returns, all four ranks train on the layout that was asked for.
    """
    run, words = folder / "run", ("layout.tp=2", "checkpoint.every=0", "checkpoint.memory_every=2")
    nodes = [start_node(f"10.99.0.{n + 1}", *words, space=spaces[n]) for n in range(2)]
    until(lambda: len(steps(run)) >= 7, nodes[0].process)
    assert not list((run / "checkpoints").glob("step-*"))
    nodes[0].kill()
    until(lambda: world(run) == 2 and len(events_of(run, "recovered")) == 1, nodes[1].process)
    (back,) = events_of(run, "recovered")
    assert back["source"] == "memory" and back["step"] >= 6
    nodes[0] = start_node("10.99.0.1", *words, space=spaces[0])
    until(lambda: world(run) == 4 and steps(run)[-1:] > [back["step"] + 5], nodes[1].process)
    nodes[1].process.send_signal(signal.SIGTERM)
    for node in nodes:
        code, said = node.end()
        assert code == 0 and "Traceback" not in said, said
    assert_undisturbed(folder, start)


def test_a_partition_heals(folder: Path, start_node: Any, start: Any, spaces: tuple[str, str]) -> None:
    """While the cable is cut, the leader's side continues and the other side waits. With the cable back, both train."""
    run, words = folder / "run", ("checkpoint.every=2",)
    nodes = [start_node(f"10.99.0.{n + 1}", *words, space=spaces[n]) for n in range(2)]
    until(lambda: len(steps(run)) >= 3, nodes[0].process)
    subprocess.run(["ip", "-n", spaces[0], "link", "set", "cable", "down"], check=True)
    until(lambda: world(run) == 2, nodes[0].process)
    subprocess.run(["ip", "-n", spaces[0], "link", "set", "cable", "up"], check=True)
    until(lambda: world(run) == 4, nodes[0].process)
    nodes[0].process.send_signal(signal.SIGTERM)
    for node in nodes:
        code, said = node.end()
        assert code == 0 and "Traceback" not in said, said
    assert_undisturbed(folder, start)


def test_two_neighbours_are_lost(folder: Path, start_node: Any, start: Any) -> None:
    """Two of three nodes are lost, and with them both copies of one node's share. The run resumes from the disk, and
    the nodes never return.
    """
    run = folder / "run"
    batch = ("train.global_batch=24", "run.eval_samples=24")
    words = ("layout.tp=2", "checkpoint.every=5", "checkpoint.memory_every=1", *batch)
    nodes = [start_node(f"127.0.0.{n + 2}", *words, nodes="1:3") for n in range(3)]
    until(lambda: len(steps(run)) >= 8 and world(run) == 6, nodes[0].process)
    leader = next(n for n, node in enumerate(nodes) if list((folder / f"127.0.0.{n + 2}").glob("*/pid-0-0")))
    for n in {0, 1, 2} - {leader}:
        os.kill(nodes[n].process.pid, signal.SIGSTOP)  # neither node may see the end of the other one
    for n in {0, 1, 2} - {leader}:
        nodes[n].kill()
    until(lambda: len(events_of(run, "recovered")) == 1, nodes[leader].process)
    (back,) = events_of(run, "recovered")
    assert back["source"] == "disk" and (back["step"] - 1) % 5 == 0 and world(run) == 2
    nodes[leader].process.send_signal(signal.SIGTERM)
    code, said = nodes[leader].end()
    assert code == 0 and "Traceback" not in said, said
    assert_undisturbed(folder, start, *batch)
