"""A GPT on a grid of tensor-parallel ranks, one pipeline chunk at a time. Every rank reads the whole micro-batch, and
each layer takes the rows of it that the grid leaves to this rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ledger import Ledger
from meshwright.config.sections import Config
from meshwright.models.gpt import Batch, BlockInputs, GPTStage
from meshwright.models.heads import Head
from meshwright.nn.alibi import Alibi
from meshwright.nn.answers import Answers
from meshwright.nn.attention import KVCache
from meshwright.nn.grid import group_of, own_rows
from meshwright.nn.grid_loss import grid_output_loss
from meshwright.nn.parallel import Parallel
from meshwright.parts.part import Coordinate, Stage


class GridHead(Head):
    """The last norm, the output layer and the loss."""

    def forward(
        self, x: Tensor, labels: Tensor, mask: Tensor, weight: float | None = None, answers: Answers | None = None
    ) -> Any:
        assert answers is None
        output: Any = self.output
        return grid_output_loss(self._ended(x), output, labels, mask, self.vocab, self.parallel, weight)


class GridStage(GPTStage):
    """One pipeline chunk; `hidden` that passes between chunks is cut as everywhere between the products."""

    head_kind = GridHead

    def __init__(
        self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage, ledger: Ledger, tokens: Group
    ) -> None:
        super().__init__(parallel, config, at, stage, ledger, tokens)
        assert config.layout.grid is not None
        self.inner = config.layout.grid.inner
        if isinstance(self.tables, Alibi):
            self.tables = Alibi(config.model, replace(parallel, tp=group_of(parallel, self.inner.features)))

    def inputs(self, batch: Batch, hidden: Tensor, past: dict[str, KVCache] | None) -> BlockInputs:
        """What blocks use, of the sequences that this rank has inside attention."""
        rows, parallel = self.inner.rows, self.parallel
        own = {name: own_rows(x, parallel, rows) for name, x in batch.items()}
        sequences = next((len(x) for x in own.values()), self.micro_batch // self.row_parts)
        seq = self.seq
        tables = None if self.tables is None else self.tables(own.get("positions"), seq)
        documents = self._documents(own, hidden.device, sequences, seq)
        return BlockInputs(sequences, tables, documents, past or {}, parallel.streams.where, {})

    @property
    def row_parts(self) -> int:
        found = 1
        for axis in self.inner.rows:
            found *= group_of(self.parallel, axis).size
        return found
