"""GPT-NeoX and Pythia: rotary positions on a part of each head, and attention parallel to the MLP."""

from __future__ import annotations

from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.models.hf.family import Family, HFConfig
from meshwright.models.hf.rotary import read_rotary, read_rotary_number, write_rotary

LAYER = "gpt_neox.layers.#"


def _read(config: HFConfig) -> dict[str, Any]:
    part = read_rotary_number(config, "partial_rotary_factor", "rotary_pct")
    return {"rotary_fraction": 0.25 if part is None else part, **read_rotary(config, "rotary_emb_base")}


def _write(model: ModelConfig) -> dict[str, Any]:
    fraction, theta = model.rotary_fraction, model.rope_theta
    return {"rotary_pct": fraction, "partial_rotary_factor": fraction, "rotary_emb_base": theta, **write_rotary(model)}


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys={
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size",
        "seq": "max_position_embeddings", "ffn": "intermediate_size", "norm_eps": "layer_norm_eps",
        "tied_embeddings": "tie_word_embeddings", "parallel_residual": "use_parallel_residual",
        "init_std": "initializer_range",
    },
    allows={
        "norm": ("layernorm",), "position": ("rope",), "bias": (True,), "parallel_residual": (True, False),
        "rotary_fraction": (), "rope_scaling": (),
    },
    stems={
        "embedding": "gpt_neox.embed_in",
        "layers.#.norm1": f"{LAYER}.input_layernorm",
        "layers.#.attention.qkv": f"{LAYER}.attention.query_key_value",
        "layers.#.attention.out": f"{LAYER}.attention.dense",
        "layers.#.norm2": f"{LAYER}.post_attention_layernorm",
        "layers.#.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
        "layers.#.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    head="embed_out",
    prefix="gpt_neox.",
    activations={
        "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    },
    defaults={
        "tie_word_embeddings": False, "use_parallel_residual": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
        "intermediate_size": 24576, "max_position_embeddings": 2048,
    },
    demands={"attention_bias": True},
    by_head=frozenset(("layers.#.attention.qkv",)),
    buffers=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    dropouts=("hidden_dropout", "attention_dropout"),
    read=_read,
    write=_write,
)  # fmt: skip
