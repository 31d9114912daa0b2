"""Small random models of every Hugging Face family, created by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 96}
OLD = {"n_layer": 2, "n_head": 4, "vocab_size": 61}
LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

MIXTURE = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "original_max_position_embeddings": 24}
DEEPSEEK = {
    **LLAMA, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
}  # fmt: skip

# (class of the config, its arguments). Each has a context of at least 96 tokens and covers another special case:
# grouped heads, tied or not, biases, scaling, ...
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {**OLD, "n_embd": 32, "n_positions": 96}),
    "gpt2-untied-relu": (
        "GPT2Config",
        {**OLD, "n_embd": 32, "n_positions": 96, "n_inner": 40, "activation_function": "relu",
         "tie_word_embeddings": False},
    ),
    "llama2": ("LlamaConfig", {**LLAMA, "num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA31, "tie_word_embeddings": True}),
    "llama-bias-linear": (
        "LlamaConfig",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 6, "num_key_value_heads": 1,
         "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", LLAMA),
    "qwen2-tied": ("Qwen2Config", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**LLAMA, "head_dim": 16}),
    "qwen3-one-kv-head": (
        "Qwen3Config",
        {**LLAMA, "head_dim": 8, "num_key_value_heads": 1, "rope_scaling": {**YARN, "truncate": False}},
    ),
    "glm": ("GlmConfig", {**LLAMA, "pad_token_id": 0}),
    "glm-no-bias": ("GlmConfig", {**LLAMA, "pad_token_id": 0, "head_dim": 16, "attention_bias": False}),
    "glm4": ("Glm4Config", {**LLAMA, "pad_token_id": 0}),
    "mistral": ("MistralConfig", {**LLAMA, "sliding_window": 96}),
    "mistral-window": ("MistralConfig", {**LLAMA, "sliding_window": 11}),
    "qwen2-window": (
        "Qwen2Config",
        {**LLAMA, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3-window": (
        "Qwen3Config",
        {**LLAMA, "num_hidden_layers": 3, "head_dim": 16, "use_sliding_window": True, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt-neox": ("GPTNeoXConfig", {**SIZES, "intermediate_size": 48, "max_position_embeddings": 96}),
    "gpt-neox-in-series": (
        "GPTNeoXConfig",
        {**SIZES, "intermediate_size": 48, "max_position_embeddings": 96, "use_parallel_residual": False,
         "hidden_act": "gelu_new", "rotary_pct": 1.0},
    ),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 48, "max_position_embeddings": 96, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {**OLD, "hidden_size": 32}),
    "bloom-six-heads": ("BloomConfig", {**OLD, "hidden_size": 48, "n_head": 6}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MIXTURE, "head_dim": 16, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3-moe-some-blocks": (
        "Qwen3MoeConfig",
        {**MIXTURE, "num_hidden_layers": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
         "mlp_only_layers": [0, 1], "num_key_value_heads": 1},
    ),
    "olmoe": ("OlmoeConfig", MIXTURE),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK),
    "deepseek-v3-direct-queries": (
        "DeepseekV3Config",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
         "first_k_dense_replace": 0, "norm_topk_prob": False, "tie_word_embeddings": True,
         "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
}  # fmt: skip
EXPERTS = ["mixtral", "qwen3-moe", "qwen3-moe-some-blocks", "olmoe", "deepseek-v3", "deepseek-v3-direct-queries"]


def make(name: str, dtype: torch.dtype = torch.float32, std: float = 0.15, **changed: Any) -> Any:
    """Return a model whose weights are all random, including norms and biases, which would start as ones and zeros.

    The bias that balances DeepSeek's experts is a buffer and not a parameter.
    """
    import transformers

    kind, arguments = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**arguments | changed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        biases = [(key, value) for key, value in model.named_buffers() if key.endswith("e_score_correction_bias")]
        for key, parameter in [*model.named_parameters(), *biases]:
            around = 1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0  # the weight of a norm
            parameter.copy_(around + (std if parameter.dim() > 1 else 0.15) * torch.randn(parameter.shape))
    return model.to(dtype)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, std: float = 0.15, **changed: Any) -> Any:
    model = make(name, dtype, std, **changed)
    model.save_pretrained(folder)
    return model


def sections_of(checkpoint: str, **layout: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of a config for two sequences at once through an imported model."""
    from meshwright.record.checkpoint_format import read_index

    model = read_index(Path(checkpoint)).config["model"]
    return {"model": model, "layout": layout, "train": {"precision": "fp32", "micro_batch": 2, "global_batch": 2}}


def loaded(rank: int, world: int, checkpoints: list[str], layout: dict[str, int]) -> Iterator[tuple[Any, Any]]:
    """Yield each model's context and its module with loaded weights, on one of the ranks of a layout."""
    from meshwright.checkpoint.load import Reader, load_weights
    from meshwright.comm.mesh import Mesh
    from meshwright.device import Device
    from meshwright.engine.context import build_context
    from meshwright.engine.providers import model_provider
    from meshwright.run.pretrain import build_modules
    from meshwright.spec.model.description import layout_of
    from tests.support.oracle import small_config

    groups: dict[Any, dict[str, Any]] = {}
    for checkpoint in checkpoints:
        config = small_config(**sections_of(checkpoint, **layout))
        key = layout_of(config, world)
        if key not in groups:
            made = Mesh(key, rank).groups
            groups[key] = {name: group.process_group for name, group in made.items() if not group.alone}
        ctx = build_context(config, rank, world, Device("cpu"), process_groups=groups[key])
        (module,) = build_modules(ctx, model_provider)
        load_weights([module], Reader(Path(checkpoint)))
        yield ctx, module.eval()


def run_models(rank: int, world: int, checkpoints: list[str], ids: torch.Tensor, layout: dict[str, int]) -> list[Any]:
    """Return this rank's columns of every model's logits, or None on a stage that is not the last. Runs on each
    rank.
    """
    with torch.no_grad():
        return [_through(ctx, module, ids) for ctx, module in loaded(rank, world, checkpoints, layout)]


def continue_prompts(
    rank: int, world: int, checkpoints: list[str], prompt: list[int], count: int, layout: dict[str, int]
) -> list[list[int]]:
    """Return every model's greedy `count` tokens after the prompt. Runs on each rank."""
    from meshwright.infer.generate import Generator, generate

    found = []
    for ctx, module in loaded(rank, world, checkpoints, layout):
        generator = Generator(module, ctx.config.model.vocab, len(prompt) + count)
        found.append(list(generate(generator, prompt, count)))
    return found


def _through(ctx: Any, module: Any, ids: torch.Tensor) -> Any:
    hidden = torch.empty(ids.numel(), ctx.config.model.hidden)
    if module.embedding is not None:
        hidden, _ = module.trunk({"tokens": ids})
    if ctx.config.layout.pp > 1:
        ctx.mesh.pp.broadcast(hidden)
        if module.embedding is None:
            hidden, _ = module.trunk({}, hidden)
    return None if module.head is None else module.head.logits(hidden).view(*ids.shape, -1).numpy()
