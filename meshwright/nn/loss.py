"""Cross entropy over a vocabulary cut over tp: the full logits are never gathered.

Each rank reduces its own columns to one number a token (the logarithm of its sum of exponentials), and only those
numbers travel. The sums are taken in float32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm.ops import all_reduce_
from meshwright.nn.parallel import Parallel


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, first: int, columns: int, group: str, size: int
    ) -> Tensor:
        """Sum over the unmasked tokens of -log p(label). logits [tokens, this rank's columns], `columns` are real."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        real = wide[:, :columns]
        norm = torch.logsumexp(real, dim=1) if columns else wide.new_full((len(wide),), -torch.inf)
        at = labels - first
        inside = (at >= 0) & (at < columns)
        at = torch.where(inside, at, 0)
        target = torch.where(inside, wide.gather(1, at[:, None]).squeeze(1), 0.0)
        if size > 1:
            top = norm.clone()
            all_reduce_(top, group, "max")
            sums = torch.stack((torch.exp(norm - top), target))
            all_reduce_(sums, group, "sum")
            norm, target = top + torch.log(sums[0]), sums[1]
        weight = mask.to(wide.dtype)
        ctx.save_for_backward(wide, norm, at, inside, weight)
        ctx.columns, ctx.dtype = columns, logits.dtype
        return ((norm - target) * weight).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide, norm, at, inside, weight = ctx.saved_tensors
        weight = weight * grad
        out = torch.sub(wide, norm[:, None]).exp_().mul_(weight[:, None])
        if ctx.columns < out.shape[1]:
            out[:, ctx.columns :] = 0.0
        out.scatter_add_(1, at[:, None], torch.where(inside, -weight, 0.0)[:, None])
        return out.to(ctx.dtype), None, None, None, None, None, None


def cross_entropy_sum(logits: Tensor, labels: Tensor, mask: Tensor, vocab: int, parallel: Parallel) -> Tensor:
    """The loss's sum; `vocab` is the true vocabulary, columns beyond it are padding."""
    tp = parallel.tp
    first = 0 if tp.alone else tp.index * logits.shape[1]
    columns = max(0, min(logits.shape[1], vocab - first))
    return _CrossEntropy.apply(logits, labels, mask, first, columns, tp.name, tp.size)
