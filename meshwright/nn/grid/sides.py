"""How tensors travel between the ranks of a grid: which groups a product has, what is gathered before it and what is
scattered after it. `spec/layout/grid.py` says who plays which role."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ops import all_gather, reduce_scatter
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.grid import Roles

Side = tuple[str, int]  # the name and the size of a group
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
    """Returns the rows of x, which every tp rank holds whole, that these axes (the slowest first) leave to a rank."""
    for axis in axes:
        group = group_of(parallel, axis)
        if not group.alone:
            x = x.chunk(group.size)[group.index]
    return x


class Sides(NamedTuple):
    """The groups over which the tensors of one product travel."""

    x: Side
    joins: bool
    weight: Side
    summed: Side
    keeps: bool = False

    @property
    def blocks(self) -> int:
        """Of how many blocks of columns, of as many ranks, x is joined."""
        return self.x[1] if self.joins else 1

    @staticmethod
    def of(parallel: Parallel, roles: Roles, keeps: bool = False) -> Sides:
        gathered, weight, summed = (side_of(parallel, axis) for axis in (roles.gathered, roles.weight, roles.summed))
        return Sides(gathered, roles.joins, weight, summed, keeps)


def gather(x: Tensor, side: Side, again: bool = False) -> Tensor:
    """Returns the rows of all ranks."""
    return x if side[1] == 1 else all_gather(x, *side, again)


def scatter(x: Tensor, side: Side) -> Tensor:
    """Returns this rank's rows of the sum of all ranks' tensors."""
    return x if side[1] == 1 else reduce_scatter(x, *side)


def bring(x: Tensor, sides: Sides) -> Tensor:
    """Returns x as the product takes it: with its features joined, or with the rows of all."""
    full = gather(x, sides.x)
    if sides.blocks == 1:
        return full
    return full.view(sides.x[1], *x.shape).transpose(0, 1).reshape(x.shape[0], -1)


def send_back(x: Tensor, sides: Sides) -> Tensor:
    """Returns this rank's block of the sum of all ranks' x: the reverse of `bring`, for its gradient."""
    if sides.blocks > 1:
        x = x.view(x.shape[0], sides.x[1], -1).transpose(0, 1).reshape(x.shape[0] * sides.x[1], -1)
    return scatter(x, sides.x)
