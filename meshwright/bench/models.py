"""The models that `meshwright bench step` knows, and what a step of one must compute and move. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.models.description import Stage, stages

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 1024, "seq": 128},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "seq": 4096},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "seq": 4096},
    "8b-8l": {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 4096},
}
MICRO_BATCH = 4

# Dense bf16 TFLOP/s by the makers' datasheets, by a part of the device's name.
DATASHEET = {"H200": 989.0, "H100": 989.0, "A100": 312.0}


def bench_config(
    model: str, precision: str = "bf16", micro_batches: int = 1, micro_batch: int = MICRO_BATCH, **sections: Any
) -> Config:
    """The config of a run that a bench measures; `sections` change it."""
    train = {
        "precision": precision, "micro_batch": micro_batch, "global_batch": micro_batch * micro_batches,
        "steps": 10**6,
    } | sections.pop("train", {})  # fmt: skip
    base = {"model": LLAMA | MODELS[model], "data": {"prefixes": ["made"]}, "lr": {"schedule": "constant"}}
    return config_from(base | {"train": train} | sections)


@dataclass(frozen=True)
class Product:
    """y [tokens, n] = x [tokens, k] W^T, `count` times a micro-batch, each with its two gradients."""

    name: str
    n: int
    k: int
    count: int


def stage_of(config: Config, pp_rank: int) -> Stage:
    o = config.layout
    return stages(config.model.layers, o.pp * o.chunks, config.pipeline.split)[pp_rank]


def products(config: Config, pp_rank: int = 0) -> list[Product]:
    """Of one micro-batch of one rank: its stage's layers, cut over tp."""
    m, tp, stage = config.model, config.layout.tp, stage_of(config, pp_rank)
    heads, kv, ffn, layers = m.heads // tp, max(1, m.kv_heads // tp), m.ffn // tp, len(stage.layers)
    found = [
        Product("qkv", (heads + 2 * kv) * m.head_dim, m.hidden, layers),
        Product("out", m.hidden, heads * m.head_dim, layers),
        Product("gate_up", 2 * ffn, m.hidden, layers),
        Product("down", m.hidden, ffn, layers),
    ]
    return [*found, Product("output", -(-m.vocab // tp), m.hidden, 1)] if stage.last else found


def parameters(config: Config, pp_rank: int = 0) -> int:
    """Of one rank, norms included."""
    m, stage = config.model, stage_of(config, pp_rank)
    embedding = m.vocab * m.hidden // config.layout.tp if stage.first else 0
    norms = (2 * len(stage.layers) + stage.last) * m.hidden
    return sum(p.n * p.k * p.count for p in products(config, pp_rank)) + embedding + norms


def flops(config: Config, tokens: int, pp_rank: int = 0) -> float:
    """Of one rank: 6 for each weight of a product and token (2 forward, 4 backward), and attention's 2 x 2 x 3 s/2 h a
    layer and token: of the scores only those that the causal mask leaves. An embedding is looked up, not multiplied."""
    m, layers = config.model, len(stage_of(config, pp_rank).layers)
    weights = sum(p.n * p.k * p.count for p in products(config, pp_rank))
    return tokens * (6.0 * weights + 6.0 * layers * m.heads * m.head_dim * m.seq / config.layout.tp)
