"""Tests of jobs under a real Slurm with two nodes. A fixture starts Slurm if it and munge are installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from tests.checkpoint.runs import lines, saved, steps
from tests.faults.planted import numbers

pytestmark = pytest.mark.wide

# A requeued job waits until its credentials expire, by default for two minutes. Hence cred_expire=5.
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={at}/munge/socket,cred_expire=5
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool.%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


def free_ports(count: int) -> list[int]:
    # Open all of them before closing any, so that they differ.
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def until(ready: Callable[[], Any], what: str, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm controller and two nodes, all on this machine. They are stopped after the test."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch", "srun"))):
        pytest.skip("Slurm can't be started here")
    at = Path("/tmp") / f"mw-slurm-{os.getpid()}"  # noqa: S108  # sockets' paths must be short
    for name in ("munge", "state", "spool.n1", "spool.n2"):
        (at / name).mkdir(parents=True)
    (at / "munge" / "key").write_bytes(os.urandom(1024))
    (at / "munge" / "key").chmod(0o400)
    (at / "munge").chmod(0o711)
    shutil.chown(at / "munge", "munge")
    shutil.chown(at / "munge" / "key", "munge")
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = " ".join(f"--{option}={at}/munge/{name}" for option, name in names.items())
    conf = at / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname(), at=at, ports=free_ports(3)))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    subprocess.run(["su", "munge", "-s", "/bin/sh", "-c", f"munged {options}"], check=True)
    for command in (["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
        subprocess.run(command, check=True)

    def idle() -> bool:
        listing = subprocess.run(["sinfo", "-h", "-o", "%T %D"], capture_output=True, text=True, check=False)
        return listing.stdout.strip() == "idle 2"

    until(idle, "the nodes do not come up", 60.0)
    yield at
    subprocess.run(["scancel", "--user=root", "--signal=KILL"], check=False)
    for pid in (*at.glob("*.pid"), at / "munge" / "pid"):
        os.kill(int(pid.read_text()), signal.SIGTERM)
    time.sleep(1.0)
    shutil.rmtree(at, ignore_errors=True)


def launcher_of(task: int) -> int:
    """Return the process id of a task's launcher, which is recognised by its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        ours = b"SLURM_PROCID=%d" % task in words and not any(word.startswith(b"RANK=") for word in words)
        if ours and b"--nodes" in command and b"meshwright\0train" in command:
            return int(path.parent.name)
    raise AssertionError(f"task {task} has no launcher")


@pytest.fixture
def submitted(slurm: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that submits job 1, with two nodes of two ranks, by `meshwright submit` and returns its log."""
    monkeypatch.chdir(folder)
    (folder / "bin").mkdir()
    script = folder / "bin" / "meshwright"
    root = Path(__file__).parents[2]
    text = f'export PYTHONPATH={root} OMP_NUM_THREADS=1\nexec {sys.executable} -m meshwright "$@"\n'
    script.write_text(f"#!/bin/sh\n{text}")
    script.chmod(0o755)

    def submitting(*words: str) -> Path:
        options = ["--nodes", "2", "--ranks-per-node", "2", "--setup", f"export PATH={folder / 'bin'}:$PATH", "--run"]
        assert main(["submit", "config.yaml", "--slurm", *options, *words]) == 0
        return folder / "run-1.log"

    return submitting


def worlds(run: Path) -> list[int]:
    """Return the number of ranks of each start of a run."""
    return [event["world"] for event in lines(run / "events.jsonl") if event["kind"] in ("start", "resume")]


def cancelled(log: Path, run: Path) -> int:
    """Cancel the job, and assert that it saves and is not requeued. Return its last step.

    The metrics must hold each step up to the last one once.
    """
    subprocess.run(["scancel", "1"], check=True)
    until(lambda: "the job was cancelled: it is not requeued" in log.read_text(), "it is not cancelled")
    done = steps(run)
    assert done == list(range(1, len(done) + 1)) and saved(run)[-1] == done[-1]
    return done[-1]


def test_an_elastic_job_outlives_a_task_and_is_cancelled(folder: Path, submitted: Callable[..., Path]) -> None:
    """The launcher of one node is killed with all of its ranks, and the other node resumes from memory."""
    words = ["faults.elastic=true", "faults.lost_after=6s", "checkpoint.every=0", "checkpoint.memory_every=2"]
    log, run = submitted("--time", "10min", "--lead", "30s", *words), folder / "run"
    until(lambda: worlds(run) == [4] and len(steps(run)) >= 6, "it does not start")
    os.kill(launcher_of(1), signal.SIGKILL)
    until(lambda: worlds(run) == [4, 2], "it does not go on")
    until(lambda: any(event["kind"] == "recovered" for event in lines(run / "events.jsonl")), "it makes no steps")
    assert [event["source"] for event in lines(run / "events.jsonl") if event["kind"] == "recovered"] == ["memory"]
    cancelled(log, run)


def test_a_job_is_killed_reaches_its_time_limit_and_goes_on_bit_for_bit(
    folder: Path, submitted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job is started three times: the scheduler kills its tasks, its time limit comes near, and it is cancelled."""
    # Large batches, so that a job of a minute or two has only a few steps.
    model = ["train.global_batch=512", "train.micro_batch=4", "run.eval_samples=16"]
    # The names of the nodes exist in this Slurm alone, so ranks could not find each other by them.
    meeting = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={free_ports(1)[0]}"
    log = submitted("--time", "2min", "--lead", "30s", "--setup", meeting, "checkpoint.every=5", *model)
    run = folder / "run"
    until(lambda: worlds(run) == [4] and len(saved(run)) > 1, "it does not start")
    subprocess.run(["scancel", "--signal=KILL", "1.0"], check=True)
    for life, last in ((2, "killed"), (3, "limit")):
        until(lambda life=life: log.read_text().count("the job is requeued") == life - 1, f"{last}: not requeued")
        newest = saved(run)[-1]
        assert last == "killed" or newest == steps(run)[-1], "all that was trained is saved before the limit"
        until(lambda life=life: worlds(run) == [4] * life, f"{last}: it does not go on")
        until(lambda newest=newest: steps(run)[-1] > newest + 3, "it makes no steps")
    resumed = [event["step"] for event in lines(run / "events.jsonl") if event["kind"] == "resume"]
    done, ours = cancelled(log, run), numbers(run)
    assert len(resumed) == 2 and 0 < resumed[0] < resumed[1] < done
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--nproc", "4", "run.dir=straight", "checkpoint.every=0", f"train.steps={done}", *model]
    assert main(["train", "config.yaml", *words]) == 0
    assert ours == numbers(folder / "straight")
