"""A unit is a part of the model whose weights are there, or not, together: the embedding, a block, the head.

Whoever shards the weights puts a `gate` on each unit's module; a model calls its units through `through`. Without a
gate that is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Gate(Protocol):
    """`open` returns when the unit's weights are there, in forward and in backward; `close` says they are not needed
    any more. `closes` is false where weights stay once they have come."""

    closes: bool

    def open(self) -> None: ...
    def close(self) -> None: ...


class _CallInBackward(torch.autograd.Function):
    """The identity, whose backward calls something first: on a unit's output when its backward is about to begin, on
    its input when the gradients of its weights are known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def call_unit(unit: nn.Module, x: Tensor, *rest: Any, hold: bool = False) -> Tensor:
    """unit(x, *rest), with its weights there. `hold`: leave them there, since backward comes at once."""
    gate: Gate | None = getattr(unit, "gate", None)
    if gate is None:
        return unit(x, *rest)
    gate.open()
    if not gate.closes:
        return unit(x, *rest)
    if x.requires_grad and torch.is_grad_enabled():
        x = _CallInBackward.apply(x, gate.close)
    y = unit(x, *rest)
    if not hold:
        gate.close()
    return _CallInBackward.apply(y, gate.open) if y.requires_grad else y
