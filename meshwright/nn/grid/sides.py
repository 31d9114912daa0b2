"""The collectives of a product over tensor-parallel ranks, along one axis or on a grid: the factors that are gathered
before it, and the result that is summed and scattered after it. `spec/layout/grid.py` defines the roles of a grid's
axes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ops import all_gather, all_reduce_, reduce_scatter
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.grid import Roles

# The name and the size of a group.
Side = tuple[str, int]
NOBODY: Side = ("", 1)


def side_of(parallel: Parallel, axis: str) -> Side:
    if not axis:
        return NOBODY
    group = group_of(parallel, axis)
    return group.name, group.size


def group_of(parallel: Parallel, axis: str) -> Group:
    assert parallel.grid is not None
    return parallel.grid[axis]


def own_rows(x: Tensor, parallel: Parallel, axes: tuple[str, ...]) -> Tensor:
    """Return this rank's rows of x, which every tp rank holds whole. `axes`, the slowest first, divide the rows."""
    for axis in axes:
        group = group_of(parallel, axis)
        if not group.alone:
            x = x.chunk(group.size)[group.index]
    return x


class Sides(NamedTuple):
    """The groups over which the tensors of one product y = x W^T travel. A layer that is sharded over tp is a grid with
    one axis, whose weight is not gathered."""

    # Gathers x, and scatters its gradient.
    x: Side = NOBODY
    # Sums y and scatters its rows, and gathers its gradient.
    summed: Side = NOBODY
    # Gathers W, and scatters its gradient. None: the product is not on a grid.
    weight: Side | None = None
    # True if x is gathered along its features, not its rows.
    joins: bool = False
    # True if gathered factors are saved for backward.
    keeps: bool = False
    # True if every rank holds all rows of x and y. Then x is not gathered, and sums are not scattered.
    all_rows: bool = False

    @staticmethod
    def of(parallel: Parallel, roles: Roles, keeps: bool = False) -> Sides:
        gathered, weight, summed = (side_of(parallel, axis) for axis in (roles.gathered, roles.weight, roles.summed))
        return Sides(gathered, summed, weight, roles.joins and gathered[1] > 1, keeps)

    @staticmethod
    def over_tp(parallel: Parallel, cut: str) -> Sides:
        """Return the sides of a layer that is sharded over tp by its output features (`column`) or its input features
        (`row`), or that every rank holds whole (`whole`)."""
        if parallel.tp.alone:
            return PLAIN
        return Sides.of_group(parallel.tp.name, parallel.tp.size, cut, not parallel.splits_tokens)

    @staticmethod
    def of_group(name: str, size: int, cut: str, all_rows: bool) -> Sides:
        side = (name, size)
        sides = {"column": Sides(x=side, all_rows=all_rows), "row": Sides(summed=side, all_rows=all_rows)}
        return sides.get(cut, PLAIN)


# The sides of a product that does not communicate.
PLAIN = Sides()


def gather(x: Tensor, side: Side | None, again: bool = False) -> Tensor:
    """Return x with the rows of all ranks. Backward says `again` when it repeats a gather of forward."""
    return x if side is None or side[1] == 1 else all_gather(x, *side, again)


def scatter(x: Tensor, side: Side | None) -> Tensor:
    """Return this rank's rows of the sum of all ranks' tensors."""
    return x if side is None or side[1] == 1 else reduce_scatter(x, *side)


def gather_input(x: Tensor, sides: Sides, again: bool = False) -> Tensor:
    """Return x as the product takes it: with the rows of all ranks, or with the features of all ranks (`joins`)."""
    group, size = sides.x
    if size == 1 or sides.all_rows:
        return x
    full: Tensor = all_gather(x, group, size, again)
    return full.view(size, *x.shape).transpose(0, 1).reshape(x.shape[0], -1) if sides.joins else full


def scatter_input_grad(grad: Tensor, sides: Sides) -> Tensor:
    """Return this rank's block of the sum of all ranks' gradients of x: the adjoint of `gather_input`."""
    group, size = sides.x
    if size == 1:
        return grad
    if sides.all_rows:
        all_reduce_(grad, group, "sum")
        return grad
    if sides.joins:
        grad = grad.view(grad.shape[0], size, -1).transpose(0, 1).reshape(grad.shape[0] * size, -1)
    return reduce_scatter(grad, group, size)


def sum_output(y: Tensor, sides: Sides) -> Tensor:
    """Return this rank's rows of the sum of all ranks' y."""
    group, size = sides.summed
    if size == 1:
        return y
    if sides.all_rows:
        all_reduce_(y, group, "sum")
        return y
    return reduce_scatter(y, group, size)


def gather_output_grad(grad: Tensor, sides: Sides) -> Tensor:
    """Return the gradient of all rows of y: the adjoint of `sum_output`."""
    group, size = sides.summed
    return grad if size == 1 or sides.all_rows else all_gather(grad, group, size)
