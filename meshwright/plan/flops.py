"""FLOPs of a model and what recomputation adds: sums over its units' products. A product of [m, k] with [k, n] takes
2 m n k operations; backward takes two of the same size, one for the gradient of each factor. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.sections import ModelConfig
from meshwright.spec.model.description import describe
from meshwright.spec.model.part import ALONE, Coordinate, Kernels, MicroBatch, Unit, Work


@lru_cache(maxsize=20_000)
def unit_work(unit: Unit, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
    return unit.work(at, batch, kernels)


class SequenceFlops(NamedTuple):
    """The forward FLOPs of one sequence: products with weights, attention's core over what is seen, and the same with
    the half that causal attention does not see, which is usually counted too. What a window leaves out is in none."""

    products: float
    seen: float
    whole: float


def _sequence_flops(units: Iterable[tuple[Unit, int]], seq: int, causal: bool) -> SequenceFlops:
    products = seen = whole = 0.0
    for unit, count in units:
        work = unit_work(unit, ALONE, MicroBatch(1, seq), Kernels())
        products += count * sum(product.flops for product in work.products)
        seen += count * work.attention_flops
        windowed = any(getattr(part, "window", 0) for _, _, part in unit.parts)
        whole += count * work.attention_flops * (2 if causal and not windowed else 1)
    return SequenceFlops(products, seen, whole)


@lru_cache(maxsize=256)
def _model_sequence(model: ModelConfig) -> tuple[SequenceFlops, float]:
    """Returns the FLOPs of the blocks and of the head."""
    # A capacity leaves places empty or drops rows; a model's FLOPs are those of all choices.
    described = describe(replace(model, experts=replace(model.experts, capacity=None)))
    head = _sequence_flops([(described.head, 1)], model.seq, False).products
    return _sequence_flops(described.kinds, model.seq, described.causal), head


def model_flops(model: ModelConfig, tokens: float, causal: bool = False) -> float:
    """Returns the forward and backward FLOPs of `tokens` tokens, nothing recomputed; attention in full or `causal`."""
    blocks, head = _model_sequence(model)
    return 3.0 * (blocks.products + (blocks.seen if causal else blocks.whole) + head) * tokens / model.seq


def recomputed_flops(model: ModelConfig, tokens: float, recompute: str, causal: bool = False) -> float:
    """Returns what recomputation adds to `model_flops`: attention's core with `selective`, all blocks with `full` and
    with `every:N`, which keeps every N-th input."""
    blocks, _ = _model_sequence(model)
    core = blocks.seen if causal else blocks.whole
    again = {"none": 0.0, "selective": core}.get(recompute, blocks.products + core)
    return again * tokens / model.seq


def head_worth(model: ModelConfig) -> float:
    """Returns how many of a model's layers have as many FLOPs as its output layer."""
    blocks, head = _model_sequence(model)
    return head / ((blocks.products + blocks.seen) / model.layers)


def balanced_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage that make the longest as short as possible; the output layer counts as the
    layers it is worth."""
    worth, others = head_worth(model), stages - 1
    exact = (model.layers + worth) / stages - worth
    tried = {max(0, min(model.layers - others, round(exact) + step)) for step in (-1, 0, 1)}
    last = min(tried, key=lambda n: (max(-(-(model.layers - n) // others), n + worth), -n))
    rest = model.layers - last
    return (*(rest // others + (i < rest % others) for i in range(others)), last)


def best_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Returns `balanced_split` if its longest stage is shorter than that of even stages; else (), which means even."""
    if stages == 1:
        return ()
    worth, split = head_worth(model), balanced_split(model, stages)
    even = max(-(-model.layers // stages), model.layers // stages + worth)
    return split if max(*split[:-1], split[-1] + worth) < even and min(split[:-1]) > 0 else ()
