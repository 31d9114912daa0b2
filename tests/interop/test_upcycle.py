"""Upcycling turns a dense model into a mixture of experts that computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import meshwright.record.checkpoint_format as fmt
from meshwright.cli.main import main
from meshwright.interop.hf import export_folder, import_folder
from tests.checkpoint.runs import tensors
from tests.interop.hf_models import logits, run_models, save

transformers = pytest.importorskip("transformers")

IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 61, (2, 24)))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Save dense models, and return their folder with the logits of the Llama."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("dense")
    found = logits(save("llama2", folder / "llama2"), IDS)
    for name in ("gpt2", "mixtral", "qwen3"):
        save(name, folder / name)
    (folder / "llama2" / "tokenizer.json").write_text("{}")
    return folder, found


def test_copies_whose_weights_sum_to_one_compute_what_the_mlp_did(dense: Any, tmp_path: Path) -> None:
    """The logits are equal however many experts are chosen, here and in transformers after an export. The routers are
    drawn from the seed.
    """
    folder, wanted = dense
    model = import_folder(folder / "llama2", tmp_path / "a", upcycle="count=4,top_k=4")
    assert (model.experts.count, model.experts.top_k, model.experts.ffn) == (4, 4, model.ffn)
    import_folder(folder / "llama2", tmp_path / "b", upcycle="count=4,top_k=2,seed=9")
    import_folder(folder / "llama2", tmp_path / "again", upcycle="count=4,top_k=2,seed=9")
    for found in run_models(0, 1, [str(tmp_path / "a"), str(tmp_path / "b")], IDS, {}):
        assert np.abs(found - wanted.numpy()).max() <= 1e-5
    a, b, again = (tensors(tmp_path / name) for name in ("a", "b", "again"))
    router = "param/layers.1.experts.router.weight"
    assert 0.01 < float(a[router].std()) < 0.03 and (a[router] != b[router]).any()
    assert all((b[name] == values).all() for name, values in again.items())
    written = export_folder(tmp_path / "a", tmp_path / "out")
    assert written["family"] == "mixtral" and "tokenizer.json" in written["beside"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == json.loads((folder / "llama2" / "config.json").read_text())["eos_token_id"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert float((logits(theirs, IDS) - wanted).abs().max()) <= 1e-5


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=1)
    return (F.silu(gate) * up) @ down.T


@pytest.mark.parametrize("block_bytes", [16 * 2**20, 700])
def test_experts_of_a_part_of_the_features_are_slices(
    block_bytes: int, dense: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are cut from whole matrices and from blocks of a few rows. With equal weights they sum to the MLP. The
    weights of the other layers do not change.
    """
    monkeypatch.setattr(fmt, "BLOCK_BYTES", block_bytes)
    import_folder(dense[0] / "qwen3", tmp_path / "dense")
    model = import_folder(dense[0] / "qwen3", tmp_path / "cut", upcycle="count=6,top_k=2,ffn=16,every=2")
    assert (model.ffn, model.experts.ffn, model.experts.every) == (48, 16, 2)
    before, after = ({name: torch.from_numpy(each) for name, each in tensors(tmp_path / kind).items()}
                     for kind in ("dense", "cut"))  # fmt: skip
    gate_up, down = (before[f"param/layers.1.mlp.{key}.weight"] for key in ("gate_up", "down"))
    experts = "param/layers.1.experts"
    for expert in range(6):
        rows = torch.arange(16) + 16 * (expert % 3)
        assert torch.equal(after[f"{experts}.gate_up.weight"][expert], gate_up[torch.cat([rows, 48 + rows])])
        assert torch.equal(after[f"{experts}.down.weight"][expert], 3 * down[:, rows])
    x = torch.randn(5, model.hidden)
    both = zip(after[f"{experts}.gate_up.weight"], after[f"{experts}.down.weight"], strict=True)
    mean = sum(mlp(x, *each) for each in both) / 6
    assert float((mean - mlp(x, gate_up, down)).abs().max()) < 1e-5
    assert set(before) - set(after) == {f"param/layers.1.mlp.{key}.weight" for key in ("gate_up", "down")}
    assert all(torch.equal(after[name], values) for name, values in before.items() if name in after)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("llama2", "", "'' in --upcycle is not of the form key=number: write e.g. count=8,top_k=2"),
        ("llama2", "top_k=2", "needs the number of experts: write e.g. count=8,top_k=2"),
        ("llama2", "count=0", "needs the number of experts"),
        ("llama2", "count=many", "'count=many' in --upcycle is not of the form key=number"),
        ("llama2", "count=2.5", "'count=2.5' in --upcycle is not of the form key=number"),
        ("llama2", "count=4,count=8", "--upcycle has count twice"),
        ("llama2", "count=4,topk=2", "does not know 'topk' (did you mean 'top_k'?)"),
        ("llama2", "count=4,top_k=5", "top_k=5 is more than model.experts.count=4: set it to 4 or less"),
        ("llama2", "count=4,ffn=32", "ffn=32 does not divide the model's ffn of 48: try 6, 8, 12, 16, 24 or 48"),
        ("llama2", "count=4,ffn=16", "make count a multiple of 3"),
        ("llama2", "count=4,first_dense=2", "none of the 2 blocks with experts: lower every or first_dense"),
        ("gpt2", "count=4", "MLPs have biases, which experts don't have: --upcycle needs a model without"),
        ("mixtral", "count=4", "the model has 4 experts already: import it without --upcycle"),
    ],
)
def test_bad_words(
    name: str, words: str, sentence: str, dense: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(dense[0] / name), "--to", str(tmp_path / "out"), "--upcycle", words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
