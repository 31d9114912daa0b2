"""The autograd pairs against one process that does the same with whole tensors."""

from __future__ import annotations

import pytest
import torch

from meshwright.comm import ops
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from tests.support.ranks import run_ranks


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(rank: int, world: int) -> float:
    """A little two-product network cut over tp in three ways; the largest difference to the whole one."""
    group = Mesh(Layout(world, tp=world), rank).tp
    x0, up, down = numbers(8, 6, seed=1), numbers(6, 4 * world, seed=2), numbers(4 * world, 6, seed=3)
    weight = numbers(8, 6, seed=4)

    def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, a, b = (t.clone().requires_grad_() for t in (x0, up, down))
        ((torch.tanh(x @ a) @ b) * weight).sum().backward()
        return x.grad, a.grad, b.grad

    gx, ga, gb = whole()
    mine = slice(4 * rank, 4 * rank + 4)
    rows = slice(8 // world * rank, 8 // world * (rank + 1))
    errors = []

    def check(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, expected: torch.Tensor) -> None:
        errors.extend([(x.grad - expected).abs().max(), (a.grad - ga[:, mine]).abs().max()])
        errors.append((b.grad - gb[mine]).abs().max())

    # copy / reduce: every rank holds x, the sum is taken at the end
    x, a, b = x0.clone().requires_grad_(), up[:, mine].clone().requires_grad_(), down[mine].clone().requires_grad_()
    y = ops.reduce_from(torch.tanh(ops.copy_to(x, group) @ a) @ b, group)
    (y * weight).sum().backward()
    check(x, a, b, gx)

    # all_gather / reduce_scatter: rows of x and y are cut
    x, a, b = x0[rows].clone().requires_grad_(), a.detach().requires_grad_(), b.detach().requires_grad_()
    y = ops.reduce_scatter_from(torch.tanh(ops.all_gather_from(x, group) @ a) @ b, group)
    (y * weight[rows]).sum().backward()
    check(x, a, b, gx[rows])

    # scatter / gather along either dim: every rank works on its part and all use the whole result alike
    for dim in (0, 1):
        x = x0.clone().requires_grad_()
        y = ops.gather_from(torch.sin(ops.scatter_to(x, group, dim)), group, dim)
        (y * weight).sum().backward()
        errors.append((x.grad - torch.cos(x0) * weight).abs().max())
        errors.append((y - torch.sin(x0)).abs().max())
    return float(max(errors))


@pytest.mark.parametrize("world", [1, 2])
def test_pairs(world: int) -> None:
    assert max(run_ranks(world, pairs)) < 1e-12
