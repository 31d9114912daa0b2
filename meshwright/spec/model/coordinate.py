"""The coordinate of a rank along the axes that can cut a part of a model. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from meshwright.spec.layout import Layout
from meshwright.spec.layout.context import WHOLE_SEQUENCES, ContextPlan
from meshwright.spec.layout.grid import DEPTH, ROW
from meshwright.spec.layout.layout import CUT_EXPERTS, whole_axis


def hash_once(self: Any) -> int:
    """Hash a dataclass once and store the hash in it.

    The planner's caches are keyed by these values, and hashing a model of a hundred blocks at each lookup is slow.
    """
    stored = self.__dict__.get("_hash")
    if stored is None:
        stored = hash(tuple(getattr(self, field.name) for field in fields(self)))
        object.__setattr__(self, "_hash", stored)
    return int(stored)


@dataclass(frozen=True)
class Coordinate:
    """The coordinate of a rank along the axes that can cut a part: the size of each axis and the rank's index along it.

    Axes that are not named have one rank. The data-parallel axes are left out, since they cut no part.
    """

    axes: tuple[tuple[str, int, int], ...] = ()  # (name, size, index), names ascending
    sequence_parallel: bool = False
    context: ContextPlan = WHOLE_SEQUENCES  # the way in which ranks along cp share their tokens
    # The fewest FLOPs per send for which a linear layer communicates over tp in chunks; None: none does.
    piece_flops: float | None = None

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
        """The coordinate without the axes that only cut experts (ep and etp)."""
        axes = tuple(axis for axis in self.axes if whole_axis(axis[0]) not in CUT_EXPERTS)
        return self if len(axes) == len(self.axes) else replace(self, axes=axes)

    @property
    def at_once(self) -> Coordinate:
        """The same coordinate for a part other than a linear layer, which never communicates in chunks."""
        return replace(self, piece_flops=None) if self.overlaps else self

    @property
    def overlaps(self) -> bool:
        """True if linear layers may communicate over tp in chunks while they multiply (`spec/model/pieces.py`)."""
        return self.piece_flops is not None

    @property
    def splits_tokens(self) -> bool:
        """True if each tp rank holds only its rows of the tokens between the products."""
        return self.sequence_parallel and self.size("tp") > 1

    @property
    def row_parts(self) -> int:
        """The number of parts into which tensor-parallel ranks cut the rows of activations between the products."""
        return self.size("tp") if self.splits_tokens else self.size(f"{ROW}-{DEPTH}")

    @property
    def cuts_experts_alike(self) -> bool:
        """True if an expert is cut over the same ranks as all other parts."""
        return self.size("etp") == self.size("tp")


def coordinate_of(
    layout: Layout,
    rank: int,
    sequence_parallel: bool,
    context: ContextPlan = WHOLE_SEQUENCES,
    piece_flops: float | None = None,
) -> Coordinate:
    """Return the coordinate of `rank` in a layout."""
    indices = {**layout.coordinate(rank), **layout.expert_coordinate(rank)}
    sizes = {axis: layout.size(axis) for axis in indices if not axis.startswith(("dp", "edp"))}
    axes = [(axis, size, indices[axis]) for axis, size in sizes.items() if size > 1]
    # Groups of stages that share parameters count as axes too. All their ranks hold the same, so the index is 0.
    shared = dict.fromkeys(("embedding", *(name for name, _ in layout.shared)))
    axes += [(name, layout.size(name), 0) for name in shared if layout.size(name) > 1]
    flops_per_send = piece_flops if layout.tp > 1 else None
    return Coordinate(tuple(sorted(axes)), sequence_parallel, context, flops_per_send)
