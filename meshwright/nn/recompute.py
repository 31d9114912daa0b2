"""Recomputation: keep a part's input instead of what lies inside, and compute that again when backward needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor, bool], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x, True)
        torch.autograd.backward(y, grad)
        return x.grad, None


def recompute(run: Callable[[Tensor, bool], Tensor], x: Tensor) -> Tensor:
    """run(x, again=False) now, keeping only x, and run(x, again=True) in backward; random numbers and collectives are
    `run`'s own to repeat."""
    # Without a gradient of the input, as of a frozen embedding's result, backward would not come by.
    return _Recompute.apply(x if x.requires_grad else x.detach().requires_grad_(), run)
