"""Sums the FLOPs of a model, and those that recomputation adds, over the products of its units. No torch.

A product of [m, k] with [k, n] takes 2 m n k operations. Its backward takes two products of the same size, one for the
gradient of each factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.sections import ModelConfig
from meshwright.spec.model.description import describe
from meshwright.spec.model.part import SINGLE_RANK, Coordinate, Kernels, MicroBatch, Unit, Work


@lru_cache(maxsize=20_000)
def unit_work(unit: Unit, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
    """Return the work of a unit's forward for one micro-batch."""
    return unit.work(at, batch, kernels)


class SequenceFlops(NamedTuple):
    """The forward FLOPs of one sequence. Scores outside the attention window are excluded from all three counts."""

    products: float  # Products with weights.
    seen: float  # The attention core over visible pairs of tokens.
    whole: float  # The attention core over all pairs: causal attention skips half of them, which are usually counted.


def _sequence_flops(units: Iterable[tuple[Unit, int]], seq: int, causal: bool) -> SequenceFlops:
    products = seen = whole = 0.0
    for unit, count in units:
        work = unit_work(unit, SINGLE_RANK, MicroBatch(1, seq), Kernels())
        products += count * sum(product.flops for product in work.products)
        seen += count * work.attention_flops
        windowed = any(getattr(part, "window", 0) for _, _, part in unit.parts)
        whole += count * work.attention_flops * (2 if causal and not windowed else 1)
    return SequenceFlops(products, seen, whole)


@lru_cache(maxsize=256)
def _model_sequence(model: ModelConfig) -> tuple[SequenceFlops, float]:
    """Return the FLOPs of the blocks and of the head for one sequence."""
    # With a capacity, some places stay empty and some rows are dropped. A model's FLOPs count every choice of a router.
    described = describe(replace(model, experts=replace(model.experts, capacity=None)))
    head = _sequence_flops([(described.head, 1)], model.seq, False).products
    return _sequence_flops(described.kinds, model.seq, described.causal), head


def model_flops(model: ModelConfig, tokens: float, causal: bool = False) -> float:
    """Return the forward and backward FLOPs of `tokens` tokens without recomputation.

    Attention counts in full, or with `causal` only over visible pairs.
    """
    blocks, head = _model_sequence(model)
    return 3.0 * (blocks.products + (blocks.seen if causal else blocks.whole) + head) * tokens / model.seq


def recomputed_flops(model: ModelConfig, tokens: float, recompute: str, causal: bool = False) -> float:
    """Return the FLOPs that recomputation adds to `model_flops`.

    With `selective` that is the attention core. With `full` and with `every:N`, which keeps every N-th input, it is all
    blocks.
    """
    blocks, _ = _model_sequence(model)
    core = blocks.seen if causal else blocks.whole
    again = {"none": 0.0, "selective": core}.get(recompute, blocks.products + core)
    return again * tokens / model.seq


def layers_worth_head(model: ModelConfig) -> float:
    """Return the number of layers that have as many FLOPs as the model's output layer."""
    blocks, head = _model_sequence(model)
    return head / ((blocks.products + blocks.seen) / model.layers)


def balanced_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage such that the longest stage is as short as possible.

    The output layer counts as the number of layers with the same FLOPs.
    """
    worth, others = layers_worth_head(model), stages - 1
    # With stages of exactly equal length, the last one would have this number of layers before the output layer.
    exact = (model.layers + worth) / stages - worth
    tried = {max(0, min(model.layers - others, round(exact) + step)) for step in (-1, 0, 1)}
    last = min(tried, key=lambda n: (max(-(-(model.layers - n) // others), n + worth), -n))
    rest = model.layers - last
    return (*(rest // others + (i < rest % others) for i in range(others)), last)


def best_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return `balanced_split` if its longest stage is shorter than that of even stages, else (), which means even."""
    if stages == 1:
        return ()
    worth = layers_worth_head(model)
    split = balanced_split(model, stages)
    even = max(-(-model.layers // stages), model.layers // stages + worth)
    return split if max(*split[:-1], split[-1] + worth) < even and min(split[:-1]) > 0 else ()
