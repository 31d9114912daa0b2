"""Tests of the first steps of a new user: the help, shell completion, `init`, and an automatic layout."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.cli.completion import bash, fish, zsh
from meshwright.cli.main import COMMANDS, GROUPS, main, usage
from meshwright.cli.train import write_event_of
from meshwright.config.load import config_keys, load_config
from meshwright.launch import this_machine
from meshwright.launch.this_machine import best_layout, resolve, words_of
from meshwright.plan.cluster import load_cluster
from meshwright.record.run_notes import read_events, write_event
from meshwright.show.units import size
from tests.support.token_files import write_documents
from tests.support.waiting import HANG_S

LARGE = (("1b", 16, "h100-80g-dgx"), ("llama3-70b", 64, "h100-80g-dgx"))
CASES = (("tiny", 2, "laptop"), *(pytest.param(*case, marks=pytest.mark.wide) for case in LARGE))


@pytest.mark.parametrize("model, devices, cluster", CASES)
def test_init_writes_what_was_planned(
    model: str, devices: int, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "config.yaml"
    words = f"--model {model} --data data/text --devices {devices} --cluster {cluster} --out {out}".split()
    assert main(["init", *words, *(["--global-batch", "64"] if devices > 2 else [])]) == 0
    config = load_config(out)
    best = best_layout(config, devices, load_cluster(cluster), 0.94 * load_cluster(cluster).device.memory_gib)
    assert words_of(config, best) == [], "the planner would change nothing in the file"
    assert f"--nproc {devices}" in out.read_text() and "copies of the model (dp)" in out.read_text().splitlines()[0]
    assert main(["init", *words]) == 2  # it already exists
    capsys.readouterr()
    assert main(["memory", str(out), "--devices", str(devices), "--json"]) == 0
    peak = size(json.loads(capsys.readouterr().out)["peak"])
    assert f"and {peak} in tensors on a rank at the peak" in out.read_text().splitlines()[1]


def test_init_says_when_the_data_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", "--out", str(tmp_path / "c.yaml"), "--model", "tiny", "--devices", "1", "--data"]
    assert main([*words, "data/text.bin"]) == 2
    assert "name them without their ending, data/text" in capsys.readouterr().err
    write_documents(tmp_path / "text", [[1, 2]])
    assert main([*words, f"{tmp_path}/txet"]) == 0
    stderr = capsys.readouterr().err.splitlines()
    assert stderr[1].startswith(f"{tmp_path}/txet is not there yet (did you mean '{tmp_path}/text'?)")
    assert stderr[2] == f"next: meshwright data prepare YOUR-TEXT --out {tmp_path}/txet --tokenizer train:32000"
    assert stderr[3].startswith("then: meshwright train ")


def test_init_looks_at_the_model_before_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("")
    assert main(["init", "--model", "tinny", "--data", "a", "--devices", "1", "--out", str(tmp_path / "c.yaml")]) == 2
    assert "there is no model 'tinny' (did you mean 'tiny'?)" in capsys.readouterr().err


def test_a_vocabulary_that_the_data_leave_unused_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("many words " * 100)
    (tmp_path / "c.yaml").write_text("model: {layers: 1, hidden: 8, heads: 2, seq: 16}\ndata: {prefixes: [tokens]}\n")
    assert main(["data", "prepare", "text.txt", "--out", "tokens", "--workers", "1"]) == 0
    # Stop the command before it starts any rank.
    monkeypatch.setattr("meshwright.device.check_machine", lambda *words: 1 / 0)
    for vocab, warns in ((384, False), (400, True)):
        with pytest.raises(ZeroDivisionError):
            main(["train", "c.yaml", "run.device=cpu", "train.steps=1", f"model.vocab={vocab}", "data.split=[1,0,0]"])
        stderr = capsys.readouterr().err.removeprefix("next: meshwright init --data tokens\n")
        assert stderr.startswith("starts runs/default, 1 step\n")
        assert ("the data use 257 of the model's 400 tokens: the others are never trained" in stderr) == warns


def test_init_makes_the_folder_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", "--model", "tiny", "--data", "data/text", "--devices", "1", "--out"]
    assert main([*words, str(tmp_path / "new" / "c.yaml")]) == 0
    assert main([*words, str(tmp_path / "new" / "c.yaml" / "d.yaml")]) == 2
    assert "d.yaml can't be written (" in capsys.readouterr().err


def test_a_mistake_before_the_run_begins_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    write_event(tmp_path, "end", "finished all 9 steps")
    write_event_of(str(tmp_path), time.time(), "refusal", "another tokenizer")
    assert [event["kind"] for event in read_events(tmp_path)] == ["end"]
    since = time.time()
    write_event(tmp_path, "resume", "continues")
    write_event_of(str(tmp_path), since, "refusal", "the disk is full")
    assert [event["kind"] for event in read_events(tmp_path)] == ["end", "resume", "failure"]


def test_init_names_the_file_after_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--model", "tiny", "--data", "data/text", "--devices", "1"]) == 0
    assert load_config("tiny.yaml").run.dir == "runs/tiny"


def test_init_asks_for_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--out", str(tmp_path / "c.yaml"), "--model", "tiny"]) == 2
    assert "give --data: token files" in capsys.readouterr().err
    assert main(["init", "--out", str(tmp_path / "c.yaml"), "--model", "tini", "--data", "x", "--devices", "1"]) == 2
    assert "there is no model 'tini' (did you mean 'tiny'?)" in capsys.readouterr().err


def test_init_offers_the_only_data_and_counts_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    (tmp_path / "data").mkdir()
    write_documents(tmp_path / "data" / "mine", [[1, 2]])
    assert main(["init", "--model", "tiny", "--devices", "1"]) == 0
    assert asked[0].endswith("[data/mine] ") and load_config("tiny.yaml").data.prefixes == ("data/mine",)
    assert "more than this machine has cores" not in capsys.readouterr().err
    write_documents(tmp_path / "data" / "other", [[1, 2]])
    assert main(["init", "--model", "tiny", "--devices", "512", "--global-batch", "512", "--out", "many.yaml"]) == 0
    assert asked[1].endswith("[data/text] ")
    assert "512 ranks are more than this machine has cores" in capsys.readouterr().err


def test_an_option_for_an_axis_names_the_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "x.yaml", "--tp", "2"]) == 2
    assert "layout keys are words, as in layout.tp=2" in capsys.readouterr().err


def test_layout_auto_keeps_what_is_given_and_says_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    train = "train: {global_batch: 128, precision: bf16}"
    config.write_text(f"model: {{preset: llama3-8b}}\ndata: {{prefixes: [x]}}\n{train}\n")
    cluster = load_cluster("h100-80g-dgx")
    monkeypatch.setattr(this_machine, "devices_of", lambda config, ranks: (cluster, 74.0))
    free = resolve(load_config(config), ["layout=auto"], 8)
    assert "copies of the model (dp)" in capsys.readouterr().err and "layout=auto" not in free
    held = resolve(load_config(config, ["layout.tp=4"]), ["layout=auto", "layout.tp=4"], 8)
    assert held[0] == "layout.tp=4" and not [word for word in held[1:] if word.startswith("layout.tp=")]
    assert load_config(config, held).layout.tp == 4
    # Without any sharding the model would not fit.
    assert load_config(config, free).zero.stage + load_config(config, free).layout.tp > 1


@pytest.mark.wide
def test_train_takes_layout_auto(tmp_path: Path) -> None:
    write_documents(tmp_path / "tokens", [[1, 2, 3, 4] * 40] * 8)
    (tmp_path / "c.yaml").write_text(
        "model: {layers: 2, hidden: 32, heads: 2, vocab: 64, seq: 16}\ndata: {prefixes: [tokens]}\n"
        "train: {steps: 2, global_batch: 8}\nrun: {dir: run, device: cpu, tensorboard: false}\n"
    )
    command = [sys.executable, "-m", "meshwright", "train", "c.yaml", "--nproc", "2", "layout=auto"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and "layout=auto: " in done.stderr, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.wide
def test_train_takes_schedule_auto(tmp_path: Path) -> None:
    write_documents(tmp_path / "tokens", [[1, 2, 3, 4] * 40] * 8)
    (tmp_path / "c.yaml").write_text(
        "model: {layers: 4, hidden: 32, heads: 2, vocab: 64, seq: 16}\ndata: {prefixes: [tokens]}\nlayout: {pp: 2}\n"
        "pipeline: {schedule: auto}\ntrain: {steps: 2, global_batch: 8}\n"
        "run: {dir: run, device: cpu, tensorboard: false}\n"
    )
    command = [sys.executable, "-m", "meshwright", "train", "c.yaml", "--nproc", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    found = re.search(r"pipeline.schedule=auto: ([\w-]+)", done.stderr)
    assert done.returncode == 0 and found, done.stderr
    assert load_config(tmp_path / "run" / "config.yaml").pipeline.schedule == found[1]


def test_the_help_is_grouped_fits_and_comes_at_once() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS), "every command is in exactly one group"
    assert max(map(len, usage().splitlines())) <= 80
    took = [_processor_seconds("-m", "meshwright", "--help") for _ in range(3)]
    assert min(took) < 0.3, took


def test_a_run_speaks_before_it_loads_what_it_may_not_need() -> None:
    """The first line comes soon, because neither torch nor the planner's search is imported before it."""
    script = "import sys, meshwright.cli.train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert not {"torch", "meshwright.plan.search"} & set(done.stdout.split())


def _processor_seconds(*words: str) -> float:
    """Return the processor time of a Python process. Unlike its duration, it hardly depends on other programs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_completions_know_commands_options_and_keys(tmp_path: Path) -> None:
    keys = set(config_keys())
    assert {"train.steps=", "zero.offload.path=", "checkpoint.async=", "run.loggers="} <= keys and "extra=" not in keys
    for script in (bash(), zsh(), fish()):
        assert all(name in script for name in (*COMMANDS, "train.steps=", "layout=auto"))
    assert "-l nproc" in fish() and "--nproc" in bash() and "@keys" not in bash() + zsh() + fish()
    (tmp_path / "script").write_text(bash())
    # By the position of the word to complete: the command line so far, and the completed word.
    cases = {"1": ("meshwright tra", "train"), "3": ("meshwright train c.yaml train.global", "train.global_batch=")}
    for position, (line, wanted) in cases.items():
        complete = f"COMP_WORDS=({line}); COMP_CWORD={position}; _meshwright 2>/dev/null; echo ${{COMPREPLY[@]}}"
        source = f"source ./script; {complete}"
        done = subprocess.run(["bash", "-c", source], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split() == [wanted], line
    for shell, text in (("zsh", zsh()), ("fish", fish())):
        if shutil.which(shell):
            done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
