"""One pipeline chunk of any model that is described as a graph.

A chunk builds the nodes of its stage and runs them in order, neighbouring blocks as one stack. It passes on the streams
that later stages read.
"""

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
from meshwright.nn.experts.experts import RoutedInputs, SavedRouting
from meshwright.nn.inputs import Inputs, NodeInputs, arguments_of
from meshwright.nn.parallel import Parallel, record_of
from meshwright.nn.unit import InputStorage, call_unit, open_units, recompute, show_mark
from meshwright.spec.model.description import CONTEXT_DOCUMENTS, CONTEXT_ROWS, fields_read, model_of
from meshwright.spec.model.graph import Node, Stage
from meshwright.spec.model.part import Coordinate, MicroBatch
from meshwright.spec.traffic.ledger import Ledger

Streams = dict[str, Tensor]
Caches = Mapping[int, KVCache]  # Keys and values of earlier tokens, by layer.


class GraphStage(nn.Module):
    """The modules of one pipeline stage, each registered under its node's key.

    Nodes of other stages are registered as None. A stack of blocks is a `ModuleDict` with one entry per layer.
    """

    embedding: Embedding | None
    blocks: nn.ModuleDict
    head: Head | None
    foreign = False
    # The compiled function that runs several blocks as one graph, and the number of blocks that it takes.
    several: tuple[Callable[..., Tensor], int] | None = None

    def __init__(
        self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage, ledger: Ledger, tokens: Group
    ) -> None:
        """Build the modules of a stage. `tokens` are the ranks that hold different tokens of the same sequences."""
        super().__init__()
        model = model_of(config)
        self.stage, self.parallel, self.ledger, self.tokens = stage, parallel, ledger, tokens
        self.model = model
        self.nodes = model.nodes_of(stage)
        self.adapts = config.tune.adapts
        self.held: dict[str, nn.Module] = {}
        # Gradient buckets follow the order of registration, which must be the order of forward.
        for node in model.nodes:
            self._register(node, at)
        self.layers = {node.layer: self.held[node.key] for node in self.nodes if node.layer is not None}
        self._tie()

        kind = TokenView if config.layout.grid is None else GridView
        self.view = kind(parallel, config, tokens)
        self.sources = [node for node in model.nodes if not node.inputs]
        # Random streams are keyed by layer. Source nodes have no layer and take negative numbers.
        self._seeds = {node.key: -1 - number for number, node in enumerate(self.sources)}
        self._expert_layers = {layer for layer in self.layers if self._block(layer).has_experts}
        self._all = steps_of(self.nodes)
        self._trunk = steps_of([node for node in self.nodes if node.writes])

        # The streams for later stages, and whether nodes of this stage read them in addition to the one they write.
        read = {name for node in self.nodes for name in node.beside}
        self._passed_on = [(stream.name, stream.name in read) for stream in model.live(model.end(stage))]
        self._set_contract(config, at)

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
        """Share one parameter among the tied parameters of this stage.

        If a tie spans stages, each stage holds a copy, and the gradients of the copies are summed.
        """
        ties: dict[str, nn.Parameter] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                record = None if parameter is None else record_of(parameter)
                if parameter is not None and record is not None and record.tied:
                    module._parameters[name] = ties.setdefault(record.tied, parameter)

    def _set_contract(self, config: Config, at: Coordinate) -> None:
        """Set the attributes that `models.stage.StageModule` requires."""
        stage, model = self.stage, self.model
        self.micro_batch, self.seq = config.train.micro_batch, config.model.seq
        self._loss_weight: float | None = None
        self.terms = model.terms  # The loss terms that the head computes.
        self.losses = model.losses  # The loss terms that blocks add.
        # The number of blocks in this chunk that add terms to the loss.
        parts = [part for node in self.nodes if node.stackable for _, _, part in node.unit.parts]
        self.losses_here = sum(any(True for _ in part.losses()) for part in parts)
        shapes = model.passes(at, MicroBatch(self.micro_batch, self.seq), stage)
        self.receives: Receives = {name: (shape, self.parallel.dtype) for name, shape in shapes.items()}
        self.ungraded = model.ungraded
        self.needs: set[str] | None = fields_read(stage, model, at.size("cp"))
        self.draws_by_key = True
        self.loss_counts = sample_counts if len(model.terms) > 1 else None

    # Running the stage

    def forward(self, batch: Batch, hidden: Tensor | None = None, **received: Tensor) -> tuple[Any, Tensor | None]:
        """Return the result of the chunk and the sums of the loss terms that its blocks add, or None if they add none.

        The result is the streams for the next chunk. In the last chunk it is the sum of the losses over the unmasked
        tokens: one tensor, or one for each of the head's terms if there are several.
        """
        received = self._as_streams(hidden, received)
        streams, losses = self._run_nodes(self._all, self.view.prepare(batch), received)
        return (self._streams_to_pass(streams, received) if self.head is None else streams[""]), losses

    def step(self, batch: Batch, received: Mapping[str, Tensor]) -> StageResult:
        """Return the streams for the next chunk and the terms of the loss."""
        out, losses = self(batch, **received)
        terms: list[tuple[str, Tensor, Any, float]] = []
        if self.head is not None:
            sums = out if isinstance(out, tuple) else (out,)
            counted = zip(self.terms, sums, self.head.counts(batch), strict=True)
            terms = [(name, total, count, 1.0) for name, total, count in counted]
        if losses is not None:
            # Tokens are counted once for each block that adds a term. The weight is multiplied by the number of such
            # blocks in the whole model, so that a term is the sum of the blocks' means.
            tokens = batch["loss_mask"].sum() * self.losses_here
            terms += [
                (term.name, total, tokens, term.weight * blocks)
                for (term, blocks), total in zip(self.losses, losses, strict=True)
            ]
        return {} if self.head is not None else out, terms

    def answers(self, batch: Batch, received: Mapping[str, Tensor]) -> Streams | AnswerLogps:
        """Return the streams for the next chunk or, in the last, the log-probability of each answer of a micro-batch.

        The micro-batch holds packed conversations.
        """
        streams, _ = self._run_nodes(self._trunk, batch, dict(received))
        if self.head is None:
            return self._streams_to_pass(streams, received)
        ranks = self.tokens
        segments = batch["segments"] if ranks.alone else batch[CONTEXT_DOCUMENTS].chunk(ranks.size, 1)[ranks.index]
        answers = Answers.of(segments, segments.shape[1] * ranks.size)
        sums = call_unit(self.head, streams[self._last], batch["labels"], batch["loss_mask"], None, answers)
        return answers.split(sums, batch["loss_mask"], ranks)

    def trunk(
        self, batch: Batch, hidden: Tensor | None = None, past: Caches | None = None, **received: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the head's input, or the output of this chunk's last block, and the sums of the blocks' loss terms.

        The sums are None if blocks add no terms. With `past`, the batch continues after the tokens in these caches.
        """
        streams, losses = self._run_nodes(self._trunk, batch, self._as_streams(hidden, received), past)
        return streams[self._last], losses

    def stream(
        self, name: str, batch: Batch, given: Mapping[str, Tensor] | None = None, past: Caches | None = None
    ) -> Tensor:
        """Return a stream after the last node of this stage that writes it.

        Only the nodes that it depends on run. A node that creates a stream is skipped if that stream is in `given`.
        """
        given = given or {}
        needed = {name}
        chosen = list[Node]()
        for node in reversed(self.nodes):
            # A node that also reads the stream it writes updates it, and must run on a given stream too.
            if node.writes in needed and not (node.writes in given and node.writes not in node.inputs):
                chosen.insert(0, node)
                needed = (needed - {node.writes}) | {*node.inputs}
        return self._run_nodes(steps_of(chosen), batch, dict(given), past)[0][name]

    def announce(self, loss_weight: float | None) -> None:
        """Set the factor by which backward will multiply the sum of the loss, or None if it is not known."""
        self._loss_weight = loss_weight

    @property
    def _last(self) -> str:
        """The stream that the last node of this stage writes or, if it writes none, reads first."""
        node = self.nodes[-1] if self.nodes else self.model.nodes[-1]
        return node.writes or node.reads[0]

    def _as_streams(self, hidden: Tensor | None, received: Streams) -> Streams:
        return received if hidden is None else {self.model.streams[0].name: hidden, **received}

    def _streams_to_pass(self, streams: Streams, received: Mapping[str, Tensor]) -> Streams:
        """Return the streams for the next chunk.

        A stream that was received, or that nodes of this stage read, is passed on as a separate view. The gradient of
        later chunks arrives at that view.
        """
        return {
            name: streams[name].view_as(streams[name]) if is_read or name in received else streams[name]
            for name, is_read in self._passed_on
        }

    def _run_nodes(
        self, steps: Sequence[Node | BlockStack], batch: Batch, streams: Streams, past: Caches | None = None
    ) -> tuple[Streams, Tensor | None]:
        """Run these nodes. Return the streams after them and the sums of the loss terms that blocks add, if any."""
        streams = dict(streams)
        total = None
        past = past or {}
        ids = next((batch[node.fields[0]] for node in self.sources if node.fields[0] in batch), None)
        sequences = self.micro_batch if ids is None else ids.shape[0]
        cached = next(iter(past.values())).length if past else 0
        for step in steps:
            if isinstance(step, BlockStack):
                streams[step.writes], losses = self._run_stack(step, batch, streams, sequences, past)
                total = _plus(total, losses)
            else:
                given = NodeInputs(batch, streams, sequences, self.view.positions(batch), cached, self._loss_weight)
                streams[step.writes] = self._run_node(step, given)
        return streams, total

    def _run_node(self, node: Node, given: NodeInputs) -> Any:
        """Return the output of a node that is not a block for one micro-batch."""
        is_source = node.key in self._seeds
        if is_source:
            self.parallel.streams.seed_layer(self._seeds[node.key])
        module = self.held[node.key]
        output = call_unit(module, *arguments_of(module, node, given))
        if not node.writes or node.everywhere:
            return output
        # With adapters, the embedding may be frozen. Its output requires a gradient all the same, so that every block
        # does the same work in backward, whether or not anything before it is trained.
        if is_source and self.adapts and torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()
        self._mark_backward(output, None)
        return output

    # Stacks of blocks

    def _run_stack(
        self, stack: BlockStack, batch: Batch, streams: Streams, sequences: int, past: Caches
    ) -> tuple[Tensor, Tensor | None]:
        """Run a stack of blocks. Return the stream that they update, and the sums of the loss terms that they add."""
        x, layers = streams[stack.writes], stack.layers
        beside = [streams[name] for name in stack.beside]
        shared = SharedInputs(
            self.view.inputs(batch, x, sequences), stack.beside, past, self.parallel.streams.where,
            self._router_inputs(batch, layers),
        )  # fmt: skip
        run = partial(self._run, shared)
        # Without gradients nothing is saved for backward, so there is nothing to recompute.
        blocks_per_run = self.parallel.recompute.blocks if torch.is_grad_enabled() else 0
        if not blocks_per_run:
            x, *losses = run(layers, x, False, *beside)
            return x, losses[0] if losses else None
        runs = [layers[at : at + blocks_per_run] for at in range(0, len(layers), blocks_per_run)]
        return self._run_recomputed(run, runs, x, *beside)

    def _run_recomputed(
        self, run: Any, runs: list[list[int]], x: Tensor, *beside: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run a stack in runs of blocks that are recomputed in backward. Return the same as `_run_stack`."""
        memory, total, last = self.parallel.offload, None, None
        offloaded = self.parallel.recompute.offloaded(len(runs), self.stage.first, self.stage.last)
        for number, layers in enumerate(runs):
            # Wait, on the device, until the input of the previous run is in host memory, and free its device memory.
            if memory is not None:
                memory.release()
            kept = InputStorage(memory if number in offloaded else None, last)
            x, *losses = recompute(partial(run, layers), x, kept, *beside)
            last = kept.last
            total = _plus(total, losses[0] if losses else None)
        if memory is not None:
            memory.release()
        return x, total

    def _router_inputs(self, batch: Batch, layers: list[int]) -> dict[int, RoutedInputs]:
        """Return, by layer, the inputs that the routers of mixtures of experts take in addition to x."""
        mask = batch.get("loss_mask")
        rows = batch.get(CONTEXT_ROWS)
        counted = None if mask is None else mask.flatten()
        return {
            layer: RoutedInputs(counted, SavedRouting(), rows=rows) for layer in layers if layer in self._expert_layers
        }

    def _block(self, layer: int) -> Block:
        block = self.layers[layer]
        assert isinstance(block, Block)
        return block

    def _run(
        self, shared: SharedInputs, layers: list[int], x: Tensor, again: bool, *beside: Tensor
    ) -> tuple[Tensor, ...]:
        """Return x after these blocks and, if they add to the loss, the sums of their terms.

        `again` says that they are recomputed. Then their backward follows at once, and other micro-batches may have
        started since their forward.
        """
        streams, total = self.parallel.streams, None
        common = shared.inputs
        if beside:
            common = replace(common, streams=dict(zip(shared.beside, beside, strict=True)))
        # A recomputation must draw the random numbers of the forward, even if later micro-batches have run since.
        with streams.replay(shared.where):
            if self.several is not None and not shared.past:
                return (self._run_together([self.layers[layer] for layer in layers], x, common),)
            for layer in layers:
                streams.seed_layer(layer)
                inputs = common
                routed = shared.routed.get(layer)
                if shared.past or routed is not None:
                    router_inputs = routed and replace(routed, again=again)
                    inputs = replace(common, past=shared.past.get(layer), routed=router_inputs)
                # The backward of the last recomputed block follows at once, so its gathered weights stay in memory.
                hold = again and layer == layers[-1]
                with self.ledger.layer(layer):
                    output = call_unit(self.layers[layer], x, inputs, hold=hold)
                x, losses = output if isinstance(output, tuple) else (output, None)
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
        """Make the ledger attribute a block's backward to its layer.

        Autograd runs backward outside of `ledger.layer`. The gradient of the block's output arrives just before the
        block's backward, so a hook on the output sets the layer.
        """
        if output.requires_grad:
            output.register_hook(partial(_set_layer, self.ledger, layer))

    # Queries of the sharding and the compiler

    def units(self) -> list[nn.Module]:
        """Return the modules whose weights are gathered together, in the order of forward."""
        return list(self.held.values())

    def compiled_blocks(self) -> list[nn.Module]:
        """Return the modules that are compiled, each as one graph.

        These are whole blocks, or single bodies of a block if the compiler cannot take in all of it
        (`Block.compiled_parts`).
        """
        return [part for layer in self.layers for part in self._block(layer).compiled_parts()]

    def compile_together(self, count: int) -> None:
        """Compile this many neighbouring blocks as one graph. The tensors between them stay inside it."""
        self.several = torch.compile(run_blocks, fullgraph=True), count

    def runs_of_layers(self) -> list[list[int]]:
        """Return the layers in runs that are called without anything in between.

        A run is a stack or, with recomputation, the blocks that are recomputed together.
        """
        longest = self.parallel.recompute.blocks or len(self.stage.layers)
        stacks = [step.layers for step in self._all if isinstance(step, BlockStack)]
        return [stack[at : at + longest] for stack in stacks for at in range(0, len(stack), longest or 1)]


class BlockStack(NamedTuple):
    """Neighbouring blocks that update the same stream: its name, their layers, and the other streams that they read."""

    writes: str
    layers: list[int]
    beside: tuple[str, ...]


def steps_of(nodes: Sequence[Node]) -> list[Node | BlockStack]:
    """Return the nodes in order, with neighbouring blocks that update the same stream joined into stacks."""
    steps: list[Node | BlockStack] = []
    for name, group in groupby(nodes, lambda node: node.writes if node.stackable else None):
        if name is None:
            steps += group
        else:
            blocks = list(group)
            beside = tuple(dict.fromkeys(stream for node in blocks for stream in node.beside))
            steps.append(BlockStack(name, [node.layer for node in blocks if node.layer is not None], beside))
    return steps


class SharedInputs(NamedTuple):
    """The inputs that all blocks of a stack share for one micro-batch.

    `beside` names the streams that blocks read in addition to x. `past` and `routed` hold caches and router inputs by
    layer. `where` is the position of the random streams when the stack ran forward.
    """

    inputs: Inputs
    beside: tuple[str, ...]
    past: Caches
    where: tuple[int, int, int]
    routed: dict[int, RoutedInputs]


def _plus(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total + more


def _set_layer(ledger: Ledger, layer: int | None, grad: Tensor) -> None:
    ledger.current_layer = layer
