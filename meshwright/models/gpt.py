"""A transformer (a GPT or a BERT), one pipeline chunk at a time, assembled from `nn` by its description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.config.sections import Config
from meshwright.models.heads import Head, MaskedHead, sample_counts
from meshwright.models.stage import Receives
from meshwright.nn.answers import AnswerLogps, Answers
from meshwright.nn.attention.alibi import Alibi
from meshwright.nn.attention.attention import KVCache
from meshwright.nn.attention.context import ContextRows
from meshwright.nn.attention.documents import Documents
from meshwright.nn.attention.pieces import Rows
from meshwright.nn.attention.rotary import Rotary, Tables
from meshwright.nn.build import Block, build_module, run_blocks
from meshwright.nn.embedding import ScaledGrad
from meshwright.nn.experts.experts import RoutedInputs, Saved
from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.nn.unit import Kept, call_unit, open_units, recompute, show_mark
from meshwright.spec.layout.params import records_under
from meshwright.spec.model.description import CONTEXT_DOCUMENTS, CONTEXT_ROWS, fields_read, model_of, on_host, passed
from meshwright.spec.model.part import BlockUnit as Description
from meshwright.spec.model.part import Coordinate, MicroBatch, Records, Stage, Unit
from meshwright.spec.traffic.ledger import Ledger

Batch = dict[str, Tensor]


class Embedding(nn.Module):
    """Maps token ids [batch, seq] to activations [tokens, hidden] (this rank's rows under sequence parallelism)."""

    def __init__(self, parallel: Parallel, unit: Unit, records: Records, p: float, grad_share: float = 1.0) -> None:
        """`p`: the share that is dropped; `grad_share`: that of its gradient which the token table gets."""
        super().__init__()
        built = {key: build_module(part, parallel, records_under(records, key)) for key, _, part in unit.parts}
        self.tokens, self.positions, self.norm = built["tokens"], built.get("positions"), built.get("norm")
        self.types = built.get("types")
        self.p, self.parallel, self.grad_share = p, parallel, grad_share

    def forward(self, ids: Tensor, positions: Tensor | None, types: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(ids.flatten())
        if self.grad_share != 1.0:
            x = ScaledGrad.apply(x, self.grad_share)
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            x = x + self.positions(self.parallel.local_tokens(positions.flatten()))
        if self.types is not None:
            types = torch.zeros_like(ids) if types is None else types
            x = x + self.types(self.parallel.local_tokens(types.flatten()))
        if self.norm is not None:
            x = self.norm(x)
        if self.p and self.training:
            streams = self.parallel.streams
            x = dropout(x, self.p, streams.own if self.parallel.divides_stream else streams.same)
        return x


class GPTStage(nn.Module):
    """One pipeline chunk. The first takes tokens, the last returns the sum of the losses, and `hidden` passes between
    them."""

    head_kind: type[Head] = Head
    several: tuple[Callable[..., Tensor], int] | None = None  # what runs blocks as one graph, and how many

    def __init__(
        self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage, ledger: Ledger, tokens: Group
    ) -> None:
        """`tokens` are the ranks that hold different tokens of the same sequences."""
        super().__init__()
        c, model = config.model, model_of(config)
        self.stage, self.parallel, self.ledger, self.tokens = stage, parallel, ledger, tokens
        self.embedding: Embedding | None = None
        blocks: dict[str, Block] = {}
        head: Head | None = None
        for key, prefix, unit in model.units(stage):
            records = unit.records(at, prefix)
            if key == "embedding":
                self.embedding = Embedding(parallel, unit, records, c.embedding_dropout or 0.0, c.embedding_grad)
            elif key == "head":
                head = (MaskedHead if model.predictions else self.head_kind)(parallel, unit, records, c.vocab)
            else:
                assert isinstance(unit, Description)
                blocks[key.removeprefix("blocks.")] = Block(parallel, unit, records)
        self.blocks = nn.ModuleDict(blocks)
        self.head = head  # registered in the order of forward, which buckets of gradients follow
        kinds: dict[str, type[Rotary | Alibi]] = {"rope": Rotary, "alibi": Alibi}
        self.tables = kinds[c.position](c, parallel) if c.position in kinds else None
        if model.tied and self.embedding is not None and self.head is not None:
            # Across stages, each end holds a copy and the gradients are summed.
            self.head.output.weight = self.embedding.tokens.get_parameter("weight")
        self.causal, self.prefix, self.windowed = model.causal, model.prefix, c.windowed
        self._offer(config, at)

    def compile_together(self, count: int) -> None:
        """Compiles so many neighbouring blocks as one graph. Nobody sees what passes between them."""
        self.several = torch.compile(run_blocks, fullgraph=True), count

    def runs_of_layers(self) -> list[list[int]]:
        """Returns the runs of layers that nothing stands between."""
        most = self.parallel.recompute.blocks or len(self.stage.layers)
        stacks = [[int(number) for number in stack] for stack in self._stacks()]
        return [stack[at : at + most] for stack in stacks for at in range(0, len(stack), most or 1)]

    def _stacks(self) -> list[nn.ModuleDict]:
        return [self.blocks]

    def _offer(self, config: Config, at: Coordinate) -> None:
        """Sets what `models.stage.StageModule` asks for."""
        c, stage, model = config.model, self.stage, model_of(config)
        self.micro_batch, self.seq = config.train.micro_batch, c.seq
        self.adapts = config.tune.adapts
        self._loss_weight: float | None = None
        self.terms = model.terms  # of the head's loss
        self.losses = model.losses  # the terms that blocks add to the loss
        parts = [part for layer in stage.layers for _, _, part in model.blocks[layer].parts]
        self.losses_here = sum(any(True for _ in part.losses()) for part in parts)  # blocks of this chunk that add them
        shapes = passed(config, at, MicroBatch(self.micro_batch, c.seq), stage)
        self.receives: Receives = {name: (shape, self.parallel.dtype) for name, shape in shapes.items()}
        self.needs: set[str] | None = fields_read(stage, model, at.size("cp"))
        self.draws_by_key = True
        self.loss_counts = sample_counts if len(model.terms) > 1 else None

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """Returns `hidden` for the next chunk or, in the last, the sum of the losses over the unmasked tokens (of each
        of the head's terms, if there are several); and the sums of the terms that blocks add to the loss, if there are
        any."""
        hidden, losses = self.trunk(batch, hidden)
        if self.head is None:
            return hidden, losses
        given = (batch[name] for name in self.head.fields)
        return call_unit(self.head, hidden, *given, self._loss_weight), losses

    def answers(self, batch: Batch, hidden: Tensor | None = None) -> Tensor | AnswerLogps:
        """Returns `hidden` for the next chunk or, in the last, the log-probability of each answer of a micro-batch of
        packed conversations."""
        hidden, _ = self.trunk(batch, hidden)
        if self.head is None:
            return hidden
        ranks = self.tokens
        own = batch["segments"] if ranks.alone else batch[CONTEXT_DOCUMENTS].chunk(ranks.size, 1)[ranks.index]
        found = Answers.of(own, own.shape[1] * ranks.size)
        sums = call_unit(self.head, hidden, batch["labels"], batch["loss_mask"], None, found)
        return found.split(sums, batch["loss_mask"], ranks)

    def announce(self, loss_weight: float | None) -> None:
        """What backward will multiply the loss's sum by, where that is known."""
        self._loss_weight = loss_weight

    def units(self) -> list[nn.Module]:
        """The parts whose weights are needed together, in the order of forward."""
        parts = [self.embedding, *self.blocks.values(), self.head]
        return [part for part in parts if part is not None]

    def compiled_blocks(self) -> list[nn.Module]:
        """Blocks, or their attention where experts, which no compiler can take in, stand beside it."""
        return [part for block in self._blocks() for part in block.compiled_parts()]

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks.values() if isinstance(block, Block)]

    def trunk(
        self, batch: Batch, hidden: Tensor | None = None, past: dict[str, KVCache] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `hidden` after this chunk's blocks, and the sums of the terms that they add to the loss, if there are
        any. With `past`, the key-value cache of each block, the batch continues after the tokens in it."""
        ids = batch.get("tokens")
        if self.embedding is not None:
            assert ids is not None
            self.parallel.streams.seed_layer(-1)
            hidden = call_unit(self.embedding, ids, self._positions(batch), batch.get("token_types"))
            if self.adapts and torch.is_grad_enabled() and not hidden.requires_grad:
                hidden.requires_grad_()  # so that all blocks do the same, whatever comes before them
            self._mark_backward(hidden, None)
        assert hidden is not None
        shared = self.inputs(batch, hidden, past)
        layers, run = [int(number) for number in self.blocks], partial(self._run, shared)
        together = self.parallel.recompute.blocks if torch.is_grad_enabled() else 0
        if not together:
            hidden, *losses = run(layers, hidden, False)
            return hidden, losses[0] if losses else None
        return self._recomputed(run, [layers[at : at + together] for at in range(0, len(layers), together)], hidden)

    def inputs(self, batch: Batch, hidden: Tensor, past: dict[str, KVCache] | None) -> BlockInputs:
        """Returns what all blocks use for one micro-batch."""
        ids = batch.get("tokens")
        sequences = self.micro_batch if ids is None else ids.shape[0]
        tokens = hidden.shape[0] * (self.parallel.tp.size if self.parallel.splits_tokens else 1)
        seq = tokens // sequences
        return BlockInputs(
            sequences, None if self.tables is None else self.tables(self._positions(batch), seq),
            self._shared_rows(batch) or self._documents(batch, hidden.device, sequences, seq), past or {},
            self.parallel.streams.where, self._routed(batch),
        )  # fmt: skip

    def _positions(self, batch: Batch) -> Tensor | None:
        """The positions of a rank's tokens: where ranks share sequences, the numbers of its rows."""
        positions = batch.get("positions")
        if positions is None and not self.tokens.alone:
            positions = batch[CONTEXT_ROWS].chunk(self.tokens.size, 1)[self.tokens.index]
        return positions

    def _recomputed(self, run: Any, runs: list[list[int]], hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what `trunk` does, of runs of blocks that are recomputed in backward."""
        memory, total, last = self.parallel.offload, None, None
        away = self.parallel.recompute.offloaded(len(runs), self.stage.first, self.stage.last)
        for number, layers in enumerate(runs):
            if memory is not None:
                memory.release()
            kept = Kept(memory if number in away else None, last)
            hidden, *losses = recompute(partial(run, layers), hidden, kept)
            last, total = kept.last, _plus(total, losses[0] if losses else None)
        if memory is not None:
            memory.release()
        return hidden, total

    def _routed(self, batch: Batch) -> dict[int, RoutedInputs]:
        """What the mixtures of experts take beside their input, by layer."""
        mask = batch.get("loss_mask")
        counted = None if mask is None else mask.flatten()
        layers = [number for number, block in zip(self.blocks, self._blocks(), strict=True) if block.has_experts]
        return {int(layer): RoutedInputs(counted, Saved(), rows=batch.get(CONTEXT_ROWS)) for layer in layers}

    def _shared_rows(self, batch: Batch) -> ContextRows | None:
        """Which rows all ranks that share the sequences hold, where there are several."""
        if self.tokens.alone:
            return None
        documents = read_field(batch, CONTEXT_DOCUMENTS) if CONTEXT_DOCUMENTS in batch else None
        return ContextRows(Rows(read_field(batch, CONTEXT_ROWS), documents), batch[CONTEXT_ROWS].device)

    def _documents(self, batch: Batch, device: torch.device, sequences: int, seq: int) -> Documents | None:
        """Returns where documents begin; None where attention is plainly causal, or to all tokens."""
        if "segments" not in batch:
            return Documents.samples(sequences, seq, device) if self.windowed else None
        return Documents.of(read_field(batch, "segments"), device, self.causal, self.prefix)

    def _run(self, shared: BlockInputs, layers: list[int], hidden: Tensor, again: bool) -> tuple[Tensor, ...]:
        """Returns `hidden` after these blocks and, if they add to the loss, the sums of their terms. `again` says that
        they are recomputed: their backward follows at once, and other micro-batches may have begun since their
        forward."""
        streams, total = self.parallel.streams, None
        with streams.replaying(shared.where):
            if self.several is not None and not shared.past:
                blocks = [self.blocks[str(layer)] for layer in layers]
                return (self._run_together(blocks, hidden, Inputs(shared.sequences, shared.tables, shared.mask)),)
            for layer in layers:
                streams.seed_layer(layer)
                last = again and layer == layers[-1]
                routed = shared.routed.get(layer)
                inputs = Inputs(
                    shared.sequences, shared.tables, shared.mask, shared.past.get(str(layer)),
                    routed and replace(routed, again=again),
                )  # fmt: skip
                with self.ledger.layer(layer):
                    found = call_unit(self.blocks[str(layer)], hidden, inputs, hold=last)
                hidden, losses = found if isinstance(found, tuple) else (found, None)
                total = _plus(total, losses)
                self._mark_backward(hidden, layer)
        return (hidden,) if total is None else (hidden, total)

    def _run_together(self, blocks: Sequence[nn.Module], hidden: Tensor, inputs: Inputs) -> Tensor:
        assert self.several is not None
        run, count = self.several
        for at in range(0, len(blocks), count):
            group = tuple(blocks[at : at + count])
            open_units(group)
            hidden = run(group, hidden, inputs)
            show_mark(group[-1], hidden, self.training, first=group[0])
        return hidden

    def _mark_backward(self, output: Tensor, layer: int | None) -> None:
        """Makes the ledger count a block's backward under its layer. Autograd runs it outside of `ledger.layer`, so a
        hook on the block's output, whose gradient arrives just before, sets the layer."""
        if output.requires_grad:
            output.register_hook(partial(_set_layer, self.ledger, layer))


class BlockInputs(NamedTuple):
    """What all blocks of a chunk use for one micro-batch, and the position of the random streams at that time."""

    sequences: int
    tables: Tables | None
    mask: Documents | ContextRows | None
    past: dict[str, KVCache]
    where: tuple[int, int, int]
    routed: dict[int, RoutedInputs]


def read_field(batch: Batch, name: str) -> np.ndarray[Any, Any]:
    """Returns a field as the host reads it. A batch that was not made by `MicroBatches` may have it on the device
    alone, and the host then waits for it."""
    found: np.ndarray[Any, Any] = batch.get(on_host(name), batch[name]).cpu().numpy()
    return found


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more


def _set_layer(ledger: Ledger, layer: int | None, grad: Tensor) -> None:
    ledger.current_layer = layer
