"""Adapters as files: checkpoints that name their base, import and export of PEFT's folders, and merged weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint.base import read_base, with_base
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.cli.main import main
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.interop.hf import export_folder, import_folder
from meshwright.interop.peft import export_adapters, import_adapters
from tests.checkpoint.runs import Attempt, complete, newest, saved, tensors, timeless, tiny
from tests.interop import hf_models
from tests.support.oracle import EXACT, gather_global, load_into, make_trainer, parameters, small_config, worst
from tests.support.ranks import run_ranks

FAMILIES = ("llama3", "qwen2", "qwen3-one-kv-head", "gpt2", "gpt-neox", "opt", "bloom", "mixtral", "deepseek-v3")
# PEFT applies the names of a dense MLP to the experts beside it too.
LATENT = {"deepseek-v3": {"targets": ["q_a", "q_b", "kv_a", "kv_b", "out"]}}
OF_EXPERTS = ["expert_gate", "expert_up", "expert_down"]


def trained(base: Path, precision: str = "fp64", **tune: Any) -> Trainer:
    """Train three steps on a Hugging Face folder, after which the adapters are far from zero."""
    model = asdict(HFFolder(base).model)
    sections = {"model": model, "train": {"precision": precision, "micro_batch": 2, "global_batch": 2},
                "optimizer": {"lr": 0.05}, "tune": {"kind": "lora", "rank": 4, "base": str(base), **tune}}  # fmt: skip
    sections["model"] = model
    trainer = make_trainer(small_config(**sections))
    read_base(trainer)
    trainer.publish()
    for _ in range(3):
        trainer.step()
    return trainer


def save(trainer: Trainer, folder: Path) -> Path:
    saver = Saver(trainer, folder, asynchronous=False, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()
    return newest(folder.parent)


def our_logits(trainer: Trainer, ids: torch.Tensor) -> torch.Tensor:
    """Return logits that are computed with the adapters separate from the weights."""
    (module,) = trainer.modules
    with torch.no_grad():
        hidden, _ = module.eval().trunk({"tokens": ids})  # type: ignore[operator]
        return module.head.logits(hidden).view(*ids.shape, -1)[..., : trainer.ctx.config.model.vocab]  # type: ignore


def peft_logits(model: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    import peft

    adapted = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    with torch.no_grad():
        return adapted(input_ids=ids).logits


@pytest.mark.parametrize(
    ("name", "tune"),
    [
        ("llama3", {"kind": "dora", "targets": ["q", "v", "gate", "down"]}),
        ("mixtral", {"targets": ["v", *OF_EXPERTS]}),
        *(pytest.param(name, {"targets": ["q_a" if "deepseek" in name else "q", *targets], "rslora": True},
                       marks=pytest.mark.wide) for name in ("mixtral", "qwen3-moe", "olmoe", "deepseek-v3")
          for targets in (OF_EXPERTS, OF_EXPERTS[1:], OF_EXPERTS[:1])),
        pytest.param("gpt2", {"modules_to_save": ["final_norm"]}, marks=pytest.mark.wide),
        *(pytest.param(name, {"kind": kind, "rslora": kind == "lora", **LATENT.get(name, {})}, marks=pytest.mark.wide)
          for name in FAMILIES for kind in ("lora", "dora")),
        pytest.param("llama2", {"modules_to_save": ["embedding", "head", "norm1"]}, marks=pytest.mark.wide),
        pytest.param("llama2", {"targets": ["down", "q"]}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_peft_and_merged_weights_compute_the_same(name: str, tune: dict[str, Any], tmp_path: Path) -> None:
    """Equal logits come from our model with adapters, from PEFT's, from transformers with the merged folder, and from
    our model again after an import, in float64.
    """
    from transformers import AutoModelForCausalLM

    base, mixed = tmp_path / "base", name in hf_models.EXPERTS  # transformers multiplies experts in float32 at most
    dtype, close = (torch.float32, 3e-4) if mixed else (torch.float64, 1e-5)
    model = hf_models.save(name, base, dtype)
    ids = torch.tensor(np.random.default_rng(3).integers(0, 61, (2, 24)))
    trainer = trained(base, "fp32" if mixed else "fp64", **tune)
    ours = our_logits(trainer, ids)
    assert (ours - model(input_ids=ids).logits).abs().max() > 1e-2  # the adapters change the logits
    checkpoint = save(trainer, tmp_path / "run" / "checkpoints")
    written = export_adapters(checkpoint, tmp_path / "peft")
    assert torch.allclose(ours, peft_logits(model, tmp_path / "peft", ids), rtol=close, atol=close)
    export_folder(checkpoint, tmp_path / "merged", "fp32" if mixed else "fp64")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype).eval()
    assert torch.allclose(ours, merged(input_ids=ids).logits, rtol=close, atol=close)
    import_adapters(tmp_path / "peft", tmp_path / "back", str(base))
    saved_tune = Reader(tmp_path / "back").index.config["tune"]
    again = trained(base, "fp32" if mixed else "fp64", **{key: saved_tune[key] for key in saved_tune if key != "base"})
    load_into(again, Reader(tmp_path / "back"), model_only=True)
    assert torch.allclose(ours, our_logits(again, ids), rtol=close, atol=close)
    assert written["bytes"] < sum(p.stat().st_size for p in base.glob("*.safetensors"))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama2", "gpt2", "gpt-neox"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_that_peft_made_are_imported(name: str, dora: bool, tmp_path: Path) -> None:
    """Some modules may have another rank and scale."""
    import peft

    base = tmp_path / "base"
    model = hf_models.save(name, base, torch.float64)
    targets = {"llama2": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "gpt-neox": ["query_key_value"]}[name]
    more: dict[str, Any] = {"rank_pattern": {targets[-1]: 2}, "alpha_pattern": {targets[-1]: 5}}
    lora = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, use_dora=dora, fan_in_fan_out=name == "gpt2",
                           init_lora_weights=False, **more)  # fmt: skip
    adapted = peft.get_peft_model(model, lora).to(torch.float64).eval()
    adapted.save_pretrained(tmp_path / "peft")
    ids = torch.tensor(np.random.default_rng(3).integers(0, 61, (2, 24)))
    theirs = adapted(input_ids=ids).logits
    import_adapters(tmp_path / "peft", tmp_path / "ours", str(base))
    export_folder(tmp_path / "ours", tmp_path / "merged", "fp64")
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert torch.allclose(theirs, merged(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_a_full_rank_adapter_can_be_any_change(tmp_path: Path) -> None:
    """B A = W2 - W1 turns one model into the other, with the rank of the weight and a scale of 1."""
    base = tmp_path / "base"
    hf_models.save("llama2", base, torch.float64)
    trainer = trained(base, rank=32, alpha=32.0, targets=["q"])
    other = torch.randn(32, 32, dtype=torch.float64)
    (module,) = trainer.modules
    linear = module.blocks["0"].attention.projection.qkv  # type: ignore[union-attr, index]
    with torch.no_grad():
        linear.q.down.copy_(torch.eye(32))
        linear.q.up.copy_(other - linear.weight[:32])
    trainer.optimizer.publish()
    ids = torch.arange(12)[None]
    ours = our_logits(trainer, ids)
    with torch.no_grad():
        linear.weight[:32] = other
        linear.q.up.zero_()
    assert (ours - our_logits(trainer, ids)).abs().max() < EXACT


TUNE = {"kind": "lora", "rank": 2}


@pytest.mark.wide
def test_a_killed_run_goes_on_and_its_base_is_stored_once(tmp_path: Path) -> None:
    """A resumed run is equal to the last bit on its own layout, and starts from the same bits on another one. Its
    checkpoints hold no frozen weight.
    """
    base = complete(1, tiny(tmp_path / "base", train={"steps": 2}))
    changes: dict[str, Any] = {"tune": {**TUNE, "dropout": 0.1}, "layout": {"tp": 2, "sequence_parallel": True},
                               "checkpoint": {"every": 2, "keep": 0}}  # fmt: skip
    straight = complete(2, tiny(tmp_path / "straight", **changes), str(base))
    sections = tiny(tmp_path / "killed", **changes)
    attempt = Attempt(2, sections, source=str(base))
    assert attempt.until(lambda: len(saved(attempt.run)) > 0)
    attempt.kill(1)
    assert attempt.finish() is None, "a rank was killed before the end"
    run = complete(2, sections)  # the run knows its base
    assert timeless(run / "metrics.jsonl") == timeless(straight / "metrics.jsonl")
    found, wanted = tensors(newest(run)), tensors(newest(straight))
    assert found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in found)
    assert all(key.rpartition(".")[2] in ("lora_a", "lora_b") for key in found)
    assert Reader(newest(run)).index.config["tune"]["base"] == str(base)
    # The bits are the same on another layout: all states are read, and written again unchanged.
    other = make_trainer(small_config(**tiny(tmp_path / "copy", **changes | {"layout": {}, "zero": {"stage": 0}})))
    load_into(other, Reader(newest(run)))
    copied = tensors(save(other, tmp_path / "copy" / "checkpoints"))
    assert copied.keys() == found.keys() and all(np.array_equal(copied[key], found[key]) for key in found)
    moved = tiny(tmp_path / "killed", **changes | {"layout": {}, "zero": {"stage": 3}, "train": {"steps": 10}})
    again = tensors(newest(complete(2, moved)))
    assert set(again) == set(found) and saved(run)[-1] == 10


def test_a_base_that_was_replaced_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    hf_models.save("llama2", base, torch.float32)
    import_folder(base, tmp_path / "imported")
    import peft

    model = hf_models.make("llama2")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "peft")
    words = ["import", str(tmp_path / "peft"), "--to", str(tmp_path / "ours")]
    assert main(words) == 2 and "--base" in capsys.readouterr().err
    assert main([*words, "--base", str(tmp_path / "imported"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tune"]["targets"] == ["q"]
    assert main(["merge", str(tmp_path / "ours"), "--to", str(tmp_path / "merged")]) == 0
    assert main(["merge", str(tmp_path / "imported"), "--to", str(tmp_path / "none")]) == 2
    assert "need no merging" in capsys.readouterr().err
    index = tmp_path / "imported" / "index.json"
    import shutil

    shutil.rmtree(tmp_path / "imported")
    hf_models.save("llama2", tmp_path / "base2", torch.float32, std=0.3)
    import_folder(tmp_path / "base2", tmp_path / "imported")
    assert index.is_file() and main(["export", str(tmp_path / "ours"), "--to", str(tmp_path / "out")]) == 2
    assert "which were replaced since" in capsys.readouterr().err


def test_what_experts_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf_models.save("mixtral", base)
    adapter_config = {"peft_type": "LORA", "target_parameters": ["mlp.gate.weight"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config), encoding="utf-8")
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="adapts the parameter mlp.gate.weight: of parameters, only experts' weights"):
        import_adapters(tmp_path, tmp_path / "ours", str(base))
    mixture = {"experts": {"count": 4, "top_k": 2}}
    for tune, words in (
        ({"targets": ["down"]}, "tune.targets=down is not in this model.*expert_down"),
        ({"targets": ["expert_down"], "kind": "dora"}, "tune.kind=dora can't be had on experts: use tune.kind=lora"),
        (
            {"targets": ["q", "expert_up"], "dropout": 0.1},
            "tune.dropout=0.1 .*: set tune.dropout=0, or leave expert_up",
        ),
    ):
        with pytest.raises(UserError, match=words):
            make_trainer(small_config(tune=TUNE | tune, model=mixture))


def theirs_and_ours(model: Any, folder: Path, base: Path, to: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's logits with a folder of adapters, and transformers' logits with our import of it, merged."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(np.random.default_rng(3).integers(0, 61, (2, 24)))
    import_adapters(folder, to / "ours", str(base))
    export_folder(to / "ours", to / "merged", "fp32")
    merged = AutoModelForCausalLM.from_pretrained(to / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        return peft_logits(model, folder, ids), merged(input_ids=ids).logits


@pytest.mark.wide
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "deepseek-v3"])
@pytest.mark.parametrize("targets", [["gate_up_proj", "down_proj"], ["down_proj"], ["gate_up_proj"]], ids="-".join)
def test_adapters_of_experts_that_peft_made_are_imported(name: str, targets: list[str], tmp_path: Path) -> None:
    """One of the parameters may have another rank and scale."""
    import peft

    base = tmp_path / "base"
    model = hf_models.save(name, base)
    more: dict[str, Any] = {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"experts.down_proj": 5}}
    lora = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["o_proj"], init_lora_weights=False,
                           target_parameters=[f"mlp.experts.{each}" for each in targets], **more)  # fmt: skip
    peft.get_peft_model(hf_models.make(name), lora).save_pretrained(tmp_path / "peft")
    theirs, ours = theirs_and_ours(model, tmp_path / "peft", base, tmp_path)
    assert torch.allclose(theirs, ours, rtol=3e-4, atol=3e-4)
    assert (ours - hf_models.logits(hf_models.make(name), torch.arange(4)[None])[0, 0, 0]).abs().max() > 1e-2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "parts"), [("mixtral", ("w1", "w3", "w2")), ("qwen3-moe", ("gate_proj", "up_proj", "down_proj"))]
)
def test_adapters_of_single_experts_are_imported(name: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """PEFT wrote such folders when each expert had separate modules."""
    base, peft = tmp_path / "base", tmp_path / "peft"
    model = hf_models.save(name, base)
    c, inside = model.config, "block_sparse_moe" if name == "mixtral" else "mlp"
    ffn = c.intermediate_size if name == "mixtral" else c.moe_intermediate_size
    tensors, random = {}, torch.Generator().manual_seed(1)
    for layer, expert, part in product(range(c.num_hidden_layers), range(c.num_local_experts), parts):
        out, width = (c.hidden_size, ffn) if part == parts[2] else (ffn, c.hidden_size)
        at = f"base_model.model.model.layers.{layer}.{inside}.experts.{expert}.{part}"
        tensors[f"{at}.lora_A.weight"] = 0.2 * torch.randn(3, width, generator=random)
        tensors[f"{at}.lora_B.weight"] = 0.2 * torch.randn(out, 3, generator=random)
    adapter_config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(parts), "bias": "none"}
    peft.mkdir()
    (peft / "adapter_config.json").write_text(json.dumps(adapter_config), encoding="utf-8")
    save_file(tensors, peft / "adapter_model.safetensors")
    theirs, ours = theirs_and_ours(model, peft, base, tmp_path)
    assert torch.allclose(theirs, ours, rtol=3e-4, atol=3e-4)
    (peft / "adapter_config.json").write_text(json.dumps({**adapter_config, "lora_dropout": 0.1}), encoding="utf-8")
    assert import_adapters(peft, tmp_path / "without", str(base)).dropout == 0.0  # experts can't have dropout
    del tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"]
    save_file(tensors, peft / "adapter_model.safetensors")
    with pytest.raises(UserError, match="only LoRA of one rank on all experts of a layer can be imported"):
        import_adapters(peft, tmp_path / "none", str(base))


def test_a_run_needs_a_base() -> None:
    with pytest.raises(UserError, match="set tune.base"):
        with_base(small_config(tune=TUNE, run={"dir": "no-such-run"}), None)
    with pytest.raises(UserError, match="tune.targets=w is not in this model"):
        make_trainer(small_config(tune={**TUNE, "targets": ["w"]}))


def based(rank: int, world: int, base: str, layout: dict[str, Any]) -> Any:
    """Return this rank's weights after it has read its base. Some modules are trained as a whole."""
    sections = {"model": asdict(HFFolder(Path(base)).model), "layout": layout, "train": {"global_batch": 2},
                "tune": {"kind": "lora", "rank": 2, "base": base, "modules_to_save": ["norm1", "head"]}}  # fmt: skip
    trainer = make_trainer(small_config(**sections), rank, world)
    read_base(trainer)
    trainer.publish()
    return parameters(trainer)


def test_replicas_read_their_base_too(tmp_path: Path) -> None:
    """The states of replicas have other names. Modules that are trained as a whole begin with the weights of the
    base.
    """
    base = tmp_path / "base"
    hf_models.save("llama2", base, torch.float64)
    wanted = gather_global(based(0, 1, str(base), {}))
    for found in run_ranks(2, based, str(base), {"replicas": 2}):
        error, name = worst(found, wanted)
        assert error < EXACT, name
