"""Adapters over a base in 4 bits: reading, computing and writing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.checkpoint.base import read_base
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import Reader
from meshwright.config.rules import first_broken_rule
from meshwright.interop.hf import export_folder
from meshwright.interop.peft import export_adapters
from meshwright.nn.adapters.nf4 import round_by_packing
from meshwright.spec.layout.params import slices_of
from tests.interop import hf_models
from tests.support.oracle import make_trainer, parameters, small_config
from tests.support.ranks import run_ranks
from tests.tune.test_adapter_files import our_logits, peft_logits, save, trained

SIZES = {"hidden_size": 128, "intermediate_size": 128}


@pytest.mark.parametrize(
    "tune",
    [{"targets": ["q", "v", "down"]}, pytest.param({"kind": "dora"}, marks=pytest.mark.wide)],
    ids=["some", "dora"],
)
def test_files_of_a_packed_run_compute_the_same(tune: dict[str, Any], tmp_path: Path) -> None:
    """Merged weights, and PEFT's adapters over rounded weights, give our logits. The files hold no frozen weight."""
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    model = hf_models.save("llama3", base, torch.float64, **SIZES)
    trainer = trained(base, quantise="nf4", **tune)
    frozen = {slot.record.name: slot.view.dtype for buffer in trainer.data_parallel.buffers for slot in buffer.slots
              if not buffer.key.trained}  # fmt: skip
    assert {name.rpartition(".")[0].rpartition(".")[2] for name, dtype in frozen.items() if dtype == torch.uint8} == {
        "qkv", "out", "gate_up", "down",
    }  # fmt: skip
    ids = torch.tensor(np.random.default_rng(3).integers(0, 61, (2, 24)))
    ours = our_logits(trainer, ids)
    checkpoint = save(trainer, tmp_path / "run" / "checkpoints")
    assert all("lora" in name or "norms" in name for name in Reader(checkpoint).index.tensors)
    export_folder(checkpoint, tmp_path / "merged", "fp64")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert torch.allclose(ours, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    export_adapters(checkpoint, tmp_path / "peft")
    exact = peft_logits(hf_models.make("llama3", torch.float64, **SIZES), tmp_path / "peft", ids)
    for name, weight in model.named_parameters():
        if "proj" in name:
            weight.data = round_by_packing(weight.data)
    assert torch.allclose(ours, peft_logits(model, tmp_path / "peft", ids), rtol=1e-5, atol=1e-5)
    assert (ours - exact).abs().max() > 1e-2  # rounding changed the base


def read(rank: int, world: int, base: str, sections: dict[str, Any]) -> Any:
    tune = {"kind": "lora", "rank": 2, "base": base, "quantise": "nf4"}
    config = small_config(model=asdict(HFFolder(Path(base)).model), train={"global_batch": 2}, tune=tune, **sections)
    trainer = make_trainer(config, rank, world)
    read_base(trainer)
    trainer.publish()
    return [(record, value.clone()) for record, value in parameters(trainer) if record.packs is not None]


@pytest.mark.wide
@pytest.mark.parametrize("sections", [{"layout": {"tp": 2}}, {"zero": {"stage": 3}}, {"layout": {"pp": 2}}])
def test_every_layout_reads_the_same_bytes(sections: dict[str, Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf_models.save("llama3", base, torch.bfloat16, **SIZES)
    wanted = {record.name: value for record, value in read(0, 1, str(base), {})}
    seen = 0
    for found in run_ranks(2, read, str(base), sections):
        for record, value in found:
            for box in record.boxes:
                there = wanted[record.name][slices_of(box.start, box.shape)]
                assert torch.equal(value[slices_of(box.local_start, box.shape)], there), record.name
                seen += 1
    assert seen


def test_cuts_inside_blocks_are_refused_in_one_sentence() -> None:
    config = small_config(tune={"kind": "lora", "quantise": "nf4"}, layout={"tp": 2}, model={"hidden": 64})
    assert "blocks of 64 values, and the width of all heads is 32 on a tp rank" in (first_broken_rule(config, 2) or "")
