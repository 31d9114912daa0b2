"""Gradients pass through every output of an autograd function in compiled blocks, in every supported version of
torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.registered import operator
from meshwright.engine.compiling import compile_blocks


@operator("meshwright_test::double_", mutates={"x"})
def double_(x: Tensor) -> None:
    x.mul_(2.0)


class _Product(torch.autograd.Function):
    """A function that returns 2 (x W^T + b), computed as `way` says, and x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, way: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y = 2.0 * (x @ weight.t())
        if way == "added in place":
            y.add_(2.0 * bias)
        elif way == "written by an operator":
            y = x @ weight.t() + bias
            double_(y)
        else:
            y = (y + 2.0 * bias).to(x.dtype)
        return y, x

    @staticmethod
    def backward(ctx: Any, grad: Tensor, passed: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return 2.0 * grad @ weight + passed, 2.0 * grad.t() @ x, 2.0 * grad.sum(0), None


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=draw, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(4, generator=draw, dtype=torch.float64))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y, x = _Product.apply(x, self.weight, self.bias, self.way)
        return x + y.sin()


class Stage(nn.Module):
    """A stage of one block, with the only method that `compile_blocks` needs."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def compiled_blocks(self) -> list[nn.Module]:
        return [self.block]


@pytest.mark.parametrize("way", ["added in place", "written by an operator", "not converted"])
def test_gradients_pass_through_every_output(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: plain(self, **how, backend="aot_eager"))
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        block = Block(way)
        if compiled:
            monkeypatch.setattr("meshwright.engine.compiling.stage_of", lambda stage: stage)
            compile_blocks(Stage(block))
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        block(x).square().sum().backward()
        found.append([x.grad, block.weight.grad, block.bias.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-13, atol=1e-13)
