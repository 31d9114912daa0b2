"""A micro-batch on a grid of tensor-parallel ranks. Every rank reads all of it, and each layer takes the rows that the
grid leaves to this rank."""

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
from meshwright.nn.attention.pieces import Rows
from meshwright.nn.grid.sides import group_of, own_rows
from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.grid import Grid
from meshwright.spec.layout.rows import ORDERS


class GridView(TokenView):
    """The view of a rank of a grid.

    Where a micro-batch has too few sequences to deal out whole ones, ranks along one axis share each: its tokens are
    put in an order in which every rank has an early and a late piece, before anything else happens to them.
    """

    def __init__(self, parallel: Parallel, config: Config, tokens: Group) -> None:
        super().__init__(parallel, config, tokens)
        self.grid, self.order = _grid_of(config), None
        if parallel.context is not None:
            seq = config.model.seq
            self.order = torch.from_numpy(ORDERS["zigzag"](seq, parallel.context.outer.size, [seq]).order)

    def heads_of(self, config: Config) -> Parallel:
        return replace(self.parallel, tp=group_of(self.parallel, _grid_of(config).inner.features))

    def prepared(self, batch: Batch) -> Batch:
        if self.order is None:
            return batch
        documents = {name: x for name, x in batch.items() if name.endswith("segments")}
        given = {name: x for name, x in batch.items() if name not in documents}
        if given and "positions" not in given:
            some = next(iter(given.values()))
            given["positions"] = torch.arange(self.seq, device=some.device).expand_as(some)
        return {name: self._dealt(x) for name, x in given.items()} | documents

    def _dealt(self, x: Tensor) -> Tensor:
        """Returns a field [sequences, seq] of all tokens in the order of the ranks that hold them, in the same shape:
        by the ranks that have other sequences, by those that share them, by sequence."""
        assert self.order is not None and self.parallel.context is not None
        shared, others = self.parallel.context.outer.size, self.row_parts // self.parallel.context.outer.size
        placed = x[:, self.order.to(x.device)].view(others, len(x) // others, shared, -1)
        return placed.transpose(1, 2).reshape(x.shape)

    def inputs(self, batch: Batch, x: Tensor, sequences: int) -> Inputs:
        """Returns what blocks use, of the sequences that this rank has inside attention."""
        parallel, shared = self.parallel, 1 if self.parallel.context is None else self.parallel.context.outer.size
        sequences = self.micro_batch * shared // self.row_parts
        rows = self.grid.inner.rows if shared == 1 else self.grid.inner.rows[:-1]
        own = {name: own_rows(each, parallel, rows) for name, each in batch.items()}
        mask: Documents | ContextRows | None
        if self.order is None:
            positions, mask = own.get("positions"), self.documents(own, x.device, sequences, self.seq)
        else:
            positions, mask = self._shared(own, sequences, x.device)
        return Inputs(sequences, None if self.tables is None else self.tables(positions, self.seq), mask)

    def _shared(self, own: Batch, sequences: int, device: torch.device) -> tuple[Tensor, ContextRows]:
        """Returns the positions of a rank's rows, and which rows of the sequences all that share them hold."""
        assert self.order is not None and self.parallel.context is not None
        group, order = self.parallel.context.outer, self.order.numpy()
        documents = read_field(own, "segments")[:, order] if "segments" in own else None
        rows = Rows(order[None].repeat(sequences, 0), documents)
        if "positions" in own:  # dealt already
            positions = own["positions"].view(group.size, sequences, -1)[group.index]
        else:
            positions = self.order.to(device).chunk(group.size)[group.index].expand(sequences, -1)
        return positions, ContextRows(rows, device)

    @property
    def row_parts(self) -> int:
        return prod(group_of(self.parallel, axis).size for axis in self.grid.inner.rows)


def _grid_of(config: Config) -> Grid:
    assert config.layout.grid is not None
    return config.layout.grid
