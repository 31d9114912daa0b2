"""Variations of a model, a layout or the data, one by one. No torch."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import BLOOM, INTERLEAVED, LLAMA, cut, rope, special

_REVERSED = "pp-dp-ep-cp-tp"
_NEOX: dict[str, Any] = {"model__position": "rope", "model__rotary_fraction": 0.5, "model__parallel_residual": True}
_TOKEN_NORMS: dict[str, Any] = {"model__qk_norm": True, "model__qk_norm_over": "all"}
_POST: dict[str, Any] = {"model__norm_place": "post"}

SPECIAL = [
    special("chunks-on-one-rank", cut(2, 1, 1, **INTERLEAVED)),
    special("uneven-split", cut(1, 1, 2), pipeline__split=[1, 3], model__layers=4),
    special("split-ends-without-layers", cut(1, 1, 4, **LLAMA), pipeline__split=[0, 2, 1, 0], model__layers=3),
    special("uneven-split", cut(1, 2, 2, sp=True, **INTERLEAVED), pipeline__split=[1, 2, 1, 1], model__layers=5),
    special("layers-not-divisible", cut(1, 1, 4), model__layers=6),
    special("micro-batch-2", cut(2, 1, 1), train__micro_batch=2, train__global_batch=8),
    special("micro-batch-2", cut(1, 2, 1, sp=True, **LLAMA), train__micro_batch=2, train__global_batch=6),
    special("micro-batch-2", cut(1, 2, 2, sp=True), train__micro_batch=2, train__global_batch=8),
    special("fewer-micro-batches-than-stages", cut(1, 1, 4, **INTERLEAVED), train__global_batch=3),
    special("one-micro-batch", cut(2, 1, 2), train__global_batch=2),
    special("order", cut(1, 2, 2, **LLAMA), layout__order=_REVERSED),
    special("order", cut(2, 2, 1, sp=True), layout__order=_REVERSED),
    special("order", cut(2, 2, 2, sp=True, tied=False), layout__order=_REVERSED),
    special("order-dp-first", cut(2, 2, 2, **INTERLEAVED), layout__order="dp-pp-tp-cp-ep"),
    special("documents", cut(2, 1, 1, **LLAMA), {"segments": True}),
    special("documents", cut(1, 2, 2, sp=True), {"segments": True}),
    special(
        "documents", cut(2, 2, 2, sp=True, **LLAMA), {"segments": True}, train__micro_batch=2, train__global_batch=8
    ),
    special("no-holes", cut(2, 2, 1), {"holes": False}),
    special("masked-rank", cut(2, 1, 1), {"blind": True}),
    special("masked-rank", cut(2, 2, 1, sp=True, **LLAMA), {"blind": True}),
    special("ramp", cut(2, 1, 2), train__ramp=[4, 4, 24], train__global_batch=12),
    special("ramp", cut(2, 2, 1, sp=True, **LLAMA), train__ramp=[2, 2, 20], train__global_batch=6),
    special("rank-without-vocabulary", cut(1, 4, 1), model__vocab=9),
    special("rank-without-vocabulary", cut(1, 8, 1, sp=True, **LLAMA), model__vocab=9),
    special("vocabulary-divides", cut(1, 4, 1, sp=True, tied=False), model__vocab=64),
    special("copies-of-one-kv-head", cut(1, 4, 1, sp=True, **LLAMA), model__kv_heads=1),
    special("kv-copies-with-bias", cut(1, 4, 1, sp=True, **LLAMA), model__bias=True),
    special("kv-copies-with-bias", cut(2, 4, 1), model__kv_heads=2),
    special("wide-heads", cut(1, 2, 1, **LLAMA), model__head_dim=6),
    special("no-positions-relu", cut(1, 2, 1, sp=True), model__position="none", model__mlp="relu"),
    special("gelu-tanh-rms-with-bias", cut(2, 1, 1), model__mlp="gelu_tanh", model__norm="rmsnorm"),
    # The parts that Hugging Face families need: Qwen3's, OLMoE's, Qwen2's, GPT-NeoX's, BLOOM's, OPT's, Llama 3.1's.
    special("qk-norm", cut(1, 4, 1, sp=True, **LLAMA), model__qk_norm=True),
    special("qk-norm", cut(2, 2, 1, **LLAMA), model__qk_norm=True),
    special("qk-norm", cut(1, 2, 2, sp=True), model__qk_norm=True, model__position="rope"),
    special("qk-norm-over-all", cut(1, 4, 1, sp=True, **LLAMA), **_TOKEN_NORMS),
    special("qk-norm-over-all", cut(1, 2, 1), **_TOKEN_NORMS),
    special("qk-norm-over-all", cut(1, 2, 2, **LLAMA), **_TOKEN_NORMS, recompute__mode="full", zero__stage=1),
    special("qkv-bias", cut(1, 2, 1, **LLAMA), model__qkv_bias=True),
    special("qkv-bias", cut(1, 4, 1, sp=True, **LLAMA), model__qkv_bias=True),
    special("partial-rotary-parallel-residual", cut(1, 2, 1, sp=True), **_NEOX),
    special("partial-rotary-parallel-residual", cut(1, 2, 2), **_NEOX),
    special("partial-rotary-parallel-residual", cut(1, 1, 2, tied=False), {"segments": True}, **_NEOX),
    special("alibi-embedding-norm", cut(1, 2, 1), **BLOOM),
    special("alibi-embedding-norm", cut(1, 2, 1, sp=True), {"segments": True}, **BLOOM),
    special("alibi-embedding-norm", cut(1, 4, 1, sp=True), **BLOOM, model__heads=12, model__hidden=48),
    special("alibi-embedding-norm", cut(1, 2, 2, sp=True, **INTERLEAVED), {"segments": True}, **BLOOM),
    special("position-offset-relu", cut(1, 2, 1, sp=True), model__position_offset=2, model__mlp="relu"),
    special("position-offset-relu", cut(1, 1, 2), {"segments": True}, model__position_offset=2, model__mlp="relu"),
    special("rope-scaling", cut(1, 2, 1, **LLAMA), model__rope_scaling=rope("llama3", 8)),
    special("rope-scaling", cut(1, 1, 2, **LLAMA), {"segments": True}, model__rope_scaling=rope("dynamic", 8)),
    special("pieces", cut(1, 2, 1, sp=True, **LLAMA), recompute__pieces=3, recompute__mode="full"),
    special("pieces", cut(2, 2, 1), recompute__pieces=2, zero__stage=2),  # With biases.
    special("pieces", cut(1, 2, 2, **LLAMA, **INTERLEAVED), recompute__pieces=16, recompute__mode="every:2"),
    special("pieces", cut(2, 1, 1, **LLAMA), {"blind": True}, recompute__pieces=5, zero__stage=3),
    special("post-norm", cut(1, 2, 1, sp=True), **_POST, model__mlp="geglu", recompute__pieces=2),
    special("post-norm", cut(2, 1, 2), **_POST, model__mlp="quick_gelu", recompute__mode="full", zero__stage=3),
    special("sandwich", cut(1, 2, 1, sp=True, **LLAMA), model__norm_place="sandwich"),
    special("sandwich", cut(2, 1, 2), model__norm_place="sandwich", recompute__mode="full", zero__stage=3),
    special("one-bucket", cut(2, 2, 1), comm__bucket_mib=25.0),
    special("bucket-a-parameter", cut(2, 1, 2), comm__bucket_mib=1e-4),
    special("sgd-unclipped", cut(2, 2, 1), optimizer__name="sgd", train__clip=0.0),
]
