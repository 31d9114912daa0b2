"""A micro-batch as the blocks of a stage see it: this rank's tokens, their positions, and the attention mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.config.sections import Config
from meshwright.nn.attention.alibi import Alibi
from meshwright.nn.attention.context import ContextRows
from meshwright.nn.attention.documents import Documents
from meshwright.nn.attention.pieces import RowPositions
from meshwright.nn.attention.rotary import Rotary
from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.spec.model.description import CONTEXT_DOCUMENTS, CONTEXT_ROWS, model_of, on_host

Batch = dict[str, Tensor]

# The position tables of attention, by `model.position`.
TABLES: dict[str, type[Rotary | Alibi]] = {"rope": Rotary, "alibi": Alibi}


class TokenView(nn.Module):
    """The view of a rank that holds whole sequences, or shares each sequence with the other ranks of `tokens`."""

    def __init__(self, parallel: Parallel, config: Config, tokens: Group) -> None:
        super().__init__()
        c, model = config.model, model_of(config)
        self.parallel, self.tokens, self.micro_batch, self.seq = parallel, tokens, config.train.micro_batch, c.seq
        self.tables = TABLES[c.position](c, self.heads_of(config)) if c.position in TABLES else None
        self.causal, self.prefix, self.windowed = model.causal, model.prefix, c.has_window

    def heads_of(self, config: Config) -> Parallel:
        """Return the parallel settings for attention heads: its tp group is the ranks that share the heads."""
        return self.parallel

    def prepare(self, batch: Batch) -> Batch:
        """Return the fields of a batch in the order in which ranks hold their tokens."""
        return batch

    def inputs(self, batch: Batch, x: Tensor, sequences: int) -> Inputs:
        """Return the inputs that all blocks updating x share for one micro-batch."""
        tokens = x.shape[0] * (self.parallel.tp.size if self.parallel.splits_tokens else 1)
        seq = tokens // sequences
        tables = None if self.tables is None else self.tables(self.positions(batch), seq)
        return Inputs(sequences, tables, self._shared_rows(batch) or self.documents(batch, x.device, sequences, seq))

    def positions(self, batch: Batch) -> Tensor | None:
        """Return the positions of this rank's tokens, or None if they simply count from 0 in each sequence.

        Where ranks share sequences, the positions default to this rank's row numbers.
        """
        positions = batch.get("positions")
        if positions is None and not self.tokens.alone:
            positions = batch[CONTEXT_ROWS].chunk(self.tokens.size, 1)[self.tokens.index]
        return positions

    def _shared_rows(self, batch: Batch) -> ContextRows | None:
        """Return the rows that each of the ranks sharing the sequences holds, or None if this rank shares none."""
        if self.tokens.alone:
            return None
        documents = read_field(batch, CONTEXT_DOCUMENTS) if CONTEXT_DOCUMENTS in batch else None
        return ContextRows(RowPositions(read_field(batch, CONTEXT_ROWS), documents), batch[CONTEXT_ROWS].device)

    def documents(self, batch: Batch, device: torch.device, sequences: int, seq: int) -> Documents | None:
        """Return the document boundaries, or None if attention is plainly causal or to all tokens."""
        if "segments" not in batch:
            return Documents.samples(sequences, seq, device) if self.windowed else None
        return Documents.of(read_field(batch, "segments"), device, self.causal, self.prefix)


def read_field(batch: Batch, name: str) -> np.ndarray[Any, Any]:
    """Return a field as a numpy array on the host.

    A batch that `MicroBatches` did not make may have the field only on the device. The host then waits for the copy.
    """
    values: np.ndarray[Any, Any] = batch.get(on_host(name), batch[name]).cpu().numpy()
    return values
