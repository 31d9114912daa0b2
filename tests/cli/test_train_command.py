"""Tests of `meshwright train` as a user runs it: with its own ranks and with torchrun's, and the files it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.cli.train import say_start
from meshwright.config.load import load_config
from meshwright.errors import UserError
from meshwright.launch.processes import ProcessPlace, find_place, first_host, rendezvous
from tests.support.oracle import small_config
from tests.support.ports import reserved_port
from tests.support.waiting import HANG_S

CONFIG = """
model: {layers: 4, hidden: 32, heads: 4, vocab: 257, seq: 16, norm: rmsnorm, mlp: swiglu, position: rope, bias: false}
layout: {tp: 2, pp: 2, sequence_parallel: true}
data: {prefixes: [tokens], split: [0.8, 0.2, 0]}
train: {steps: 6, global_batch: 8, ramp: [4, 4, 12]}
optimizer: {lr: 1e-2}
lr: {warmup: 2}
run: {dir: run, eval_every: 3, device: cpu}
"""
KEYS = {
    "step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "consumed", "global_batch", "step_time_s",
    "tokens_per_s", "phases", "comm", "time", "tflops", "mfu", "exposed_s", "ranks",
}  # fmt: skip
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    (path / "text").mkdir()
    for n in range(20):
        (path / "text" / f"{n}.txt").write_text(f"{n} little words make a document of no great length. " * 8)
    words = [
        "data",
        "prepare",
        str(path / "text"),
        "--out",
        str(path / "tokens"),
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    assert main(words) == 0
    (path / "config.yaml").write_text(CONFIG)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "train", "config.yaml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S, env=ENV)


def test_a_run_and_what_it_leaves(folder: Path) -> None:
    done = train(folder, "--nproc", "4")
    assert done.returncode == 0, done.stderr
    steps = lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["global_batch"] for line in steps] == [4, 4, 4, 8, 8, 8]
    for line in steps:
        assert set(line) == KEYS
        assert line["tokens"] == 16 * line["global_batch"] and line["loss_scale"] is None and not line["skipped"]
        assert set(line["phases"]) == {"data", "forward", "backward", "reduce", "optimizer"}
        assert {"tp", "pp", "world", "embedding"} <= set(line["comm"])
        assert set(line["comm"]["tp"]) == {"calls", "payload_bytes", "wire_bytes"}
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["step"] for line in lines(folder / "run" / "validation.jsonl")] == [3, 6]
    written = load_config(folder / "run" / "config.yaml")
    assert written == load_config(folder / "config.yaml")
    assert list((folder / "run" / "tensorboard").glob("events*"))
    assert "tp" in done.stdout and "loss" in done.stdout, "the summary"

    again = train(folder, "--nproc", "4")
    assert again.returncode == 2 and "complete at step 6" in again.stderr and "raise train.steps" in again.stderr


@pytest.mark.wide
def test_the_same_losses_under_torchrun_and_in_one_process(folder: Path) -> None:
    port = reserved_port()
    nodes = []
    for node in (0, 1):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node),
            "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(port),
            "-m", "meshwright", "train", "config.yaml", "run.dir=two", "train.steps=3",
        ]  # fmt: skip
        nodes.append(subprocess.Popen(command, cwd=folder, env=ENV, stderr=subprocess.PIPE, text=True))
    for number, agent in enumerate(nodes):
        _, stderr = agent.communicate(timeout=HANG_S)
        assert agent.returncode == 0, stderr
        printed = [words in stderr for words in ("starts two with 4 ranks", "step 1/3", "finished 3 steps")]
        assert printed == [number == 0] * 3, f"only the first node prints: {stderr}"
    one = train(folder, "run.dir=one", "train.steps=3", "layout.tp=1", "layout.pp=1", "--nproc", "1")
    assert one.returncode == 0, one.stderr
    straight = train(folder, "--nproc", "4", "run.dir=straight", "train.steps=3", "--json")
    assert straight.returncode == 0, straight.stderr
    assert json.loads(straight.stdout)["last"] == lines(folder / "straight" / "metrics.jsonl")[-1]
    two, alone, same = (
        [line["loss"] for line in lines(folder / name / "metrics.jsonl")] for name in ("two", "one", "straight")
    )
    assert two == same, "the ranks of two launchers are the same as those of one"
    assert two == pytest.approx(alone, rel=1e-5)


def test_places() -> None:
    assert find_place({}) == ProcessPlace(0, 1, 0, 1)
    assert find_place({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}) == ProcessPlace(
        5, 8, 1, 4, True
    )
    slurm = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77"}
    assert find_place(slurm) == ProcessPlace(), "a batch script, not a step of srun"
    slurm["SLURM_STEP_ID"] = "0"
    assert find_place(slurm) == ProcessPlace(9, 16, 1, 8, True)
    assert rendezvous(slurm | {"SLURM_STEP_NODELIST": "gpu[07-09,12],x1"}) == ("gpu07", 12387)
    assert rendezvous({"MASTER_ADDR": "h", "MASTER_PORT": "1"}) == ("h", 1)
    for wrong in ({"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "5", "WORLD_SIZE": "2"}, slurm | {"SLURM_NTASKS": "9"}):
        with pytest.raises(UserError, match="unset it, or start by a launcher"):
            find_place(wrong)
    assert [first_host(n) for n in ("a1", "a1,b2", "n[3,5]", "n[003-007]")] == ["a1", "a1", "n3", "n003"]
    assert [first_host(n) for n in ("x[0-1]n[2-3],y", "n[07]-ib", "a-1,b")] == ["x0n2", "n07-ib", "a-1"]


@pytest.mark.wide
def test_the_example_that_brings_its_own_model(tmp_path: Path) -> None:
    """examples/own_model.py has the same losses on one process and on dp=2 x pp=2, and its own monitored value."""
    script = Path(__file__).parents[2] / "examples" / "own_model.py"
    alone = [sys.executable, str(script), str(tmp_path / "one"), "30"]
    four = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    four += [str(script), str(tmp_path / "four"), "30"]
    for command in (alone, four):
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=ENV, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, many = (lines(tmp_path / name / "metrics.jsonl") for name in ("one", "four"))
    assert [a["loss"] for a in many][:20] == pytest.approx([a["loss"] for a in one][:20], rel=1e-4)
    assert many[-1]["loss"] < 0.97 * many[0]["loss"] and 0 < many[-1]["monitored"]["accuracy"] <= 1


def test_only_a_new_run_is_said_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(train={"steps": 90}, run={"dir": str(tmp_path)})
    say_start(config, 2)
    (tmp_path / "checkpoints" / "step-00000060").mkdir(parents=True)
    say_start(config, 2)
    started, goes_on = capsys.readouterr().err.splitlines()
    assert started == f"starts {tmp_path} with 2 ranks, 90 steps"
    assert goes_on == f"continues {tmp_path} on 2 ranks, up to step 90"


def test_a_refused_twin_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "llama3-8b-lora1", "--tiny", "train.steps=2"]) == 2
    assert "lr.warmup=3 is longer than train.steps=2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "its data and its base are not made for nothing"
