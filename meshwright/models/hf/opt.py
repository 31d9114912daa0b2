"""OPT: GPT-2's shape with ReLU, and a position table whose first two rows stand for no position."""

from __future__ import annotations

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.models.hf.family import Family, HFConfig

LAYER = "model.decoder.layers.#"


def _read(config: HFConfig) -> dict[str, object]:
    inner = config.get("word_embed_proj_dim", config["hidden_size"])
    if inner != config["hidden_size"]:
        raise UserError(
            f"word_embed_proj_dim={inner} differs from hidden_size={config['hidden_size']} in config.json: an OPT "
            "whose embedding is projected can't be imported"
        )
    return {}


def _write(model: ModelConfig) -> dict[str, object]:
    return {"word_embed_proj_dim": model.hidden}


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    keys={
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size",
        "seq": "max_position_embeddings", "ffn": "ffn_dim", "tied_embeddings": "tie_word_embeddings",
        "init_std": "init_std",
    },
    allows={
        "norm": ("layernorm",), "norm_eps": (1e-5,), "position": ("learned",), "position_offset": (2,), "bias": (True,),
    },
    stems={
        "embedding": "model.decoder.embed_tokens",
        "position": "model.decoder.embed_positions",
        "layers.#.norm1": f"{LAYER}.self_attn_layer_norm",
        "layers.#.attention.qkv": tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "layers.#.attention.out": f"{LAYER}.self_attn.out_proj",
        "layers.#.norm2": f"{LAYER}.final_layer_norm",
        "layers.#.mlp.up": f"{LAYER}.fc1",
        "layers.#.mlp.down": f"{LAYER}.fc2",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    head="lm_head",
    prefix="model.",
    activation_key="activation_function",
    activations={"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"},
    defaults={
        "tie_word_embeddings": True, "activation_function": "relu", "ffn_dim": 3072, "max_position_embeddings": 2048,
    },
    demands={
        "do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    dropouts=("dropout", "attention_dropout"),
    read=_read,
    write=_write,
)  # fmt: skip
