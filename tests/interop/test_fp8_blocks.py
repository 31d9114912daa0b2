"""Folders in DeepSeek's fp8 form, with a scale for each block of a matrix, are read in full precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.hf_files import HFFolder
from meshwright.cli.main import main
from tests.interop.hf_models import logits, run_models, save

pytest.importorskip("transformers")
IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 61, (2, 24)))
ROWS, COLUMNS = 16, 12
FORM = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [ROWS, COLUMNS], "activation_scheme": "dynamic"}


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float8 numbers, the scales of their blocks, and what both stand for, one block at a time."""
    counts = -(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS)
    numbers, scales, values = torch.empty(weight.shape).to(torch.float8_e4m3fn), torch.empty(counts), weight.clone()
    for i in range(counts[0]):
        for j in range(counts[1]):
            where = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
            scales[i, j] = weight[where].abs().max() / 448
            small = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers.view(torch.uint8)[where] = small.view(torch.uint8)
            values[where] = small.float() * scales[i, j]
    return numbers, scales, values


def make_folder(name: str, folder: Path) -> Any:
    """Save a model with its linear layers in fp8, and return transformers' model of the same values."""
    model = save(name, folder)
    files, parameters = load_file(folder / "model.safetensors"), dict(model.state_dict())
    for key, weight in list(files.items()):
        if key.endswith("_proj.weight") and weight.dim() == 2:
            files[key], files[f"{key}_scale_inv"], values = quantised(weight)
            if key in parameters:
                parameters[key].copy_(values)
    save_file(files, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FORM}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_the_scaled_model_computes_what_transformers_does(tmp_path: Path, capsys: Any) -> None:
    model = make_folder("qwen2", tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    (found,) = run_models(0, 1, [str(tmp_path / "ours")], IDS, {})
    assert np.abs(found[..., :61] - logits(model, IDS).numpy()).max() <= 1e-5
    assert main(["export", str(tmp_path / "ours"), "--to", str(tmp_path / "out")]) == 0
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def test_any_rows_get_the_scales_of_their_blocks(tmp_path: Path) -> None:
    make_folder("deepseek-v3", tmp_path / "hf")
    folder = HFFolder(tmp_path / "hf")
    files = load_file(tmp_path / "hf" / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    numbers, scales = files[name].float(), files[f"{name}_scale_inv"]
    for low, high in ((0, 32), (5, 9), (15, 17), (16, 32), (31, 32)):
        rows = folder.slice(name)[low:high]
        wanted = torch.stack([
            torch.stack([numbers[i, j] * scales[i // ROWS, j // COLUMNS] for j in range(numbers.shape[1])])
            for i in range(low, high)
        ])  # fmt: skip
        assert torch.equal(rows, wanted), (low, high)
    ours = folder.rows("layers.1.experts.down.weight", 3 * 32, 4 * 32)
    assert torch.equal(ours, folder.slice(name)[:])


def test_scales_that_do_not_fit_are_refused(tmp_path: Path, capsys: Any) -> None:
    make_folder("qwen2", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    words = ["import", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]
    for form, sentence in (
        (FORM | {"weight_block_size": [8, 8]}, "which don't fit blocks of 8 x 8"),
        (FORM | {"weight_block_size": "128"}, "must be two numbers above zero"),
        (FORM | {"quant_method": "awq"}, "holds quantised weights"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
