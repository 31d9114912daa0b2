"""An encoder-decoder (T5), one pipeline chunk at a time. A chunk may hold blocks of the encoder, of the decoder or of
both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.config.sections import Config
from meshwright.models.gpt import Batch, Embedding, GPTStage
from meshwright.models.heads import Head
from meshwright.nn.attention.attention import KVCache
from meshwright.nn.attention.relative import RelativeBias
from meshwright.nn.build import Block, build_module
from meshwright.nn.inputs import Inputs
from meshwright.nn.parallel import Parallel
from meshwright.nn.unit import call_unit, recompute
from meshwright.spec.layout.params import records_under
from meshwright.spec.model.description import describe
from meshwright.spec.model.part import BlockUnit, Coordinate, Records, Stage, Unit
from meshwright.spec.model.t5 import EncoderDecoder
from meshwright.spec.traffic.ledger import Ledger


class T5Stage(GPTStage):
    """One pipeline chunk. `hidden` are the activations of the stack that the chunk's first block belongs to, and
    `memory` the encoder's output: inside the decoder both pass from chunk to chunk."""

    def __init__(
        self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage, ledger: Ledger, tokens: Group
    ) -> None:
        nn.Module.__init__(self)
        model = describe(config.model)
        assert isinstance(model, EncoderDecoder)
        self.stage, self.parallel, self.ledger, self.tokens = stage, parallel, ledger, tokens
        made: dict[str, Any] = {}
        for key, prefix, unit in model.units(stage):
            made[key] = _module(key, parallel, unit, unit.records(at, prefix), config)
        encoder, decoder = ({str(n): made[f"blocks.{n}"] for n in layers} for layers in model.stacks(stage))
        # Registered in the order of forward, which buckets of gradients follow.
        self.embedding, self.encoder_bias = made.get("embedding"), made.get("encoder_bias")
        self.encoder, self.encoder_end = nn.ModuleDict(encoder), made.get("encoder_end")
        self.decoder_embedding, self.decoder_bias = made.get("decoder_embedding"), made.get("decoder_bias")
        self.decoder, self.head = nn.ModuleDict(decoder), made.get("head")
        self.layers = {**encoder, **decoder}
        ends = [end.tokens for end in (self.embedding, self.decoder_embedding) if end is not None]
        ends += [self.head.output] if model.tied and self.head is not None else []
        for end in ends[1:]:  # one table; on other chunks each end has a copy, and the gradients are summed
            end.weight = ends[0].weight
        self.passes_memory = bool(decoder) and stage.layers.stop < len(model.blocks)
        self._offer(config, at)

    def forward(self, batch: Batch, hidden: Tensor | None = None, memory: Tensor | None = None) -> tuple[Any, None]:
        """Returns the tensors for the next chunk or, in the last, the sum of the losses over the unmasked tokens."""
        if self.embedding is not None or self.encoder:
            hidden = self._encoded(batch, hidden)
        if self.encoder_end is not None:
            assert hidden is not None
            memory = call_unit(self.encoder_end, hidden)
            self._mark_backward(memory, None)
        if self.decoder_embedding is not None:
            hidden = self._embedded(self.decoder_embedding, batch["decoder_tokens"], -2)
        if self.decoder:
            assert hidden is not None and memory is not None
            hidden = self.decoded(hidden, memory)
        if self.head is not None:
            assert hidden is not None
            return call_unit(self.head, hidden, *(batch[name] for name in self.head.fields), self._loss_weight), None
        if self.encoder_end is not None and not self.decoder:
            return {"memory": memory}, None
        if memory is None:
            return {"hidden": hidden}, None
        # What was received goes on as a tensor of its own, into which the later chunks' gradient comes back.
        return {"hidden": hidden, **({"memory": memory.view_as(memory)} if self.passes_memory else {})}, None

    def units(self) -> list[nn.Module]:
        first = [self.embedding, self.encoder_bias, *self.encoder.values(), self.encoder_end]
        parts = [*first, self.decoder_embedding, self.decoder_bias, *self.decoder.values(), self.head]
        return [part for part in parts if part is not None]

    def _stacks(self) -> list[nn.ModuleDict]:
        return [self.encoder, self.decoder]

    def _blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def encoded(self, ids: Tensor) -> Tensor:
        """Returns the encoder's output; this chunk must hold all of the encoder."""
        assert self.encoder_end is not None
        memory: Tensor = call_unit(self.encoder_end, self._encoded({"tokens": ids}, None))
        return memory

    def _encoded(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Returns `hidden` after this chunk's blocks of the encoder."""
        if self.embedding is not None:
            hidden = self._embedded(self.embedding, batch["tokens"], -1)
        assert hidden is not None
        if not self.encoder:
            return hidden
        sequences = batch["tokens"].shape[0] if "tokens" in batch else self.micro_batch
        return self._stack(self.encoder, self.encoder_bias, sequences, hidden, {})

    def decoded(
        self, hidden: Tensor, memory: Tensor, past: dict[str, KVCache] | None = None, sequences: int = 0
    ) -> Tensor:
        """Returns `hidden` after this chunk's blocks of the decoder. With `past`, the key-value cache of each block, it
        continues after the tokens in it."""
        return self._stack(self.decoder, self.decoder_bias, sequences or self.micro_batch, hidden, past or {}, memory)

    def _embedded(self, embedding: Embedding, ids: Tensor, number: int) -> Tensor:
        self.parallel.streams.seed_layer(number)
        hidden: Tensor = call_unit(embedding, ids, None)
        self._mark_backward(hidden, None)
        return hidden

    def _stack(
        self, blocks: nn.ModuleDict, table: RelativeBias | None, sequences: int, hidden: Tensor,
        past: dict[str, KVCache], *memory: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns `hidden` after all blocks of one stack, whose scores get one bias from `table`."""
        assert table is not None
        queries = hidden.shape[0] * (self.parallel.tp.size if self.parallel.splits_tokens else 1) // sequences
        before = next(iter(past.values())).length if past else 0
        bias = call_unit(table, table.buckets(queries, before + queries), queries)
        names = ["encoder_bias" if blocks is self.encoder else "decoder_bias", "memory"]
        run = partial(self._run_stack, sequences, past, names, self.parallel.streams.where)
        layers = list(blocks)
        together = self.parallel.recompute.blocks if torch.is_grad_enabled() else 0
        for at in range(0, len(layers), together or len(layers)):
            some = partial(run, layers[at : at + (together or len(layers))])
            (hidden,) = recompute(some, hidden, None, bias, *memory) if together else some(hidden, False, bias, *memory)
        return hidden

    def _run_stack(
        self, sequences: int, past: dict[str, KVCache], names: list[str], where: tuple[int, int, int],
        layers: list[str], hidden: Tensor, again: bool, *streamed: Tensor,
    ) -> tuple[Tensor]:  # fmt: skip
        """Returns `hidden` after these blocks. `again`: see `GPTStage._run`."""
        streams, given = self.parallel.streams, dict(zip(names, streamed, strict=False))
        with streams.replaying(where):
            if self.several is not None and not past:
                blocks = [self.layers[layer] for layer in layers]
                return (self._run_together(blocks, hidden, Inputs(sequences, streams=given)),)
            for layer in layers:
                streams.seed_layer(int(layer))
                inputs = Inputs(sequences, past=past.get(layer), streams=given)
                with self.ledger.layer(int(layer)):
                    hidden = call_unit(self.layers[layer], hidden, inputs, hold=again and layer == layers[-1])
                self._mark_backward(hidden, int(layer))
        return (hidden,)


def _module(key: str, parallel: Parallel, unit: Unit, records: Records, config: Config) -> nn.Module:
    """Builds the module of one unit."""
    if isinstance(unit, BlockUnit):
        return Block(parallel, unit, records)
    if key == "head":
        return Head(parallel, unit, records, config.model.vocab)
    if key.endswith("embedding"):
        return Embedding(parallel, unit, records, config.model.embedding_dropout or 0.0)
    ((name, _, part),) = unit.parts
    return build_module(part, parallel, records_under(records, name))
