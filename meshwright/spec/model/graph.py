"""A model as a graph of nodes that read and write named streams. Each node applies one unit. No torch.

Modules are built from the nodes of a stage, and the planner adds up their units. The tensors that pass from stage to
stage are not listed anywhere. They are the streams that a node before the cut writes and a node after it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

from meshwright.spec.model.coordinate import Coordinate, hash_once
from meshwright.spec.model.part import SINGLE_RANK, BlockUnit, LossTerm, MicroBatch, Records, Rows, Unit

HIDDEN = "hidden"  # the stream of a model with one stack of blocks


@dataclass(frozen=True)
class Stage:
    """One chunk of the pipeline: its virtual stage number and the global numbers of its layers."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


class Stream(NamedTuple):
    """A named tensor [rows, width] in the model's precision that nodes read and write.

    With `by_sample`, its shape is [sequences, seq, width] instead.
    """

    name: str
    width: int
    rows: Rows = Rows()
    by_sample: bool = False

    def shape(self, at: Coordinate, batch: MicroBatch) -> tuple[int, ...]:
        """Return the stream's local shape for one micro-batch."""
        own = self.rows.of(batch)
        if self.by_sample:
            return own.sequences, own.seq, self.width
        return own.rows(at) if self.rows.divided else own.sequences * own.seq, self.width


def reference_of(name: str) -> str:
    """Return the name of a stream's reference: the same stream computed by the frozen weights alone."""
    return f"reference {name}"


class Node(NamedTuple):
    """A unit in the graph of a model.

    - `key`: the key of its module.
    - `reads`: the streams that it reads. The streams that parts of the unit name are read too (`inputs`).
    - `writes`: the stream that it writes; empty: it produces terms of the loss.
    - `fields`: the fields of a batch that it reads, if the data have them.
    - `layer`: a block's layer number, by which stages are cut. Runs of blocks are recomputed and compiled together.
    - `prefix`: the prefix of the global names of its parameters.
    - `everywhere`: it belongs to every stage that reads its stream, which then never passes between stages.
    """

    key: str
    unit: Unit
    reads: tuple[str, ...] = ()
    writes: str = ""
    fields: tuple[str, ...] = ()
    layer: int | None = None
    prefix: str = ""
    everywhere: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """All streams that the node reads."""
        return (*self.reads, *(name for name in self.unit.reads if name not in self.reads))

    @property
    def stackable(self) -> bool:
        return self.layer is not None

    @property
    def beside(self) -> tuple[str, ...]:
        """The streams that the node reads but does not write."""
        return tuple(name for name in self.inputs if name != self.writes)


AnyModel = TypeVar("AnyModel", bound="Model")


@dataclass(frozen=True)
class Model:
    """The nodes of a model in forward order, and their streams."""

    nodes: tuple[Node, ...]
    streams: tuple[Stream, ...]
    tied: bool = False  # the output layer uses the embedding's weight
    causal: bool = True  # a token only sees tokens up to itself
    prefix: bool = False  # of a causal model: every token also sees the whole first segment of its sample
    terms: tuple[str, ...] = ("loss",)  # the terms of the loss, except the ones that parts of blocks add
    lengths: tuple[tuple[str, int], ...] = ()  # elements per sample of the fields that don't have one per token
    compared: bool = False  # the frozen weights alone run in addition to the trained ones, for comparison

    __hash__ = hash_once

    def __post_init__(self) -> None:
        # A node works on the rows of the stream that it writes.
        rows = {stream.name: stream.rows for stream in self.streams}
        for node in self.nodes:
            assert node.writes not in rows or node.everywhere or node.unit.rows == rows[node.writes], node.key

    @cached_property
    def blocks(self) -> tuple[BlockUnit, ...]:
        """The units of all layers. Blocks of one kind are equal values."""
        return tuple(node.unit for node in self.nodes if isinstance(node.unit, BlockUnit))

    @property
    def embedding(self) -> Unit:
        return self.nodes[0].unit

    @property
    def head(self) -> Unit:
        return self.nodes[-1].unit

    @property
    def hidden(self) -> int:
        return self.streams[0].width

    def map_units(self: AnyModel, change: Callable[[Node], Unit]) -> AnyModel:
        """Return the model with the unit of each node replaced by `change(node)`."""
        return replace(self, nodes=tuple(node._replace(unit=change(node)) for node in self.nodes))

    @cached_property
    def whole(self) -> Stage:
        """The only stage of a model without pipeline parallelism."""
        return Stage(0, 1, range(len(self.blocks)))

    def nodes_of(self, stage: Stage | None = None) -> tuple[Node, ...]:
        """Return the nodes of a stage (by default: of the model) in forward order."""
        return _nodes_of(self, stage or self.whole)

    def first_node_of(self, stage: Stage) -> int:
        """Return the number of the first node of a stage.

        Nodes before the first block belong to the first stage, and nodes after the last block to the last. If there
        are nodes between two blocks, a stage begins with the first one that reads no stream. If there is none, it
        begins with the block.
        """
        return 0 if stage.first else self._begin(stage.layers.start)

    def end(self, stage: Stage) -> int:
        """Return the number of the first node after a stage."""
        return len(self.nodes) if stage.last else self._begin(stage.layers.stop)

    def _begin(self, layer: int) -> int:
        places = self._places
        if layer in (0, len(places)):
            return places[0] if layer == 0 else places[-1] + 1
        between = range(places[layer - 1] + 1, places[layer])
        return next((number for number in between if not self.nodes[number].inputs), places[layer])

    @cached_property
    def _places(self) -> list[int]:
        """The node numbers of the blocks."""
        return [number for number, node in enumerate(self.nodes) if node.stackable]

    def live(self, cut: int) -> list[Stream]:
        """Return the streams that nodes before the cut write and nodes after it read."""
        return self._live[cut]

    @cached_property
    def _live(self) -> list[list[Stream]]:
        """The streams that are live at each cut.

        They are collected in one walk from the end, because the planner asks for thousands of cuts.
        """
        # Every stage computes these streams itself, so they never cross a cut.
        local = {node.writes for node in self.nodes if node.everywhere}
        needed: set[str] = set()
        live: list[list[Stream]] = [[]]
        for node in reversed(self.nodes):
            needed = (needed - {node.writes}) | {*node.inputs}
            live.append([stream for stream in self.streams if stream.name in needed - local])
        return live[::-1]

    def passes(self, at: Coordinate, batch: MicroBatch, stage: Stage) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, in the model's precision, that a stage receives from the previous one."""
        shapes = {stream.name: stream.shape(at, batch) for stream in self.live(self.first_node_of(stage))}
        references = {reference_of(name): shape for name, shape in shapes.items()} if self.compared else {}
        return shapes | references

    @cached_property
    def ungraded(self) -> frozenset[str]:
        """The names of the tensors passed between stages for which no gradient is sent back."""
        return frozenset(reference_of(stream.name) for stream in self.streams if self.compared)

    def read_beside(self, stage: Stage) -> list[Stream]:
        """Return the streams that blocks of a stage read in addition to the one that they change.

        They are saved once for all blocks. Streams that the stage computes itself (`Node.everywhere`) are left out.
        """
        nodes = self.nodes_of(stage)
        local = {node.writes for node in nodes if node.everywhere}
        names = {name for node in nodes if node.stackable for name in node.beside} - local
        return [stream for stream in self.streams if stream.name in names]

    def fields(self, stage: Stage) -> set[str]:
        """Return the fields of a batch that the nodes of a stage read, if the data have them."""
        return {name for node in self.nodes_of(stage) for name in node.fields}

    def groups(self, stage: Stage) -> set[str]:
        """Return the names of the groups of ranks with which a stage shares parameters."""
        return {name for node in self.nodes_of(stage) for name in node.unit.groups}

    def records(self, at: Coordinate, stage: Stage | None = None) -> Records:
        """Return every parameter of a stage (by default: of the model), in forward order. Parameters that are tied
        within a stage appear once."""
        records: Records = {}
        ties: set[str] = set()
        for node in self.nodes_of(stage):
            for name, record in node.unit.records(at, node.prefix).items():
                # `ties` never contains "", so parameters that are not tied are always added.
                if record.tied not in ties:
                    records[f"{node.key}.{name}"] = record
                ties |= {record.tied} if record.tied else set()
        return records

    @cached_property
    def kinds(self) -> tuple[tuple[BlockUnit, int], ...]:
        """The kinds of blocks, each with the number of blocks of this kind."""
        return tuple(Counter(self.blocks).items())

    @cached_property
    def losses(self) -> tuple[tuple[LossTerm, int], ...]:
        """The terms that parts add to the loss, with the number of parts that add each."""
        terms = (term for block in self.blocks for _, _, part in block.parts for term in part.losses())
        return tuple(Counter(terms).items())


@lru_cache(maxsize=20_000)
def _nodes_of(model: Model, stage: Stage) -> tuple[Node, ...]:
    numbers = range(model.first_node_of(stage), model.end(stage))
    read = {name for number in numbers for name in model.nodes[number].inputs}
    return tuple(
        node
        for number, node in enumerate(model.nodes)
        if (node.writes in read if node.everywhere else number in numbers)
    )


def stack_nodes(
    blocks: Iterable[BlockUnit], stream: str = HIDDEN, key: str = "blocks", prefix: str = "layers", first: int = 0,
    fields: tuple[str, ...] = (),
) -> tuple[Node, ...]:  # fmt: skip
    """Return the nodes of blocks that change one stream.

    Their layer numbers begin with `first`. The numbers in the names of their parameters begin with 0.
    """
    return tuple(
        Node(f"{key}.{first + n}", block, (stream,), stream, fields, first + n, f"{prefix}.{n}.")
        for n, block in enumerate(blocks)
    )


@lru_cache(maxsize=64)
def parameter_count(model: Model) -> int:
    """Return the number of parameters of a whole model."""
    return sum(record.values.numel for record in model.records(SINGLE_RANK).values())


def active_parameters(model: Model) -> int:
    """Return the number of parameters that one token uses. In a mixture, only its chosen experts count."""
    idle = (count * part.idle for block, count in model.kinds for _, _, part in block.parts)
    return parameter_count(model) - sum(idle)
