"""The models of `meshwright bench step`, and the work of a step: its products, parameters and FLOPs. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.plan.flops import unit_work
from meshwright.plan.job import Job, job_of
from meshwright.plan.memory import rank_parameters
from meshwright.plan.stack import COMPILED
from meshwright.spec.model.part import Product, Work
from meshwright.spec.model.pieces import in_chunks

LLAMA_ARCHITECTURE = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False}
BENCH_MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 1024, "seq": 128},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "seq": 4096},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "seq": 4096},
    "qwen3-30b-a3b-6l": {
        "layers": 6,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "ffn": 6144,
        "vocab": 151936,
        "seq": 4096,
        "qk_norm": True,
        "rope_theta": 1e6,
        "experts": {"count": 128, "top_k": 8, "ffn": 768},
    },
    "olmoe-7b-6l": {
        "layers": 6,
        "hidden": 2048,
        "heads": 16,
        "ffn": 1024,
        "vocab": 50304,
        "seq": 4096,
        "qk_norm": True,
        "qk_norm_over": "all",
        "experts": {"count": 64, "top_k": 8, "ffn": 1024, "normalise": False},
    },
    "mixtral-8x7b-2l": {
        "layers": 2,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 14336,
        "vocab": 32000,
        "seq": 4096,
        "rope_theta": 1e6,
        "experts": {"count": 8, "top_k": 2},
    },
    "tiny-experts": {
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 384,
        "vocab": 1024,
        "seq": 128,
        "experts": {"count": 8, "top_k": 2, "ffn": 128},
    },
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 4096},
    "8b-8l": {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 4096},
}
MICRO_BATCH = 4

# Dense bf16 TFLOP/s from the vendors' datasheets, by a substring of the device's name.
DATASHEET = {"H200": 989.0, "H100": 989.0, "A100": 312.0}


def bench_config(
    model: str, precision: str = "bf16", micro_batches: int = 1, micro_batch: int = MICRO_BATCH, seq: int = 0,
    **sections: Any,
) -> Config:  # fmt: skip
    """Return the config of the run that a benchmark measures. `sections` override it. `seq`: the context length; 0
    keeps the model's."""
    train = {"precision": precision, "micro_batch": micro_batch, "global_batch": micro_batch * micro_batches}
    train |= {"steps": 10**6} | sections.pop("train", {})
    shape = LLAMA_ARCHITECTURE | BENCH_MODELS[model] | ({"seq": seq} if seq else {})
    base = {"model": shape, "data": {"prefixes": ["made"]}, "lr": {"schedule": "constant"}}
    return config_from(base | {"train": train} | sections)


def job_of_bench(config: Config) -> Job:
    """Return the benchmark's job on the smallest number of ranks that its layout allows."""
    return job_of(config, ranks_of(config), COMPILED)


def ranks_of(config: Config) -> int:
    return config.layout.least_world


def work_of(config: Config) -> list[tuple[Work, int]]:
    """Return the work of the first rank's units for one micro-batch, with the number of units of each kind."""
    job = job_of_bench(config)
    units = [pair for stage in job.chunks[0] for pair in job.units(stage)]
    return [(unit_work(unit, job.at, job.batch, job.kernels), count) for unit, count in units]


def products(config: Config) -> list[Product]:
    """Return the products with weights of the first rank for one micro-batch."""
    return [replace(p, count=count * p.count) for work, count in work_of(config) for p in work.products]


def products_in_pieces(config: Config) -> dict[str, bool]:
    """Return, by name, whether each product of the first rank's blocks is cut into chunks to overlap communication.

    A product is cut if tp ranks divide the rows and it is long enough (`spec/model/pieces.py`). The result is empty if
    the layout never cuts any.
    """
    job = job_of_bench(config)
    if not (job.at.overlaps and job.at.splits_tokens):
        return {}
    size, least = job.at.size("tp"), job.at.piece_flops
    blocks = [unit for unit, _ in job.rank_units(0) if unit.stackable]
    linear = [p for unit in blocks for p in unit_work(unit, job.at, job.batch, job.kernels).products if p.linear]
    return {p.name: in_chunks(p.m, p.n * p.k, size, least) for p in linear}


def parameters(config: Config) -> int:
    return rank_parameters(job_of_bench(config), 0)


def flops(config: Config, tokens: int, visible: float = 1.0) -> float:
    """Return the FLOPs of the first rank for `tokens` tokens: three times those of forward.

    Of the attention scores, only the `visible` share of those under the causal mask counts. Embeddings are looked up,
    so they cost nothing.
    """
    forward = sum(count * (work.flops - (1.0 - visible) * work.attention_flops) for work, count in work_of(config))
    return 3.0 * forward * tokens / (config.train.micro_batch * config.model.seq)
