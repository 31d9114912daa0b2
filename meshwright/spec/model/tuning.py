"""Models with frozen weights and low-rank adapters on some of their products (LoRA, DoRA). No torch.

The product of a weight W [rows, in] becomes x W^T + scale (x A^T) B^T with A [rank, in] and B [rows, rank]. Each rank
adds its partial result before the sums that the product takes anyway, so an adapter needs no further collective. If the
rows of W are cut over tp, B is cut like W, and all ranks hold A, each with a partial gradient. If the inputs of W are
cut, A is cut and B is held by all. DoRA scales each row of W + scale B A to a trained norm: the norm of the row of W
plus a number that begins at 0. If inputs are cut, the norm of a row is a sum over tp.

Each expert has its own A and B, which are on the same ranks as the expert: ep divides the experts, and etp replaces tp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from meshwright.errors import UserError, nearest
from meshwright.spec.layout.packed import BLOCK, packed_record, row_bytes
from meshwright.spec.layout.params import AdapterRecord, Box, Init, ParamRecord, columns_of, rows_of, whole
from meshwright.spec.model.experts import ExpertsPart
from meshwright.spec.model.gpt import NormPart, TokenEmbeddingPart
from meshwright.spec.model.graph import Model
from meshwright.spec.model.linear import ZEROS, replicated_axes
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import (
    SINGLE_RANK,
    Collective,
    Coordinate,
    Kernels,
    LinearPieces,
    LossTerm,
    MicroBatch,
    NamedPart,
    Part,
    Product,
    Records,
    SavedTensor,
    Unit,
    Work,
)

AnyUnit = TypeVar("AnyUnit", bound=Unit)
ADAPTER = ("lora_a", "lora_b", "norms")  # the last words of the names of adapter parameters


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER


@dataclass(frozen=True)
class Tuning:
    """The trained parts of a model: adapters of rank `rank` on the row slices of linear layers that `targets` names,
    and the whole parts that `whole` names."""

    rank: int
    scale: float
    norms: bool = False  # DoRA: the norms of rows are trained too
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    every: bool = False  # all linear layers except the ones of experts are targets too
    whole: tuple[str, ...] = ()
    packs: bool = False  # the frozen weights of linear layers are stored in 4 bits

    def adapts(self, piece: str) -> bool:
        return piece in self.targets


@dataclass(frozen=True)
class TunedPart(Part):
    """A part whose weights are frozen, with adapters on its linear layers that are targets."""

    part: Part
    tuning: Tuning

    @property
    def has_experts(self) -> bool:  # type: ignore[override]
        return self.part.has_experts

    @property
    def idle(self) -> int:
        return self.part.idle

    def losses(self) -> Iterable[LossTerm]:
        return self.part.losses()

    def linears(self) -> tuple[LinearPieces, ...]:
        return self.part.linears()

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the heights of the factors, which are whole matrices even where they serve several heads."""
        adapters = (adapter for record in self.records(SINGLE_RANK, "").values() for adapter in record.adapters)
        factors = (factor for adapter in adapters for factor in (adapter.down, adapter.up))
        return {factor.name.removeprefix("."): (factor.shape[-2],) for factor in factors}

    def _is_adapted(self, linear: LinearPieces) -> bool:
        return any(self.tuning.adapts(piece) for piece, _ in linear.pieces)

    def records(self, at: Coordinate, name: str) -> Records:
        """Return the part's records, marked as frozen, and the adapters' records, which the weights' records also
        refer to."""
        linears = {f"{name}.{linear.name}.weight": linear for linear in self.part.linears()}
        frozen: Records = {}
        adapted: Records = {}
        for key, record in self.part.records(at, name).items():
            record = replace(record, trained=False)
            if record.name in linears:
                linear = linears[record.name]
                adapters = tuple(adapter_records(record, at, name, linear, self.tuning))
                record = replace(record, adapters=adapters)
                record = packed_record(record) if self.tuning.packs and not linear.experts else record
                for adapter in adapters:
                    prefix = f"{key.removesuffix('.weight')}.{adapter.name}"
                    adapted |= {f"{prefix}.{factor}": own for factor, own in adapter.records.items()}
            frozen[key] = record
        return frozen | adapted

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        work = self.part.work(at, batch, kernels)
        frozen = tuple(replace(product, frozen=product.linear) for product in work.products)
        added, moved = [], 0.0
        for adapter, linear in self._adapters(at):
            rows = adapter.stop - adapter.start
            inputs = adapter.down.local_shape[-1]
            tokens = self._tokens(linear, at, batch)
            rank = self.tuning.rank
            groups = 0
            # Adapters of experts are grouped products, and don't save x A^T: backward computes it again.
            if isinstance(self.part, ExpertsPart) and linear.experts:
                groups = self.part.experts(at)
            added += [
                Product("down", tokens, rank, inputs, precise=groups > 0, groups=groups, again=groups > 0),
                Product("up", tokens, rows, rank, precise=groups > 0, groups=groups),
            ]
            moved += 2.0 * tokens * rows * batch.element
        # Unpacking reads the bytes of a packed weight and writes its values.
        unpacked = self._unpacked_counts(at)
        moved += sum(unpacked) * (row_bytes(BLOCK) / BLOCK + batch.element)
        kernels_run = work.kernels + len(added) + len(unpacked)
        return replace(work, products=(*frozen, *added), moved=work.moved + moved, kernels=kernels_run)

    def _adapters(self, at: Coordinate) -> Iterator[tuple[AdapterRecord, LinearPieces]]:
        linears = {linear.name: linear for linear in self.part.linears()}
        for record in self.records(at, "").values():
            for adapter in record.adapters:
                yield adapter, linears[_linear_name(record)]

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the part's calls that are still needed, and the calls of DoRA.

        Backward gathers the input of a product again only if that has an adapter (shared experts never do), and a
        frozen embedding has no backward. DoRA sums the squared norms of the rows of each product whose inputs are cut,
        for W and for the changed W.
        """
        columns = iter([linear for linear in self.part.linears() if linear.cuts_outputs and not linear.experts])
        frozen_table, has_experts = isinstance(self.part, TokenEmbeddingPart), isinstance(self.part, ExpertsPart)
        for call in self.part.collectives(at, batch):
            linear = next(columns, None) if call.repeated else None
            used = self._is_adapted(linear) if linear is not None else not (call.repeated and has_experts)
            if used and not (frozen_table and call.backward):
                yield call
        for linear in self.part.linears():
            if self.tuning.norms and linear.cuts_inputs and self._is_adapted(linear):
                rows = sum(count for _, count in linear.pieces)
                yield Collective("forward", "tp", "all_reduce", 2 * rows * batch.wide)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the part's saved tensors, without those that only gradients of frozen weights need, and the adapters'.

        An adapter saves x A^T and, with dropout, the mask of its input. DoRA also saves the product before it is
        scaled. Adapters of experts save nothing and recompute everything.
        """
        dropped = {"weight gradient"} | ({"normed input"} if isinstance(self.part, NormPart) else set())
        yield from (kept for kept in self.part.saved(at, batch, kernels) if kept.name not in dropped)
        linears = {linear.name: linear for linear in self.part.linears()}
        for record in (record for record in self.records(at, "").values() if record.adapters):
            linear = linears[_linear_name(record)]
            tuning = self.tuning
            if linear.experts:
                continue
            (rows, inputs), tokens = record.values.local_shape, self._tokens(linear, at, batch)
            yield SavedTensor("adapters", len(record.adapters) * tokens * tuning.rank * batch.element)
            yield SavedTensor("adapter mask", tokens * inputs * batch.element if tuning.dropout else 0)
            norms = tokens * rows * batch.element + 2 * rows * batch.wide
            yield SavedTensor("unscaled product", norms if tuning.norms else 0)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the part's workspace, plus the values of its largest packed weight."""
        return self.part.workspace(at, batch, kernels) + max(self._unpacked_counts(at), default=0) * batch.element

    def _tokens(self, linear: LinearPieces, at: Coordinate, batch: MicroBatch) -> int:
        """Return the number of rows of the input of a linear layer."""
        if isinstance(self.part, ExpertsPart) and linear.experts:
            return self.part.computed_rows(at, batch)
        return batch.tokens(at) if linear.cuts_outputs or linear.cuts_inputs else batch.rows(at)

    def _unpacked_counts(self, at: Coordinate) -> list[int]:
        """Return the number of values of each packed weight."""
        return [record.values.numel for record in self.records(at, "").values() if record.packs is not None]


def _linear_name(weight: ParamRecord) -> str:
    return weight.name.removesuffix(".weight").rpartition(".")[2]


def adapter_records(
    weight: ParamRecord, at: Coordinate, name: str, linear: LinearPieces, tuning: Tuning
) -> Iterator[AdapterRecord]:
    """Yield the adapters of the targeted slices of a weight of which this rank holds rows."""
    if linear.experts:
        yield from _expert_adapters(weight, at, name, linear, tuning)
        return
    first, (local_rows, inputs) = 0, weight.local_shape
    for piece, rows in linear.pieces:
        boxes = [box for box in weight.boxes if first <= box.start[0] < first + rows]
        if tuning.adapts(piece) and boxes:
            local = min(box.local_start[0] for box in boxes)
            count = max(box.local_start[0] + box.shape[0] for box in boxes) - local
            parts = tuple((box.start[0] - first, box.shape[0], box.local_start[0] - local) for box in boxes)
            yield _adapter(weight, at, f"{name}.{piece}", linear.cut, (local, count), rows, parts, tuning)
        first += rows
    assert first == weight.shape[0] and inputs and local_rows


def _adapter(
    weight: ParamRecord, at: Coordinate, name: str, cut: str, local: tuple[int, int], rows: int,
    parts: tuple[tuple[int, int, int], ...], tuning: Tuning,
) -> AdapterRecord:  # fmt: skip
    rank, width = tuning.rank, weight.shape[1]
    init = _first_values(width)
    norms: ParamRecord | None = None
    # Every rank has a partial gradient of the factor that all of them hold.
    if cut == "row":
        axes = {"copies": ("tp",), "partial": ("tp",)} if at.size("tp") > 1 else {}
        down = columns_of(f"{name}.lora_a", rank, width, at.size("tp"), at.index("tp"), init)
        up = whole(f"{name}.lora_b", (rows, rank), ZEROS, **axes)
        norms = whole(f"{name}.norms", (rows,), ZEROS, decay=False, **axes)
    else:
        shared = (
            {"copies": ("tp",), "partial": ("tp",)} if at.size("tp") > 1 and cut == "column" else replicated_axes(at)
        )
        held = {"copies": weight.copies, "partial": weight.partial}
        down = whole(f"{name}.lora_a", (rank, width), init, **shared)
        up = rows_of(f"{name}.lora_b", parts, rows, (rank,), ZEROS, local[1], **held)
        norms = rows_of(f"{name}.norms", parts, rows, (), ZEROS, local[1], decay=False, **held)
    start, count = local
    return AdapterRecord(
        name.rpartition(".")[2], start, start + count, down, up, norms if tuning.norms else None, tuning.scale,
        tuning.dropout,
    )  # fmt: skip


def _first_values(width: int) -> Init:
    """Return the initial values of an A, with the standard deviation of Kaiming's uniform distribution, which LoRA
    uses."""
    return Init("normal", 1.0 / math.sqrt(3.0 * width))


def _expert_adapters(
    weight: ParamRecord, at: Coordinate, name: str, linear: LinearPieces, tuning: Tuning
) -> Iterator[AdapterRecord]:
    """Yield the adapters of a weight of all experts [experts, rows, in], of which a rank holds one box per slice.

    A factor that is not cut over etp is held by all etp ranks, each with a partial gradient.
    """
    first, (experts, _, inputs), rank = 0, weight.shape, tuning.rank
    axes = ("etp",) if at.size("etp") > 1 else ()
    for piece, rows in linear.pieces:
        (box,) = [box for box in weight.boxes if first <= box.start[1] < first + rows]
        (expert, row, column), (held, count, width), start = box.start, box.shape, box.local_start[1]
        downs = Box((expert, 0, column), (held, rank, width), (0, 0, 0))
        ups = Box((expert, row - first, 0), (held, count, rank), (0, 0, 0))
        shared, named = axes if linear.cuts_outputs else (), f"{name}.{piece}"
        down = ParamRecord(
            f"{named}.lora_a", (experts, rank, inputs), downs.shape, (downs,), _first_values(inputs),
            data_axes=weight.data_axes, partial=shared, copies=shared,
        )  # fmt: skip
        shared = axes if linear.cuts_inputs else ()
        up = ParamRecord(
            f"{named}.lora_b", (experts, rows, rank), ups.shape, (ups,), ZEROS,
            data_axes=weight.data_axes, partial=shared, copies=shared,
        )  # fmt: skip
        if tuning.adapts(piece):
            yield AdapterRecord(piece, start, start + count, down, up, None, tuning.scale, 0.0)
        first += rows


def _check_experts(tuning: Tuning, experts: set[str]) -> None:
    """Raise if adapters of experts use a setting that PEFT's adapters of experts can't have either."""
    named = sorted(experts.intersection(tuning.targets))
    refused = {"tune.kind=dora": tuning.norms, f"tune.dropout={tuning.dropout:g}": tuning.dropout > 0}
    for key, is_set in refused.items():
        if named and is_set:
            instead = "use tune.kind=lora" if tuning.norms else "set tune.dropout=0"
            raise UserError(f"{key} can't be had on experts: {instead}, or leave {named[0]} out of tune.targets")


def with_tuning(model: Model, tuning: Tuning) -> Model:
    """Return the model with frozen weights and adapters."""
    linears = [linear for block in model.blocks for _, _, part in block.parts for linear in part.linears()]
    experts = {piece for linear in linears if linear.experts for piece, _ in linear.pieces}
    usual = {piece for linear in linears if not linear.experts for piece, _ in linear.pieces}
    pieces = experts | usual
    if not pieces:
        raise UserError("adapters need linear layers, and no part of this model names any: set tune.kind=full")
    _check_experts(tuning, experts)
    if tuning.every:
        tuning = replace(tuning, targets=tuple(sorted(usual.union(tuning.targets))))
    parts = {name for node in model.nodes for _, name, _ in node.unit.parts}
    for key, wanted, known in (("targets", tuning.targets, pieces), ("modules_to_save", tuning.whole, parts)):
        for name in wanted:
            if name not in known:
                has = ", ".join(sorted(known)) or "none"
                raise UserError(f"tune.{key}={name} is not in this model{nearest(name, known)}: it has {has}")
    # As in QLoRA, the head has no adapters and is not packed.
    of_head = replace(tuning, targets=(), packs=False)
    changed = cache(_tuned_unit)
    return model.map_units(lambda node: changed(node.unit, tuning if node.writes else of_head))


def _tuned_unit(unit: AnyUnit, tuning: Tuning) -> AnyUnit:
    """Freeze a unit's parts and add their adapters.

    The output of a norm or an activation is then saved only if the product after it has an adapter that needs it.
    """
    parts: list[NamedPart] = []
    bodies = {norm.key: body.part for norm, body in unit.branches}
    for named in unit.parts:
        part = named.part
        if isinstance(part, NormPart) and named.key in bodies:
            first = next((linear for linear in bodies[named.key].linears()), None)
            needs = first is None or first.experts or any(tuning.adapts(piece) for piece, _ in first.pieces)
            part = replace(part, keeps_output=part.keeps_output and needs)
        if isinstance(part, MLPPart):
            part = replace(part, keeps_result=tuning.adapts("down"))
        if isinstance(part, ExpertsPart) and part.shared is not None:
            part = replace(part, shared=replace(part.shared, keeps_result=False))
        parts.append(named if named.name in tuning.whole else named._replace(part=TunedPart(part, tuning)))
    return replace(unit, parts=tuple(parts))
