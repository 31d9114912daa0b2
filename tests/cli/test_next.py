"""Commands end with a `next:` line: its commands exist, parse, and say nothing of it with --json."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import COMMANDS, arguments, main
from meshwright.cli.train import commands_after
from meshwright.config.load import config_from
from tests.support.token_files import write_documents

H100 = ["--cluster", "h100-80g-dgx", "--devices", "8"]
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "seq": 16}


def next_commands(said: str) -> list[list[str]]:
    """Return the commands of a `next:` block at the end of stderr, each as words."""
    lines = said.rstrip().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("next:"))
    return [shlex.split(line.removeprefix("next:"), comments=True) for line in lines[begin:]]


def assert_they_parse(commands: list[list[str]]) -> None:
    for program, name, *words in commands:
        assert program == "meshwright" and name in COMMANDS
        arguments(name, words)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["cost", "llama3-8b", *H100, "--global-batch", "64", "--layout", "tp=2,zero=1"], ["memory", "plan"]),
        (["memory", "llama3-8b", "layout.tp=8", "--devices", "8"], ["cost", "plan"]),
        (["simulate", "llama3-8b", *H100, "train.global_batch=16", "zero.stage=3"], ["cost", "plan"]),
        (["config", "check", "CONFIG", "--devices", "2"], ["memory", "train"]),
        (["recipes", "bloom-176b"], ["cost", "train", "predict"]),
        (["data", "prepare", "TEXT", "--out", "tokens"], ["init"]),
    ],
)
def test_next_commands_parse(
    words: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "made", [range(200)])
    config = {"model": MODEL, "data": {"prefixes": ["made"]}, "train": {"global_batch": 4}}
    Path("CONFIG").write_text(json.dumps(config))
    Path("TEXT.txt").write_text("some text")
    given = [word.replace("TEXT", "TEXT.txt") for word in words]
    assert main(given) == 0
    shown = capsys.readouterr()
    commands = next_commands(shown.err)
    assert [command[1] for command in commands] == names
    assert_they_parse(commands)
    assert main([*given, "--json", *(["--force"] if words[0] == "data" else [])]) == 0
    assert "next:" not in capsys.readouterr().err


def test_a_next_command_asks_about_the_same_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "llama3-8b", *H100, "--global-batch", "64", "--layout", "tp=2,zero=1"]) == 0
    memory, plan = next_commands(capsys.readouterr().err)
    assert main([*memory[1:], "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert main(["cost", "llama3-8b", *H100, "--global-batch", "64", "--layout", "tp=2,zero=1", "--json"]) == 0
    assert same["device_gib"] == json.loads(capsys.readouterr().out)["memory"]["needed_gib"]
    assert plan[2:] == ["llama3-8b", *H100, "--global-batch", "64"]


def test_what_follows_a_run() -> None:
    data = {"prefixes": ["made"]}
    adapters = {"kind": "lora", "rank": 4, "base": "x"}
    plain = config_from({"model": MODEL, "data": data})
    tuned = config_from({"model": MODEL, "data": data | {"objective": "chat"}, "tune": adapters})
    assert [line.split()[1] for line in commands_after(plain)] == ["watch", "generate", "export"]
    assert [line.split()[1] for line in commands_after(tuned)] == ["watch", "chat", "merge"]
    run = config_from({"model": MODEL, "data": data, "run": {"dir": "runs/a b"}})
    assert_they_parse([shlex.split(command) for command in commands_after(run)])


def test_what_does_not_fit_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "llama3-8b", *H100, "--global-batch", "64"]) == 0
    said = capsys.readouterr().out
    assert said.index("DOES NOT FIT") < said.index("MFU") and "communication of a rank" not in said
    assert main(["cost", "llama3-8b", *H100, "--global-batch", "64", "zero.stage=3", "--full"]) == 0
    said = capsys.readouterr().out
    assert ": fits" in said and "communication of a rank" in said
    # A preset has no batch. The least one that the ranks can share is counted.
    assert main(["memory", "llama3-70b", "--devices", "256"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out.splitlines()[0]
