"""GPT-2. Its linear layers hold their weights transposed."""

from __future__ import annotations

from meshwright.models.hf.family import Family

LAYER = "transformer.h.#"

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size", "seq": "n_positions",
        "ffn": "n_inner", "norm_eps": "layer_norm_epsilon", "tied_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
    },
    allows={"norm": ("layernorm",), "position": ("learned",), "bias": (True,)},
    stems={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "layers.#.norm1": f"{LAYER}.ln_1",
        "layers.#.attention.qkv": f"{LAYER}.attn.c_attn",
        "layers.#.attention.out": f"{LAYER}.attn.c_proj",
        "layers.#.norm2": f"{LAYER}.ln_2",
        "layers.#.mlp.up": f"{LAYER}.mlp.c_fc",
        "layers.#.mlp.down": f"{LAYER}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    head="lm_head",
    prefix="transformer.",
    activation_key="activation_function",
    activations={"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"},
    defaults={
        "tie_word_embeddings": True, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
    },
    demands={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    transposed=frozenset(
        ("layers.#.attention.qkv", "layers.#.attention.out", "layers.#.mlp.up", "layers.#.mlp.down")
    ),
    buffers=r".*\.attn\.(bias|masked_bias)",
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
)  # fmt: skip
