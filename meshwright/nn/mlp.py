"""The feed-forward part of a block, cut over tp by its inner features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.layout.params import ParamRecord
from meshwright.nn.linear import Linear
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.parts import gpt

Activation = Callable[[Tensor], Tensor]

def gated(activation: Activation) -> Activation:
    """Returns the product of the activation of a tensor's first half, the gate, with the second."""

    def product(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return product


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "geglu": gated(F.gelu),
    "reglu": gated(F.relu),
}  # SwiGLU is in fused.py: it can be a part of the product after it


class MLP(nn.Module):
    """Two projections with an activation between them; a gated MLP has gate and up in its first projection."""

    def __init__(self, parallel: Parallel, part: gpt.MLPPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        name = part.first
        self.up = Linear(parallel, records[f"{name}.weight"], records.get(f"{name}.bias"), "column")
        self.activation = None if part.kind == "swiglu" else ACTIVATIONS[part.kind]
        self.down = Linear(parallel, records["down.weight"], records.get("down.bias"), "row")

    def forward(self, x: Tensor, norm: Norm, *unused: object) -> tuple[Tensor, Tensor]:
        """Returns x, for the residual, and the MLP of its norm. What attention needs besides is unused."""
        x, inner = self.up.after_norm(x, norm)
        return x, self._down(inner)

    def of(self, x: Tensor) -> Tensor:
        """Returns the MLP of x itself."""
        return self._down(self.up(x))

    def _down(self, inner: Tensor) -> Tensor:
        return self.down.after_swiglu(inner) if self.activation is None else self.down(self.activation(inner))
