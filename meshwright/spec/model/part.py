"""What a part of a model states about itself, once and without torch.

A part (a norm, attention, an MLP, an embedding) says for one rank's coordinate and one micro-batch which parameters it
holds, which products it computes, what it communicates and what it keeps for backward. `nn` is built from these
statements, the planner is a fold over them, and the dry run checks that they are true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.coordinate import Coordinate as Coordinate
from meshwright.spec.model.coordinate import coordinate_of as coordinate_of
from meshwright.spec.model.coordinate import hash_once as hash_once

Records = dict[str, ParamRecord]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: the number of sequences, their length, the bytes of one activation, whether attention stays
    within a document, which needs a mask, how unevenly tokens fall on experts, and how much is a prefix."""

    sequences: int
    seq: int
    element: int = 2
    documents: bool = False
    imbalance: float = 1.0  # rows of the busiest rank's experts over the mean
    prefix: float = 0.0  # the mean square of the share of a sample that all of it sees

    __hash__ = hash_once

    def tokens(self, at: Coordinate) -> int:
        """Return the tokens that a rank's products work on; all tp ranks of a group work on the same ones."""
        return self.sequences * self.seq // at.size("cp")

    def rows(self, at: Coordinate) -> int:
        """Return the tokens that a rank holds between the products."""
        return self.tokens(at) // at.row_parts

    @property
    def wide(self) -> int:
        """The bytes of a number in the precision of sums: fp32, or fp64 for fp64."""
        return max(4, self.element)


class Rows(NamedTuple):
    """The rows of a tensor [rows, width]: `seq` of each sample of a micro-batch, or one for each token that the model
    reads where that is 0. Unless they are `divided`, every rank that works on a sample holds all of its rows."""

    seq: int = 0
    divided: bool = True

    def of(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch as those see it that work on these rows."""
        return replace(batch, seq=self.seq) if self.seq else batch


@dataclass(frozen=True)
class Product:
    """`count` equal products [m, k] x [k, n] of one forward pass.

    `linear`: one factor is a weight. `scattered`: under sequence parallelism each tp rank keeps only its own rows of
    the result. `precise`: it runs in bf16 where others run in fp8. `groups`: the m rows are divided among so many
    weights; 0: there is one, for all rows. `again`: in backward it is computed once more, whatever else is recomputed.
    `frozen`: its weight has no gradient. `defers`: that gradient can be computed after the backward of the input's.
    """

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    linear: bool = True
    scattered: bool = False
    precise: bool = False
    groups: int = 0
    again: bool = False
    frozen: bool = False
    defers: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def factors(self) -> int:
        """The elements of the input and of the output's gradient, whose product is the weight gradient."""
        return self.count * self.m * (self.k + self.n) if self.linear and self.defers and not self.frozen else 0


@dataclass(frozen=True)
class Work:
    """The forward work of a part on one micro-batch. A part's backward takes twice the products."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0  # of a fused attention core; 0 where its products are listed
    moved: float = 0.0  # bytes that norms and elementwise kernels read and write
    softmax: float = 0.0  # bytes that a softmax outside of a fused attention reads and writes
    kernels: int = 0  # kernels launched

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products, self.attention_flops + other.attention_flops, self.moved + other.moved,
            self.softmax + other.softmax, self.kernels + other.kernels,
        )  # fmt: skip

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + self.attention_flops


@dataclass(frozen=True)
class Collective:
    """One rank's `times` equal calls for one micro-batch; `payload` is the whole logical tensor in bytes. `repeated`:
    backward repeats a call of forward, and only a weight gradient waits for it. `replayed`: a recomputation takes what
    arrived in the first pass instead of calling again. `routed`: the payload is that of balanced experts, and a busy
    rank exchanges more."""

    phase: str
    axis: str
    op: str
    payload: int
    times: int = 1
    repeated: bool = False
    replayed: bool = False
    routed: bool = False


class LossTerm(NamedTuple):
    """A term that a part adds to the loss: the weight of its mean over the tokens that count in the loss."""

    name: str
    weight: float


class LinearPieces(NamedTuple):
    """A linear layer of a part: the name of its weight, how tp cuts it (column, row, whole), and its rows by what they
    are (queries, keys, values), in order. Each such piece can be adapted alone. `experts`: each expert has its own such
    layer, and etp cuts it."""

    name: str
    cut: str
    pieces: tuple[tuple[str, int], ...]
    experts: bool = False


class Kept(NamedTuple):
    """A tensor that is kept for backward. `core`: the attention core produces it, so recomputing the core saves its
    memory. `passing`: it exists only while its part's backward runs."""

    name: str
    size: float
    core: bool = False
    passing: bool = False


@dataclass(frozen=True)
class Kernels:
    """What a program's kernels keep for backward, as far as programs differ. The defaults are our own uncompiled ones
    on an accelerator."""

    fused: bool = False  # ours, compiled: RMS norms, SwiGLU and rotations keep their input alone
    fused_attention: bool = True  # attention is one kernel that keeps log-sums instead of scores
    gate_copies: float = 4.0  # widths of the MLP that a gated activation keeps
    keeps_rotation: bool = True  # queries and keys before and after they are rotated
    mask_bytes: float = 0.0  # per element of a dropout mask; 0: as many as an activation has
    logit_bytes: float = 0.0  # per logit, at the peak of a loss that makes all logits at once; 0: our loss in tiles
    host: bool = False  # a CPU's kernels keep other things
    pieces: int = 1  # chunks of tokens of our MLPs
    fp8: bool = False  # products multiply numbers of 8 bits, except for the precise ones
    own: bool = True  # our kernels; of other programs only what they keep is known, not their temporary memory

    __hash__ = hash_once


class Part:
    """The base of all parts, whose statements are empty. A concrete part is a frozen dataclass of its sizes, and
    `nn/build.py` names the module that computes it."""

    module = ""  # of a part from outside the package: the path `package.module:Class` of the module that computes it

    has_experts = False  # whether it is cut along the axes of experts
    reads: tuple[str, ...] = ()  # the streams of the model that it takes beside its input
    group: str = ""  # the name of the ranks that hold the same parameters, where several nodes or stages do

    def records(self, at: Coordinate, name: str) -> Records:
        """Return the parameters that a rank holds, by their name in the part's module; `name` begins their global
        names."""
        return {}

    def linears(self) -> tuple[LinearPieces, ...]:
        """Return its linear layers, in the order of forward."""
        return ()

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Return, by the end of a weight's global name, the rows of the matrices that stand one below the other in it:
        queries, keys and values are three. An optimizer may update each of them as a whole."""
        return {f"{layer.name}.weight": tuple(rows for _, rows in layer.pieces) for layer in self.linears()}

    def losses(self) -> Iterable[LossTerm]:
        """Return the terms that the part adds to the loss."""
        return ()

    @property
    def idle(self) -> int:
        """The parameters that a token does not use."""
        return 0

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        """Return what the forward of one micro-batch computes."""
        return Work()

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterable[Collective]:
        """Return what forward and backward of one micro-batch communicate; calls over one rank may be listed."""
        return ()

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterable[Kept]:
        """Return the tensors that forward keeps for backward."""
        return ()

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes that forward or backward needs temporarily, besides what is kept."""
        return 0.0

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes that stay after a backward without weight gradients, until these are computed: the factors
        of every product with a trained weight."""
        products = self.work(at, batch, kernels).products
        return float(sum(p.factors * (1 if kernels.fp8 and not p.precise else batch.element) for p in products))

    def core_backward(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes that the backward of a body's core needs, besides what the body and the parts before it
        keep and the gradients outside of it. What the parts after it kept has gone by then."""
        return 0.0


def innermost(part: Part) -> Part:
    """Return the part inside those that only change how it is cut, tuned or applied, each of which names it `part`."""
    while isinstance(inner := getattr(part, "part", None), Part):
        part = inner
    return part


class NamedPart(NamedTuple):
    """A part of a unit: its attribute in the unit's module, and what its parameters' global names begin with."""

    key: str
    name: str
    part: Part


@dataclass(frozen=True)
class Unit:
    """Parts whose weights are needed together: the embedding, a block, the head. A unit is what stages are made of,
    what is recomputed, compiled and gathered, and what the planner counts."""

    parts: tuple[NamedPart, ...]
    rows: Rows = Rows()  # that it works on

    __hash__ = hash_once

    stackable = False  # whether runs of such units are recomputed, compiled and offloaded together

    @property
    def branches(self) -> list[tuple[NamedPart, NamedPart]]:
        """Its pairs of a norm and a body, where it is made of such."""
        return []

    @cached_property
    def has_experts(self) -> bool:
        return any(part.has_experts for _, _, part in self.parts)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The streams that its parts take beside its input."""
        return tuple(dict.fromkeys(name for _, _, part in self.parts for name in innermost(part).reads))

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of the ranks that hold the same parameters of its parts."""
        return frozenset(group for _, _, part in self.parts if (group := innermost(part).group))

    def seen_by(self, at: Coordinate) -> Coordinate:
        """Return what of a coordinate the unit depends on, by which the planner remembers its figures."""
        return at if self.has_experts else at.dense

    def records(self, at: Coordinate, prefix: str = "") -> Records:
        return {
            f"{key}.{own}": record
            for key, name, part in self.parts
            for own, record in part.records(at, prefix + name).items()
        }

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        batch = self.rows.of(batch)
        return sum((part.work(at, batch, kernels) for _, _, part in self.parts), Work())

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        batch = self.rows.of(batch)
        for _, _, part in self.parts:
            yield from (call for call in part.collectives(at, batch) if at.size(call.axis) > 1)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> tuple[Kept, ...]:
        batch = self.rows.of(batch)
        return tuple(kept for _, _, part in self.parts for kept in part.kept(at, batch, kernels))

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        batch = self.rows.of(batch)
        return max((part.working(at, batch, kernels) for _, _, part in self.parts), default=0.0)

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        batch = self.rows.of(batch)
        return sum(part.factors(at, batch, kernels) for _, _, part in self.parts)

    def split_working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return what `working` does for a backward that defers weight gradients: with the unit's factors so far."""
        return self.working(at, batch, kernels) + self.factors(at, batch, kernels)


class EmbeddingUnit(Unit):
    """Parts that turn ids into activations: `tokens` and, where there are such, `positions`, `types` and a `norm`."""


class HeadUnit(Unit):
    """Parts that turn activations into terms of the loss: a `norm`, where there is one, and the `output` layer."""


class MaskedHeadUnit(HeadUnit):
    """A head on chosen rows of each sample (`spec/model/bert.py`)."""


@dataclass(frozen=True)
class BlockUnit(Unit):
    """A unit of the residual stream: pairs of a norm and a body. Each adds body(norm(x)) to x: one after the other or,
    if `parallel`, all from the block's input. With `post_norm`, x becomes norm(x + body(x)): as many tensors are kept,
    since what is now a body's input was a norm's. With `sandwich`, a second norm follows each body, and what is added
    is its output. Dropout comes before each sum."""

    hidden: int = 0
    parallel: bool = False
    dropout: float = 0.0
    post_norm: bool = False
    residual: float = 1.0  # what x is multiplied by in the sums
    sandwich: bool = False
    whole_matrices: bool = False  # the optimizer updates its matrices as wholes

    __hash__ = hash_once

    stackable = True

    def records(self, at: Coordinate, prefix: str = "") -> Records:
        found = super().records(at, prefix)
        if not self.whole_matrices:
            return found
        rows = {f"{prefix}{name}.{own}": each for _, name, part in self.parts for own, each in part.matrices().items()}
        return {key: replace(record, matrices=rows.get(record.name, ())) for key, record in found.items()}

    @property
    def branches(self) -> list[tuple[NamedPart, NamedPart]]:
        each = 3 if self.sandwich else 2
        return list(zip(self.parts[::each], self.parts[1::each], strict=True))

    @property
    def after(self) -> tuple[NamedPart, ...]:
        """The norms that follow the bodies."""
        return self.parts[2::3] if self.sandwich else ()

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        batch = self.rows.of(batch)
        # A sum reads two rows and writes one; dropout reads and writes a mask with it.
        width = 3 * self.hidden * batch.element + (self.hidden if self.dropout else 0)
        count = len(self.branches)
        sums = Work(moved=float(batch.rows(at) * count * width), kernels=2 * count)
        return super().work(at, batch, kernels) + sums

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> tuple[Kept, ...]:
        found: list[Kept] = []
        batch = self.rows.of(batch)
        for number, (norm, body) in enumerate(self.branches):
            shared = self.parallel and number > 0  # all norms take the block's input, which is kept once
            found += [kept for kept in norm.part.kept(at, batch, kernels) if not (shared and kept.name == "input")]
            found += body.part.kept(at, batch, kernels)
            if self.dropout:
                each = kernels.mask_bytes or batch.element
                found.append(Kept("dropout mask", batch.rows(at) * self.hidden * each))
        found += [kept for norm in self.after for kept in norm.part.kept(at, batch, kernels)]
        return tuple(found)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        batch = self.rows.of(batch)
        stream = self._passed(at, batch)
        if not kernels.own:
            return 2.0 * stream if at.splits_tokens else 0.0  # a gathered input and a gradient
        norms = max(norm.part.working(at, batch, kernels) for norm, _ in self.branches)
        bodies = max(body.part.working(at, batch, kernels) for _, body in self.branches)
        return max(norms + bodies + 3 * stream, self._in_core(at, batch, kernels))

    def split_working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """See `Unit`. While the backward goes through the bodies, activations go and factors come."""
        own, stream, change, found = self.rows.of(batch), self._passed(at, self.rows.of(batch)), 0.0, -math.inf
        for norm, body in reversed(self.branches):
            working = sum(each.part.working(at, own, kernels) for each in (norm, body)) + 3 * stream
            core = body.part.core_backward(at, own, kernels) + 2 * own.rows(at) * self.hidden * own.element
            found = max(found, change + working, change + core)
            change += body.part.factors(at, own, kernels)
            change -= sum(kept.size for one in (norm, body) for kept in one.part.kept(at, own, kernels))
        return max(found, change + 2 * stream)

    def _passed(self, at: Coordinate, batch: MicroBatch) -> int:
        """Return the bytes of what the stream gives to a product: the rows of all ranks that divide it."""
        gathered = at.size("tp") if at.splits_tokens else 1
        return batch.rows(at) * gathered * self.hidden * batch.element

    def _in_core(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return what the backward of a body's core needs beyond all that the block keeps, of which a part has gone by
        then; negative where that is more. The gradients of the block's result and of the sum so far are there too."""
        gone, found = 0.0, -math.inf
        for norm, body in reversed(self.branches):
            found = max(found, body.part.core_backward(at, batch, kernels) - gone)
            gone += sum(kept.size for one in (norm, body) for kept in one.part.kept(at, batch, kernels))
        return found + 2 * batch.rows(at) * self.hidden * batch.element


ALONE = Coordinate()
