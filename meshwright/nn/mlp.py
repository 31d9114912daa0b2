"""The feed-forward part of a block, cut over tp by its inner features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.layout.params import ParamRecord
from meshwright.nn.linear import Linear
from meshwright.nn.parallel import Parallel


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "swiglu": _swiglu,
}


class MLP(nn.Module):
    def __init__(self, parallel: Parallel, kind: str, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        name = "gate_up" if kind == "swiglu" else "up"
        self.up = Linear(parallel, records[f"{name}.weight"], records.get(f"{name}.bias"), "column")
        self.activation = ACTIVATIONS[kind]
        self.down = Linear(parallel, records["down.weight"], records.get("down.bias"), "row")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
