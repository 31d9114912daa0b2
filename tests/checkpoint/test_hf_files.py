"""Tests of import from and export to Hugging Face folders without the transformers library.

They cover refused folders, dtypes, the tokenizer that is exported with the model, and the streaming file writer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.save import Saver
from meshwright.checkpoint.tensor_file import TensorEntry, checksum, write_tensors
from meshwright.cli.main import main
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.interop.hf import ORIGIN, export_folder, import_folder
from meshwright.nn.parallel import record_of
from meshwright.spec.model.hf import FAMILIES
from tests.models.test_hf_families import SECTIONS
from tests.support.oracle import make_trainer, small_config


def saved(folder: Path, **sections: dict[str, Any]) -> Path:
    """Save a checkpoint of an untrained model and return its folder."""
    trainer = make_trainer(small_config(**sections))
    saver = Saver(trainer, folder, asynchronous=False, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()
    return folder / "step-00000000"


def test_a_streamed_file_is_a_safetensors_file(tmp_path: Path) -> None:
    """Its bytes may be passed in chunks of any size and memory layout. The writer returns each chunk's checksum."""
    a, b = torch.arange(12, dtype=torch.float32).view(3, 4), torch.randn(5).bfloat16()
    entries = [TensorEntry.of("a", a), TensorEntry("b", "BF16", (5,)), TensorEntry("c", "F32", (4, 3))]
    chunks = [a[:2], a[2:], b, *a.t().split(1)]
    sums = write_tensors(tmp_path / "x.safetensors", entries, iter(chunks), {"format": "pt"})
    assert sums == [checksum(chunk) for chunk in chunks]
    loaded = load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], a) and torch.equal(loaded["b"], b) and torch.equal(loaded["c"], a.t())
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(AssertionError, match="bytes written of"):
        write_tensors(tmp_path / "y.safetensors", entries, [a, b])


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    export_folder(saved(tmp_path / "run"), tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no model.safetensors"):
        import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(UserError, match="pytorch_model.bin, a pickle, which is never read.*save_pretrained"):
        import_folder(tmp_path / "hf", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must be keys and values"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), "can't be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "lacks weight_map"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
            "../b, which .* is missing",
        ),
    ],
)
def test_broken_folders(break_it: Any, words: str, tmp_path: Path) -> None:
    export_folder(saved(tmp_path / "run"), tmp_path / "hf")
    break_it(tmp_path / "hf")
    with pytest.raises(UserError, match=words):
        import_folder(tmp_path / "hf", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": "linear"}, "rope_parameters='linear'"),
        ({"rope_scaling": {"rope_type": ["a"]}}, "rope_type '['a']'"),
        ({"rope_theta": "abc"}, "rope_theta='abc'"),
        ({"sliding_window": "4"}, "sliding_window='4'"),
        ({"sliding_window": 0}, "sliding_window=0"),
    ],
    ids=str,
)
def test_import_of_a_damaged_config(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistral = FAMILIES["mistral"]
    config = mistral.config_of(ModelConfig(**SECTIONS["mistral"])) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["import", str(tmp_path), "--to", str(tmp_path / "checkpoint")]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and "--seq" not in error


def test_our_own_model_there_and_back(tmp_path: Path) -> None:
    """An export and an import keep the model section and every bit of the weights.

    The weights are equal too when they are read straight from the folder. A second export into it is refused.
    """
    checkpoint = saved(tmp_path / "run", train={"precision": "fp32"})
    written = export_folder(checkpoint, tmp_path / "hf")
    assert (written["family"], written["beside"]) == ("gpt2", [])
    model = import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    again = export_folder(tmp_path / "checkpoint", tmp_path / "again")
    assert (model.mlp, again["tensors"]) == ("gelu", written["tensors"])
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again"))
    assert first == second
    trainer, folder = make_trainer(small_config(train={"precision": "fp32"})), HFFolder(tmp_path / "hf")
    for parameter in trainer.modules[0].parameters():
        local = torch.empty_like(parameter)
        record = record_of(parameter)
        assert record is not None
        folder.fill(f"param/{record.name}", record, local)
        assert torch.equal(local, parameter)
    with pytest.raises(UserError, match="exists already"):
        export_folder(checkpoint, tmp_path / "hf")


@pytest.mark.parametrize("dtype", ["", "fp16"])
@pytest.mark.parametrize("given", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {}], ids=str)
def test_config_json_names_the_dtype_that_was_written(given: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """The dtype in the config of `like` is replaced. Otherwise transformers would round the weights on loading."""
    checkpoint = saved(tmp_path / "run", train={"precision": "fp32"})
    export_folder(checkpoint, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.pop("torch_dtype") == "float32"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | given))
    export_folder(checkpoint, tmp_path / "out", dtype, like=tmp_path / "hf")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    (kind,) = {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()}
    key = next(iter(given), "torch_dtype")
    assert written == config | {key: str(kind).removeprefix("torch.")}
    assert kind == (torch.float16 if dtype else torch.float32)


@pytest.mark.parametrize("origin", [True, False], ids=["like it came", "a file of ours"])
def test_weights_of_several_dtypes(origin: bool, tmp_path: Path) -> None:
    """The `torch_dtype` of an imported folder is exported again. Otherwise it is the widest dtype of the weights."""
    export_folder(saved(tmp_path / "run", train={"precision": "fp32"}), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].double()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    if not origin:
        (tmp_path / "checkpoint" / ORIGIN).unlink()
    export_folder(tmp_path / "checkpoint", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.dtype for name, value in found.items()} == {name: v.dtype for name, v in tensors.items()}
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == ("float32" if origin else "float64")


def test_a_model_of_no_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run" / "checkpoints", model={"position": "none"})
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 2
    assert "no model.position=none" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_the_tokenizer_of_the_data_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words to learn a few words from\n" * 50)
    prefix = str(tmp_path / "data")
    assert main(["data", "prepare", str(text), "--out", prefix, "--tokenizer", "train:300"]) == 0
    capsys.readouterr()
    checkpoint = saved(tmp_path / "run", data={"prefixes": [prefix]}, model={"vocab": 300})
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["beside"] == ["tokenizer.json", "tokenizer_config.json"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == json.loads((tmp_path / "data.json").read_text())["eod"]
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("a few words")["input_ids"]
    assert tokenizer.decode(ids) == "a few words" and tokenizer.eos_token_id == config["eos_token_id"]
