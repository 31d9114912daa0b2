"""Checkpoints of Megatron-LM and DeepSpeed are read without being unpickled, and compute what transformers does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.interop.torch_files import TorchFile
from tests.checkpoint.runs import tensors
from tests.interop.hf_models import logits, make, run_models
from tests.interop.peer_files import write_classic, write_deepspeed, write_distributed, write_old

pytest.importorskip("transformers")
IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 61, (2, 24)))
CLOSE = 1e-5

Case = tuple[str, dict[str, Any], Callable[[Path, Any], None]]
CASES: dict[str, Case] = {
    "classic llama, tp 2, pp 2, two chunks": (
        "llama2", {"num_hidden_layers": 4, "num_key_value_heads": 2},
        lambda folder, model: write_classic(folder, model, 2, 2, 2),
    ),
    "classic gpt, pp 2": ("gpt2", {}, lambda folder, model: write_classic(folder, model, 1, 2)),
    "gpt of version 0": ("gpt2", {}, lambda folder, model: write_old(folder, model, 2, 0)),
    "gpt of version 1": ("gpt2", {}, lambda folder, model: write_old(folder, model, 2, 1.0)),
    "distributed llama": ("llama2", {"num_key_value_heads": 2}, write_distributed),
    "ZeRO 0": ("qwen2-tied", {}, lambda folder, model: write_deepspeed(folder, model, 0, 1)),
    "ZeRO 1": ("llama2", {}, lambda folder, model: write_deepspeed(folder, model, 1, 3)),
    "ZeRO 3": ("qwen2-tied", {}, lambda folder, model: write_deepspeed(folder, model, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_model_computes_what_transformers_does(case: str, tmp_path: Path, capsys: Any) -> None:
    name, changed, write = CASES[case]
    model = make(name, **changed)
    write(tmp_path / "theirs", model)
    words = ["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours"), "--json"]
    if case.startswith("ZeRO"):
        model.config.save_pretrained(tmp_path / "like")
        words += ["--like", str(tmp_path / "like")]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["vocab"] == 61 and found["report"][0].startswith("taken: ")
    (ours,) = run_models(0, 1, [str(tmp_path / "ours")], IDS, {})
    assert np.abs(ours[..., :61] - logits(model, IDS).numpy()).max() <= CLOSE


def test_the_twin_is_compared(tmp_path: Path, capsys: Any) -> None:
    model = make("llama2")
    model.save_pretrained(tmp_path / "twin")
    write_classic(tmp_path / "theirs", model, 2)
    words = ["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours"), "--compare"]
    assert main(words) == 2 and "name it with --like" in capsys.readouterr().err
    assert main([*words, "--like", str(tmp_path / "twin"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared"]["agree"]


class Hostile:
    """An object whose pickle runs a command when it is loaded."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.at}",)


@pytest.mark.parametrize("kind", ["classic", "distributed", "deepspeed"])
def test_a_hostile_pickle_is_refused_and_not_run(kind: str, tmp_path: Path, capsys: Any) -> None:
    made, hostile = tmp_path / "made", {"args": Hostile(tmp_path / "made")}
    if kind == "classic":
        (tmp_path / "mp_rank_00").mkdir()
        torch.save(hostile, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    elif kind == "distributed":
        write_distributed(tmp_path / "theirs", make("llama2"))
        torch.save(hostile, tmp_path / "theirs" / "common.pt")
    else:
        make("llama2").config.save_pretrained(tmp_path)
        torch.save(hostile, tmp_path / "mp_rank_00_model_states.pt")
    folder = tmp_path / "theirs" if kind == "distributed" else tmp_path
    assert main(["import", str(folder), "--to", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert "system, which no checkpoint of weights needs: nothing of it was run" in said and "Traceback" not in said
    assert not made.exists() and not (tmp_path / "ours").exists()
    # The file is hostile: torch's own reader, if told to trust it, runs the command.
    file = next(folder.rglob("common.pt" if kind == "distributed" else "*.pt"))
    torch.load(file, weights_only=False)
    assert made.exists()


def test_a_reader_that_can_only_name_classes_calls_none(tmp_path: Path) -> None:
    """Functions of torch itself stay names too: `torch.hub.load` could download code."""

    class Calls:
        def __reduce__(self) -> Any:
            return torch.save, ({"x": 1}, str(tmp_path / "made"))

    torch.save({"a": Calls()}, tmp_path / "file.pt")
    value = TorchFile(tmp_path / "file.pt").value["a"]
    assert value.kind.full == "torch.serialization.save" and not (tmp_path / "made").exists()


def test_tensors_keep_their_dtype_and_strides(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    saved = {
        "turned": base.t(), "part": base[1:3, 2:], "half": base.bfloat16(), "small": base.to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(base), "none": base[:0], "number": torch.tensor(3),
    }  # fmt: skip
    torch.save(saved, tmp_path / "file.pt")
    found = TorchFile(tmp_path / "file.pt").value
    for name, tensor in saved.items():
        values = found[name].read()
        assert values.dtype == tensor.dtype and torch.equal(values.float(), tensor.detach().float()), name


def _drop(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000005" / "mp_rank_01")


def _cut(folder: Path) -> None:
    file = folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:5000])


def _nothing(folder: Path) -> None:
    torch.save({"model": {}}, folder / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("harm", "words", "sentence"),
    [
        (_drop, [], "has files of tp=1 x pp=1, and its arguments say tp=2 x pp=1: copy all of its folders"),
        (_cut, [], "can't be read"),
        (_nothing, [], "holds no arguments of a training script"),
        (lambda folder: None, ["--vocab", "99"], "and by arguments it has [99, 32]"),
        (lambda folder: None, ["--format", "deepspeed"], "which describes the model: name a Hugging Face folder"),
        (lambda folder: None, ["--format", "hf", "--vocab", "9"], "--vocab has no effect on a hf folder"),
    ],
)
def test_bad_input(harm: Any, words: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    write_classic(tmp_path / "theirs", make("llama2"), 2)
    harm(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--to", str(tmp_path / "ours"), *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "value", [[1, 2], {"model": 3, "args": 4}, {"module": [], "checkpoint_version": "x", "args": {}}], ids=str
)
@pytest.mark.parametrize("kind", ["megatron", "deepspeed"])
def test_values_of_another_form_are_refused(kind: str, value: Any, tmp_path: Path, capsys: Any) -> None:
    make("llama2").config.save_pretrained(tmp_path)
    names = {"megatron": ["mp_rank_00/model_optim_rng.pt"], "deepspeed": ["mp_rank_00_model_states.pt",
             "zero_pp_rank_0_mp_rank_00_optim_states.pt"]}  # fmt: skip
    (tmp_path / "mp_rank_00").mkdir()
    for name in names[kind]:
        torch.save(value, tmp_path / name)
    assert main(["import", str(tmp_path), "--to", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1 and "Traceback" not in said


def test_a_storage_that_is_too_short_is_refused(tmp_path: Path) -> None:
    torch.save(torch.arange(8.0), tmp_path / "file.pt")
    tensor = TorchFile(tmp_path / "file.pt").value
    longer = type(tensor)(tensor.storage, tensor.dtype, 0, (9,), (1,))
    with pytest.raises(UserError, match="lies outside of its storage"):
        longer.read()


@pytest.mark.parametrize(
    ("name", "changed", "tp", "pp"), [("llama2", {"num_key_value_heads": 2}, 2, 2), ("gpt2", {}, 4, 2)]
)
def test_an_export_comes_back_as_it_was(
    name: str, changed: dict[str, int], tp: int, pp: int, tmp_path: Path, capsys: Any
) -> None:
    make(name, **changed).save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    axes = ["--tp", str(tp), "--pp", str(pp)]
    assert main(["export", str(tmp_path / "ours"), "--to", str(tmp_path / "out"), "--format", "megatron", *axes]) == 0
    last = TorchFile(tmp_path / "out" / "release" / f"mp_rank_00_{pp - 1:03d}" / "model_optim_rng.pt").value
    assert last["model"]["output_layer.weight"].shape == (128, 32) and len(list(tmp_path.glob("out/*/*"))) == tp * pp
    assert main(["import", str(tmp_path / "out"), "--to", str(tmp_path / "again")]) == 0
    before, after = tensors(tmp_path / "ours"), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(np.array_equal(values, after[key]) for key, values in before.items())


def test_what_megatron_can_not_express_is_not_exported(tmp_path: Path, capsys: Any) -> None:
    for name in ("bloom", "llama2"):
        make(name).save_pretrained(tmp_path / name)
        assert main(["import", str(tmp_path / name), "--to", str(tmp_path / f"our-{name}")]) == 0
    out = ["--to", str(tmp_path / "out"), "--format", "megatron"]
    capsys.readouterr()
    assert main(["export", str(tmp_path / "our-bloom"), *out]) == 2
    assert "Megatron-LM's GPT can't have model." in capsys.readouterr().err
    assert main(["export", str(tmp_path / "our-llama2"), *out, "--tp", "3"]) == 2
    assert "--tp 3 does not divide model.heads=4: try 1, 2 or 4" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "our-llama2"), "--to", str(tmp_path / "out"), "--tp", "2"]) == 2
    assert "--tp and --pp are for --format megatron" in capsys.readouterr().err
