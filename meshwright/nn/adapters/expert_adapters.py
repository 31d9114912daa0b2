"""Low-rank adapters of experts' products: `nn/adapters/adapters.py` for rows that are sorted by expert.

Each expert e has an A_e and a B_e for a span of its weight's rows. Their output is added to this rank's part of the
product, before the sum over etp that the experts need anyway. Nothing of it is saved for backward: the vectors x A^T
are short, and are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.nn.adapters.adapters import Adapter
from meshwright.nn.experts.grouped import grouped_product, grouped_weight_grad


class Spans(NamedTuple):
    """The spans of a weight's rows that have adapters, and the scale of the adapters."""

    rows: tuple[tuple[int, int], ...] = ()
    scale: float = 0.0


def factors_of(adapters: Sequence[Adapter]) -> tuple[Spans, list[Tensor]]:
    """Return a weight's adapters as an autograd function takes them: their spans, and A and B of each."""
    if not adapters:
        return Spans(), []
    spans = Spans(tuple((adapter.start, adapter.stop) for adapter in adapters), adapters[0].scale)
    return spans, [factor for adapter in adapters for factor in (adapter.down, adapter.up)]


def add_changes_(y: Tensor, x: Tensor, ends: Tensor, spans: Spans, factors: Sequence[Tensor]) -> Tensor:
    """Add scale (x_e A_e^T) B_e^T to the product y of the rows x, span by span, and return y."""
    if spans.rows:
        parts = _short(x, ends, factors)
        for (start, stop), part, up in zip(spans.rows, parts, factors[1::2], strict=True):
            y[:, start:stop] += spans.scale * grouped_product(part, up, ends)
    return y


def _short(x: Tensor, ends: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return x_e A_e^T for each span, [rows, rank]."""
    return grouped_product(x, torch.cat(list(factors[::2]), 1), ends).chunk(len(factors) // 2, 1)


def short_grad(grad: Tensor, ends: Tensor, spans: Spans, factors: Sequence[Tensor]) -> Tensor | None:
    """Return the gradients of x A^T of all spans, side by side, or None if there are no adapters."""
    if not spans.rows:
        return None
    pairs = zip(spans.rows, factors[1::2], strict=True)
    grads = [grouped_product(grad[:, start:stop], up, ends, transposed=True) for (start, stop), up in pairs]
    return spans.scale * torch.cat(grads, 1)


def add_input_grad_(grad_x: Tensor, back: Tensor | None, ends: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Add the gradient that flows back through the adapters to the gradient of a product's rows, and return it."""
    if back is not None:
        grad_x += grouped_product(back, torch.cat(list(factors[::2]), 1), ends, transposed=True)
    return grad_x


def factor_grads(
    grad: Tensor, x: Tensor, back: Tensor | None, ends: Tensor, spans: Spans, factors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of A and B of each span, given those of the product (`grad`) and of x A^T (`back`)."""
    if back is None:
        return []
    downs = grouped_weight_grad(back, x, ends).chunk(len(spans.rows), 1)
    parts = _short(x, ends, factors)
    ups = [spans.scale * grouped_weight_grad(grad[:, start:stop], part, ends)
           for (start, stop), part in zip(spans.rows, parts, strict=True)]  # fmt: skip
    return [factor_grad for pair in zip(downs, ups, strict=True) for factor_grad in pair]
