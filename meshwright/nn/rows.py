"""Parts of heads that work on a few chosen rows of each sample. Every tp rank holds all of these rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.comm.ops import reduce_from
from meshwright.nn.linear import Linear
from meshwright.nn.mlp import ACTIVATIONS
from meshwright.nn.parallel import Parallel
from meshwright.spec.model import bert
from meshwright.spec.model.part import Records


class ChosenRows(nn.Module):
    """Selects rows of each sample from activations x [tokens, hidden].

    Under sequence parallelism each tp rank fills in the rows that it holds, and their sum goes to all of them. The
    gradient needs no sum, since every rank computes all of it.
    """

    def __init__(self, parallel: Parallel, part: bert.ChosenRowsPart, records: Records) -> None:
        super().__init__()
        self.parallel = parallel

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Return the chosen rows [samples, count, hidden], given their places [samples, count] in the samples."""
        split, tp = self.parallel.splits_tokens, self.parallel.tp
        seq = x.shape[0] * (tp.size if split else 1) // places.shape[0]
        index = (places + seq * torch.arange(len(places), device=places.device)[:, None]).flatten()
        if not split:
            return x[index].unflatten(0, places.shape)
        index = index - tp.index * x.shape[0]
        inside = (index >= 0) & (index < x.shape[0])
        own = x[torch.where(inside, index, 0)] * inside[:, None]
        return reduce_from(own, tp).unflatten(0, places.shape)


class Dense(nn.Module):
    """A linear layer with an optional activation. Every tp rank computes the same, and never in fp8."""

    def __init__(self, parallel: Parallel, part: bert.DensePart, records: Records) -> None:
        super().__init__()
        activations = {**ACTIVATIONS, "tanh": torch.tanh}
        self.linear = Linear(replace(parallel, products=""), records["weight"], records["bias"], "whole")
        self.activation = activations[part.activation] if part.activation else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.activation is None else self.activation(y)
