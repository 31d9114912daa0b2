"""The output layer and the cross entropy on a grid of tensor-parallel ranks, whose gradients are computed in forward as
those of `nn/loss.py` are: one piece of the rows at a time, so that the logits of all of them never exist."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.ops import all_reduce_
from meshwright.nn.fused import wide
from meshwright.nn.grid.products import GridLinear
from meshwright.nn.grid.sides import Side, Sides, bring, gather, group_of, own_rows, scatter, send_back, side_of
from meshwright.nn.loss import Vocabulary, loss_and_grad_
from meshwright.nn.parallel import Parallel, record_of
from meshwright.nn.weight_grad import sink_of, write_product
from meshwright.spec.model.grid_products import loss_rows


class Settings(NamedTuple):
    """How a rank computes the loss: over whom things travel, its columns of the logits, its part of the rows of a
    piece, the groups over which the losses of rows are summed, and what is known of the gradient."""

    sides: Sides
    vocabulary: Vocabulary
    part: int
    row_sides: tuple[Side, ...]
    sink: Tensor | None
    scale: float | None
    direct: bool
    training: bool


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, how: Settings) -> Tensor:
        sides, parts = how.sides, how.sides.summed[1]
        full, whole = bring(x, sides), gather(weight, sides.weight)
        needs_x, needs_weight = (how.training and needed for needed in ctx.needs_input_grad[:2])
        precise = wide(x.new_empty(0)).dtype
        grad_x = torch.empty_like(full) if needs_x else None
        grad_weight = torch.empty(whole.shape, dtype=precise, device=whole.device) if needs_weight else None
        total = x.new_zeros((), dtype=precise)
        factor = (1.0 if how.scale is None else how.scale) if how.training else None
        rows = loss_rows(len(full), len(whole), parts)
        for begin in range(0, len(full), rows):
            some = slice(begin, min(begin + rows, len(full)))
            logits = scatter(F.linear(full[some], whole), sides.summed)
            own = slice(begin + how.part * len(logits), begin + (how.part + 1) * len(logits))
            total = total + loss_and_grad_(logits, labels[own], mask[own], factor, how.vocabulary).sum()
            if how.training:
                logits = gather(logits, sides.summed)
            if grad_x is not None:
                torch.mm(logits, whole, out=grad_x[some])
            if grad_weight is not None:
                write_product(grad_weight, logits, full[some], add=begin > 0)
            del logits
        del full, whole
        for name, _ in how.row_sides:
            all_reduce_(total, name, "sum")
        kept_x = send_back(grad_x, sides) if grad_x is not None else None
        kept = scatter(grad_weight, sides.weight) if grad_weight is not None else None
        if how.direct and kept is not None and how.sink is not None:
            sink_of(how.sink).add(kept)
            kept = None
        ctx.save_for_backward(kept_x, kept)
        ctx.sink, ctx.scale, ctx.direct, ctx.dtype = how.sink, factor, how.direct, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, kept = ctx.saved_tensors
        ratio = grad / ctx.scale
        if ctx.direct:
            torch._assert_async((ratio - 1.0).abs() < 1e-5, "the loss's gradient is not the one that was announced")
        elif grad_x is not None:
            grad_x = (wide(grad_x) * ratio).to(grad_x.dtype)
        grad_weight = None
        if kept is not None:
            kept = kept * ratio.to(kept.dtype)
            if ctx.sink is None:
                grad_weight = kept.to(ctx.dtype)
            else:
                sink_of(ctx.sink).add(kept)
        return grad_x, grad_weight, None, None, None


def grid_output_loss(
    x: Tensor, output: GridLinear, labels: Tensor, mask: Tensor, vocab: int, parallel: Parallel,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Returns what `nn.loss.output_loss` does, the sum over all tokens of a micro-batch, of which `labels` and `mask`
    are those of all; x is this rank's block."""
    roles, training = output.roles, torch.is_grad_enabled()
    columns, summed = group_of(parallel, roles.y.features), roles.summed
    width = output.weight.shape[0] * output.sides.weight[1]
    first = columns.index * width
    vocabulary = Vocabulary(first, max(0, min(width, vocab - first)), columns.name, columns.size, parallel.host)
    row_sides = tuple(side for side in (side_of(parallel, axis) for axis in roles.y.rows) if side[1] > 1)
    record, sink = record_of(output.weight), output.sinks.get("weight")
    # A tied embedding on this stage adds to the same place in backward (see nn/loss.py).
    alone = record is None or not record.tied or "embedding" in record.partial
    direct = alone and scale is not None and (sink is not None or not output.weight.requires_grad)
    part = group_of(parallel, summed).index if summed else 0
    how = Settings(output.sides, vocabulary, part, row_sides, sink, scale, direct, training)
    labels, mask = (own_rows(each.flatten(), parallel, roles.rows) for each in (labels, mask))
    return _OutputLoss.apply(x, output.weight, labels, mask, how)
