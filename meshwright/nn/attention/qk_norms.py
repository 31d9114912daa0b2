"""RMS norms of queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.ops import all_reduce_
from meshwright.nn.norm import RMSNorm
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord, records_under
from meshwright.spec.model import gpt


class HeadNorms(nn.Module):
    """Norms over the features of each head, with one weight for all heads."""

    def __init__(self, parallel: Parallel, part: gpt.AttentionPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        of_head = gpt.NormPart("rmsnorm", part.head_dim, part.norm_eps)
        self.q = RMSNorm(parallel, of_head, records_under(records, "q_norm"))
        self.k = RMSNorm(parallel, of_head, records_under(records, "k_norm"))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q), self.k(k)


class TokenNorms(nn.Module):
    """Norms over all heads of a token. Where tp shards the heads, the squares are averaged over its ranks."""

    def __init__(self, parallel: Parallel, part: gpt.AttentionPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.eps = part.norm_eps
        self.group = (parallel.tp.name, parallel.tp.size)
        self.q = parallel.parameter(records["q_norm.weight"])
        self.k = parallel.parameter(records["k_norm.weight"])

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed q and k, both [batch, seq, this rank's heads, head_dim]."""
        return _TokenNorms.apply(q, k, self.q.view(q.shape[2:]), self.k.view(k.shape[2:]), self.eps, *self.group)


class _TokenNorms(torch.autograd.Function):
    """y = r * x * w for queries and for keys, where 1 / r^2 is eps plus the mean of x^2 over all ranks of the group."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, eps: float, group: str, size: int) -> Any:
        wide = torch.promote_types(q.dtype, torch.float32)
        scales = torch.rsqrt(_means([x.to(wide).square() for x in (q, k)], group, size) + eps)
        ctx.save_for_backward(q, k, wq, wk, scales)
        ctx.group = (group, size)
        return tuple((x * r[..., None, None]).to(x.dtype) * w for x, w, r in ((q, wq, scales[0]), (k, wk, scales[1])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, wq, wk, scales = ctx.saved_tensors
        weighted = [grad * w.to(scales.dtype) for grad, w in zip(grads, (wq, wk), strict=True)]
        means = _means([q * weighted[0], k * weighted[1]], *ctx.group)
        input_grads, weight_grads = [], []
        for n, x in enumerate((q, k)):
            # For y = r(x) x, the gradient of x is r g - x r^3 mean(g x).
            r, mean = scales[n][..., None, None], means[n][..., None, None]
            input_grads.append((r * weighted[n] - x * (r**3 * mean)).to(x.dtype))
            weight_grads.append((grads[n] * (r * x)).sum((0, 1)).to(wq.dtype))
        return *input_grads, *weight_grads, None, None, None


def _means(tensors: list[Tensor], group: str, size: int) -> Tensor:
    """Return the means [2, batch, seq] of two tensors [batch, seq, heads, head_dim] over the heads of all ranks.

    If ranks share a head, each copy counts. All heads have equally many copies, so the mean is the same.
    """
    means = torch.stack([x.mean((2, 3)) for x in tensors])
    if size > 1:
        all_reduce_(means, group, "sum")
    return means / size
