"""Tests of `meshwright chat`, whose answers follow the whole conversation, and of prompts from a file in batches."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli.main import main
from meshwright.infer.generate import Generator, generate, generate_all
from tests.interop.hf_models import save
from tests.support.oracle import make_trainer, small_config
from tests.support.waiting import HANG_S
from tests.support.word_model import make_word_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_word_model(tmp_path_factory.mktemp("chat") / "hf")


OPTIONS = ("--temperature", "0", "--max-tokens", "7", "--json")


def talk(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, *more: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(folder), *OPTIONS, *more]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def follows(folder: Path, text: str, capsys: Any) -> str:
    """Return the text that the model generates after a prompt that the template could have rendered."""
    assert main(["generate", str(folder), "--prompt", text, "--max-tokens", "7", "--json"]) == 0
    ids = json.loads(capsys.readouterr().out)["tokens"]
    return " ".join(f"w{n}" for n in ids if n not in (0, 60))


def test_answers_follow_the_whole_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lines = "w9 w10\n\nw11\n/reset\nw9 w10\n/system w12 w13\nw9 w10\n"
    first, second, again, with_system = (each["text"] for each in talk(folder, lines, monkeypatch, capsys))
    assert first == follows(folder, "w5 w9 w10 <e> w6", capsys) == again
    assert second == follows(folder, f"w5 w9 w10 <e> w6 {first} <e> w5 w11 <e> w6", capsys)
    assert with_system == follows(folder, "w7 w12 w13 <e> w5 w9 w10 <e> w6", capsys) != first
    assert with_system == talk(folder, "w9 w10\n", monkeypatch, capsys, "--system", "w12 w13")[0]["text"]


def test_a_conversation_that_is_too_long_is_told_and_can_begin_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" ".join(["w9"] * 100) + "\nw9 w10\n"))
    assert main(["chat", str(folder), *OPTIONS[:-1]]) == 0
    captured = capsys.readouterr()
    assert "more than the model's 96: /reset" in captured.err
    assert captured.out.split() == follows(folder, "w5 w9 w10 <e> w6", capsys).split()


def test_what_can_not_be_is_said(folder: Path, tmp_path: Path, capsys: Any) -> None:
    bare = tmp_path / "bare"
    save("llama2", bare)
    assert main(["chat", str(bare)]) == 2 and "no chat template" in capsys.readouterr().err
    for text in ("{% if %}", "{{ raise_exception('no') }}"):
        (tmp_path / "t.jinja").write_text(text)
        assert main(["chat", str(folder), "--template", str(tmp_path / "t.jinja")]) == 2
        assert "template" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('{"text": "w1"}\n')
    for name in ("p.jsonl", "none.txt"):
        assert main(["generate", str(folder), "--prompts", str(tmp_path / name)]) == 2
        assert "--prompts" in capsys.readouterr().err


@pytest.mark.wide
def test_two_ranks_say_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    one = talk(folder, "w9 w10\nw11\n", monkeypatch, capsys)
    command = [sys.executable, "-m", "meshwright", "chat", str(folder), *OPTIONS, "--nproc", "2"]
    both = subprocess.run(command, input="w9 w10\nw11\n", capture_output=True, text=True, timeout=HANG_S)
    assert [json.loads(line) for line in both.stdout.splitlines()] == one, both.stderr


def test_a_file_of_prompts_gives_what_each_gives_alone(folder: Path, tmp_path: Path, capsys: Any) -> None:
    prompts = ["w9 w10 w11 w12 w13", "w3", "w20 w21 w22"]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n")
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "p.txt"), "--max-tokens", "9", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for prompt, line in zip(prompts, result, strict=True):
        assert main(["generate", str(folder), "--prompt", prompt, "--max-tokens", "9", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == line


@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
def test_sequences_of_other_lengths_run_together_as_alone(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch gives the same logits and texts in float64 as its sequences alone.

    Some of the texts end early, and some at the end of the context.
    """
    config = small_config(model={"position": position, "seq": 32})
    module = make_trainer(config).modules[0]
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    deterministic = torch.are_deterministic_algorithms_enabled()
    # With this, torch fills uninitialised memory with NaN, so that any use of it shows.
    torch.use_deterministic_algorithms(True)
    try:
        check_together(config.model, module)
    finally:
        torch.use_deterministic_algorithms(deterministic)


def check_together(model: Any, module: Any) -> None:
    """Assert that sequences of different lengths give the same results in a batch and alone."""
    for parameter in module.parameters():
        parameter.data.mul_(3.0)
    prompts = [[5, 1, 44, 2, 2, 19], [3], [7, 7, 7, 9, 1, 2, 3, 4, 5, 6, 7], [50, 1], list(range(30)), list(range(32))]
    together = Generator(module, 53, 32)
    rows = [together.next_rows(prompts[:3]), together.next_rows([[8], [9], [10]])]
    for n, after in enumerate((8, 9, 10)):
        alone = Generator(module, 53, 32)
        for each, ids in zip(rows, (prompts[n], [after]), strict=True):
            assert float((each[n] - alone.next_logits(ids)).abs().max()) < 1e-12
    for temperature in (0.0, 1.3):
        alone_texts = [
            list(generate(Generator(module, 53, 32), ids, min(12, 33 - len(ids)), temperature, 0.9, 4 + n, {11}))
            for n, ids in enumerate(prompts)
        ]
        assert generate_all(module, model, prompts, 12, temperature, 0.9, 4, {11}, batch=4) == alone_texts
