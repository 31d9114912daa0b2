"""A decoder-only transformer, one pipeline chunk at a time, assembled from `nn` by its description."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.comm.ledger import Ledger
from meshwright.config.sections import ModelConfig
from meshwright.layout.params import under
from meshwright.models.description import GPTDescription, Stage, fields_read
from meshwright.nn.attention import Alibi, causal_mask
from meshwright.nn.block import Block
from meshwright.nn.embedding import PositionEmbedding, TokenEmbedding
from meshwright.nn.linear import Linear
from meshwright.nn.loss import output_loss
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.nn.recompute import recompute
from meshwright.nn.rotary import Rotary
from meshwright.nn.unit import through

Batch = dict[str, Tensor]


class Embedding(nn.Module):
    """Token ids [batch, seq] to activations [tokens, hidden] (this rank's rows under sequence parallelism)."""

    def __init__(self, parallel: Parallel, model: ModelConfig, description: GPTDescription) -> None:
        super().__init__()
        records = description.embedding()
        self.tokens = TokenEmbedding(parallel, records["tokens.weight"])
        learned = records.get("positions.weight")
        self.positions = PositionEmbedding(parallel, learned, model.position_offset) if learned else None
        norm = under(records, "norm")
        self.norm = Norm(parallel, model.norm, model.norm_eps, norm) if norm else None
        self.p, self.parallel = model.dropout, parallel

    def forward(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        x = self.tokens(ids.flatten())
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            x = x + self.positions(self.parallel.local_tokens(positions.flatten()))
        if self.norm is not None:
            x = self.norm(x)
        if self.p and self.training:
            streams = self.parallel.streams
            x = dropout(x, self.p, streams.own if self.parallel.splits_tokens else streams.same)
        return x


class Head(nn.Module):
    """The last norm, the output layer (a column-cut product whose weight may be the embedding's) and the loss."""

    def __init__(self, parallel: Parallel, model: ModelConfig, description: GPTDescription) -> None:
        super().__init__()
        records = description.head()
        self.norm = Norm(parallel, model.norm, model.norm_eps, under(records, "norm"))
        self.output = Linear(replace(parallel, products=""), records["output.weight"], None, "column")
        self.vocab, self.parallel = model.vocab, parallel

    def logits(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, weight: float | None = None) -> Tensor:
        """The loss's sum; `weight` announces its gradient."""
        x = self.norm(x)
        return output_loss(x, self.output, labels.flatten(), mask.flatten(), self.vocab, self.parallel, weight)


class GPTStage(nn.Module):
    """One chunk. The first takes tokens, the last gives the loss's sum, between them travels `hidden`."""

    def __init__(
        self, parallel: Parallel, description: GPTDescription, stage: Stage, micro_batch: int, ledger: Ledger
    ) -> None:
        super().__init__()
        model = description.model
        self.stage, self.parallel, self.ledger = stage, parallel, ledger
        self.embedding = Embedding(parallel, model, description) if stage.first else None
        self.blocks = nn.ModuleDict({str(n): Block(parallel, model, description.block(n)) for n in stage.layers})
        self.rotary = Rotary(model, parallel) if model.position == "rope" else None
        self.alibi = Alibi(model, parallel) if model.position == "alibi" else None
        self.head = Head(parallel, model, description) if stage.last else None
        if model.tied_embeddings and self.embedding is not None and self.head is not None:
            tie(self.head, self.embedding)
        tokens = micro_batch * model.seq // (parallel.tp.size if parallel.splits_tokens else 1)
        self.micro_batch = micro_batch
        self.loss_weight: float | None = None  # what backward will multiply the loss's sum by, where that is known
        self.needs = fields_read(stage)
        # What this chunk takes from the one before it.
        self.receives = {} if stage.first else {"hidden": ((tokens, model.hidden), parallel.dtype)}

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """`hidden` for the next chunk or, from the last, the loss's sum over the unmasked tokens."""
        hidden = self.trunk(batch, hidden)
        if self.head is None:
            return hidden
        return through(self.head, hidden, batch["labels"], batch["loss_mask"], self.loss_weight)

    def units(self) -> list[nn.Module]:
        """The parts whose weights are needed together, in the order of forward."""
        parts = [self.embedding, *self.blocks.values(), self.head]
        return [part for part in parts if part is not None]

    def trunk(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """`hidden` after this chunk's blocks."""
        streams = self.parallel.streams
        ids, positions = batch.get("tokens"), batch.get("positions")
        if self.embedding is not None:
            assert ids is not None
            streams.layer(-1)
            hidden = through(self.embedding, ids, positions)
            self._mark_backward(hidden, None)
        assert hidden is not None
        tokens = hidden.shape[0] * (self.parallel.tp.size if self.parallel.splits_tokens else 1)
        seq = tokens // self.micro_batch
        rotary = None if self.rotary is None else self.rotary(positions, seq)
        mask = None if "segments" not in batch else segment_mask(batch["segments"])
        if self.alibi is not None:
            mask = self.alibi.causal(seq, hidden.device) if mask is None else self.alibi(mask)
        layers, run = [int(number) for number in self.blocks], partial(self._run, rotary, mask, streams.where)
        together = self.parallel.recompute.blocks if torch.is_grad_enabled() else 0
        if not together:
            return run(layers, hidden, False)
        for first in range(0, len(layers), together):
            hidden = recompute(partial(run, layers[first : first + together]), hidden)
        return hidden

    def _run(
        self,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        where: tuple[int, int, int],
        layers: list[int],
        hidden: Tensor,
        again: bool,
    ) -> Tensor:
        """`hidden` after these blocks. `again`: backward comes right after, and other micro-batches may have begun."""
        streams = self.parallel.streams
        with streams.again(where):
            for layer in layers:
                streams.layer(layer)
                last = again and layer == layers[-1]
                with self.ledger.layer(layer):
                    hidden = through(self.blocks[str(layer)], hidden, self.micro_batch, rotary, mask, hold=last)
                self._mark_backward(hidden, layer)
        return hidden

    def _mark_backward(self, output: Tensor, layer: int | None) -> None:
        """Backward runs outside of the block's context: the gradient of a block's output tells that it begins."""
        if output.requires_grad:
            output.register_hook(partial(_enter, self.ledger, layer))


def _enter(ledger: Ledger, layer: int | None, grad: Tensor) -> None:
    ledger.current_layer = layer


def tie(head: Head, embedding: Embedding) -> None:
    """Both use one parameter. (Across stages, each end holds a copy and the gradients are summed.)"""
    head.output.weight = embedding.tokens.weight


def segment_mask(segments: Tensor) -> Tensor:
    """[batch, 1, seq, seq]: causal, and within one document."""
    causal = causal_mask(segments.shape[1], segments.device)
    return causal & (segments[:, :, None] == segments[:, None, :])[:, None]
