"""Quantised exports: transformers loads every format, GPTQ's codes keep products close, bad requests are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.cli.main import main
from meshwright.interop.quantised import FORMATS, encoded, gptq, quantise_folder, samples_of
from tests.interop.hf_models import save

VOCAB = 128
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
# The largest difference of a weight from its codes, relative to the largest weight that shares its scale.
ROUNDING = {"fp8": 1 / 16, "int8": 0.5 / 127, "int4": 0.5 / 7.5, "nf4": 0.16}
SAMPLES = samples_of(np.random.default_rng(0).integers(0, VOCAB, 4096), 4, 32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def loaded(folder: Path, **more: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def mean_loss(model: Any, samples: list[Tensor]) -> float:
    with torch.no_grad():
        losses = [float(model(input_ids=each[None], labels=each[None]).loss) for each in samples]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_transformers_computes_the_measured_perplexity(plain: Path, tmp_path: Path, form: str) -> None:
    import transformers

    calibration, measured = SAMPLES
    found = quantise_folder(plain, tmp_path / "out", form, calibration, measured)
    whole = transformers.CompressedTensorsConfig(run_compressed=False)
    model = loaded(tmp_path / "out", quantization_config=whole)
    assert found["perplexity"] == pytest.approx(math.exp(mean_loss(model, measured)), rel=1e-5)
    assert found["perplexity_before"] == pytest.approx(math.exp(mean_loss(loaded(plain), measured)), rel=1e-5)
    assert found["perplexity"] != found["perplexity_before"]
    assert found["layers"] == 14 and found["calibrated"] == (4 if FORMATS[form].is_integer else 0)
    assert found["bytes"] < 0.45 * found["bytes_before"]


@pytest.mark.wide
def test_bitsandbytes_reads_nf4(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    found = quantise_folder(plain, tmp_path / "out", "nf4", (), SAMPLES[1])
    # bitsandbytes has its own CPU products, in other precisions.
    measured = math.exp(mean_loss(loaded(tmp_path / "out"), SAMPLES[1]))
    assert found["perplexity"] == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("form", list(ROUNDING))
def test_codes_are_the_nearest(form: str) -> None:
    torch.manual_seed(1)
    weight = torch.randn(16, 256)
    weight[3] = 0.0
    kind = FORMATS[form].for_widths([256]) if form in FORMATS else None
    _, values = encoded("layer", weight, kind, torch.float32)
    shared = weight.reshape(-1, {"int4": 128, "nf4": 64}.get(form, 256))
    bound = ROUNDING[form] * shared.abs().amax(1, keepdim=True)
    assert ((values.reshape(shared.shape) - shared).abs() <= bound * 1.001).all() and (values[3] == 0).all()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_gptq_keeps_products_closer_than_rounding(form: str) -> None:
    """Inputs of a model are correlated, which rounding each weight alone can't use."""
    torch.manual_seed(2)
    kind = FORMATS[form].for_widths([128])
    weight, inputs = torch.randn(32, 128), torch.randn(512, 16) @ torch.randn(16, 128) + 0.1 * torch.randn(512, 128)
    # A column that no sample uses must not spoil the factors.
    inputs[:, 7] = 0.0
    chosen = gptq(weight, inputs.t() @ inputs, kind, torch.float32).values()
    near = kind.nearest(weight, torch.float32).values()
    errors = [float(((each - weight) @ inputs.t()).norm()) for each in (chosen, near)]
    assert errors[0] < 0.5 * errors[1]


def test_groups_divide_every_row() -> None:
    assert FORMATS["int4"].for_widths([256, 384]).group == 128
    assert FORMATS["int4"].for_widths([256, 96]).group == 32
    # Groups of 16 columns would cost more scales than they are worth, and no kernel takes them.
    assert FORMATS["int4"].for_widths([256, 48]).group == 0
    assert FORMATS["int8"].for_widths([256]).group == 0


def test_export_quantises_a_folder(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(plain), "--to", str(tmp_path / "a"), "--quantise", "int8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "int8" and found["calibrated"] == 0 and "perplexity" not in found
    assert main(["export", str(plain), "--to", str(tmp_path / "b"), "--quantise", "int4"]) == 0
    assert "perplexity not measured: name a text with --text" in capsys.readouterr().out
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"


def test_export_quantises_a_checkpoint(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(plain), "--to", str(tmp_path / "checkpoint")]) == 0
    for source, to in ((plain, "a"), (tmp_path / "checkpoint", "b")):
        assert main(["export", str(source), "--to", str(tmp_path / to), "--quantise", "fp8"]) == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    # The plain export that it starts from is removed.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "checkpoint"]


@pytest.mark.parametrize(("model", "form", "sentence"), [
    ("gpt2", "int8", "has no linear layers of torch"),
    ("mixtral", "int8", "has experts"),
])  # fmt: skip
def test_models_that_can_not_be_quantised(
    model: str, form: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(model, tmp_path / "hf")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "hf"), "--to", str(tmp_path / "out"), "--quantise", form]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_layers_that_blocks_do_not_fill_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 36, "head_dim": 10, "num_hidden_layers": 1})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "hf"), "--to", str(tmp_path / "out"), "--quantise", "nf4"]) == 2
    assert "nf4 stores blocks of 64: choose --quantise int4" in capsys.readouterr().err


def test_too_little_text_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(plain), "--to", str(tmp_path / "out"), "--quantise", "int4"]
    assert main([*words, "--samples", "-1"]) == 2 and main([*words, "--compare"]) == 2
    (tmp_path / "short.txt").write_text("Hello")
    # This folder has no tokenizer to read a text with.
    assert main([*words, "--text", str(tmp_path / "short.txt")]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
