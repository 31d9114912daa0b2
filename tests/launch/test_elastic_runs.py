"""Elastic runs through the real command, whose ranks and nodes are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.nodes import knock
from tests.checkpoint.runs import lines, steps
from tests.support.commands import ended, ranks, torchrun
from tests.support.waiting import until

# The random numbers of dropout depend on the layout.
DROPOUTS = ("model.dropout=0", "model.attention_dropout=0", "model.embedding_dropout=0")
PLAIN = (*DROPOUTS, "train.steps=30", "checkpoint.every=3", "optimizer.lr=1e-4")


def losses(run: Path) -> list[float]:
    assert steps(run) == list(range(1, 31)), "each step once"
    return [line["loss"] for line in lines(run / "metrics.jsonl")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run / "events.jsonl") if event["kind"] == kind]


@pytest.mark.wide
def test_one_of_eight_is_killed(folder: Path, start: Any) -> None:
    """The losses are those of an undisturbed run. When the device has rested, all eight ranks train again."""
    layout = ("layout.tp=2", "layout.pp=2")
    assert ended(start("--nproc", "1", *PLAIN, "run.dir=straight"))[0] == 0
    run = folder / "run"
    process = start("--nproc", "8", *layout, *PLAIN, "faults.elastic=true", "faults.rest=1s")
    until(lambda: len(steps(run)) >= 5, process)
    os.kill(ranks(folder)[3], signal.SIGKILL)
    code, said = ended(process)
    assert code == 0, said
    assert losses(run) == pytest.approx(losses(folder / "straight"), rel=2e-6)
    worlds = [event["world"] for event in lines(run / "events.jsonl") if event["kind"] in ("start", "resume")]
    assert worlds == [8, 4, 8] or worlds == [8, 4], worlds  # the run may have ended before the device came back
    (back,) = events(run, "recovered")
    assert back["detection_s"] < 15 and back["restart_s"] > 0 and back["source"] == "disk"
    assert "rank 3 was killed by SIGKILL" in events(run, "restart")[0]["text"]


@pytest.mark.wide
def test_a_node_of_torchrun_is_lost_and_comes_back(folder: Path, start: Any) -> None:
    """The option `--nnodes 1:2` lets torch's agents agree on the remaining nodes. The ranks choose a layout for that
    number.
    """
    port = torchrun(1)[-1]
    settings = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
    agent = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "2", "--max-restarts", "3"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one"]
    agent += ["--rdzv-conf", settings]
    model = (*DROPOUTS, "train.precision=fp64", "optimizer.lr=1e-4")
    words = (*model, "layout.tp=2", "checkpoint.every=2", "faults.elastic=true")
    run, env = folder / "run", {"GLOO_SOCKET_IFNAME": "lo"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a returning agent waits for an outdated address

    def worlds() -> list[int]:
        return [event["world"] for event in lines(run / "events.jsonl") if event["kind"] in ("start", "resume")]

    first = start(*words, launcher=agent, env=env)
    until(lambda: knock("127.0.0.1", int(port)) == "open", first)  # this agent has the store of both agents
    second = start(*words, launcher=agent, env=env)
    until(lambda: worlds()[-1:] == [4] and len(steps(run)) >= 4, first)
    os.killpg(second.pid, signal.SIGKILL)
    until(lambda: worlds()[-1:] == [2], first)
    before = steps(run)[-1]
    until(lambda: steps(run)[-1] > before + 2, first)
    third = start(*words, launcher=agent, env=env)
    until(lambda: worlds()[-1:] == [4], first)
    before = steps(run)[-1]
    until(lambda: steps(run)[-1] > before + 2, first)
    for process in (first, third):
        os.killpg(process.pid, signal.SIGKILL)
    count = len(steps(run))
    assert ended(start(*model, "run.dir=straight", "checkpoint.every=0", f"train.steps={count}"))[0] == 0
    ours, theirs = (lines(path / "metrics.jsonl")[:count] for path in (run, folder / "straight"))
    assert [line["step"] for line in ours] == list(range(1, count + 1)), "each step once"
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-9)
