"""Llama and its relatives: Mistral, Qwen2 and Qwen3. They differ in biases, norms of queries and keys, and windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.models.hf.family import Family, HFConfig
from meshwright.models.hf.fields import read_length
from meshwright.models.hf.rotary import read_whole_rotary, write_rotary

LAYER = "model.layers.#"


def _read(config: HFConfig) -> dict[str, Any]:
    attention, mlp = (bool(config.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        raise UserError(
            f"attention_bias={attention} with mlp_bias={mlp} in config.json can't be imported: both or none of a "
            "Llama's projections may have biases"
        )
    return {"bias": attention, **read_whole_rotary(config)}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.bias, "mlp_bias": model.bias, **write_rotary(model)}


def _window(config: HFConfig) -> int | None:
    return read_length(config, "sliding_window")


def _qwen_window(config: HFConfig) -> int | None:
    return _window(config) if config.get("use_sliding_window") else None


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size",
        "seq": "max_position_embeddings", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
        "ffn": "intermediate_size", "norm_eps": "rms_norm_eps", "tied_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
    },
    allows={
        "norm": ("rmsnorm",), "position": ("rope",), "bias": (False, True),
        "rope_scaling": (),
    },
    stems={
        "embedding": "model.embed_tokens",
        "layers.#.norm1": f"{LAYER}.input_layernorm",
        "layers.#.attention.qkv": tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "layers.#.attention.q_norm": f"{LAYER}.self_attn.q_norm",
        "layers.#.attention.k_norm": f"{LAYER}.self_attn.k_norm",
        "layers.#.attention.out": f"{LAYER}.self_attn.o_proj",
        "layers.#.norm2": f"{LAYER}.post_attention_layernorm",
        "layers.#.mlp.gate_up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        "layers.#.mlp.down": f"{LAYER}.mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
    head="lm_head",
    prefix="model.",
    activations={"silu": "swiglu"},
    defaults={
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
    buffers=r".*\.rotary_emb\.inv_freq",
    square=False,
    dropouts=("attention_dropout",),
    read=_read,
    write=_write,
)  # fmt: skip

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    allows={**LLAMA.allows, "bias": (False,)},
    defaults={
        **LLAMA.defaults, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    read=read_whole_rotary,
    write=lambda model: {"sliding_window": None, **write_rotary(model)},
    window=_window,
)  # fmt: skip

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    allows={**LLAMA.allows, "bias": (False,), "qkv_bias": (True,)},
    defaults={
        **LLAMA.defaults, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    read=read_whole_rotary,
    write=lambda model: {"use_sliding_window": False, "sliding_window": None, **write_rotary(model)},
    window=_qwen_window,
)  # fmt: skip

QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    allows={**LLAMA.allows, "bias": (False,), "qk_norm": (True,)},
    defaults={**QWEN2.defaults, "head_dim": 128},
    demands={"attention_bias": False},
)
