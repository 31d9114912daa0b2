"""Grids of tensor-parallel ranks (2D, 2.5D and 3D tensor parallelism). No torch.

Some axes of a grid cut the rows of an activation, some its features and some a weight. The role of each axis in a
product is data here, so that one implementation of the product serves all three kinds of grids.

A grid's axes are parts of tp, `tp.col` the fastest. Between the products, the rows of an activation [tokens, features]
are cut over depth and row and its features over col, in every kind of grid. A product y = x W^T, W [out, in], gathers
the parts of both factors that it lacks, and sums over the axis that cuts the contraction, if any:

    2d, 2.5d   x is joined along its features (over col), W along its rows (over row); y is cut as x was.
               Ranks along depth hold copies of W and different rows of x.
    3d         x is gathered along its rows (over row), W along its rows (over depth), and y is a sum over col, whose
               rows are scattered over it. So y has its rows over depth and col, its features over row. The next
               product swaps these two axes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from meshwright.spec.layout.layout import Parts

COL, ROW, DEPTH = "tp.col", "tp.row", "tp.depth"
GRID_AXES = (COL, ROW, DEPTH)  # fastest first


class GridSharding(NamedTuple):
    """The axes that cut an activation's rows, the slowest first, and the axis that cuts its features."""

    rows: tuple[str, ...]
    features: str


class Roles(NamedTuple):
    """The role of each axis of a grid in one product."""

    x: GridSharding
    y: GridSharding
    gathered: str  # the axis over which x is gathered
    joins: bool  # gathering x joins its features; false: its rows
    weight: str  # the axis over which the weight's rows are gathered
    summed: str  # the axis over which y is summed and its rows scattered; empty: none

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes that cut the rows of the gathered x, and of y before its rows are scattered."""
        return self.x.rows if self.joins else tuple(axis for axis in self.x.rows if axis != self.gathered)

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes along which the weight is replicated. Their ranks hold different rows of x."""
        return tuple(axis for axis in GRID_AXES if axis not in (self.y.features, self.weight, self.summed))


STREAM = GridSharding((DEPTH, ROW), COL)
_INNER = GridSharding((DEPTH, COL), ROW)
_JOINED = Roles(STREAM, STREAM, COL, True, ROW, "")
# By kind: the roles in a product that reads the residual stream, and in one that writes to it.
ROLES: dict[str, tuple[Roles, Roles]] = {
    "2d": (_JOINED, _JOINED),
    "2.5d": (_JOINED, _JOINED),
    "3d": (Roles(STREAM, _INNER, ROW, False, DEPTH, COL), Roles(_INNER, STREAM, COL, False, DEPTH, ROW)),
}
LENGTHS = {"2d": 2, "2.5d": 3, "3d": 3}  # how many sizes `layout.tp_grid` lists for each kind


@dataclass(frozen=True)
class Grid:
    """A grid of tensor-parallel ranks. With `keeps`, gathered factors are saved for backward, which otherwise gathers
    them again."""

    kind: str
    row: int
    col: int
    depth: int = 1
    keeps: bool = False

    @staticmethod
    def of(kind: str, sizes: tuple[int, ...], keeps: bool = False) -> Grid:
        # Two sizes mean a depth of 1.
        row, col, depth = (*sizes, 1)[:3]
        return Grid(kind, row, col, depth, keeps)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the config's `layout` section that select this grid."""
        sizes = (self.row, self.col, self.depth)[: LENGTHS[self.kind]]
        return {"tp_grid": sizes, "tp_kind": self.kind, "tp_keep_gathered": self.keeps}

    @property
    def parts(self) -> Parts:
        """The axes of the grid, as the layout knows them."""
        return (("tp", ((COL, self.col), (ROW, self.row), (DEPTH, self.depth))),)

    def size(self, axis: str) -> int:
        return {COL: self.col, ROW: self.row, DEPTH: self.depth}.get(axis, 1)

    def rows(self, cut: GridSharding) -> int:
        """Return the number of parts into which `cut` divides the rows."""
        return prod(self.size(axis) for axis in cut.rows)

    @property
    def first(self) -> Roles:
        """The roles in a product that reads the residual stream: qkv, up and the output layer."""
        return ROLES[self.kind][0]

    @property
    def second(self) -> Roles:
        """The roles in a product that writes to the residual stream: attention's output and down."""
        return ROLES[self.kind][1]

    @property
    def inner(self) -> GridSharding:
        """The cut of activations inside attention and the MLP."""
        return self.first.y

    @property
    def sharing_axis(self) -> str:
        """The axis whose ranks share sequences, if a micro-batch has too few sequences to give each rank whole ones."""
        return self.inner.rows[-1]

    def shares(self, sequences: int) -> int:
        """Return the number of ranks that share each sequence of a micro-batch of `sequences` sequences."""
        return self.size(self.sharing_axis) if sequences % self.rows(self.inner) else 1

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.keys['tp_grid']))}"
