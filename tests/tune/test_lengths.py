"""The length of samples of conversations: chosen from the data and named in the header, with the loss by its cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.config.load import config_from, load_config
from meshwright.data.packed import LengthLoss, cut_of, fitting_length
from tests.interop.hf_models import save
from tests.tune.test_chat import make_model

CONFIG = """
model: {hf: base}
data: {prefixes: [data/talks], objective: chat}
train: {steps: 2, global_batch: 2}
optimizer: {lr: 0.001}
run: {dir: run, device: cpu, tensorboard: false}
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama that takes 131,072 tokens, and 40 conversations of which one is twice as long as the others."""
    monkeypatch.chdir(tmp_path)
    save("llama2", tmp_path / "base", vocab_size=300, max_position_embeddings=131072)
    make_model(tmp_path / "base")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def write(there: Path, name: str, records: list[dict[str, Any]]) -> None:
    (there / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def talks(count: int = 40) -> list[dict[str, Any]]:
    return [{"prompt": "Say it.", "completion": "well " * (30 if n == 7 else 10)} for n in range(count)]


def pairs(count: int = 40) -> list[dict[str, Any]]:
    return [{"prompt": "q" * 60, "chosen": f"It is {n}.", "rejected": "Who knows?"} for n in range(count)]


def test_the_length_fits_the_data_and_not_the_model_s_longest() -> None:
    sizes = np.full(400, 101)
    assert fitting_length(sizes, 1, 10**6) == 128 and fitting_length(sizes, 2, 10**6) == 256
    sizes[3] = 190
    assert fitting_length(sizes, 1, 10**6) == 192, "not twice as long: it is not cut"
    sizes[3] = 5000
    assert fitting_length(sizes, 1, 10**6) == 128, "one very long conversation is cut"
    assert fitting_length(sizes, 1, 96) == 96, "the model takes no more"
    assert fitting_length(np.ones(3, np.int64), 1, 10**6) == 64


def test_a_run_takes_the_length_of_its_conversations(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(there, "talks.jsonl", talks())
    assert load_config("config.yaml").model.seq == 131072, "the files are not there yet"
    assert main(["data", "chat", "talks.jsonl", "--model", "base", "--out", "data/talks"]) == 0
    assert load_config("config.yaml").model.seq == 256
    assert load_config("config.yaml", ["model.seq=64"]).model.seq == 64
    chat = ["data", "chat", "talks.jsonl", "--model", "base", "--out", "data/talks", "--force", "--seq", "160"]
    assert main(chat) == 0
    assert load_config("config.yaml").model.seq == 160, "as `data chat --seq` named it"
    causal = {"model": {"hf": "base"}, "data": {"prefixes": ["data/talks"]}}
    assert config_from(causal).model.seq == 131072

    capsys.readouterr()
    assert main(["train", "config.yaml", "--nproc", "1"]) == 0
    said = capsys.readouterr().err
    assert "weights: those of base (model.hf), all of them trained" in said
    assert "samples of 160 tokens, which `data chat --seq` named: the end of 1 of 40 conversations is cut" in said
    assert main(["train", "config.yaml", "--nproc", "1", "model.seq=64", "run.dir=short", "train.steps=1"]) == 0
    said = capsys.readouterr().err
    assert "meshwright: warning: samples of 64 tokens (model.seq): the end of 40 of 40 conversations is" in said


def test_what_a_short_sample_cuts_is_told(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pair has half of a sample for each answer, and the question leaves no room in it."""
    write(there, "pairs.jsonl", pairs())
    chat = ["data", "chat", "pairs.jsonl", "--model", "base", "--out", "data/pairs"]
    assert main([*chat, "--seq", "64"]) == 0
    said = capsys.readouterr()
    lost = "the end of 80 of 80 conversations is cut off, which loses 100.0 % of the learned tokens, and 80 of "
    assert lost in said.err
    better = int(said.err.split("--seq ")[1].split()[0])
    found = cut_of(["data/pairs"], 64)
    assert found.kept == 0 and found.empty == 80 and found.learned > 0
    assert cut_of(["data/pairs"], better) == LengthLoss(80, 0, 0, found.learned, found.learned)
    assert main([*chat, "--force", "--seq", str(better), "--json"]) == 0
    said = capsys.readouterr()
    assert not said.err and json.loads(said.out)["learned_kept"] == found.learned
    assert json.loads(said.out)["nothing_learned"] == 0


def test_pairs_without_answers_do_not_end_as_complete(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(there, "pairs.jsonl", pairs())
    chat = ["data", "chat", "pairs.jsonl", "--model", "base", "--out", "data/talks", "--seq", "64"]
    assert main(chat) == 0
    words = ["data.objective=preference", "tune.kind=lora", "tune.rank=2", "run.eval_samples=2"]
    assert main(["train", "config.yaml", "--nproc", "1", *words]) == 2
    said = capsys.readouterr().err
    assert "2 of 2 updates were skipped, so run is not complete" in said and "raise model.seq" in said
