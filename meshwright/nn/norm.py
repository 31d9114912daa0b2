"""Norms over the last dimension: the hidden features of [tokens, hidden], or the features of a head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model import gpt


class Norm(nn.Module):
    """The base of all norms. If `fuses` is true, the product after the norm computes it (`Linear.after_norm`)."""

    def __init__(self, parallel: Parallel, part: gpt.NormPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.eps = part.eps
        self.fuses = part.facts.fuses and parallel.fused
        self.weight = parallel.parameter(records["weight"])
        self.bias = parallel.parameter(records["bias"]) if "bias" in records else None


class LayerNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class StreamNorm(nn.Module):
    """The base of norms that read another stream as well as x, such as a condition of each sample.

    Its forward takes (x, inputs). The part that describes the norm names the stream in `reads`.
    """


class BoundNorm:
    """A `StreamNorm` bound to the inputs of one call of its block, so that the block's bodies call it with x alone."""

    fuses = False

    def __init__(self, norm: StreamNorm, inputs: Inputs) -> None:
        self.norm, self.inputs = norm, inputs

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x, self.inputs)
        return y


class NoNorm(Norm):
    """The identity, which a block with post-norm passes to its bodies in place of a norm."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.fuses = False

    def forward(self, x: Tensor) -> Tensor:
        return x
