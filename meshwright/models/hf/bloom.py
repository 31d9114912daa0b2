"""BLOOM: ALiBi in place of positions, a norm after the embedding. Its config names no context length."""

from __future__ import annotations

from meshwright.models.hf.family import Family

LAYER = "transformer.h.#"

BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    keys={
        "layers": "n_layer", "hidden": "hidden_size", "heads": "n_head", "vocab": "vocab_size", "seq": "seq_length",
        "norm_eps": "layer_norm_epsilon", "tied_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
    },
    allows={
        "norm": ("layernorm",), "mlp": ("gelu_tanh",), "position": ("alibi",), "bias": (True,),
        "embedding_norm": (True,),
    },
    stems={
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "layers.#.norm1": f"{LAYER}.input_layernorm",
        "layers.#.attention.qkv": f"{LAYER}.self_attention.query_key_value",
        "layers.#.attention.out": f"{LAYER}.self_attention.dense",
        "layers.#.norm2": f"{LAYER}.post_attention_layernorm",
        "layers.#.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
        "layers.#.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    head="lm_head",
    prefix="transformer.",
    defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "seq_length": 2048},
    demands={"apply_residual_connection_post_layernorm": False},
    by_head=frozenset(("layers.#.attention.qkv",)),
    dropouts=("hidden_dropout", "attention_dropout"),
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)  # fmt: skip
