"""Low-rank adapters of experts' products: `nn/adapters/adapters.py` for rows that are sorted by expert.

Each expert e has an A_e and a B_e for a span of its weight's rows. What they add is this rank's own part of the
product, before the sum over etp that the experts take anyway. Nothing of them is kept for backward: the vectors x A^T
are short, and computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.nn.adapters.adapters import Adapter
from meshwright.nn.experts.grouped import grouped_product, grouped_weight_grad


class Spans(NamedTuple):
    """The rows of a weight that are adapted, span by span, and the scale of the changes."""

    rows: tuple[tuple[int, int], ...] = ()
    scale: float = 0.0


def factors_of(adapters: Sequence[Adapter]) -> tuple[Spans, list[Tensor]]:
    """Return a weight's adapters as an autograd function takes them: what they are, then A and B of each."""
    if not adapters:
        return Spans(), []
    spans = Spans(tuple((each.start, each.stop) for each in adapters), adapters[0].scale)
    return spans, [factor for each in adapters for factor in (each.down, each.up)]


def add_changes_(y: Tensor, x: Tensor, ends: Tensor, spans: Spans, factors: Sequence[Tensor]) -> Tensor:
    """Add scale (x_e A_e^T) B_e^T to the product y of the rows x, span by span, and returns it."""
    if spans.rows:
        parts = _short(x, ends, factors)
        for (start, stop), part, up in zip(spans.rows, parts, factors[1::2], strict=True):
            y[:, start:stop] += spans.scale * grouped_product(part, up, ends)
    return y


def _short(x: Tensor, ends: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return x_e A_e^T of each span, [rows, rank]."""
    return grouped_product(x, torch.cat(list(factors[::2]), 1), ends).chunk(len(factors) // 2, 1)


def short_grad(grad: Tensor, ends: Tensor, spans: Spans, factors: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient of the short vectors of all spans, side by side; None where nothing is adapted."""
    if not spans.rows:
        return None
    pairs = zip(spans.rows, factors[1::2], strict=True)
    found = [grouped_product(grad[:, start:stop], up, ends, transposed=True) for (start, stop), up in pairs]
    return spans.scale * torch.cat(found, 1)


def add_input_grad_(grad_x: Tensor, back: Tensor | None, ends: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Add what comes back through the adapters to the gradient of a product's rows, and returns it."""
    if back is not None:
        grad_x += grouped_product(back, torch.cat(list(factors[::2]), 1), ends, transposed=True)
    return grad_x


def factor_grads(
    grad: Tensor, x: Tensor, back: Tensor | None, ends: Tensor, spans: Spans, factors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of A and B of each span, given those of the product and of the short vectors."""
    if back is None:
        return []
    downs = grouped_weight_grad(back, x, ends).chunk(len(spans.rows), 1)
    parts = _short(x, ends, factors)
    ups = [spans.scale * grouped_weight_grad(grad[:, start:stop], part, ends)
           for (start, stop), part in zip(spans.rows, parts, strict=True)]  # fmt: skip
    return [each for pair in zip(downs, ups, strict=True) for each in pair]
