"""The output layer and the cross entropy over a vocabulary that may be cut over tp, one piece of the tokens at a time.

Only the logits of one piece exist at a time, in the model's precision, and their gradient overwrites them: the
gradients of the input and of the weight are computed in forward. A piece has so many tokens that its logits stay small
beside the model. The full logits are never gathered: each rank reduces its own columns to one number per token (the
logarithm of its sum of exponentials), and only those numbers are communicated. Sums are taken in float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.ops import all_gather, all_reduce_
from meshwright.kernels import kernels_take
from meshwright.nn.linear import Linear, sum_input_grad
from meshwright.nn.parallel import Parallel, record_of
from meshwright.nn.weight_grad import add_product, sink_of, write_product
from meshwright.spec.model.loss_pieces import piece_rows


@dataclass(frozen=True)
class Vocabulary:
    """This rank's columns of the logits: `columns` of them belong to tokens from number `first` on; more is padding."""

    first: int
    columns: int
    group: str
    size: int
    host: bool = False  # without kernels of our own

    @staticmethod
    def of(width: int, vocab: int, parallel: Parallel) -> Vocabulary:
        tp = parallel.tp
        first = 0 if tp.alone else tp.index * width
        return Vocabulary(first, max(0, min(width, vocab - first)), tp.name, tp.size, parallel.host)


def loss_and_grad_(logits: Tensor, labels: Tensor, mask: Tensor, scale: float | None, vocabulary: Vocabulary) -> Tensor:
    """Returns each token's -log p(label) times its mask, in float32 at least. With a `scale`, it overwrites the logits
    [tokens, this rank's columns] with `scale` times the gradient of the sum of these losses."""
    v = vocabulary
    kernel = (kernels_take(logits) or (logits.is_meta and not v.host)) and v.columns > 0
    norm = logits.new_empty(len(logits), dtype=_wide(logits.dtype))
    target = torch.empty_like(norm)
    both = kernel and v.size == 1 and scale is not None
    if kernel:
        _loss_rows(logits, labels, mask, v, (norm, target), scale or 0.0, stats=True, grad=both)
    else:
        norm, target = _stats(logits, labels, v)
    if v.size > 1:
        top = norm.clone()
        all_reduce_(top, v.group, "max")
        sums = torch.stack((torch.exp(norm - top), target))
        all_reduce_(sums, v.group, "sum")
        norm, target = top + torch.log(sums[0]), sums[1]
    if scale is not None and not both:
        if kernel:
            _loss_rows(logits, labels, mask, v, (norm, target), scale, stats=False, grad=True)
        else:
            _grad_(logits, labels, mask, norm, scale, v)
    return (norm - target) * mask.to(norm.dtype)


def _loss_rows(
    logits: Tensor, labels: Tensor, mask: Tensor, v: Vocabulary, rows: tuple[Tensor, Tensor], scale: float, stats: bool,
    grad: bool,
) -> None:  # fmt: skip
    """Calls the kernel, which needs no intermediate tensors; in a dry run there is nothing to compute."""
    if logits.is_meta:
        return
    from meshwright.kernels.cross_entropy import loss_rows

    loss_rows(logits, labels, mask, v.first, v.columns, *rows, scale, stats=stats, grad=grad)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _place(labels: Tensor, v: Vocabulary) -> tuple[Tensor, Tensor]:
    at = labels - v.first
    inside = (at >= 0) & (at < v.columns)
    return torch.where(inside, at, 0), inside


def _stats(logits: Tensor, labels: Tensor, v: Vocabulary) -> tuple[Tensor, Tensor]:
    wide = logits.to(_wide(logits.dtype))
    norm = torch.logsumexp(wide[:, : v.columns], dim=1) if v.columns else wide.new_full((len(wide),), -torch.inf)
    at, inside = _place(labels, v)
    return norm, torch.where(inside, wide.gather(1, at[:, None]).squeeze(1), 0.0)


def _grad_(logits: Tensor, labels: Tensor, mask: Tensor, norm: Tensor, scale: float, v: Vocabulary) -> None:
    weight = mask.to(norm.dtype) * scale
    out = logits if logits.dtype == norm.dtype else logits.to(norm.dtype)
    out.sub_(norm[:, None]).exp_().mul_(weight[:, None])
    out[:, v.columns :] = 0.0
    at, inside = _place(labels, v)
    out.scatter_add_(1, at[:, None], torch.where(inside, -weight, 0.0)[:, None])
    if out is not logits:
        logits.copy_(out)


class _OutputLoss(torch.autograd.Function):
    """Computes the sum of the losses from the hidden states, and its gradients already in forward.

    Backward would have to keep the logits of all tokens or compute them once more. Forward therefore needs the factor
    that backward will multiply by: `scale`, where the caller knows it. Then, with `direct`, the weight gradient is
    written straight into the gradient buffer, so this forward is a part of the step and must not run twice. Otherwise
    the weight gradient is kept until backward brings the factor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, mask: Tensor, sink: Tensor | None,
        mode: str, vocabulary: Vocabulary, scale: float | None, direct: bool, training: bool,
    ) -> Tensor:  # fmt: skip
        v = vocabulary
        full = all_gather(x, v.group, v.size) if mode == "gather" else x
        needs_x, needs_weight, needs_bias = (training and needed for needed in ctx.needs_input_grad[:3])
        grad_x = torch.empty_like(full) if needs_x else None
        kept = None
        direct = direct and scale is not None and (sink is not None or not needs_weight)
        if needs_weight and not direct:
            kept = torch.empty(weight.shape, dtype=_wide(weight.dtype), device=weight.device)
        grad_bias = full.new_zeros(weight.shape[0], dtype=_wide(full.dtype)) if needs_bias else None
        total = full.new_zeros((), dtype=_wide(full.dtype))
        factor = (1.0 if scale is None else scale) if training else None
        rows = piece_rows(len(full), weight.shape[0])
        for begin in range(0, len(full), rows):
            part = slice(begin, begin + rows)
            logits = F.linear(full[part], weight, bias)
            total = total + loss_and_grad_(logits, labels[part], mask[part], factor, v).sum()
            if grad_x is not None:
                torch.mm(logits, weight, out=grad_x[part])
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=grad_bias.dtype)
            if needs_weight and direct and sink is not None:
                add_product(sink_of(sink), logits, full[part], last=begin + rows >= len(full))
            elif kept is not None:
                write_product(kept, logits, full[part], add=begin > 0)
            del logits  # otherwise the next piece's logits would be allocated while these still exist
        ctx.save_for_backward(grad_x, kept, grad_bias)
        ctx.mode, ctx.group, ctx.size = mode, v.group, v.size
        ctx.sink, ctx.scale, ctx.direct, ctx.dtype = sink, factor, direct, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, kept, grad_bias = ctx.saved_tensors
        ratio = grad / ctx.scale
        if ctx.direct:
            # Forward has added the weight gradient to the buffer already, scaled by the factor it was promised.
            torch._assert_async((ratio - 1.0).abs() < 1e-5, "the loss's gradient is not the one that was announced")
        if grad_x is not None:
            if not ctx.direct:  # in float32: a factor rounded to bf16 would bias every gradient before this layer
                grad_x = (grad_x.to(_wide(grad_x.dtype)) * ratio).to(grad_x.dtype)
            grad_x = sum_input_grad(ctx, grad_x)
        grad_weight = None
        if kept is not None:
            kept = kept.mul_(ratio.to(kept.dtype))
            if ctx.sink is None:
                grad_weight = kept.to(ctx.dtype)
            else:
                sink_of(ctx.sink).add(kept)
        if grad_bias is not None:
            grad_bias = (grad_bias * ratio).to(ctx.dtype)
        return grad_x, grad_weight, grad_bias, *([None] * 8)


def output_loss(
    x: Tensor, output: Linear, labels: Tensor, mask: Tensor, vocab: int, parallel: Parallel, scale: float | None = None
) -> Tensor:
    """Returns the sum of -log p(label) over the unmasked tokens, from hidden states x [tokens, hidden]. `vocab` is the
    true size of the vocabulary, beyond which columns are padding; `scale` announces this sum's gradient, if known."""
    vocabulary = Vocabulary.of(output.weight.shape[0], vocab, parallel)
    sink = output.sinks.get("weight")
    record = record_of(output.weight)
    # A tied embedding adds to the same place in backward. Written in forward, the order of the two sums would depend on
    # the schedule, and with it the last bits. (Tied weights on two stages have two places, summed over their own axis.)
    direct = record is None or not record.tied or bool(record.partial)
    training = torch.is_grad_enabled()
    return _OutputLoss.apply(
        x, output.weight, output.bias, labels, mask, sink, output.mode, vocabulary, scale, direct, training
    )
