"""A DeepSpeed JSON and a Megatron-LM script become a config, and every key of theirs appears in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.main import main
from meshwright.config.load import config_keys, load_config
from meshwright.interop.configs import DEEPSPEED, MEGATRON, SHAPE, arguments, from_deepspeed, from_megatron

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
# --num-layers 99
GPT_ARGS=(
    --num-layers 4
    --hidden-size 64 \\
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 32 --vocab-size 512 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-backend auto
)
OTHERS="--micro-batch-size 2 --global-batch-size=16 --rampup-batch-size 4 4 64 --fp16 --lr 6.0e-5
    --lr-decay-style cosine --lr-warmup-fraction .01 --train-iters 500 --made-up 7 --use-distributed-optimizer
    --adam-beta1 0.9 --adam-beta2 0.98 --split 949,50,1"
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_ARGS[@]} $OTHERS --tensor-model-parallel-size $TP \\
    --data-path 0.3 one 0.7 two --vocab-file $VOCAB_FILE
"""
JSON = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5, "bf16": {"enabled": False},
    "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 2, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 1000}},
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": False,
        "reduce_bucket_size": 5e8,
    },
    "aio": {"block_size": 1},
}  # fmt: skip


def made(capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["config", "from", *words]) == 0
    said = capsys.readouterr()
    assert "taken: " in said.err and "left out: " in said.err
    return yaml.safe_load(said.out)


def test_a_script_of_megatron_becomes_a_config(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    found = made(capsys, str(tmp_path / "run.sh"), "optimizer.eps=1e-9")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(found))
    config = load_config(tmp_path / "mine.yaml")
    model = config.model
    assert (model.layers, model.kv_heads, model.mlp, model.norm, model.position) == (4, 2, "swiglu", "rmsnorm", "rope")
    assert not model.bias and not model.tied_embeddings and model.vocab == 512 and model.ffn == 128
    assert (config.layout.tp, config.zero.stage, config.train.ramp) == (2, 1, (4, 4, 64))
    assert (config.train.precision, config.lr.warmup, config.optimizer.eps) == ("fp16", "1%", 1e-9)
    assert config.optimizer.betas == (0.9, 0.98) and config.data.weights == (0.3, 0.7)


def test_a_json_of_deepspeed_becomes_a_config(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(JSON))
    (tmp_path / "ds.yaml").write_text(
        yaml.safe_dump(made(capsys, str(tmp_path / "ds.json"), "model.preset=llama3-8b", "data.prefixes=data/text"))
    )
    config = load_config(tmp_path / "ds.yaml")
    assert (config.train.global_batch, config.train.micro_batch, config.train.clip) == (16, 2, 0.5)
    assert (config.train.precision, config.loss_scale.initial, config.loss_scale.hysteresis) == ("fp16", 4096.0, 2)
    assert (config.zero.stage, config.zero.offload.optimizer, config.comm.overlap.gradients) == (2, "cpu", False)
    assert (config.lr.schedule, config.lr.warmup, config.train.steps) == ("linear", 10, 1000)


def test_every_key_is_in_the_report() -> None:
    found = from_deepspeed(JSON)
    said = " ".join([*found.taken, *found.left])
    words = ["train_batch_size", "gradient_accumulation_steps: follows", "fp16.loss_scale: the",
             "aio.block_size: not known", "zero_optimization.reduce_bucket_size",
             "bf16.enabled=False: runs are so"]  # fmt: skip
    for name in words:
        assert name in said
    peer = from_megatron(SCRIPT)
    said = " ".join([*peer.taken, *peer.left])
    assert all(name in said for name in arguments(SCRIPT)), said
    assert "made_up: not known here" in said and "vocab_file: token files" in said


def test_all_rules_lead_to_keys_that_exist() -> None:
    """Each rule is tried with a value that it takes. The config that has all of its keys is read as any other."""
    usual = {
        "optimizer.type": "Lion", "scheduler.type": "WarmupCosineLR", "lr_decay_style": "WSD", "split": "949,50,1",
        "recompute_granularity": "full", "optimizer.params.betas": [0.9, 0.9], "rampup_batch_size": [2, 2, 8],
        "save": "runs/x", "zero_optimization.offload_optimizer.device": "nvme", "zero_optimization.stage": 3,
        "zero_optimization.offload_param.device": "nvme", "fp16.hysteresis": 2, "lr_warmup_fraction": 0.1,
    }  # fmt: skip
    known = {*(key.rstrip("=") for key in config_keys()), "optimizer.beta1", "optimizer.beta2"}
    for table in (DEEPSPEED, MEGATRON):
        for name, rule in table.items():
            if not isinstance(rule, str):
                keys = rule(usual.get(name, 2))
                assert keys and set(keys) <= known, name
    assert not set(SHAPE) & set(MEGATRON)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("echo hello", "holds no arguments such as --num-layers 24"),
        ('{"optimizer": {"type": "Lamb"}}', "optimizer.type='Lamb' has no counterpart or is not valid"),
        ("x --hidden-size 4 --num-layers 2", "the Megatron arguments lack num_attention_heads"),
        ("x --num-layers 2 --hidden-size 64 --num-attention-heads 3 --seq-length 8 --vocab-size 64 --data-path a "
         "--kv-channels 3 --position-embedding-type rope", "must be even"),
    ],
)  # fmt: skip
def test_bad_input(text: str, sentence: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text(text)
    assert main(["config", "from", str(tmp_path / "file")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said
