"""A model as a graph: nodes, each a unit in its place, that read and write named streams. No torch.

Modules are built from the nodes of a stage, and the planner adds up their units. What passes from stage to stage is
stated nowhere: it follows from who writes a stream before the cut and who reads it after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

from meshwright.spec.model.coordinate import Coordinate, hash_once
from meshwright.spec.model.part import ALONE, BlockUnit, LossTerm, MicroBatch, Records, Rows, Unit

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
    """A named tensor [rows, width] in the model's precision that nodes read and write. `by_sample`: its shape is
    [sequences, seq, width]."""

    name: str
    width: int
    rows: Rows = Rows()
    by_sample: bool = False

    def shape(self, at: Coordinate, batch: MicroBatch) -> tuple[int, ...]:
        """Return the shape of one micro-batch on a rank."""
        own = self.rows.of(batch)
        if self.by_sample:
            return own.sequences, own.seq, self.width
        return own.rows(at) if self.rows.divided else own.sequences * own.seq, self.width


def reference_of(name: str) -> str:
    """Return the name under which a stream passes as the frozen weights alone compute it."""
    return f"reference {name}"


class Node(NamedTuple):
    """A unit in its place: the key of its module, the streams that it reads and the one that it writes ("": it makes
    terms of the loss), and the fields of a batch that it reads, where the data have them. The streams that parts of the
    unit name are read too (`inputs`).

    Blocks have a `layer` each, by which stages are cut. Runs of them are recomputed and compiled together. A node that
    is `everywhere` belongs to every stage that reads its stream, which never passes between stages. `prefix` begins the
    global names of the parameters.
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
        """All streams that it reads."""
        return (*self.reads, *(name for name in self.unit.reads if name not in self.reads))

    @property
    def stackable(self) -> bool:
        return self.layer is not None

    @property
    def beside(self) -> tuple[str, ...]:
        """The streams that it reads and does not write."""
        return tuple(name for name in self.inputs if name != self.writes)


AnyModel = TypeVar("AnyModel", bound="Model")


@dataclass(frozen=True)
class Model:
    """The nodes of a model in the order of forward, and their streams."""

    nodes: tuple[Node, ...]
    streams: tuple[Stream, ...]
    tied: bool = False  # the output layer's weight is the embedding's
    causal: bool = True  # whether a token sees only those before it
    prefix: bool = False  # of a causal one: whether the first segment of a sample is seen as a whole
    terms: tuple[str, ...] = ("loss",)  # of the loss, beside those that parts of blocks add
    lengths: tuple[tuple[str, int], ...] = ()  # elements of a sample's fields that have not one for each token
    compared: bool = False  # the frozen weights alone run beside the trained ones

    __hash__ = hash_once

    def __post_init__(self) -> None:
        rows = {stream.name: stream.rows for stream in self.streams}
        for node in self.nodes:
            assert node.writes not in rows or node.everywhere or node.unit.rows == rows[node.writes], node.key

    @cached_property
    def blocks(self) -> tuple[BlockUnit, ...]:
        """The units of all layers; blocks of one kind are equal values."""
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

    def mapped(self: AnyModel, change: Callable[[Node], Unit]) -> AnyModel:
        """Return the model with the unit of each node changed."""
        return replace(self, nodes=tuple(node._replace(unit=change(node)) for node in self.nodes))

    @cached_property
    def whole(self) -> Stage:
        """The one stage of a model without a pipeline."""
        return Stage(0, 1, range(len(self.blocks)))

    def nodes_of(self, stage: Stage | None = None) -> tuple[Node, ...]:
        """Return the nodes of a stage (by default: of the model) in the order of forward."""
        return _nodes_of(self, stage or self.whole)

    def cut(self, stage: Stage) -> int:
        """Return the number of the first node of a stage. Nodes before the first block belong to the first stage and
        those after the last block to the last. Between two blocks, a stage begins with a node that reads no stream, if
        there is one: what comes before it belongs to the stage before."""
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
        """The numbers of the blocks among the nodes."""
        return [number for number, node in enumerate(self.nodes) if node.stackable]

    def live(self, cut: int) -> list[Stream]:
        """Return the streams that nodes before the cut write and nodes after it read."""
        return self._live[cut]

    @cached_property
    def _live(self) -> list[list[Stream]]:
        """The streams that are live at each cut, found in one walk from the end: the planner asks for thousands."""
        local = {node.writes for node in self.nodes if node.everywhere}
        needed: set[str] = set()
        found: list[list[Stream]] = [[]]
        for node in reversed(self.nodes):
            needed = (needed - {node.writes}) | {*node.inputs}
            found.append([stream for stream in self.streams if stream.name in needed - local])
        return found[::-1]

    def passes(self, at: Coordinate, batch: MicroBatch, stage: Stage) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, in the model's precision, that a stage receives from the one before."""
        found = {stream.name: stream.shape(at, batch) for stream in self.live(self.cut(stage))}
        twins = {reference_of(name): shape for name, shape in found.items()} if self.compared else {}
        return found | twins

    @cached_property
    def ungraded(self) -> frozenset[str]:
        """The names of passed tensors whose gradient does not come back."""
        return frozenset(reference_of(stream.name) for stream in self.streams if self.compared)

    def read_beside(self, stage: Stage) -> list[Stream]:
        """Return the streams that blocks of a stage read beside the one that they change. They are kept once for all
        of them, unless the stage makes them itself."""
        nodes = self.nodes_of(stage)
        local = {node.writes for node in nodes if node.everywhere}
        names = {name for node in nodes if node.stackable for name in node.beside} - local
        return [stream for stream in self.streams if stream.name in names]

    def fields(self, stage: Stage) -> set[str]:
        """Return the fields of a batch that the nodes of a stage read, where the data have them."""
        return {name for node in self.nodes_of(stage) for name in node.fields}

    def groups(self, stage: Stage) -> set[str]:
        """Return the names of the groups of ranks with which a stage shares parameters."""
        return {name for node in self.nodes_of(stage) for name in node.unit.groups}

    def records(self, at: Coordinate, stage: Stage | None = None) -> Records:
        """Return every parameter of a stage (by default: of the model), in the order of forward; a tie within a stage
        appears once."""
        records: Records = {}
        ties: set[str] = set()
        for node in self.nodes_of(stage):
            for name, record in node.unit.records(at, node.prefix).items():
                if record.tied not in ties:
                    records[f"{node.key}.{name}"] = record
                ties |= {record.tied} if record.tied else set()
        return records

    @cached_property
    def kinds(self) -> tuple[tuple[BlockUnit, int], ...]:
        """The kinds of blocks, with how many there are of each."""
        return tuple(Counter(self.blocks).items())

    @cached_property
    def losses(self) -> tuple[tuple[LossTerm, int], ...]:
        """The terms that parts add to the loss, with the number of parts that add each."""
        terms = (term for block in self.blocks for _, _, part in block.parts for term in part.losses())
        return tuple(Counter(terms).items())


@lru_cache(maxsize=20_000)
def _nodes_of(model: Model, stage: Stage) -> tuple[Node, ...]:
    held = range(model.cut(stage), model.end(stage))
    read = {name for number in held for name in model.nodes[number].inputs}
    here = (node.writes in read if node.everywhere else number in held for number, node in enumerate(model.nodes))
    return tuple(node for node, held_here in zip(model.nodes, here, strict=True) if held_here)


def stack_nodes(
    blocks: Iterable[BlockUnit], stream: str = HIDDEN, key: str = "blocks", prefix: str = "layers", first: int = 0,
    fields: tuple[str, ...] = (),
) -> tuple[Node, ...]:  # fmt: skip
    """Return the nodes of blocks that change one stream. Their numbers in the model begin with `first`, and those in
    their parameters' names with 0."""
    return tuple(
        Node(f"{key}.{first + n}", block, (stream,), stream, fields, first + n, f"{prefix}.{n}.")
        for n, block in enumerate(blocks)
    )


@lru_cache(maxsize=64)
def parameter_count(model: Model) -> int:
    """Return the number of parameters of a whole model."""
    return sum(record.values.numel for record in model.records(ALONE).values())


def active_parameters(model: Model) -> int:
    """Return the number of parameters that one token uses: of a mixture, the experts that it goes to."""
    idle = (count * part.idle for block, count in model.kinds for _, _, part in block.parts)
    return parameter_count(model) - sum(idle)
