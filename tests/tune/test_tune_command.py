"""`meshwright tune`: from a folder that transformers made and conversations to a model that one can chat with."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import tune
from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.record.run_notes import read_events
from tests.interop.hf_models import save
from tests.tune.test_chat import make_model

FAST = ["run.tensorboard=false", "run.device=cpu"]
TALKS = ["tune", "base", "talks.jsonl", *FAST]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama that takes 131,072 tokens, whose end token is none of the usual ones, and 48 conversations."""
    monkeypatch.chdir(tmp_path)
    save("llama2", tmp_path / "base", vocab_size=300, max_position_embeddings=131072, std=0.02)
    make_model(tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    write(tmp_path / "talks.jsonl", [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(48)])
    return tmp_path


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def trained(run: str) -> list[int]:
    return [json.loads(line)["step"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_one_command_goes_from_a_folder_to_a_chat(
    there: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows three samples, chooses length, batch and steps, and evaluates; the model goes back to transformers."""
    assert main(TALKS) == 0
    said = capsys.readouterr()
    assert [said.out.count(f"\n{n}: ") + said.out.startswith(f"{n}: ") for n in (1, 3, 4)] == [1, 1, 0]
    assert "«It is 1.<|im_end|>»" in said.out
    assert "samples of 64 tokens, chosen because they hold the longest conversation: no conversation is cut" in said.out
    config = load_config("runs/base-talks/tune.yaml")
    assert (config.model.seq, config.model.hf, config.tune.kind) == (64, "base", "full")
    assert config.train.steps * config.train.global_batch >= 3 * 40 > (config.train.steps - 1)
    assert trained("runs/base-talks") == list(range(1, config.train.steps + 1))
    first, *_, last = map(json.loads, Path("runs/base-talks/validation.jsonl").read_text().splitlines())
    assert first["step"] == 0 and last["loss"] < first["loss"]
    assert f"loss {first['loss']:.4f} before, {last['loss']:.4f} at step {config.train.steps}" in said.err
    for command in ("chat runs/base-talks", "export runs/base-talks --to", "tune base talks.jsonl --out runs/base"):
        assert f"meshwright {command}" in said.err

    monkeypatch.setattr(sys, "stdin", io.StringIO("Say 5.\n"))
    assert main(["chat", "runs/base-talks", "--max-tokens", "3", "--json"]) == 0
    assert '"tokens"' in capsys.readouterr().out
    assert main(["generate", "runs/base-talks", "--prompt", "Say", "--max-tokens", "80"]) == 0
    assert "context of" not in capsys.readouterr().err, "the model reads more than a sample of the run has"
    assert main(["export", "runs/base-talks", "--to", "exported", "--json"]) == 0
    assert json.loads(Path("exported/config.json").read_text())["max_position_embeddings"] == 131072
    assert Path("exported/tokenizer_config.json").read_bytes() == Path("base/tokenizer_config.json").read_bytes()


def test_the_same_command_continues(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", "mine", "--lora"]
    assert main([*TALKS, *out, "train.steps=2", "tune.rank=2", "model.seq=96"]) == 0
    config = load_config("mine/tune.yaml")
    assert (config.train.steps, config.tune.rank, config.model.seq, config.tune.kind) == (2, 2, 96, "lora")
    made = Path("mine/data/talks.bin").stat().st_mtime_ns
    assert main([*TALKS, *out]) == 0
    assert "mine is complete at step 2" in capsys.readouterr().err
    assert main([*TALKS, *out, "train.steps=3"]) == 0
    assert trained("mine") == [1, 2, 3] and Path("mine/data/talks.bin").stat().st_mtime_ns == made
    assert [event["step"] for event in read_events("mine") if event["kind"] in ("start", "resume")] == [0, 2]
    capsys.readouterr()
    assert main([*TALKS, "--out", "mine"]) == 2
    assert "mine was made with another --lora (there True, here False)" in capsys.readouterr().err
    write(there / "talks.jsonl", [{"prompt": "Say.", "completion": "No."}])
    assert main([*TALKS, *out]) == 2
    assert "mine was made with another data (there talks.jsonl" in capsys.readouterr().err
    assert trained("mine") == [1, 2, 3]


def test_pairs_are_preferred_over_the_frozen_model(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(there / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": f"{n}.", "rejected": "No."} for n in range(6)])
    assert main(["tune", "base", "pairs.jsonl", *FAST]) == 2
    assert "pairs.jsonl holds preference pairs, whose loss compares" in capsys.readouterr().err
    assert main(["tune", "base", "pairs.jsonl", *FAST, "--lora", "tune.rank=2", "train.steps=1"]) == 0
    assert "they are too few to validate with some" in capsys.readouterr().err
    line = json.loads(Path("runs/base-pairs-lora/metrics.jsonl").read_text())
    assert line["loss"] == pytest.approx(0.6931, abs=1e-4), "the reference is the folder's model"


def test_preferences_are_compared_with_the_model_that_the_run_began_with(there: Path) -> None:
    """The reference is the base with the adapters of --from, which `tune.reference=base` omits."""
    import torch
    from safetensors.torch import load_file

    assert main([*TALKS, "--lora", "tune.rank=2", "train.steps=4", "--out", "sft", "optimizer.lr=0.02"]) == 0
    write(there / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": f"{n}.", "rejected": "No."} for n in range(6)])
    assert main(["data", "chat", "pairs.jsonl", "--model", "base", "--out", "pairs", "--seq", "128"]) == 0
    dpo = ["train", "sft/tune.yaml", "--from", "sft", "data.prefixes=pairs", "data.objective=preference", *FAST,
           "data.split=[1,0,0]", "run.eval_first=false", "train.global_batch=1", "train.micro_batch=1", "model.seq=128",
           "train.steps=1"]  # fmt: skip
    losses = {}
    for name, words in {"start": [], "base": ["tune.reference=base"]}.items():
        assert main([*dpo, f"run.dir={name}", "optimizer.lr=1e-12", "lr.min=0", *words]) == 0
        losses[name] = json.loads(Path(name, "metrics.jsonl").read_text())["loss"]
    assert losses["start"] == pytest.approx(0.693147, abs=1e-6) and abs(losses["base"] - 0.693147) > 1e-4, losses
    assert main([*dpo, "run.dir=start", "optimizer.lr=1e-12", "lr.min=0", "train.steps=2"]) == 0
    assert trained("start") == [1, 2], "it continues with the same base"
    for run in ("sft", "start"):
        assert main(["merge", run, "--to", f"{run}-merged", "--json"]) == 0
    ours, theirs = (load_file(f"{run}-merged/model.safetensors") for run in ("start", "sft"))
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in theirs)
    base = load_file("base/model.safetensors")
    assert max((base[key] - theirs[key]).abs().max() for key in theirs) > 1e-3, "the first run changed the weights"


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no data": (["base", "none.jsonl"], "none.jsonl can't be read (No such file or directory)"),
    "a name of the hub": (["meta/Llama-1B", "talks.jsonl"], "`hf download meta/Llama-1B --local-dir models/Llama-1B`"),
    "no weights": (["bare", "talks.jsonl"], "bare has no weights: name a folder that transformers saved a model in"),
    "a run": (["run", "talks.jsonl"], "run is a run: write its model with `meshwright export run --to DIR` first"),
    "a wrong key": (["base", "talks.jsonl", "train.stpes=2"], "did you mean 'train.steps'?"),
    "broken lines": (["base", "broken.jsonl"], "broken.jsonl, line 1 is not JSON"),
    "no answer": (["base", "asked.jsonl"], "asked.jsonl, line 1: no message of the assistant is there to learn from"),
    "another run": (["base", "talks.jsonl", "--out", "run"], "run holds another run: name a new folder with --out"),
    "no passes": (["base", "talks.jsonl", "--epochs", "0"], "--epochs must be above 0"),
}


def test_mistakes_are_sentences_and_lose_nothing(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (there / "bare").mkdir()
    (there / "bare" / "config.json").write_bytes((there / "base" / "config.json").read_bytes())
    (there / "run").mkdir()
    (there / "run" / "run.json").write_text("{}")
    (there / "broken.jsonl").write_text('{"messages": [}\n')
    write(there / "asked.jsonl", [{"messages": [{"role": "user", "content": "Why?"}]}])
    for name, (words, wanted) in MISTAKES.items():
        assert main(["tune", *words]) == 2, name
        said = capsys.readouterr().err
        assert wanted in said and "Traceback" not in said, (name, said)
    assert [path.name for path in (there / "run").iterdir()] == ["run.json"]


def test_the_learning_rate_falls_with_the_size() -> None:
    assert tune.learning_rate_for(10**9, adapts=False) == 2e-5 and tune.learning_rate_for(10**9, adapts=True) == 2e-4
    assert (
        tune.learning_rate_for(8 * 10**9, adapts=False) == 1e-5 and tune.learning_rate_for(10**5, adapts=False) == 1e-3
    )
