"""Norms of rows whose features are divided over the ranks of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.ops import all_reduce_
from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.nn.fused import wide
from meshwright.nn.grid.sides import Side, gather, side_of
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.grid import STREAM
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model import grid as parts


class Features(NamedTuple):
    """The features of a row: their number on all ranks, the group of these ranks, and the variance's epsilon."""

    width: int
    side: Side
    eps: float


def row_statistics(x: Tensor, features: Features, centred: bool) -> tuple[Tensor, Tensor | None]:
    """Return the factor that normalises each row and, for a layer norm (`centred`), each row's mean.

    For a layer norm the ranks' means and sums of squared differences are combined. This is as accurate as computing
    them over whole rows.
    """
    values = wide(x)
    own = x.shape[1]
    mean = None
    if centred:
        mean = values.mean(1)
        squares = (values - mean[:, None]).square().sum(1)
        both = gather(torch.stack((mean, squares))[None], features.side)  # [ranks, 2, rows]
        means, mean = both[:, 0], both[:, 0].mean(0)
        # Squared differences within the ranks, plus those between the ranks' means and the mean of the row.
        total = both[:, 1].sum(0) + own * (means - mean).square().sum(0)
    else:
        total = values.square().sum(1)
        if features.side[1] > 1:
            all_reduce_(total, features.side[0], "sum")
    return torch.rsqrt(total / features.width + features.eps), mean


@pure_operator("meshwright::in_backward")
def in_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Return a copy of x that depends on `grad`, and so exists in backward only.

    A compiler that sees the same computation in forward and backward may save its result instead of computing it again.
    A computation from this copy differs from that of forward, so it stays in backward.
    """
    return x.clone()


@shapes_of(in_backward)
def _(x: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(x)


def normalise(x: Tensor, scale: Tensor, mean: Tensor | None) -> Tensor:
    """Return the rows minus their means, if given, and scaled by `scale` to unit variance, in float32 or wider."""
    values = wide(x)
    return (values if mean is None else values - mean[:, None]) * scale[:, None]


def norm_grads(
    grad: Tensor, ones: Tensor, weight: Tensor, scale: Tensor, features: Features, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input and weight. `ones` is the normalised rows, before the weight."""
    given = wide(grad)
    scaled = given * wide(weight)
    means = torch.stack([(scaled * ones).sum(1)] + ([scaled.sum(1)] if centred else []))
    if features.side[1] > 1:
        all_reduce_(means, features.side[0], "sum")
    means = means / features.width
    inside = scaled - ones * means[0][:, None] - (means[1][:, None] if centred else 0.0)
    return (inside * scale[:, None]).to(grad.dtype), (given * ones).sum(0).to(weight.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, features: Features, centred: bool) -> Tensor:
        scale, mean = row_statistics(x, features, centred)
        ctx.save_for_backward(x, weight, scale, mean)
        ctx.features = features
        y = normalise(x, scale, mean) * wide(weight)
        return (y if bias is None else y + wide(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, mean = ctx.saved_tensors
        scale = in_backward(scale, grad)
        mean = None if mean is None else in_backward(mean, grad)
        both = norm_grads(grad, normalise(x, scale, mean), weight, scale, ctx.features, mean is not None)
        return *both, wide(grad).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None, None, None


class GridNorm(Norm):
    """A layer norm or RMS norm of rows whose features are divided over ranks."""

    def __init__(self, parallel: Parallel, part: parts.GridNormPart, records: dict[str, ParamRecord]) -> None:
        super().__init__(parallel, part.part, records)
        self.centred = part.part.facts.centred
        self.features = Features(part.part.width, side_of(parallel, STREAM.features), self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.bias, self.features, self.centred)
