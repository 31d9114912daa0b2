"""One pipeline chunk of any model that is described as a graph. It builds the nodes of its stage, runs them in order,
stacks of blocks together, and hands on the streams that later stages read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.config.sections import Config
from meshwright.models.grid import GridView
from meshwright.models.heads import Embedding, Head, build_unit, sample_counts
from meshwright.models.stage import Receives, StageResult
from meshwright.models.views import Batch, TokenView
from meshwright.nn.answers import AnswerLogps, Answers
from meshwright.nn.attention.attention import KVCache
from meshwright.nn.build import Block, run_blocks
from meshwright.nn.experts.experts import RoutedInputs, Saved
from meshwright.nn.inputs import Inputs, NodeInputs, arguments_of
from meshwright.nn.parallel import Parallel, record_of
from meshwright.nn.unit import Kept, call_unit, open_units, recompute, show_mark
from meshwright.spec.model.description import CONTEXT_DOCUMENTS, CONTEXT_ROWS, fields_read, model_of
from meshwright.spec.model.graph import Node, Stage
from meshwright.spec.model.part import Coordinate, MicroBatch
from meshwright.spec.traffic.ledger import Ledger

Streams = dict[str, Tensor]
Caches = Mapping[int, KVCache]  # keys and values of earlier tokens, by layer


class GraphStage(nn.Module):
    """The nodes of one stage. Each node's module has the node's key as its name in the stage; those of other stages are
    None there, and stacks are dicts of blocks by layer."""

    embedding: Embedding | None
    blocks: nn.ModuleDict
    head: Head | None
    foreign = False
    several: tuple[Callable[..., Tensor], int] | None = None  # the function that runs blocks as one graph; how many

    def __init__(
        self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage, ledger: Ledger, tokens: Group
    ) -> None:
        """`tokens` are the ranks that hold different tokens of the same sequences."""
        super().__init__()
        model = model_of(config)
        self.stage, self.parallel, self.ledger, self.tokens = stage, parallel, ledger, tokens
        self.model, self.nodes, self.adapts = model, model.nodes_of(stage), config.tune.adapts
        self.held: dict[str, nn.Module] = {}
        for node in model.nodes:  # registered in the order of forward, which buckets of gradients follow
            self._register(node, at)
        self.layers = {node.layer: self.held[node.key] for node in self.nodes if node.layer is not None}
        self._tie()
        kind = TokenView if config.layout.grid is None else GridView
        self.view = kind(parallel, config, tokens)
        self.sources = [node for node in model.nodes if not node.inputs]
        self._seeds = {node.key: -1 - number for number, node in enumerate(self.sources)}
        self._mixed = {layer for layer in self.layers if self._block(layer).has_experts}
        self._all = steps_of(self.nodes)
        self._trunk = steps_of([node for node in self.nodes if node.writes])
        read = {name for node in self.nodes for name in node.beside}
        self._goes_on = [(stream.name, stream.name in read) for stream in model.live(model.end(stage))]
        self._offer(config, at)

    def _register(self, node: Node, at: Coordinate) -> None:
        stack, _, name = node.key.rpartition(".")
        module = None
        if node in self.nodes:
            module = build_unit(self.parallel, node.unit, node.unit.records(at, node.prefix))
            self.held[node.key] = module
        if not stack:
            self.register_module(name, module)
            return
        if stack not in self._modules:
            self.register_module(stack, nn.ModuleDict())
        if module is not None:
            self.get_submodule(stack).register_module(name, module)

    def _tie(self) -> None:
        """Makes one parameter of those that are tied. Across stages, each has a copy, and the gradients are summed."""
        ties: dict[str, nn.Parameter] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                record = None if parameter is None else record_of(parameter)
                if parameter is not None and record is not None and record.tied:
                    module._parameters[name] = ties.setdefault(record.tied, parameter)

    def _offer(self, config: Config, at: Coordinate) -> None:
        """Sets what `models.stage.StageModule` asks for."""
        stage, model = self.stage, self.model
        self.micro_batch, self.seq = config.train.micro_batch, config.model.seq
        self._loss_weight: float | None = None
        self.terms = model.terms  # of the head's loss
        self.losses = model.losses  # the terms that blocks add to the loss
        parts = [part for node in self.nodes if node.stackable for _, _, part in node.unit.parts]
        self.losses_here = sum(any(True for _ in part.losses()) for part in parts)  # blocks of this chunk that add them
        shapes = model.passes(at, MicroBatch(self.micro_batch, self.seq), stage)
        self.receives: Receives = {name: (shape, self.parallel.dtype) for name, shape in shapes.items()}
        self.ungraded = model.ungraded
        self.needs: set[str] | None = fields_read(stage, model, at.size("cp"))
        self.draws_by_key = True
        self.loss_counts = sample_counts if len(model.terms) > 1 else None

    # How it runs

    def forward(self, batch: Batch, hidden: Tensor | None = None, **received: Tensor) -> tuple[Any, Tensor | None]:
        """Returns the streams for the next chunk or, in the last, the sum of the losses over the unmasked tokens (of
        each of the head's terms, if there are several); and the sums of the terms that blocks add to the loss, if there
        are any."""
        received = self._received(hidden, received)
        streams, losses = self._run_nodes(self._all, self.view.prepared(batch), received)
        return (self._passed(streams, received) if self.head is None else streams[""]), losses

    def step(self, batch: Batch, received: Mapping[str, Tensor]) -> StageResult:
        """Returns the streams for the next chunk and the terms of the loss."""
        out, losses = self(batch, **received)
        terms: list[tuple[str, Tensor, Any, float]] = []
        if self.head is not None:
            sums = out if isinstance(out, tuple) else (out,)
            counted = zip(self.terms, sums, self.head.counts(batch), strict=True)
            terms = [(name, total, count, 1.0) for name, total, count in counted]
        if losses is not None:
            tokens = batch["loss_mask"].sum() * self.losses_here
            terms += [
                (term.name, total, tokens, term.weight * blocks)
                for (term, blocks), total in zip(self.losses, losses, strict=True)
            ]
        return {} if self.head is not None else out, terms

    def answers(self, batch: Batch, received: Mapping[str, Tensor]) -> Streams | AnswerLogps:
        """Returns the streams for the next chunk or, in the last, the log-probability of each answer of a micro-batch
        of packed conversations."""
        streams, _ = self._run_nodes(self._trunk, batch, dict(received))
        if self.head is None:
            return self._passed(streams, received)
        ranks = self.tokens
        own = batch["segments"] if ranks.alone else batch[CONTEXT_DOCUMENTS].chunk(ranks.size, 1)[ranks.index]
        found = Answers.of(own, own.shape[1] * ranks.size)
        sums = call_unit(self.head, streams[self._last], batch["labels"], batch["loss_mask"], None, found)
        return found.split(sums, batch["loss_mask"], ranks)

    def trunk(
        self, batch: Batch, hidden: Tensor | None = None, past: Caches | None = None, **received: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the stream that the head would take, or that this chunk's last block wrote, and the sums of the terms
        that blocks add to the loss, if there are any. With `past`, the batch continues after the tokens in it."""
        streams, losses = self._run_nodes(self._trunk, batch, self._received(hidden, received), past)
        return streams[self._last], losses

    def stream(
        self, name: str, batch: Batch, given: Mapping[str, Tensor] | None = None, past: Caches | None = None
    ) -> Tensor:
        """Returns a stream after the last node here that writes it. Only nodes run that it depends on, and none that
        would write anew what is `given`."""
        given, needed, chosen = given or {}, {name}, list[Node]()
        for node in reversed(self.nodes):
            if node.writes in needed and not (node.writes in given and node.writes not in node.inputs):
                chosen.insert(0, node)
                needed = (needed - {node.writes}) | {*node.inputs}
        return self._run_nodes(steps_of(chosen), batch, dict(given), past)[0][name]

    def announce(self, loss_weight: float | None) -> None:
        """Takes the number that backward will multiply the loss's sum by, where that is known."""
        self._loss_weight = loss_weight

    @property
    def _last(self) -> str:
        """The stream that the last node here reads or writes."""
        node = self.nodes[-1] if self.nodes else self.model.nodes[-1]
        return node.writes or node.reads[0]

    def _received(self, hidden: Tensor | None, received: Streams) -> Streams:
        return received if hidden is None else {self.model.streams[0].name: hidden, **received}

    def _passed(self, streams: Streams, received: Mapping[str, Tensor]) -> Streams:
        """Returns what the next chunk takes. A stream that was received, or that blocks here read, goes on as a tensor
        of its own, into which the gradient of later chunks comes back."""
        return {
            name: streams[name].view_as(streams[name]) if is_read or name in received else streams[name]
            for name, is_read in self._goes_on
        }

    def _run_nodes(
        self, steps: Sequence[Node | Stack], batch: Batch, streams: Streams, past: Caches | None = None
    ) -> tuple[Streams, Tensor | None]:
        """Returns the streams after these nodes, and the sums of the terms that blocks add to the loss."""
        streams, total, past = dict(streams), None, past or {}
        ids = next((batch[node.fields[0]] for node in self.sources if node.fields[0] in batch), None)
        sequences = self.micro_batch if ids is None else ids.shape[0]
        cached = next(iter(past.values())).length if past else 0
        for step in steps:
            if isinstance(step, Stack):
                streams[step.writes], losses = self._run_stack(step, batch, streams, sequences, past)
                total = _plus(total, losses)
            else:
                given = NodeInputs(batch, streams, sequences, self.view.positions(batch), cached, self._loss_weight)
                streams[step.writes] = self._run_node(step, given)
        return streams, total

    def _run_node(self, node: Node, given: NodeInputs) -> Any:
        """Returns what a node that is no block makes of a micro-batch."""
        begins = node.key in self._seeds
        if begins:
            self.parallel.streams.seed_layer(self._seeds[node.key])
        module = self.held[node.key]
        found = call_unit(module, *arguments_of(module, node, given))
        if not node.writes or node.everywhere:
            return found
        if begins and self.adapts and torch.is_grad_enabled() and not found.requires_grad:
            found.requires_grad_()  # so that all blocks do the same, whatever comes before them
        self._mark_backward(found, None)
        return found

    # Stacks of blocks

    def _run_stack(
        self, stack: Stack, batch: Batch, streams: Streams, sequences: int, past: Caches
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the stream that neighbouring blocks change, and the sums of the terms that they add to the loss."""
        x, layers, beside = streams[stack.writes], stack.layers, [streams[name] for name in stack.beside]
        shared = SharedInputs(
            self.view.inputs(batch, x, sequences), stack.beside, past, self.parallel.streams.where,
            self._routed(batch, layers),
        )  # fmt: skip
        run = partial(self._run, shared)
        together = self.parallel.recompute.blocks if torch.is_grad_enabled() else 0
        if not together:
            x, *losses = run(layers, x, False, *beside)
            return x, losses[0] if losses else None
        runs = [layers[at : at + together] for at in range(0, len(layers), together)]
        return self._recomputed(run, runs, x, *beside)

    def _recomputed(self, run: Any, runs: list[list[int]], x: Tensor, *beside: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns what `_run_stack` does, of runs of blocks that are recomputed in backward."""
        memory, total, last = self.parallel.offload, None, None
        away = self.parallel.recompute.offloaded(len(runs), self.stage.first, self.stage.last)
        for number, layers in enumerate(runs):
            if memory is not None:
                memory.release()
            kept = Kept(memory if number in away else None, last)
            x, *losses = recompute(partial(run, layers), x, kept, *beside)
            last, total = kept.last, _plus(total, losses[0] if losses else None)
        if memory is not None:
            memory.release()
        return x, total

    def _routed(self, batch: Batch, layers: list[int]) -> dict[int, RoutedInputs]:
        """Return the router inputs of the mixtures of experts besides x, by layer."""
        mask, rows = batch.get("loss_mask"), batch.get(CONTEXT_ROWS)
        counted = None if mask is None else mask.flatten()
        return {layer: RoutedInputs(counted, Saved(), rows=rows) for layer in layers if layer in self._mixed}

    def _block(self, layer: int) -> Block:
        block = self.layers[layer]
        assert isinstance(block, Block)
        return block

    def _run(
        self, shared: SharedInputs, layers: list[int], x: Tensor, again: bool, *beside: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns x after these blocks and, if they add to the loss, the sums of their terms. `again` says that they
        are recomputed: their backward follows at once, and other micro-batches may have begun since their forward."""
        streams, total = self.parallel.streams, None
        every = shared.inputs
        if beside:
            every = replace(every, streams=dict(zip(shared.beside, beside, strict=True)))
        with streams.replaying(shared.where):
            if self.several is not None and not shared.past:
                return (self._run_together([self.layers[layer] for layer in layers], x, every),)
            for layer in layers:
                streams.seed_layer(layer)
                last, inputs, routed = again and layer == layers[-1], every, shared.routed.get(layer)
                if shared.past or routed is not None:
                    given = routed and replace(routed, again=again)
                    inputs = replace(every, past=shared.past.get(layer), routed=given)
                with self.ledger.layer(layer):
                    found = call_unit(self.layers[layer], x, inputs, hold=last)
                x, losses = found if isinstance(found, tuple) else (found, None)
                total = _plus(total, losses)
                self._mark_backward(x, layer)
        return (x,) if total is None else (x, total)

    def _run_together(self, blocks: Sequence[nn.Module], x: Tensor, inputs: Inputs) -> Tensor:
        assert self.several is not None
        run, count = self.several
        for at in range(0, len(blocks), count):
            group = tuple(blocks[at : at + count])
            open_units(group)
            x = run(group, x, inputs)
            show_mark(group[-1], x, self.training, first=group[0])
        return x

    def _mark_backward(self, output: Tensor, layer: int | None) -> None:
        """Makes the ledger count a block's backward under its layer. Autograd runs it outside of `ledger.layer`, so a
        hook on the block's output, whose gradient arrives just before, sets the layer."""
        if output.requires_grad:
            output.register_hook(partial(_set_layer, self.ledger, layer))

    # What those who shard and compile it ask

    def units(self) -> list[nn.Module]:
        """The parts whose weights are needed together, in the order of forward."""
        return list(self.held.values())

    def compiled_blocks(self) -> list[nn.Module]:
        """Blocks, or their attention where experts, which no compiler can take in, stand beside it."""
        return [part for layer in self.layers for part in self._block(layer).compiled_parts()]

    def compile_together(self, count: int) -> None:
        """Compile this many neighbouring blocks as one graph. The tensors between them stay inside it."""
        self.several = torch.compile(run_blocks, fullgraph=True), count

    def runs_of_layers(self) -> list[list[int]]:
        """Returns the runs of layers that nothing stands between."""
        most = self.parallel.recompute.blocks or len(self.stage.layers)
        stacks = [step.layers for step in self._all if isinstance(step, Stack)]
        return [stack[at : at + most] for stack in stacks for at in range(0, len(stack), most or 1)]


class Stack(NamedTuple):
    """Neighbouring blocks that change one stream: its name, their layers, and the streams that they read beside it."""

    writes: str
    layers: list[int]
    beside: tuple[str, ...]


def steps_of(nodes: Sequence[Node]) -> list[Node | Stack]:
    """Returns nodes in their order, with neighbouring blocks that change one stream joined to stacks."""
    found: list[Node | Stack] = []
    for name, group in groupby(nodes, lambda node: node.writes if node.stackable else None):
        if name is None:
            found += group
        else:
            blocks = list(group)
            beside = tuple(dict.fromkeys(each for node in blocks for each in node.beside))
            found.append(Stack(name, [node.layer for node in blocks if node.layer is not None], beside))
    return found


class SharedInputs(NamedTuple):
    """What all blocks of a stack use for one micro-batch: the inputs, the names of the streams that come beside x, the
    caches and what routers take, by layer, and the position of the random streams at that time."""

    inputs: Inputs
    beside: tuple[str, ...]
    past: Caches
    where: tuple[int, int, int]
    routed: dict[int, RoutedInputs]


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more


def _set_layer(ledger: Ledger, layer: int | None, grad: Tensor) -> None:
    ledger.current_layer = layer
