"""Model shapes and known training runs by name.

Sources: the GPT-2 and GPT-3 papers' tables, the config files that Llama and Qwen publish, and the papers of BLOOM,
GPT-NeoX-20B, GLM-130B, MT-NLG, OPT and CodeGeeX. `RUNS` adds the layout that a run chose and what it reports.
"""

from __future__ import annotations

from typing import Any


def _gpt(layers: int, hidden: int, heads: int, seq: int = 1024, vocab: int = 50257, **more: Any) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq, "norm": "layernorm",
        "mlp": "gelu_tanh", "position": "learned", "bias": True, "tied_embeddings": True, **more,
    }  # fmt: skip


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    seq: int,
    theta: float,
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab,
        "seq": seq, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "rope_theta": theta, "bias": False,
        "tied_embeddings": tied, **more,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _gpt(12, 768, 12),
    "gpt2-355m": _gpt(24, 1024, 16),
    "gpt2-774m": _gpt(36, 1280, 20),
    "gpt2-1.5b": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, seq=2048),
    "gpt-neox-20b": _gpt(
        44, 6144, 64, seq=2048, vocab=50432, position="rope", rotary_fraction=0.25, parallel_residual=True,
        tied_embeddings=False,
    ),
    "bloom-176b": _gpt(70, 14336, 112, seq=2048, vocab=250880, position="alibi", embedding_norm=True),
    "glm-130b": _gpt(70, 12288, 96, seq=2048, vocab=150528, position="rope", mlp="swiglu", ffn=32768),
    "mt-nlg-530b": _gpt(105, 20480, 128, seq=2048, vocab=51200),
    "opt-175b": _gpt(96, 12288, 96, seq=2048, vocab=50272, mlp="relu", position_offset=2),
    "codegeex-13b": _gpt(40, 5120, 40, seq=2048, vocab=52224),
    "qwen-72b": _llama(80, 8192, 64, 64, 24576, 152064, 32768, 1e6, qkv_bias=True, norm_eps=1e-6),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096, 1e4),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096, 1e4),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096, 1e4),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, 5e5),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, 5e5),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192, 5e5),
}  # fmt: skip


# Presets of models that differ from theirs in more than numbers: enough to plan with, but training one would train
# another model under its name. What differs, by name.
APPROXIMATE_PRESETS = {
    "glm-130b": "GLM-130B has GeGLU, DeepNorm and blanks to fill in, the preset SwiGLU, pre-norm and the next token",
    "codegeex-13b": "CodeGeeX has 39 blocks, a top query layer and fast GELU, the preset 40 blocks with tanh GELU",
}


# Runs that were published: what they ran on, the layout they chose, and their throughput in TFLOP/s per device, where
# `hardware` counts recomputation (empty: the source doesn't say) and `whole run` is that over the calendar, with all
# that interrupted the run. The model has the run's name.
RUNS: dict[str, dict[str, Any]] = {
    "gpt-neox-20b": {
        "cluster": "a100-40g-dgx", "devices": 96, "stack": "unfused-deepspeed", "tflops": 117, "counts": "",
        "layout": {"tp": 2, "pp": 4, "order": "tp-pp-cp-ep-dp"}, "network_gb_s": 100,  # four HDR adapters per node
        "train": {"global_batch": 1536, "micro_batch": 4, "precision": "fp16"},
        "zero": {"stage": 1}, "recompute": {"mode": "full"},
    },
    "bloom-176b": {
        "cluster": "a100-80g-dgx", "devices": 384, "stack": "unfused-deepspeed", "tflops": 150, "counts": "hardware",
        "layout": {"tp": 4, "pp": 12}, "network_gb_s": 50,
        "pipeline": {"split": [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]},
        "train": {"global_batch": 2048, "micro_batch": 2, "precision": "bf16"},
        "zero": {"stage": 1}, "recompute": {"mode": "full"},
    },
    "glm-130b": {
        "cluster": "a100-40g-dgx", "devices": 768, "stack": "unfused-deepspeed", "tflops": 135, "counts": "hardware",
        "layout": {"tp": 4, "pp": 8},
        "pipeline": {"split": [8, 9, 9, 9, 9, 9, 9, 8]},
        "train": {"global_batch": 4224, "micro_batch": 1, "precision": "fp16"},
        "zero": {"stage": 1}, "recompute": {"mode": "full"},
    },
    "mt-nlg-530b": {
        "cluster": "a100-80g-dgx", "devices": 4480, "stack": "unfused-deepspeed", "tflops": 113, "counts": "hardware",
        "layout": {"tp": 8, "pp": 35},
        "train": {"global_batch": 1920, "micro_batch": 1, "precision": "bf16"},
        "recompute": {"mode": "full"},
    },
    "opt-175b": {
        "cluster": "a100-80g-dgx", "devices": 992, "stack": "fsdp", "tflops": 147, "counts": "hardware",
        "layout": {"tp": 8, "pp": 1},
        "train": {"global_batch": 992, "micro_batch": 8, "precision": "fp16"},
        "zero": {"stage": 3}, "recompute": {"mode": "full"},
    },
    # 850B tokens from 18 April to 22 June 2022.
    "codegeex-13b": {
        "cluster": "ascend-910-32g", "devices": 1536, "stack": "unfused", "tflops": 10.8, "counts": "whole run",
        "layout": {"tp": 8, "pp": 1},
        "train": {"global_batch": 3072, "micro_batch": 16, "precision": "fp16"},
        "zero": {"stage": 2}, "recompute": {"mode": "full"},
    },
}  # fmt: skip
