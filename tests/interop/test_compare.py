"""`import --compare` and `export --compare` compare our logits and text with transformers', and find planted faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.check.compare_hf as compare_hf
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.cli.main import main
from tests.interop.hf_models import MODELS, save
from tests.models.test_bert import MODELS as ENCODERS
from tests.models.test_bert import make as make_encoder
from tests.models.test_t5 import MODELS as PAIRS
from tests.models.test_t5 import make as make_pair

QUICK = ("llama3",)


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--compare", "--json"])
    return code, json.loads(capsys.readouterr().out)["compared"]


def round_trip(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("import", str(folder), "--to", str(tmp_path / "checkpoint")),
        ("export", str(tmp_path / "checkpoint"), "--to", str(tmp_path / "out")),
    ):
        code, found = compared(capsys, *words)
        assert code == 0 and found["agree"] and found["maximum"] < 1e-4, found
        assert found["tokens"] >= 48 and found["split"] is None


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.wide]) for n in MODELS])
def test_every_decoder_agrees(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(name, tmp_path / "hf")
    round_trip(tmp_path / "hf", tmp_path, capsys)


@pytest.mark.wide
@pytest.mark.parametrize("name", list(ENCODERS))
def test_every_encoder_agrees(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder(name).float().save_pretrained(tmp_path / "hf")
    round_trip(tmp_path / "hf", tmp_path, capsys)


@pytest.mark.wide
@pytest.mark.parametrize("name", list(PAIRS))
def test_every_encoder_decoder_agrees(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pair(name).float().save_pretrained(tmp_path / "hf")
    round_trip(tmp_path / "hf", tmp_path, capsys)


def test_a_wrong_rope_base_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama2", tmp_path / "hf")
    real = compare_hf.with_model

    def wrong(source: str, sections: dict[str, dict[str, Any]], use: Any) -> Any:
        return real(source, {**sections, "model": {"rope_theta": 20000.0}}, use)

    with mock.patch.object(compare_hf, "with_model", wrong):
        code, found = compared(capsys, "import", str(tmp_path / "hf"), "--to", str(tmp_path / "checkpoint"))
    assert code == 1 and not found["agree"] and found["maximum"] > 1e-3


def test_a_transposed_weight_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama2", tmp_path / "hf")
    real = HFFolder.block

    def wrong(self: HFFolder, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if name != "layers.1.attention.out.weight":
            return real(self, name, start, shape)
        whole = real(self, name, (0, 0), self.shapes[name]).t().contiguous()
        return whole[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]

    with mock.patch.object(HFFolder, "block", wrong):
        code, found = compared(capsys, "import", str(tmp_path / "hf"), "--to", str(tmp_path / "checkpoint"))
    assert code == 1 and not found["agree"]


def test_what_can_not_be_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama2", tmp_path / "hf")
    words = ["import", str(tmp_path / "hf"), "--to", str(tmp_path / "c"), "--compare"]
    assert main([*words, "--upcycle", "count=2"]) == 2
    assert "--compare is for models that stay what they are" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["import", "export"])
def test_what_compare_needs_is_asked_for_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both complaints come although the source does not exist, because the source is read later."""
    words = [name, str(tmp_path / "nowhere"), "--to", str(tmp_path / "c"), "--compare"]
    assert main([*words, "--tolerance", "2"]) == 2
    assert "--tolerance 2 must be at least 0" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(words) == 2
    assert "pip install transformers" in capsys.readouterr().err
