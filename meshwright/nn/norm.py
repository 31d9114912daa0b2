"""Norms over the last dim: the hidden features of [tokens, hidden], or those of a head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model import gpt


class Norm(nn.Module):
    """The base of all norms. One that `fuses` is computed by the product after it (`Linear.after_norm`)."""

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
    """The base of norms that read a stream beside x, such as a condition of each sample: `forward(x, inputs)`. Their
    parts name the stream in `reads`."""


class BoundNorm:
    """A norm with the inputs of one call of its block: a function of x alone, as bodies call it."""

    fuses = False

    def __init__(self, norm: StreamNorm, inputs: Inputs) -> None:
        self.norm, self.inputs = norm, inputs

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x, self.inputs)
        return found


class NoNorm(Norm):
    """The identity, which the body of a block gets where the norm comes after the sum."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.fuses = False

    def forward(self, x: Tensor) -> Tensor:
        return x
