"""One rank's place along the axes that can cut a part of a model. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from meshwright.spec.layout import Layout
from meshwright.spec.layout.context import NOT_SHARED, ContextPlan
from meshwright.spec.layout.grid import DEPTH, ROW


def hash_once(self: Any) -> int:
    """Hash a value once and remembers it: the planner's caches are keyed by these values, and hashing a model of a
    hundred blocks at each lookup is slow."""
    found = self.__dict__.get("_hash")
    if found is None:
        found = hash(tuple(getattr(self, each.name) for each in fields(self)))
        object.__setattr__(self, "_hash", found)
    return int(found)


@dataclass(frozen=True)
class Coordinate:
    """One rank's place along the axes that can cut a part: the size of each axis and the rank's index along it.

    Axes that are not named have one rank. The data-parallel axes are left out, since no part is cut by them.
    """

    axes: tuple[tuple[str, int, int], ...] = ()  # (name, size, index), names ascending
    sequence_parallel: bool = False
    context: ContextPlan = NOT_SHARED  # how ranks along cp share their tokens
    piece_flops: float | None = None  # least FLOPs for each send where linear layers communicate over tp in pieces

    __hash__ = hash_once

    @cached_property
    def _axes(self) -> dict[str, tuple[int, int]]:
        return {name: (size, index) for name, size, index in self.axes}

    def size(self, axis: str) -> int:
        """Return the size of an axis, or of a product of axes as in "tp-cp"."""
        if "-" not in axis:
            return self._axes.get(axis, (1, 0))[0]
        return math.prod(self.size(word) for word in axis.split("-"))

    def index(self, axis: str) -> int:
        return self._axes.get(axis, (1, 0))[1]

    @cached_property
    def dense(self) -> Coordinate:
        """The place along the axes that cut everything but experts."""
        axes = tuple(each for each in self.axes if each[0].split(".")[0] not in ("ep", "etp"))
        return self if len(axes) == len(self.axes) else replace(self, axes=axes)

    @property
    def at_once(self) -> Coordinate:
        """The same place for what is no linear layer, and so does not communicate in pieces."""
        return replace(self, piece_flops=None) if self.overlaps else self

    @property
    def overlaps(self) -> bool:
        """Whether linear layers communicate over tp in pieces, while they multiply (`spec/model/pieces.py`)."""
        return self.piece_flops is not None

    @property
    def splits_tokens(self) -> bool:
        """Whether each tp rank holds only its rows of the tokens between the products."""
        return self.sequence_parallel and self.size("tp") > 1

    @property
    def row_parts(self) -> int:
        """The number of parts into which tensor-parallel ranks cut the rows of activations between the products."""
        return self.size("tp") if self.splits_tokens else self.size(f"{ROW}-{DEPTH}")

    @property
    def cuts_experts_alike(self) -> bool:
        """Whether an expert is divided over the same ranks as everything else."""
        return self.size("etp") == self.size("tp")


def coordinate_of(
    layout: Layout,
    rank: int,
    sequence_parallel: bool,
    context: ContextPlan = NOT_SHARED,
    piece_flops: float | None = None,
) -> Coordinate:
    """Return the coordinate of `rank` in a layout."""
    found = {**layout.coordinate(rank), **layout.expert_coordinate(rank)}
    sizes = {axis: layout.size(axis) for axis in found if not axis.startswith(("dp", "edp"))}
    axes = [(axis, size, found[axis]) for axis, size in sizes.items() if size > 1]
    shared = dict.fromkeys(("embedding", *(name for name, _ in layout.shared)))
    axes += [(name, layout.size(name), 0) for name in shared if layout.size(name) > 1]
    least = piece_flops if layout.tp > 1 else None
    return Coordinate(tuple(sorted(axes)), sequence_parallel, context, least)
