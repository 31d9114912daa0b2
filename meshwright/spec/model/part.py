"""Parts of a model, each with its parameters, compute, communication and memory. No torch.

A part is a norm, attention, an MLP or an embedding, for example. For one rank's coordinate and one micro-batch, it
gives the parameters that it holds, the products that it computes, its collectives, and the tensors that it saves for
backward. `nn` builds modules from these figures, the planner adds them up, and the dry run checks that they are true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.spec.layout.params import AdapterRecord, ParamRecord
from meshwright.spec.model.coordinate import Coordinate as Coordinate
from meshwright.spec.model.coordinate import coordinate_of as coordinate_of
from meshwright.spec.model.coordinate import hash_once as hash_once

Records = dict[str, ParamRecord]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as the figures of parts depend on it."""

    sequences: int
    seq: int  # tokens of a sequence
    element: int = 2  # bytes of one element of an activation
    documents: bool = False  # attention stays within a document, which needs a mask
    imbalance: float = 1.0  # rows of the busiest rank's experts, divided by the mean
    prefix: float = 0.0  # the mean square of the fraction of a sample that is a prefix, which every token sees

    __hash__ = hash_once

    def tokens(self, at: Coordinate) -> int:
        """Return the number of tokens in a rank's products. All ranks of a tp group multiply the same tokens."""
        return self.sequences * self.seq // at.size("cp")

    def rows(self, at: Coordinate) -> int:
        """Return the number of tokens that a rank holds between the products."""
        return self.tokens(at) // at.row_parts

    @property
    def wide(self) -> int:
        """The bytes of an element in accumulation precision: fp32, or fp64 if activations are fp64."""
        return max(4, self.element)


class Rows(NamedTuple):
    """The rows of a tensor [rows, width]: `seq` rows per sample of a micro-batch, or, if it is 0, one per input token.

    If they are not `divided`, every rank that works on a sample holds all of its rows.
    """

    seq: int = 0
    divided: bool = True

    def of(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the sequence length of these rows."""
        return replace(batch, seq=self.seq) if self.seq else batch


@dataclass(frozen=True)
class Product:
    """`count` equal products [m, k] x [k, n] of one forward pass.

    - `linear`: one factor is a weight.
    - `scattered`: under sequence parallelism, each tp rank keeps only its own rows of the result.
    - `precise`: it runs in bf16 even if other products run in fp8.
    - `groups`: the number of weights among which the m rows are divided (a grouped product); 0: one weight for all.
    - `again`: backward always computes it once more, whatever else is recomputed.
    - `frozen`: its weight has no gradient.
    - `defers`: its weight gradient can be computed later than its input gradient.
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
        """The number of elements of the input and of the output gradient, which a deferred weight gradient needs."""
        return self.count * self.m * (self.k + self.n) if self.linear and self.defers and not self.frozen else 0


@dataclass(frozen=True)
class Work:
    """The forward work of a part on one micro-batch. A part's backward takes twice the products."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0  # of a fused attention core; 0 if its products are listed instead
    moved: float = 0.0  # bytes that norms and elementwise kernels read and write
    softmax: float = 0.0  # bytes that a softmax outside of a fused attention kernel reads and writes
    kernels: int = 0  # the number of kernel launches

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
    """`times` equal collective calls of one rank for one micro-batch.

    - `payload`: the size of the whole logical tensor in bytes.
    - `repeated`: backward repeats a call of forward, and only a weight gradient waits for it.
    - `replayed`: a recomputation reuses the result of the first pass instead of calling again.
    - `routed`: the payload assumes balanced experts; a busy rank exchanges more.
    """

    phase: str
    axis: str
    op: str
    payload: int
    times: int = 1
    repeated: bool = False
    replayed: bool = False
    routed: bool = False

    @property
    def forward(self) -> bool:
        return self.phase == "forward"

    @property
    def backward(self) -> bool:
        return self.phase == "backward"


class LossTerm(NamedTuple):
    """A term that a part adds to the loss: `weight` times its mean over the tokens that count in the loss."""

    name: str
    weight: float


class LinearPieces(NamedTuple):
    """A linear layer of a part.

    - `name`: the name of its weight.
    - `cut`: how tp cuts it: column, row or whole.
    - `pieces`: (name, number of rows) of its consecutive row slices, such as queries, keys and values. Each slice can
      have its own adapter.
    - `experts`: each expert has its own such layer, cut by etp instead of tp.
    """

    name: str
    cut: str
    pieces: tuple[tuple[str, int], ...]
    experts: bool = False

    @property
    def cuts_outputs(self) -> bool:
        return self.cut == "column"

    @property
    def cuts_inputs(self) -> bool:
        return self.cut == "row"


class SavedTensor(NamedTuple):
    """A tensor that is saved for backward, with its `size` in bytes.

    `core`: the attention core produces it, so that recomputing the core frees its memory. `passing`: it exists only
    while the backward of its part runs.
    """

    name: str
    size: float
    core: bool = False
    passing: bool = False


@dataclass(frozen=True)
class Kernels:
    """The differences in memory between the kernels of several programs (ours and other frameworks).

    The defaults describe our own uncompiled kernels on an accelerator.
    """

    fused: bool = False  # our compiled kernels: RMS norms, SwiGLU and rotations only save their input
    fused_attention: bool = True  # attention is one kernel that saves log-sums instead of scores
    gate_copies: float = 4.0  # tensors of the MLP's width that a gated activation saves
    keeps_rotation: bool = True  # queries and keys are saved both before and after they are rotated
    mask_bytes: float = 0.0  # per element of a dropout mask; 0: the bytes of an activation's element
    logit_bytes: float = 0.0  # per logit at the peak of a loss that computes all logits at once; 0: our loss in tiles
    host: bool = False  # the kernels of a CPU, which save other tensors
    pieces: int = 1  # the number of token chunks in which our MLPs are computed
    fp8: bool = False  # products multiply 8-bit numbers, except for the precise ones
    own: bool = True  # our kernels; for other programs only the saved tensors are known, not the workspace

    __hash__ = hash_once


class Part:
    """The base class of all parts, which has no parameters, work, communication or memory.

    A concrete part is a frozen dataclass of its sizes. `nn/build.py` names the module that computes it.
    """

    # Only for parts from outside the package: the path `package.module:Class` of the module that computes it.
    module = ""

    has_experts = False  # it is cut along the axes of experts
    reads: tuple[str, ...] = ()  # the streams of the model that it reads in addition to its input
    group: str = ""  # the group of ranks that hold the same parameters, if several nodes or stages do

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        # Methods of the old names would never be called, and the plan would lack the memory that they state.
        for old, new in (("kept", "saved"), ("working", "workspace")):
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old} is called {new} now: rename it")

    def records(self, at: Coordinate, name: str) -> Records:
        """Return the parameters that a rank holds, by their name in the part's module. `name` is the prefix of their
        global names."""
        return {}

    def linears(self) -> tuple[LinearPieces, ...]:
        """Return the part's linear layers, in forward order."""
        return ()

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the row counts of the matrices that are stacked in each weight, by the suffix of its global name.

        Queries, keys and values are three matrices of one weight, or with `by_head` three for each head. An optimizer
        may update each matrix as a whole.
        """
        return {f"{layer.name}.weight": tuple(rows for _, rows in layer.pieces) for layer in self.linears()}

    def losses(self) -> Iterable[LossTerm]:
        """Return the terms that the part adds to the loss."""
        return ()

    @property
    def idle(self) -> int:
        """The number of parameters that a token does not use."""
        return 0

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        """Return the work of the forward of one micro-batch."""
        return Work()

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterable[Collective]:
        """Return the collectives of forward and backward of one micro-batch. Calls over one rank may be listed too."""
        return ()

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterable[SavedTensor]:
        """Return the tensors that forward saves for backward."""
        return ()

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the workspace of forward or backward in bytes, in addition to the saved tensors."""
        return 0.0

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes that remain after a backward with deferred weight gradients, until these are computed: the
        factors of every product with a trained weight."""
        products = self.work(at, batch, kernels).products
        return float(sum(p.factors * (1 if kernels.fp8 and not p.precise else batch.element) for p in products))

    def core_backward(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the workspace of the backward of an attention core, in bytes.

        It does not include the tensors that this part and the parts before it have saved, nor the gradients outside of
        the core. The saved tensors of the parts after it have been freed by then.
        """
        return 0.0


def innermost(part: Part) -> Part:
    """Return the part inside all wrappers that only change how it is cut, tuned or applied. Each wrapper has it as its
    attribute `part`."""
    while isinstance(inner := getattr(part, "part", None), Part):
        part = inner
    return part


class UpdateOptions(NamedTuple):
    """The way the optimizer updates a parameter.

    This is its group (`ParamRecord.update_group`), whether it decays (None: as its part says), and the heights of the
    matrices that are updated as wholes.
    """

    group: int = 0
    decay: bool | None = None
    matrices: tuple[int, ...] = ()


def with_updates(record: ParamRecord, updates: Mapping[str, UpdateOptions]) -> ParamRecord:
    """Return a record, and those of its adapters, with the updates of their names."""
    if record.adapters:
        record = replace(record, adapters=tuple(_marked_adapter(adapter, updates) for adapter in record.adapters))
    updated = updates.get(record.name)
    if updated is None:
        return record
    decay = record.decay if updated.decay is None else updated.decay
    return replace(record, update_group=updated.group, decay=decay, matrices=updated.matrices)


def _marked_adapter(adapter: AdapterRecord, updates: Mapping[str, UpdateOptions]) -> AdapterRecord:
    norms = None if adapter.norms is None else with_updates(adapter.norms, updates)
    return replace(adapter, down=with_updates(adapter.down, updates), up=with_updates(adapter.up, updates), norms=norms)


class NamedPart(NamedTuple):
    """A part of a unit, with its attribute name in the unit's module (`key`) and the prefix of its parameters' global
    names (`name`)."""

    key: str
    name: str
    part: Part


@dataclass(frozen=True)
class Unit:
    """Parts whose weights are needed together: the embedding, a block or the head.

    Stages consist of units. Units are recomputed, compiled and gathered as wholes, and the planner counts them.
    """

    parts: tuple[NamedPart, ...]
    rows: Rows = Rows()  # the rows that it works on
    # By a parameter's name in the unit: how the optimizer updates it, if not as usual.
    updates: tuple[tuple[str, UpdateOptions], ...] = field(default=(), kw_only=True)

    __hash__ = hash_once

    stackable = False  # runs of such units are recomputed, compiled and offloaded together

    @property
    def branches(self) -> list[tuple[NamedPart, NamedPart]]:
        """The unit's pairs of a norm and a body, if it consists of such pairs."""
        return []

    @cached_property
    def has_experts(self) -> bool:
        return any(part.has_experts for _, _, part in self.parts)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The streams that its parts read in addition to its input."""
        return tuple(dict.fromkeys(name for _, _, part in self.parts for name in innermost(part).reads))

    @cached_property
    def groups(self) -> frozenset[str]:
        """The names of the groups of ranks that share parameters of its parts."""
        return frozenset(group for _, _, part in self.parts if (group := innermost(part).group))

    def seen_by(self, at: Coordinate) -> Coordinate:
        """Return the part of a coordinate that the unit depends on. The planner caches figures by it."""
        return at if self.has_experts else at.dense

    def records(self, at: Coordinate, prefix: str = "") -> Records:
        updates = {prefix + name: updated for name, updated in self.updates}
        return {
            f"{key}.{own}": with_updates(record, updates) if updates else record
            for key, name, part in self.parts
            for own, record in part.records(at, prefix + name).items()
        }

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the row counts of the matrices of each weight of a product, by the weight's name in the unit.

        Only blocks have such weights. Embeddings and heads look like matrices too, but are not updated as such.
        """
        return {}

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        batch = self.rows.of(batch)
        return sum((part.work(at, batch, kernels) for _, _, part in self.parts), Work())

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        batch = self.rows.of(batch)
        for _, _, part in self.parts:
            yield from (call for call in part.collectives(at, batch) if at.size(call.axis) > 1)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> tuple[SavedTensor, ...]:
        batch = self.rows.of(batch)
        return tuple(kept for _, _, part in self.parts for kept in part.saved(at, batch, kernels))

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        batch = self.rows.of(batch)
        return max((part.workspace(at, batch, kernels) for _, _, part in self.parts), default=0.0)

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        batch = self.rows.of(batch)
        return sum(part.factors(at, batch, kernels) for _, _, part in self.parts)

    def split_workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the workspace of a backward that defers weight gradients, including the factors that it produces."""
        return self.workspace(at, batch, kernels) + self.factors(at, batch, kernels)


class EmbeddingUnit(Unit):
    """Parts that turn ids into activations: `tokens` and, optionally, `positions`, `types` and a `norm`."""


class HeadUnit(Unit):
    """Parts that turn activations into terms of the loss: an optional `norm` and the `output` layer."""


class MaskedHeadUnit(HeadUnit):
    """A head on chosen rows of each sample (`spec/model/bert.py`)."""


@dataclass(frozen=True)
class BlockUnit(Unit):
    """A unit of the residual stream: pairs of a norm and a body.

    Each pair adds body(norm(x)) to x. The pairs follow each other or, if `parallel`, all read the block's input. With
    `post_norm`, x becomes norm(x + body(x)). The same number of tensors is saved then, since a body's input takes the
    place of a norm's input. With `sandwich`, a second norm follows each body before the sum. Dropout precedes each sum.
    """

    hidden: int = 0
    parallel: bool = False
    dropout: float = 0.0
    post_norm: bool = False
    residual: float = 1.0  # the factor of x in the sums
    sandwich: bool = False

    __hash__ = hash_once

    stackable = True

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}.{suffix}": rows for _, name, part in self.parts for suffix, rows in part.matrices(by_head).items()
        }

    @property
    def branches(self) -> list[tuple[NamedPart, NamedPart]]:
        stride = 3 if self.sandwich else 2
        return list(zip(self.parts[::stride], self.parts[1::stride], strict=True))

    @property
    def after(self) -> tuple[NamedPart, ...]:
        """The norms that follow the bodies."""
        return self.parts[2::3] if self.sandwich else ()

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        batch = self.rows.of(batch)
        # A sum reads two rows and writes one. Dropout also moves its mask, one byte per element.
        width = 3 * self.hidden * batch.element + (self.hidden if self.dropout else 0)
        count = len(self.branches)
        sums = Work(moved=float(batch.rows(at) * count * width), kernels=2 * count)
        return super().work(at, batch, kernels) + sums

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> tuple[SavedTensor, ...]:
        saved: list[SavedTensor] = []
        batch = self.rows.of(batch)
        for number, (norm, body) in enumerate(self.branches):
            # All norms of a parallel block read the block's input, which is saved once.
            shared = self.parallel and number > 0
            saved += [kept for kept in norm.part.saved(at, batch, kernels) if not (shared and kept.name == "input")]
            saved += body.part.saved(at, batch, kernels)
            if self.dropout:
                mask_bytes = kernels.mask_bytes or batch.element
                saved.append(SavedTensor("dropout mask", batch.rows(at) * self.hidden * mask_bytes))
        saved += [kept for norm in self.after for kept in norm.part.saved(at, batch, kernels)]
        return tuple(saved)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        batch = self.rows.of(batch)
        stream = self._stream_bytes(at, batch)
        if not kernels.own:
            # A gathered input and a gradient.
            return 2.0 * stream if at.splits_tokens else 0.0
        norms = max(norm.part.workspace(at, batch, kernels) for norm, _ in self.branches)
        bodies = max(body.part.workspace(at, batch, kernels) for _, body in self.branches)
        return max(norms + bodies + 3 * stream, self._in_core(at, batch, kernels))

    def split_workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the workspace of a backward that defers weight gradients (see `Unit`).

        As the backward passes through the bodies, saved activations are freed and factors accumulate. `change` is the
        difference so far, and the result is the peak over the bodies.
        """
        own = self.rows.of(batch)
        stream = self._stream_bytes(at, own)
        change = 0.0
        peak = -math.inf
        for norm, body in reversed(self.branches):
            working = sum(named.part.workspace(at, own, kernels) for named in (norm, body)) + 3 * stream
            core = body.part.core_backward(at, own, kernels) + 2 * own.rows(at) * self.hidden * own.element
            peak = max(peak, change + working, change + core)
            change += body.part.factors(at, own, kernels)
            change -= sum(kept.size for named in (norm, body) for kept in named.part.saved(at, own, kernels))
        return max(peak, change + 2 * stream)

    def _stream_bytes(self, at: Coordinate, batch: MicroBatch) -> int:
        """Return the bytes of the stream as a product reads it: the rows of all ranks that divide it."""
        gathered = at.size("tp") if at.splits_tokens else 1
        return batch.rows(at) * gathered * self.hidden * batch.element

    def _in_core(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the workspace of the backward of a body's core, less the saved tensors of the block that have been
        freed by then.

        It is negative if more has been freed. It includes the gradients of the block's result and of the sum so far.
        """
        freed = 0.0
        peak = -math.inf
        for norm, body in reversed(self.branches):
            peak = max(peak, body.part.core_backward(at, batch, kernels) - freed)
            freed += sum(kept.size for named in (norm, body) for kept in named.part.saved(at, batch, kernels))
        return peak + 2 * batch.rows(at) * self.hidden * batch.element


SINGLE_RANK = Coordinate()
