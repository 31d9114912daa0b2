"""`meshwright.train`, `load` and `evaluate` in a row, in one process and with several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cli.main import main
from meshwright.data.prepare import prepare
from meshwright.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    lines = [json.dumps({"text": f"{n} cats sat on the mat. " * 5}) for n in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    prepare([str(tmp_path / "text.jsonl")], str(tmp_path / "text"))
    return {
        "model": {"layers": 1, "hidden": 32, "heads": 2, "vocab": 257, "seq": 32},
        "data": {"prefixes": [str(tmp_path / "text")], "split": [0.9, 0.1, 0]},
        "train": {"steps": 4, "global_batch": 8, "precision": "fp32", "compile": False},
        "optimizer": {"lr": 0.01}, "lr": {"warmup": 0},
        "run": {"dir": str(tmp_path / "run"), "device": "cpu", "tensorboard": False, "eval_every": 2,
                "eval_samples": 4},
    }  # fmt: skip


def test_train_load_and_evaluate(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    result = meshwright.train(config, "train.steps=6", quiet=True)
    said = capsys.readouterr()
    assert said.out == "" and "step 6/6" not in said.err
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert result.steps == 6 and list(result.metrics["loss"]) == [line["loss"] for line in lines]
    assert result.loss == lines[-1]["loss"] < lines[0]["loss"]
    assert result.validations["step"] == [2, 4, 6] and result.tokens_per_s > 0
    assert "tokens per second" in repr(result) and "last validation" in repr(result)
    page = result._repr_html_()
    assert "<svg" in page and "validation" in page

    # A run continues where it ended, as with the command.
    longer = meshwright.train(config, "train.steps=8")
    assert longer.steps == 8 and list(longer.metrics["loss"])[:6] == list(result.metrics["loss"])
    assert "step 8/8" in capsys.readouterr().err

    found = meshwright.evaluate(longer.run, samples=4)
    # The run's validations take other samples of the same data.
    assert found.loss == pytest.approx(longer.validation, rel=0.02)
    capsys.readouterr()
    assert main(["eval", str(longer.run), "--samples", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == found.loss
    assert found.perplexity is not None and "perplexity" in repr(found) and "<table>" in found._repr_html_()
    whole = meshwright.evaluate(longer.run, data=config["data"]["prefixes"][0], samples=4)
    assert whole.samples == 4 and whole.loss != found.loss
    text = meshwright.load(longer.run).generate("the ", max_tokens=5)
    assert isinstance(text, str) and text

    with pytest.raises(UserError, match="is complete"):
        meshwright.train(config, "train.steps=8")
    with pytest.raises(UserError, match="unknown key 'train.stepz'"):
        meshwright.train(config, "train.stepz=8")


@pytest.mark.wide
def test_ranks_of_their_own_train_the_same(config: dict[str, Any], tmp_path: Path) -> None:
    alone = meshwright.train(config, quiet=True)
    config["run"]["dir"] = str(tmp_path / "two")
    both = meshwright.train(config, "layout.tp=2", ranks=2, quiet=True)
    assert both.steps == alone.steps and both.loss == pytest.approx(alone.loss, rel=1e-4)
