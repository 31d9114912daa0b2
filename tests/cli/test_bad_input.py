"""Tests of mistakes of users: each gives one sentence that names the fix, exit code 2 and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from tests.support.processes import named_below, tree_below
from tests.support.token_files import write_documents
from tests.support.waiting import HANG_S, until

GOOD = """
model: {layers: 4, hidden: 32, heads: 4, vocab: 300, seq: 16}
data: {prefixes: [tokens]}
train: {steps: 2, global_batch: 8}
run: {device: cpu, tensorboard: false}
"""

# By name: (arguments after `meshwright train config.yaml`, some words that the error message must contain).
TRAIN = {
    "unknown section": (["optimiser.lr=1"], "did you mean 'optimizer'"),
    "another model": (["model.preset=codegeex-13b"], "model.preset=codegeex-13b can't be trained yet (CodeGeeX has 39"),
    "unknown key": (["model.hiden=64"], "did you mean 'model.hidden'?"),
    "negative size": (["model.layers=-1"], "model.layers=-1 must be greater than zero"),
    "zero size": (["train.micro_batch=0"], "must be greater than zero"),
    "not a number": (["train.steps=many"], "must be a whole number"),
    "a fraction of a step": (["train.steps=1.5"], "must be a whole number"),
    "precision that does not exist": (["train.precision=fp7"], "fp64, fp32, bf16, fp16"),
    "tokens that fp8 can't take": (["train.precision=fp8", "model.seq=15"], "micro_batch x model.seq is 15"),
    "not key=value": (["train.steps"], "section.key=value"),
    "heads do not divide hidden": (["model.heads=5"], "give model.head_dim"),
    "kv heads do not divide heads": (["model.kv_heads=3"], "try 1, 2 or 4"),
    "tp does not divide heads": (["layout.tp=3", "--nproc", "3"], "try layout.tp=1, 2 or 4"),
    "tp does not divide ffn": (["layout.tp=4", "model.ffn=126", "--nproc", "4"], "try model.ffn=128"),
    "world not divisible": (["layout.tp=2", "layout.pp=2", "--nproc", "6"], "start 4 or 8 ranks"),
    "more stages than layers": (["layout.pp=8", "--nproc", "8"], "lower layout.pp"),
    "chunks without interleaving": (["layout.chunks=2"], "pipeline.schedule=interleaved"),
    "split that does not add up": (["layout.pp=2", "pipeline.split=[1,2]", "--nproc", "2"], "add up to layers=4"),
    "global batch": (["train.global_batch=7", "--nproc", "2"], "try 6 or 8"),
    "micro-batch": (
        ["train.micro_batch=8", "--nproc", "2"], "dp x micro_batch = 2 x 8 = 16: set train.micro_batch=4 (the training "
        "stays the same), or train.global_batch=16"
    ),
    "more ranks than samples": (
        ["layout.tp=2", "--nproc", "64"], "train.global_batch=8 can't be divided over 32 data-parallel ranks: use at "
        "most 16 ranks, or train.global_batch=32"
    ),
    "offloading nothing": (["recompute.offload=true"], "recomputes none: set recompute.mode=full"),
    "no pieces": (["recompute.pieces=0"], "recompute.pieces=0 must be greater than zero"),
    "more pieces than tokens": (["recompute.pieces=9999"], "tokens of a rank's micro-batch: lower it"),
    "pieces of experts": (["recompute.pieces=2", "model.experts.count=4"], "all blocks of this model have experts"),
    "scaling without rope": (["model.rope_scaling.kind=linear"], "model.rope_scaling has no effect"),
    "a key of another scaling": (["model.rope_scaling.beta_fast=8"], "has no effect with model.rope_scaling.kind=none"),
    "ramp that misses": (["train.ramp=[3,2,100]"], "does not lead from 3"),
    "ramp through an odd size": (["train.ramp=[1,1,64]", "--nproc", "2"], "passes through 1 samples"),
    "a sequence that cp can't cut": (
        ["layout.cp=2", "model.seq=18", "--nproc", "2"], "into 4 equal parts: try model.seq=20"
    ),
    "a sequence without stripes": (
        ["layout.cp=2", "model.seq=17", "context.order=striped", "--nproc", "2"], "into 2 equal parts: try model.seq=18"
    ),
    "heads for tokens": (
        ["layout.cp=8", "context.kind=ulysses", "--nproc", "8"], "4 key-value heads of a tp rank evenly over 8 ranks"
    ),
    "kv heads for tokens": (
        ["layout.cp=2", "model.heads=6", "model.kv_heads=3", "model.hidden=36", "context.kind=ulysses", "--nproc", "2"],
        "use context.kind=gather or ring",
    ),
    "heads inside groups": (
        ["layout.cp=8", "context.kind=hybrid", "context.inner=8", "--nproc", "8"], "use context.kind=gather or ring"
    ),
    "inner does not divide cp": (
        ["layout.cp=6", "context.kind=hybrid", "context.inner=4", "model.seq=24", "--nproc", "6"],
        "context.inner=4 does not divide layout.cp=6: try 1, 2, 3 or 6",
    ),
    "inner without hybrid": (["layout.cp=2", "context.inner=2", "--nproc", "2"], "belongs to context.kind=hybrid"),
    "hybrid without inner": (
        ["layout.cp=2", "context.kind=hybrid", "--nproc", "2"], "context.kind=hybrid context.inner=2, or neither"
    ),
    "an unknown kind": (["layout.cp=2", "context.kind=rings", "--nproc", "2"], "ring"),
    "an unknown order": (["layout.cp=2", "context.order=zig", "--nproc", "2"], "zigzag"),
    "dropout over shared sequences": (
        ["layout.cp=2", "model.dropout=0.1", "--nproc", "2"], "set model.attention_dropout=0 or layout.cp=1"
    ),
    "ep without experts": (["layout.ep=2", "--nproc", "2"], "the model has none: set model.experts.count, or leave"),
    "etp without experts": (["layout.etp=2", "--nproc", "2"], "leave layout.etp=2 out"),
    "order": (["layout.order=tp-dp", "layout.pp=2", "--nproc", "2"], "pp"),
    "sequence parallel tokens": (
        ["layout.tp=4", "layout.sequence_parallel=true", "model.seq=15", "--nproc", "4"], "sequence_parallel=false"
    ),
    "warm-up longer than the run": (["lr.warmup=10"], "lower it"),
    "minimum above the peak": (["lr.min=1"], "lower it"),
    "unknown preset": (["model.preset=gpt2-125m"], "did you mean 'gpt2-124m'"),
    "unknown schedule": (["pipeline.schedule=1f1"], "did you mean '1f1b'"),
    "dropout of one": (["model.dropout=1.0"], "below 1"),
    "betas": (["optimizer.betas=[0.9,1.0]"], "two numbers in [0, 1)"),
    "weights for nothing": (["data.weights=[1,2]"], "give one each, or none"),
    "split of two": (["data.split=[1,2]"], "three shares"),
    "missing token file": (["data.prefixes=[nowhere]"], "nowhere"),
    "vocabulary too small for the data": (["model.vocab=200"], "set model.vocab=257"),
    "too few tokens for the sequence": (["model.seq=100000"], "too small"),
    "evaluation samples": (["run.eval_samples=3", "--nproc", "2"], "try 4"),
    "too many evaluation samples": (["run.eval_samples=3000000"], "use 2097152 at most"),
    "no ranks": (["--nproc", "0"], "at least 1"),
    "a device that is not there": (["run.device=npu"], "run.device=cpu"),
    "a back end without devices": (["comm.backend=nccl", "run.device=auto", "--nproc", "2"], "use comm.backend=auto"),
    "nothing to start from": (["--from", "nowhere"], "there is no folder 'nowhere': name a run's"),
    "a key without its section": (["lr=1e-4"], "(did you mean optimizer.lr?)"),
    "another one": (["steps=10"], "(did you mean train.steps?)"),
    "a key by another name": (["learning_rate=1e-4"], "(did you mean optimizer.lr?)"),
    "a key of nobody": (["xyzzy=1"], "section.key=value, e.g. train.steps=100"),
    "a step that is no number": (["--from", "runs/a@last"], "after @ comes a step's number"),
    "negative restarts": (["--restarts", "-1"], "must not be negative"),
    "unknown option": (["--nprocs", "2"], "--help"),
    "run folder is a file": (["run.dir=config.yaml"], "config.yaml is not a folder: choose another run.dir"),
    "run folder below a file": (["run.dir=config.yaml/run"], "config.yaml is not a folder: choose another run.dir"),
    "run folder with a strange name": (['run.dir="a\\0"'], "that is not allowed in a path: choose another run.dir"),
}  # fmt: skip

# The same for a model with eight experts of 20 features. Each token goes to two of them.
EXPERTS = ["model.experts.count=8", "model.experts.ffn=20"]
TRAIN |= {
    name: ([*EXPERTS, *words], expected) for name, (words, expected) in {
        "experts over ranks that do not divide them": (
            ["layout.ep=3", "train.global_batch=9", "--nproc", "3"], "model.experts.count=8: try 1, 2, 4 or 8"
        ),
        "more choices than experts": (["model.experts.top_k=9"], "set it to 8 or less"),
        "no choice": (["model.experts.top_k=0"], "must be greater than zero"),
        "groups that do not divide": (["model.experts.groups=3"], "try 1, 2, 4 or 8"),
        "more groups used than there are": (
            ["model.experts.groups=4", "model.experts.groups_used=5"], "set it to 4 or less"
        ),
        "more choices than the groups have": (
            ["model.experts.groups=4", "model.experts.top_k=3"], "raise model.experts.groups_used"
        ),
        "ep beyond the ranks": (["layout.ep=8", "--nproc", "2"], "dp*cp=2*1=2: choose ep=1 or 2"),
        "ep beyond the folded ranks": (
            ["layout.ep=4", "layout.etp=2", "--nproc", "4"], "tp*cp*dp/etp=1*1*4/2=2: choose ep=1 or 2"
        ),
        "etp beyond the folded ranks": (["layout.etp=4", "--nproc", "2"], "choose etp=1 or 2"),
        "etp that does not divide an expert": (["layout.etp=8", "--nproc", "8"], "try layout.etp=1, 2, 4, 5, 10 or 20"),
        "tp that does not divide the shared expert": (
            ["model.experts.shared=1", "model.experts.ffn=10", "layout.tp=4", "layout.etp=1", "--nproc", "4"],
            "try layout.tp=1, 2, 5 or 10",
        ),
        "tokens that tp ranks can't share": (
            ["layout.tp=4", "model.seq=15", "--nproc", "4"], "change model.seq, train.micro_batch or layout.tp"
        ),
        "a capacity of zero": (["model.experts.capacity=0"], "give e.g. 1.25, or leave it out"),
        "a capacity without an end": (["model.experts.capacity=.inf"], "must be a finite number"),
        "experts in no block": (["model.experts.first_dense=4"], "lower them, or set model.experts.count=0"),
        "experts in no block of so few": (["model.experts.every=5"], "lower them, or set model.experts.count=0"),
        "experts on other stages": (
            ["layout.order=dp-pp-tp-cp-ep", "layout.ep=2", "layout.pp=2", "--nproc", "4"], "end it with pp"
        ),
        "experts on other tp ranks": (
            ["layout.order=dp-tp-cp-ep-pp", "layout.ep=2", "layout.tp=2", "--nproc", "4"], "begin it with tp"
        ),
        "unknown router": (["model.experts.router=tanh"], "softmax, sigmoid"),
        "unknown key of experts": (["model.experts.topk=2"], "did you mean 'model.experts.top_k'?"),
    }.items()
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a valid config and its token files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(GOOD)
    (tmp_path / "text").mkdir()
    for n in range(12):
        (tmp_path / "text" / f"{n}.txt").write_text(f"document {n} says this and that. " * 20)
    assert main(["data", "prepare", "text", "--out", "tokens", "--tokenizer", "bytes", "--workers", "1"]) == 0
    return tmp_path


def sentence(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Run a command that must fail with exit code 2, and return its error message, which must be one line."""
    capsys.readouterr()
    assert main(words) == 2
    captured = capsys.readouterr()
    # The first line of a run is printed before anything is checked.
    lines = [line for line in captured.err.strip().splitlines() if not line.startswith("starts ")]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("meshwright: ") and "Traceback" not in captured.err
    assert captured.out == ""
    return lines[0]


@pytest.mark.parametrize("name", TRAIN)
def test_train_refuses(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = TRAIN[name]
    assert expected in sentence(capsys, ["train", "config.yaml", *words])


def test_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no config file" in sentence(capsys, ["train", "nothing.yaml"])
    (here / "bad.yaml").write_text("model: {layers: 4\ntrain: [")
    assert "not valid YAML" in sentence(capsys, ["train", "bad.yaml"])
    (here / "list.yaml").write_text("- a\n- b\n")
    assert "sections" in sentence(capsys, ["train", "list.yaml"])
    (here / "empty.yaml").write_text("")
    assert "must be given" in sentence(capsys, ["train", "empty.yaml"])
    (here / "sizes.yaml").write_text("model: {layers: 2}\ndata: {prefixes: [tokens]}\n")
    assert "model.hidden and model.heads" in sentence(capsys, ["train", "sizes.yaml"])
    assert "did you mean 'train'" in sentence(capsys, ["trian", "config.yaml"])


INDENT = "(indent this line like the others of its section)"
YAML = {
    "model:\n  layers: 2\n   hidden: 4\n": "line 3 is not valid YAML: mapping values are not allowed here (indent this",
    "model:\n  layers: 2\n hidden: 4\n": f"but found '<block mapping start>' {INDENT}",
    "model:\n\tlayers: 2\n": "found character '\\t' that cannot start any token (indent with spaces, not with tabs)",
    "model: {layers: 2\nhidden: 3\n": "line 2 is not valid YAML: expected ',' or '}', but got ':' (close the bracket",
    "model:\nlayers: 2\n": "unknown section 'layers' (did you mean model.layers? indent it below its section)",
    "model:\n  layers:2\n": "not 'layers:2': put a space after each colon",
}


@pytest.mark.parametrize("text", YAML)
def test_what_is_wrong_with_a_config_file(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.yaml").write_text(text)
    assert YAML[text] in sentence(capsys, ["config", "show", "bad.yaml"])


def test_a_model_of_the_hub_has_to_be_downloaded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "meta-llama/Llama-3.1-8B"
    words = (
        f"generate {name} --prompt a", f"import {name} --to x", f"train config.yaml --from {name}",
        f"plan {name} --cluster h100-80g-dgx", f"data prepare text --out x --tokenizer {name}",
        f"data chat x.jsonl --model {name} --out x",
    )  # fmt: skip
    for each in words:
        message = sentence(capsys, each.split())
        assert f"`hf download {name} --local-dir models/Llama-3.1-8B` gets it" in message, message
    assert "hf download" not in sentence(capsys, ["generate", "runs/first", "--prompt", "a"])


def test_a_folder_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs" / "config").mkdir(parents=True)
    for command in (["generate", "runs/confg", "--prompt", "a"], ["inspect", "runs/confg@3"]):
        message = sentence(capsys, command)
        assert "there is no folder 'runs/confg' (did you mean 'runs/config'?): name a run's folder" in message


def test_damaged_token_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index, tokens = (here / "tokens.idx").read_bytes(), (here / "tokens.bin").read_bytes()
    (here / "tokens.idx").write_bytes(index[:-9])
    assert "tokens.idx" in sentence(capsys, ["train", "config.yaml"])
    (here / "tokens.idx").write_bytes(b"not an index at all" * 4)
    assert "tokens.idx" in sentence(capsys, ["train", "config.yaml"])
    (here / "tokens.idx").write_bytes(index)
    (here / "tokens.bin").write_bytes(tokens[:-4])
    assert "tokens.bin" in sentence(capsys, ["train", "config.yaml"])
    (here / "tokens.bin").unlink()
    assert "tokens.bin" in sentence(capsys, ["train", "config.yaml"])


def command(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, timeout=HANG_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )  # fmt: skip


@pytest.mark.wide
def test_token_beyond_the_vocabulary_stops_every_rank(here: Path) -> None:
    """A token beyond the vocabulary is found when it is read, and reported once, by the rank that read it.

    A file without metadata does not state its vocabulary, so it can't be checked before.
    """
    write_documents("foreign", [np.full(50, 999)] * 20)
    done = command("train", "config.yaml", "--nproc", "2", "layout.tp=2", "data.prefixes=[foreign]")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("begin a run with model.vocab=1000 or more") == 1 and "Traceback" not in done.stderr


def test_port_taken(here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = command(
            "train", "config.yaml",
            RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"port {port}" in done.stderr and "choose another" in done.stderr and "Traceback" not in done.stderr


def test_a_rank_that_dies_ends_the_run(here: Path) -> None:
    """The command says that a rank was killed and ends, and so do the other ranks."""
    run = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", "config.yaml", "--nproc", "4", "layout.tp=2", "train.steps=9999"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    metrics = here / "runs" / "default" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size, run)
    below, ranks = tree_below(run.pid), named_below(run.pid, "meshwright rank ")
    assert len(ranks) == 4
    os.kill(ranks[-1], 9)
    _, stderr = run.communicate(timeout=HANG_S)
    assert run.returncode == 1
    assert "was killed by SIGKILL" in stderr and "Traceback" not in stderr
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), why="ranks outlived their launcher")
