"""`plan`, `cost`, `memory` and `dryrun` give the same parameters, bytes per axis and peak memory for one config. The
dry run measures the peak instead of counting it, and is within 2 %.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.cli.main import main

EAGER = "train.compile=false"
# Mixtures of experts with few layers: shaped like Mixtral, Qwen3-MoE and DeepSeek-V2-Lite (with a balance loss).
MIXTRAL = ["model.layers=4", "model.kv_heads=8", "model.ffn=14336", "model.experts.count=8", "train.global_batch=32"]
QWEN = [
    "model.layers=6", "model.hidden=2048", "model.heads=32", "model.kv_heads=4", "model.head_dim=128",
    "model.qk_norm=true", "model.vocab=151936", "model.experts.count=128", "model.experts.top_k=8",
    "model.experts.ffn=768", "train.global_batch=32",
]  # fmt: skip
DEEPSEEK = [
    "model.layers=6", "model.hidden=2048", "model.heads=16", "model.kv_heads=16", "model.ffn=10944",
    "model.vocab=102400", "model.latent.kv_rank=512", "model.experts.count=64", "model.experts.top_k=6",
    "model.experts.ffn=1408", "model.experts.shared=2", "model.experts.first_dense=1", "model.experts.router=sigmoid",
    "model.experts.bias_balance=0.001", "model.experts.aux_loss=0.001", "train.global_batch=32",
]  # fmt: skip
# Name: (target, ranks, layout in short words, further config words).
CASES: dict[str, tuple[str, int, str, list[str]]] = {
    "gpt2": ("gpt2-124m", 1, "mb=8", ["train.global_batch=8"]),
    "gpt2-eager": ("gpt2-124m", 8, "mb=4,zero=1", ["train.global_batch=64", EAGER]),
    "gpt2-zero3": ("gpt2-355m", 8, "zero=3", ["train.global_batch=16"]),
    "gpt2-zero3-pp": ("gpt2-355m", 8, "zero=3,pp=2", ["train.global_batch=16"]),
    "gpt2-dropout": ("gpt2-124m", 4, "tp=2,sp=true,mb=8", ["train.global_batch=16", "model.dropout=0.1"]),
    "gpt2-cpu": ("gpt2-124m", 2, "tp=2,mb=4", ["train.global_batch=4", "run.device=cpu"]),
    "gpt2-cpu-bf16": ("gpt2-124m", 2, "pp=2,mb=2", ["train.global_batch=8", "run.device=cpu", "train.precision=bf16"]),
    "llama2-7b": ("llama2-7b", 8, "tp=8", ["train.global_batch=8"]),
    "llama2-7b-eager": ("llama2-7b", 8, "tp=8", ["train.global_batch=8", EAGER]),
    "llama2-7b-sp": ("llama2-7b", 8, "tp=4,sp=true,zero=1", ["train.global_batch=8"]),
    "llama2-7b-zero2": ("llama2-7b", 16, "zero=2", ["train.global_batch=32"]),
    "llama2-7b-zero2-eager": ("llama2-7b", 16, "zero=2", ["train.global_batch=32", EAGER]),
    "llama2-7b-full": ("llama2-7b", 16, "tp=2,recompute=full", ["train.global_batch=16"]),
    "llama2-13b-pp": ("llama2-13b", 16, "pp=4,zero=1", ["train.global_batch=64"]),
    "llama2-13b-gpipe": ("llama2-13b", 8, "pp=8,schedule=gpipe", ["train.global_batch=12"]),
    "llama2-70b": ("llama2-70b", 64, "tp=8,pp=8,sp=true", ["train.global_batch=32"]),
    "llama3-8b": ("llama3-8b", 8, "tp=2,sp=true", ["train.global_batch=8"]),
    "llama3-8b-zero1": ("llama3-8b", 64, "tp=4,pp=2,zero=1", ["train.global_batch=256"]),
    "llama3-8b-zero3": ("llama3-8b", 8, "zero=3", ["train.global_batch=16"]),
    "llama3-8b-zero3-eager": ("llama3-8b", 8, "zero=3", ["train.global_batch=16", EAGER]),
    "llama3-8b-every": ("llama3-8b", 8, "zero=3,recompute=every:4", ["train.global_batch=16"]),
    "llama3-8b-selective": ("llama3-8b", 8, "tp=2,recompute=selective", ["train.global_batch=8"]),
    "llama3-8b-chunks": ("llama3-8b", 16, "pp=4,chunks=2", ["train.global_batch=64"]),
    "llama3-8b-chunks-full": ("llama3-8b", 8, "pp=4,chunks=4,recompute=full,zero=1", ["train.global_batch=16"]),
    "llama3-8b-documents": ("llama3-8b", 8, "tp=8", ["train.global_batch=1", "data.reset_attention=true"]),
    "llama3-8b-offload": ("llama3-8b", 8, "zero=1", ["train.global_batch=8", "zero.offload.optimizer=cpu"]),
    # The buffers are small, because a dry run has no second memory to bring weights from and so does not create them.
    "llama3-8b-offload-params": ("llama3-8b", 8, "zero=3,recompute=full", [
        "train.global_batch=8", "zero.offload.optimizer=cpu", "zero.offload.params=cpu", "zero.offload.buffer_mib=8",
    ]),
    "llama3-8b-bf16-states": ("llama3-8b", 8, "zero=1", ["train.global_batch=8", "optimizer.state_dtype=bf16"]),
    "llama3-8b-bf16-grads": ("llama3-8b", 8, "zero=2", ["train.global_batch=16", "train.grad_dtype=bf16"]),
    "llama3-8b-sgd": ("llama3-8b", 8, "tp=4", ["train.global_batch=8", "optimizer.name=sgd"]),
    "llama3-8b-lion": ("llama3-8b", 8, "tp=2,zero=1", ["train.global_batch=8", "optimizer.name=lion"]),
    "llama3-8b-muon": ("llama3-8b", 8, "tp=2,zero=1", ["train.global_batch=8", "optimizer.name=muon"]),
    "llama3-8b-kv": ("llama3-8b", 16, "tp=16", ["train.global_batch=1"]),
    "llama3-70b": ("llama3-70b", 64, "tp=8,sp=true,zero=3,recompute=full", ["train.global_batch=64"]),
    "llama3-70b-kept": ("llama3-70b", 64, "tp=8,sp=true,zero=2", ["train.global_batch=64"]),
    "llama3-70b-eager": ("llama3-70b", 64, "tp=8,pp=4,sp=true,zero=1", ["train.global_batch=64", EAGER]),
    "neox": ("gpt-neox-20b", 96, "tp=2,pp=4,zero=1,mb=4", ["train.global_batch=1536"]),
    "neox-eager": ("gpt-neox-20b", 96, "tp=2,pp=4,zero=1,mb=4", ["train.global_batch=1536", EAGER]),
    "opt": ("opt-175b", 992, "tp=8,zero=3,recompute=full", ["train.global_batch=992"]),
    "bloom": ("bloom-176b", 48, "tp=4,pp=12,recompute=full", ["train.global_batch=24"]),
    "bloom-eager": ("bloom-176b", 48, "tp=4,pp=12,recompute=full,sp=true", ["train.global_batch=24", EAGER]),
    "qwen": ("qwen-72b", 64, "tp=8,pp=4,recompute=full", ["train.global_batch=16"]),
    "gpt3": ("gpt3-175b", 128, "tp=8,pp=16,sp=true", ["train.global_batch=16"]),
    "gpt3-zero1": ("gpt3-175b", 256, "tp=8,pp=8,zero=1,recompute=full", ["train.global_batch=64"]),
    "mt-nlg": ("mt-nlg-530b", 280, "tp=8,pp=35,recompute=full", ["train.global_batch=40"]),
    "qk-norm": ("llama3-8b", 8, "tp=2,sp=true", ["train.global_batch=8", "model.qk_norm=true"]),
    "token-norms": (
        "llama3-8b", 8, "tp=2,sp=true", ["train.global_batch=8", "model.qk_norm=true", "model.qk_norm_over=all"]
    ),
    "mixtral-every": ("llama2-7b", 8, "tp=2,pp=2,ep=2,etp=1,zero=3", [*MIXTRAL, "model.experts.every=2"]),
    # Only experts are sharded by ZeRO: there is one data-parallel rank, and each tp rank has a copy of the experts.
    "mixtral-experts-zero1": ("llama2-7b", 2, "tp=2,ep=1,etp=1,zero=1", MIXTRAL),
    "mixtral-experts-zero2": ("llama2-7b", 2, "tp=2,ep=1,etp=1,zero=2", MIXTRAL),
    "mixtral-experts-zero3": ("llama2-7b", 2, "tp=2,ep=1,etp=1,zero=3", MIXTRAL),
    # Everything but the experts is sharded, since each expert has one copy.
    "mixtral-dense-zero1": ("llama2-7b", 8, "ep=8,etp=1,zero=1", MIXTRAL),
    "mixtral-dense-zero2": ("llama2-7b", 8, "ep=8,etp=1,zero=2", MIXTRAL),
    "mixtral-dense-zero3": ("llama2-7b", 8, "ep=8,etp=1,zero=3", MIXTRAL),
    "mixtral-etp": ("llama2-7b", 4, "tp=2,sp=true,ep=2,etp=2,zero=3", MIXTRAL),
    "qwen3-moe": ("llama2-7b", 8, "ep=4,etp=1,zero=2", QWEN),
    "qwen3-moe-across-tp": ("llama2-7b", 4, "tp=4,ep=2,etp=1,zero=3", QWEN),
    "qwen3-moe-chunks": ("llama2-7b", 8, "pp=2,chunks=3,ep=4,etp=1,zero=1", QWEN),
    "qwen3-moe-capacity": ("llama2-7b", 8, "ep=8,etp=1,zero=1", [*QWEN, "model.experts.capacity=1.25"]),
    "deepseek-zero2": ("llama2-7b", 8, "tp=2,sp=true,ep=4,etp=1,zero=2", DEEPSEEK),
    "deepseek-zero3": ("llama2-7b", 8, "pp=2,ep=2,etp=1,zero=3", DEEPSEEK),
    "deepseek-full": ("llama2-7b", 4, "ep=2,etp=1,zero=3,recompute=full", DEEPSEEK),
    "deepseek-eager": ("llama2-7b", 8, "ep=8,etp=1,zero=1", [*DEEPSEEK, EAGER]),
}  # fmt: skip
QUICK = {
    "gpt2-zero3", "gpt2-zero3-pp", "gpt2-cpu", "llama2-7b", "llama3-8b-every", "llama3-8b-chunks", "neox",
    "mixtral-every", "mixtral-experts-zero3", "mixtral-dense-zero3", "deepseek-zero2",
}  # fmt: skip
SHORT = {
    "tp": "layout.tp", "cp": "layout.cp", "pp": "layout.pp", "ep": "layout.ep", "etp": "layout.etp",
    "chunks": "layout.chunks", "sp": "layout.sequence_parallel", "mb": "train.micro_batch", "zero": "zero.stage",
    "recompute": "recompute.mode", "schedule": "pipeline.schedule",
}  # fmt: skip
FIXED = {
    "tp": "1", "pp": "1", "chunks": "1", "sp": "false", "mb": "1", "zero": "0", "recompute": "none", "cp": "1",
}  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0, words
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.wide]) for name in CASES
])  # fmt: skip
def test_four_commands_give_one_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, world, layout, words = CASES[name]
    given = dict(part.split("=") for part in layout.split(","))
    keys = [f"{SHORT[key]}={value}" for key, value in (FIXED | given).items()]
    keys += [f"{SHORT['schedule']}={'interleaved' if 'chunks' in given else '1f1b'}"]
    words = [*words, "model.dropout=0"] if not any("dropout" in word for word in words) else words
    cluster = "laptop" if "run.device=cpu" in words else "h100-80g-dgx"
    devices = ["--cluster", cluster, "--devices", str(world)]
    plan = answer(capsys, "plan", target, *devices, "--fit", "100000", *keys, "layout.order=tp-cp-ep-dp-pp", *words)
    # The search chooses these itself: the split and, for a preset, the precision that the cluster is used with.
    keys += [f"pipeline.split={plan['best']['layout']['split']}", f"train.precision={plan['best']['precision']}"]
    cost = answer(capsys, "cost", target, *devices, "--stack", _stack(words), *keys, *words)
    rank = cost["rank"]
    memory = answer(capsys, "memory", target, *devices, *keys, *words)
    dry = answer(capsys, "dryrun", target, "--world", str(world), "--ranks", str(rank["rank"]), *keys, *words)

    assert plan["best"]["parameters"] == cost["parameters"] and plan["best"]["rank"] == rank
    assert plan["best"]["active_parameters"] == cost["active_parameters"]
    assert plan["best"].get("experts") == cost.get("experts") == memory.get("experts")
    assert memory["rank"] == rank["rank"] and memory["comm"] == rank["comm"]
    assert {kind: memory[kind] for kind in rank["memory"]} == rank["memory"] == {
        kind: cost["memory"][kind] for kind in rank["memory"]
    }  # fmt: skip
    assert {axis: {key: each[key] for key in rank["comm"][axis]} for axis, each in cost["comm"].items()} == rank["comm"]
    device = plan["best"]["device"]
    assert device == cost["memory"]["device"] == memory["device"], "one breakdown of what a device needs"
    parts = [device[f"{part}_gib"] for part in ("tensors", "reserve", "context")]
    assert plan["best"]["memory_gib"] == cost["memory"]["needed_gib"] == memory["device_gib"] == sum(parts)
    assert memory["at_peak"] == cost["memory"]["at_peak"] and device["tensors_gib"] == rank["memory"]["peak"] / 2**30
    (ran,) = dry["ranks"]
    assert dry["equal"], "states, calls and schedule are exact"
    assert ran["parameters"]["ran"] == rank["parameters"] == memory["rank_parameters"]
    assert {axis: each["ran"] for axis, each in ran["comm"].items()} == rank["comm"]
    assert ran["most"]["peak"]["planned"] == rank["memory"]["peak"]
    assert ran["most"]["peak"]["ratio"] == pytest.approx(1.0, abs=0.02), ran["most"]
    assert ran["most"]["activations"]["ratio"] == pytest.approx(1.0, abs=0.02), ran["most"]


def _stack(words: list[str]) -> str:
    """Return the stack of the run itself. The published run of a preset may have another one."""
    if "run.device=cpu" in words:
        return "cpu"
    return "eager" if EAGER in words or "model.dropout=0.1" in words else "compiled"
