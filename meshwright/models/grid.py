"""A micro-batch as ranks of a tensor-parallel grid (2D, 2.5D or 3D) see it.

Every rank reads the whole micro-batch, and each layer takes the rows that the grid assigns to this rank.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.sections import Config
from meshwright.models.views import Batch, TokenView, read_field
from meshwright.nn.attention.context import ContextRows
from meshwright.nn.attention.documents import Documents
from meshwright.nn.attention.pieces import RowPositions
from meshwright.nn.grid.sides import group_of, own_rows
from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.grid import Grid
from meshwright.spec.layout.rows import ORDERS


class GridView(TokenView):
    """The view of one rank of a grid.

    If a micro-batch has too few sequences for each rank to get whole ones, the ranks along one axis share each
    sequence. Its tokens are then first put in an order in which every rank has an early and a late chunk.
    """

    def __init__(self, parallel: Parallel, config: Config, tokens: Group) -> None:
        super().__init__(parallel, config, tokens)
        self.grid, self.order = _grid_of(config), None
        if parallel.context is not None:
            seq = config.model.seq
            self.order = torch.from_numpy(ORDERS["zigzag"](seq, parallel.context.outer.size, [seq]).order)

    def heads_of(self, config: Config) -> Parallel:
        return replace(self.parallel, tp=group_of(self.parallel, _grid_of(config).inner.features))

    def prepare(self, batch: Batch) -> Batch:
        if self.order is None:
            return batch
        documents = {name: x for name, x in batch.items() if name.endswith("segments")}
        given = {name: x for name, x in batch.items() if name not in documents}
        if given and "positions" not in given:
            some = next(iter(given.values()))
            given["positions"] = torch.arange(self.seq, device=some.device).expand_as(some)
        return {name: self._in_rank_order(x) for name, x in given.items()} | documents

    def _in_rank_order(self, x: Tensor) -> Tensor:
        """Return a field [sequences, seq] of all tokens, in the same shape, in the order of the ranks that hold them.

        Tokens are ordered by the ranks that hold different sequences, then by the ranks that share them, then by
        sequence.
        """
        assert self.order is not None and self.parallel.context is not None
        shared = self.parallel.context.outer.size
        others = self.row_parts // shared
        placed = x[:, self.order.to(x.device)].view(others, len(x) // others, shared, -1)
        return placed.transpose(1, 2).reshape(x.shape)

    def inputs(self, batch: Batch, x: Tensor, sequences: int) -> Inputs:
        """Return the inputs that blocks share, for the sequences that this rank has inside attention."""
        parallel = self.parallel
        shared = 1 if parallel.context is None else parallel.context.outer.size
        sequences = self.micro_batch * shared // self.row_parts
        # Where ranks along the last axis share sequences, keep the rows of all of them.
        rows = self.grid.inner.rows if shared == 1 else self.grid.inner.rows[:-1]
        own = {name: own_rows(each, parallel, rows) for name, each in batch.items()}
        mask: Documents | ContextRows | None
        if self.order is None:
            positions = own.get("positions")
            mask = self.documents(own, x.device, sequences, self.seq)
        else:
            positions, mask = self._sequence_rows(own, sequences, x.device)
        return Inputs(sequences, None if self.tables is None else self.tables(positions, self.seq), mask)

    def _sequence_rows(self, own: Batch, sequences: int, device: torch.device) -> tuple[Tensor, ContextRows]:
        """Return the positions of this rank's rows, and the rows that each of the ranks sharing the sequences holds."""
        assert self.order is not None and self.parallel.context is not None
        group = self.parallel.context.outer
        order = self.order.numpy()
        documents = read_field(own, "segments")[:, order] if "segments" in own else None
        rows = RowPositions(order[None].repeat(sequences, 0), documents)
        if "positions" in own:
            # `prepare` has already put positions in the order of ranks.
            positions = own["positions"].view(group.size, sequences, -1)[group.index]
        else:
            positions = self.order.to(device).chunk(group.size)[group.index].expand(sequences, -1)
        return positions, ContextRows(rows, device)

    @property
    def row_parts(self) -> int:
        """The number of ranks among which the rows of a micro-batch are divided."""
        return prod(group_of(self.parallel, axis).size for axis in self.grid.inner.rows)


def _grid_of(config: Config) -> Grid:
    assert config.layout.grid is not None
    return config.layout.grid
