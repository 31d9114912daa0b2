"""A GPT on a grid of tensor-parallel ranks, one pipeline chunk at a time. Every rank reads the whole micro-batch, and
each layer takes the rows of it that the grid leaves to this rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.sections import Config
from meshwright.models.gpt import Batch, BlockInputs, GPTStage, read_field
from meshwright.models.heads import Head
from meshwright.nn.answers import Answers
from meshwright.nn.attention.alibi import Alibi
from meshwright.nn.attention.attention import KVCache
from meshwright.nn.attention.context import ContextRows
from meshwright.nn.attention.documents import Documents
from meshwright.nn.attention.pieces import Rows
from meshwright.nn.grid.sides import group_of, own_rows
from meshwright.nn.loss import grid_output_loss
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.rows import ORDERS
from meshwright.spec.model.part import Coordinate, Stage
from meshwright.spec.traffic.ledger import Ledger


class GridHead(Head):
    """The last norm, the output layer and the loss."""

    def forward(
        self, x: Tensor, labels: Tensor, mask: Tensor, weight: float | None = None, answers: Answers | None = None
    ) -> Any:
        assert answers is None
        output: Any = self.output
        return grid_output_loss(self.ended(x), output, labels, mask, self.vocab, self.parallel, weight)


class GridStage(GPTStage):
    """One pipeline chunk; `hidden` that passes between chunks is cut as everywhere between the products.

    Where a micro-batch has too few sequences to deal out whole ones, ranks along one axis share each: its tokens are
    put in an order in which every rank has an early and a late piece, before anything else happens to them.
    """

    head_kind = GridHead

    def __init__(
        self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage, ledger: Ledger, tokens: Group
    ) -> None:
        super().__init__(parallel, config, at, stage, ledger, tokens)
        assert config.layout.grid is not None
        self.grid, self.order = config.layout.grid, None
        if isinstance(self.tables, Alibi):
            features = group_of(parallel, self.grid.inner.features)
            self.tables = Alibi(config.model, replace(parallel, tp=features))
        if parallel.context is not None:
            seq = config.model.seq
            self.order = torch.from_numpy(ORDERS["zigzag"](seq, parallel.context.outer.size, [seq]).order)

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> tuple[Any, Tensor | None]:
        if self.order is not None:
            documents = {name: x for name, x in batch.items() if name.endswith("segments")}
            given = {name: x for name, x in batch.items() if name not in documents}
            if given and "positions" not in given:
                some = next(iter(given.values()))
                given["positions"] = torch.arange(self.seq, device=some.device).expand_as(some)
            batch = {name: self._dealt(x) for name, x in given.items()} | documents
        return super().forward(batch, hidden)

    def _dealt(self, x: Tensor) -> Tensor:
        """Returns a field [sequences, seq] of all tokens in the order of the ranks that hold them, in the same shape:
        by the ranks that have other sequences, by those that share them, by sequence."""
        assert self.order is not None and self.parallel.context is not None
        shared, others = self.parallel.context.outer.size, self.row_parts // self.parallel.context.outer.size
        placed = x[:, self.order.to(x.device)].view(others, len(x) // others, shared, -1)
        return placed.transpose(1, 2).reshape(x.shape)

    def inputs(self, batch: Batch, hidden: Tensor, past: dict[str, KVCache] | None) -> BlockInputs:
        """What blocks use, of the sequences that this rank has inside attention."""
        parallel, shared = self.parallel, 1 if self.parallel.context is None else self.parallel.context.outer.size
        sequences = self.micro_batch * shared // self.row_parts
        rows = self.grid.inner.rows if shared == 1 else self.grid.inner.rows[:-1]
        own = {name: own_rows(x, parallel, rows) for name, x in batch.items()}
        given: Documents | ContextRows | None
        if self.order is None:
            positions, given = own.get("positions"), self._documents(own, hidden.device, sequences, self.seq)
        else:
            positions, given = self._shared(own, sequences, hidden.device)
        tables = None if self.tables is None else self.tables(positions, self.seq)
        return BlockInputs(sequences, tables, given, past or {}, parallel.streams.where, {})

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
