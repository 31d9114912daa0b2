"""The output layer and the cross entropy over a vocabulary that may be sharded over tp or a grid.

Only one tile of logits exists at a time, in the model's precision. The gradient overwrites it, and the gradients of the
input and of the weight are computed from it in forward. A tile has few enough tokens to stay small beside the model.

The full logits are never gathered. Each rank reduces its own columns to two numbers per token (the logarithm of its sum
of exponentials, and the label's logit), and only those are communicated. Sums are taken in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ops import all_reduce_
from meshwright.kernels import kernels_take
from meshwright.nn.grid.products import GridLinear
from meshwright.nn.grid.sides import (
    PLAIN,
    Side,
    Sides,
    gather,
    gather_input,
    group_of,
    own_rows,
    scatter,
    scatter_input_grad,
    side_of,
)
from meshwright.nn.linear import Linear
from meshwright.nn.parallel import Parallel, record_of
from meshwright.nn.weight_grad import add_product, sink_of, write_product
from meshwright.spec.model.loss_pieces import tile_rows


@dataclass(frozen=True)
class Vocabulary:
    """This rank's columns of the logits. `columns` of them belong to tokens, beginning with token `first`; the rest is
    padding."""

    first: int
    columns: int
    # The name and size of the group over which the vocabulary is sharded.
    group: str
    size: int
    # True on a CPU, and in a dry run of one, where Triton's kernels don't run.
    host: bool = False

    @staticmethod
    def of(width: int, vocab: int, group: Group, host: bool) -> Vocabulary:
        """Return the vocabulary of a rank with `width` columns, where the other ranks of the group hold the rest."""
        first = 0 if group.alone else group.index * width
        return Vocabulary(first, max(0, min(width, vocab - first)), group.name, group.size, host)


def loss_and_grad_(logits: Tensor, labels: Tensor, mask: Tensor, scale: float | None, vocabulary: Vocabulary) -> Tensor:
    """Return each token's -log p(label) times its mask, in float32 at least.

    With a `scale`, the logits [tokens, this rank's columns] are overwritten with `scale` times the gradient of the sum
    of these losses.
    """
    v = vocabulary
    kernel = (kernels_take(logits) or (logits.is_meta and not v.host)) and v.columns > 0
    norm = logits.new_empty(len(logits), dtype=_wide(logits.dtype))
    target = torch.empty_like(norm)
    # One call computes the statistics and the gradient, unless other ranks have a part of the statistics.
    both = kernel and v.size == 1 and scale is not None
    if kernel:
        _loss_rows(logits, labels, mask, v, (norm, target), scale or 0.0, stats=True, grad=both)
    else:
        norm, target = _stats(logits, labels, v)
    if v.size > 1:
        # The sum of the exponentials over all ranks, relative to the largest logarithm so that it can't overflow.
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
    """Call the kernel, which needs no intermediate tensors. In a dry run, compute nothing."""
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


def logit_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int = 1, copies: int = 1
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the rows of x, each with the logits of these rows.

    The size of a tile allows for a caller that scatters it in `parts`, or gathers `copies` tensors of its size. The
    caller must delete a tile before it asks for the next one; otherwise both would exist at the same time.
    """
    rows = max(1, tile_rows(len(x), len(weight) * copies, parts))
    for begin in range(0, len(x), rows):
        at = slice(begin, min(begin + rows, len(x)))
        yield at, F.linear(x[at], weight, bias)


class OutputGrads:
    """The gradients of the output layer's input, weight and bias, accumulated tile by tile.

    Only those that are needed are computed. If there is a `sink`, the weight gradient is added to it.
    """

    def __init__(self, x: Tensor, weight: Tensor, needs: Sequence[bool], sink: Tensor | None = None) -> None:
        needs_x, needs_weight, needs_bias = needs
        self._x = x
        self._weight = weight
        self._sink = sink if needs_weight else None
        self.x = torch.empty_like(x) if needs_x else None
        keeps = needs_weight and sink is None
        self.weight = torch.empty_like(weight, dtype=_wide(weight.dtype)) if keeps else None
        self.bias = x.new_zeros(weight.shape[0], dtype=_wide(x.dtype)) if needs_bias else None

    def add(self, at: slice, grad: Tensor) -> None:
        """Add the contributions of one tile, given the gradient of its logits. `at` is the tile's rows."""
        if self.x is not None:
            torch.mm(grad, self._weight, out=self.x[at])
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self._sink is not None:
            add_product(sink_of(self._sink), grad, self._x[at], last=at.stop == len(self._x))
        elif self.weight is not None:
            write_product(self.weight, grad, self._x[at], add=at.start > 0)


class LossSettings(NamedTuple):
    """The settings with which a rank computes the loss."""

    sides: Sides
    vocabulary: Vocabulary
    # The handle of the weight gradient's sink.
    sink: Tensor | None
    # The gradient that the sum of losses will get in backward, if it is known in forward.
    scale: float | None
    # True if forward writes the weight gradient to the sink.
    direct: bool
    training: bool
    # On a grid each tile of logits is scattered by rows: this rank's part, and the groups over which losses are summed.
    part: int = 0
    row_sides: tuple[Side, ...] = ()

    @staticmethod
    def of(output: Linear, vocabulary: Vocabulary, scale: float | None, *on_grid: Any) -> LossSettings:
        record = record_of(output.weight)
        sink = output.sinks.get("weight")
        # A tied embedding adds to the same sink in backward. If this gradient were written in forward, the order of the
        # two additions would depend on the schedule, and with it the last bits of the sum. Tied weights on two stages
        # have two sinks, which are summed over an axis for that purpose.
        alone = record is None or not record.tied or "embedding" in record.partial
        direct = alone and scale is not None and (sink is not None or not output.weight.requires_grad)
        return LossSettings(output.sides, vocabulary, sink, scale, direct, torch.is_grad_enabled(), *on_grid)


class _OutputLoss(torch.autograd.Function):
    """The sum of the losses, computed from the hidden states. Its gradients are computed in forward.

    If they were computed in backward, the logits of all tokens would have to be saved or computed again. Forward needs
    the factor by which backward will multiply: `scale`, if the caller knows it. If the settings are also `direct`, the
    weight gradient is written straight into the gradient buffer, so this forward is a part of the step and must not run
    twice. Otherwise the weight gradient is saved until backward provides the factor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, mask: Tensor, how: LossSettings
    ) -> Tensor:
        sides = how.sides
        on_grid = how.sides.weight is not None
        full, table = gather_input(x, sides), gather(weight, sides.weight)
        needs = [how.training and needed for needed in ctx.needs_input_grad[:3]]
        grads = OutputGrads(full, table, needs, how.sink if how.direct and not on_grid else None)
        total = full.new_zeros((), dtype=_wide(full.dtype))
        scale = 1.0 if how.scale is None else how.scale
        factor = scale if how.training else None
        for at, logits in logit_tiles(full, table, bias, sides.summed[1]):
            logits = scatter(logits, sides.summed)
            first = at.start + how.part * len(logits)
            own = slice(first, first + len(logits))
            total = total + loss_and_grad_(logits, labels[own], mask[own], factor, how.vocabulary).sum()
            if how.training:
                logits = gather(logits, sides.summed)
                grads.add(at, logits)
            del logits
        grad_x, kept, grad_bias = grads.x, grads.weight, grads.bias
        del full, table, grads
        for name, _ in how.row_sides:
            all_reduce_(total, name, "sum")
        if on_grid:
            # Each rank takes its blocks of the gradients now, so that no gathered tensor is saved for backward.
            grad_x = scatter_input_grad(grad_x, sides) if grad_x is not None else None
            kept = scatter(kept, sides.weight) if kept is not None else None
            if how.direct and kept is not None and how.sink is not None:
                sink_of(how.sink).add(kept)
                kept = None
        ctx.save_for_backward(grad_x, kept, grad_bias)
        ctx.sides = PLAIN if on_grid else sides
        ctx.sink, ctx.scale, ctx.direct, ctx.dtype = how.sink, factor, how.direct, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, kept, grad_bias = ctx.saved_tensors
        ratio = grad / ctx.scale
        if ctx.direct:
            # Forward has already added the weight gradient to the buffer, multiplied by the announced factor.
            torch._assert_async((ratio - 1.0).abs() < 1e-5, "the loss's gradient is not the one that was announced")
        if grad_x is not None:
            if not ctx.direct:
                # In float32, because a factor rounded to bf16 would bias the gradients of all layers before this one.
                grad_x = (grad_x.to(_wide(grad_x.dtype)) * ratio).to(grad_x.dtype)
            grad_x = scatter_input_grad(grad_x, ctx.sides)
        grad_weight = None
        if kept is not None:
            kept = kept.mul_(ratio.to(kept.dtype))
            if ctx.sink is None:
                grad_weight = kept.to(ctx.dtype)
            else:
                sink_of(ctx.sink).add(kept)
        if grad_bias is not None:
            grad_bias = (grad_bias * ratio).to(ctx.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def output_loss(
    x: Tensor, output: Linear, labels: Tensor, mask: Tensor, vocab: int, parallel: Parallel, scale: float | None = None
) -> Tensor:
    """Return the sum of -log p(label) over the unmasked tokens, from hidden states x [tokens, hidden].

    `vocab` is the true size of the vocabulary; further columns are padding. `scale` is the gradient that this sum will
    get in backward, if the caller knows it.
    """
    vocabulary = Vocabulary.of(output.weight.shape[0], vocab, parallel.tp, parallel.host)
    how = LossSettings.of(output, vocabulary, scale)
    return _OutputLoss.apply(x, output.weight, output.bias, labels, mask, how)


def grid_output_loss(
    x: Tensor, output: GridLinear, labels: Tensor, mask: Tensor, vocab: int, parallel: Parallel,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the same as `output_loss` on a grid of ranks: the sum over all tokens of a micro-batch.

    `labels` and `mask` are those of all tokens; x is this rank's block of the hidden states.
    """
    roles = output.roles
    width = output.weight.shape[0] * side_of(parallel, roles.weight)[1]
    vocabulary = Vocabulary.of(width, vocab, group_of(parallel, roles.y.features), parallel.host)
    row_sides = tuple(side for side in (side_of(parallel, axis) for axis in roles.y.rows) if side[1] > 1)
    part = group_of(parallel, roles.summed).index if roles.summed else 0
    how = LossSettings.of(output, vocabulary, scale, part, row_sides)
    labels, mask = (own_rows(of_all.flatten(), parallel, roles.rows) for of_all in (labels, mask))
    return _OutputLoss.apply(x, output.weight, None, labels, mask, how)
