"""Recomputation: only a part's input is kept, and its activations are computed again when backward needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[Tensor, bool], tuple[Tensor, ...]]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Run) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            ys = ctx.run(x, True)
        torch.autograd.backward(ys, grads)
        return x.grad, None


def recompute(run: Run, x: Tensor) -> tuple[Tensor, ...]:
    """Returns run(x, again=False), of which only x is kept, and calls run(x, again=True) in backward. `run` itself must
    repeat its random numbers and collectives."""
    # Autograd skips the backward of a function none of whose inputs needs a gradient, and the weights inside `run` are
    # no inputs. So x gets one even where it needs none, as after a frozen embedding.
    return _Recompute.apply(x if x.requires_grad else x.detach().requires_grad_(), run)
