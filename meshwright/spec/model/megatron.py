"""Megatron-LM's description of a model: its arguments as our model section, and its names of our tensors. No torch.

"Theirs" are the names of megatron-core. Older versions have other names for the same tensors, which `current_name`
replaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.spec.model.hf.family import Family, function_keys, model_section

NAMES = {
    "embedding": "embedding.word_embeddings",
    "position": "embedding.position_embeddings",
    "layers.#.norm1": "decoder.layers.#.input_layernorm",
    "layers.#.attention.qkv": "decoder.layers.#.self_attention.linear_qkv",
    "layers.#.attention.q_norm": "decoder.layers.#.self_attention.q_layernorm",
    "layers.#.attention.k_norm": "decoder.layers.#.self_attention.k_layernorm",
    "layers.#.attention.out": "decoder.layers.#.self_attention.linear_proj",
    "layers.#.norm2": "decoder.layers.#.pre_mlp_layernorm",
    "layers.#.mlp.up": "decoder.layers.#.mlp.linear_fc1",
    "layers.#.mlp.gate_up": "decoder.layers.#.mlp.linear_fc1",
    "layers.#.mlp.down": "decoder.layers.#.mlp.linear_fc2",
    "final_norm": "decoder.final_layernorm",
    "head": "output_layer",
}
# Rows of queries, keys and values are grouped by key-value head. Extra states are those of fp8 scales.
FAMILY = Family(
    "megatron", "GPTModel", keys={}, allows={}, names={ours: [theirs] for ours, theirs in NAMES.items()}, prefix="",
    by_head=("layers.#.attention.qkv",), buffers=r".*(_extra_state(/.*)?|rotary_pos_emb\.inv_freq)",
)  # fmt: skip

# Names of earlier versions, and of layers fused with the norm before them (Transformer Engine).
RENAMED = (
    (r"^(module\.)*(language_model\.)?", ""),
    (r"^(transformer|encoder)\.", "decoder."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"(self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"(self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
    (r"self_attention\.linear_qkv\.layer_norm_(?=weight|bias)", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_(?=weight|bias)", "pre_mlp_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.(post_attention_layernorm|post_attention_norm)\.", ".pre_mlp_layernorm."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"^word_embeddings\.", "embedding.word_embeddings."),
)
# The dimension along which tensor parallelism cuts a tensor; all others are whole on every rank.
CUT = (
    (r"self_attention\.linear_qkv\.(weight|bias)|mlp\.linear_fc1\.(weight|bias)", 0),
    (r"(embedding\.word_embeddings|output_layer)\.weight", 0),
    (r"(self_attention\.linear_proj|mlp\.linear_fc2)\.weight", 1),
)

# Arguments whose models are not ours, with the only value that is.
DEMANDS: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0), "multi_latent_attention": (False, None), "apply_layernorm_1p": (False, None),
    "apply_residual_connection_post_layernorm": (False, None), "rotary_interleaved": (False, None),
    "squared_relu": (False, None), "window_size": (None,), "mtp_num_layers": (None, 0), "onnx_safe": (None, False),
    "heterogeneous_layers_config_path": (None,), "experimental_attention_variant": (None,),
}  # fmt: skip


def current_name(name: str) -> str:
    """Return megatron-core's name of a tensor that any version of Megatron-LM wrote."""
    for old, new in RENAMED:
        name = re.sub(old, new, name)
    return name


def cut_of(name: str) -> int | None:
    """Return the dimension along which tensor-parallel ranks hold parts of a tensor; None if each has all of it."""
    return next((dim for pattern, dim in CUT if re.search(f"(^|\\.)({pattern})$", name)), None)


def model_of(args: Mapping[str, Any], vocab: int = 0, seq: int = 0) -> ModelConfig:
    """Return the model section for Megatron-LM's arguments, as its checkpoints hold them.

    `vocab` and `seq`, if not 0, replace the rows of the padded vocabulary and the context length.
    """
    for name, allowed in DEMANDS.items():
        if args.get(name, allowed[0]) not in allowed:
            raise UserError(f"a Megatron model with {name}={args[name]} can't be imported: only one without it can")
    return model_section(model_values(args, vocab, seq))


def model_values(args: Mapping[str, Any], vocab: int = 0, seq: int = 0) -> dict[str, Any]:
    """Return the keys of our model section that Megatron-LM's arguments set. Missing ones have its defaults."""
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if type(args.get(name)) is not int:
            raise UserError(f"the Megatron arguments lack {name}, which every model has: name a model with --like")
    heads, bias = args["num_attention_heads"], bool(args.get("add_bias_linear", True))
    grouped = args.get("group_query_attention", "num_query_groups" in args)
    norm = str(args.get("normalization") or "LayerNorm").lower()
    rotary = args.get("position_embedding_type") == "rope" or bool(args.get("use_rotary_position_embeddings"))
    position = "rope" if rotary else {"none": "none"}.get(str(args.get("position_embedding_type")), "learned")
    length = seq or (args.get("max_position_embeddings") if position == "learned" else None) or args.get("seq_length")
    values: dict[str, Any] = {
        "layers": args["num_layers"], "hidden": args["hidden_size"], "heads": heads,
        "kv_heads": args.get("num_query_groups") or heads if grouped else heads,
        "head_dim": args.get("kv_channels"), "ffn": args.get("ffn_hidden_size") or _ffn(args),
        "vocab": vocab or args.get("vocab_size") or args.get("padded_vocab_size"), "seq": length,
        "norm": norm, "norm_eps": args.get("layernorm_epsilon") or args.get("norm_epsilon") or 1e-5,
        "mlp": _mlp(args, bias), "position": position, "bias": bias,
        "qkv_bias": bool(args.get("add_qkv_bias")) and not bias, "qk_norm": bool(args.get("qk_layernorm")),
        "tied_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "init_std": args.get("init_method_std") or 0.02, "dropout": args.get("hidden_dropout", 0.1),
        "attention_dropout": args.get("attention_dropout", 0.1),
    }  # fmt: skip
    if values["qk_norm"] and norm != "rmsnorm":
        raise UserError("qk_layernorm with LayerNorm has no counterpart here, only with RMSNorm: leave it out")
    if rotary:
        values |= {"rope_theta": float(args.get("rotary_base") or 10000.0)}
        values |= {"rotary_fraction": float(args.get("rotary_percent") or 1.0)}
        values |= _rope_scaling(args)
    return {key: value for key, value in values.items() if value is not None}


def _ffn(args: Mapping[str, Any]) -> int:
    # Megatron-LM rounds a gated MLP down to a multiple of 64.
    hidden = args["hidden_size"]
    return int(hidden * 8 / 3 / 64) * 64 if args.get("swiglu") else 4 * hidden


def _mlp(args: Mapping[str, Any], bias: bool) -> str:
    """Return our name of the MLP. Megatron's kernel that fuses the bias with GELU computes the tanh approximation."""
    if args.get("swiglu"):
        return "swiglu"
    return "gelu_tanh" if args.get("openai_gelu") or (args.get("bias_gelu_fusion", True) and bias) else "gelu"


def _rope_scaling(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary scaling: Llama 3.1's, or positions divided by a factor."""
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor") or 8.0)
        kept = {"low": 1.0, "high": 4.0, "original": 8192}
        return {"rope_scaling": {"kind": "llama3", "factor": factor, **kept}}
    divisor = args.get("rotary_seq_len_interpolation_factor")
    return {"rope_scaling": {"kind": "linear", "factor": float(divisor)}} if divisor not in (None, 1) else {}


def args_of(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments for a model. Raise if they can't express it."""
    rope = model.position == "rope"
    args: dict[str, Any] = {
        "num_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads,
        "group_query_attention": model.kv_heads != model.heads, "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim, "ffn_hidden_size": model.ffn, "vocab_size": model.vocab,
        "seq_length": model.seq, "max_position_embeddings": model.seq, "layernorm_epsilon": model.norm_eps,
        "norm_epsilon": model.norm_eps, "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "swiglu": model.mlp == "swiglu", "bias_gelu_fusion": model.mlp == "gelu_tanh" and model.bias,
        "openai_gelu": model.mlp == "gelu_tanh" and not model.bias, "add_bias_linear": model.bias,
        "add_qkv_bias": model.qkv_bias, "qk_layernorm": model.qk_norm,
        "position_embedding_type": {"learned": "learned_absolute"}.get(model.position, model.position),
        "untie_embeddings_and_output_weights": not model.tied_embeddings, "init_method_std": model.init_std,
        "hidden_dropout": model.dropout, "attention_dropout": model.attention_dropout,
    }  # fmt: skip
    if rope:
        scaling = model.rope_scaling
        args |= {"rotary_base": model.rope_theta, "rotary_percent": model.rotary_fraction}
        args |= {"use_rope_scaling": scaling.kind == "llama3", "rope_scaling_factor": scaling.factor}
        args["rotary_seq_len_interpolation_factor"] = scaling.factor if scaling.kind == "linear" else None
    wanted, found = function_keys(model), function_keys(model_of(args))
    if misfits := [f"{key}={value}" for key, value in wanted.items() if found[key] != value]:
        raise UserError(f"Megatron-LM's GPT can't have model.{' or model.'.join(misfits)}: export it as another format")
    return args
