"""Data parallelism on contiguous buffers, for every ZeRO stage.

Gradients are reduced bucket by bucket while backward still runs, and weights are gathered before they are needed.

- Stage 0: every rank owns whole buckets. A bucket is all-reduced once per step over the axes that its records name.
- Stage 1: a rank owns a shard of each bucket. Gradients are reduce-scattered once per step, and weights are gathered
  after the update.
- Stage 2: whole gradients exist for one micro-batch only. A bucket is reduce-scattered once per micro-batch, and the
  shards of the sums are added up.
- Stage 3: whole weights exist only while a unit uses them (see `weights`).

Stage and groups may differ between buffers, since a buffer's records say over which ranks its gradients are summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.comm.mesh import Mesh
from meshwright.config.comm import GatherConfig, OverlapConfig
from meshwright.config.memory import ZeroConfig
from meshwright.device import is_host, is_meta
from meshwright.engine.sharding.buffers import (
    REDUCER,
    Bucket,
    BufferKey,
    FlatBuffer,
    SideState,
    Slot,
    State,
    StateRows,
    build_buffers,
    with_widest_rows,
)  # fmt: skip
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, PendingReduction, Reducer, ReducerPlan, mixing_alignment
from meshwright.engine.sharding.reduction import EveryMicroBatch, OncePerStep
from meshwright.engine.sharding.weights import GatedUnit, WeightGatherer, find_units, number_units
from meshwright.errors import UserError
from meshwright.nn.weight_grad import Sink, SinkTable, VectorGradients
from meshwright.spec.traffic.ledger import Ledger
from meshwright.spec.traffic.placement import Split, copy_axis, shard_axes

OwnWeight = tuple[dict[str, Tensor], Slot]  # the sink handles of a layer, and the slot of its weight

NORM_PIECE = 1 << 15  # the most elements that a CPU sums into one norm in float32


class DataGroups(NamedTuple):
    """The ranks that shard a buffer, and the ranks that replicate this rank's shard."""

    shards: Group
    replicas: Group


class DataParallel:
    """The gradients of one rank's chunks, from the first contribution of a step to the reduced sum.

    `buffers` are all buffers, `trained` the ones with gradients, and `buckets` the buckets of `trained`.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        mesh: Mesh,
        bucket_mib: float = 0.0,
        reducer: Reducer = PLAIN_REDUCER,
        zero: ZeroConfig | None = None,
        grad_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        overlap: OverlapConfig | None = None,
        releases_grads: bool = False,
        outer: ReducerPlan = PLAIN_REDUCER,
        gather: GatherConfig | None = None,
    ) -> None:
        """Move the modules' parameters into buffers.

        `seed` initialises parameters that have no memory yet. `outer` is the reducer that sums parameters over
        `layout.replicas`. `releases_grads`: in stages 0 and 1, gradients have memory only from a step's backward to its
        update, which needs steps of one micro-batch.
        """
        overlap = overlap or OverlapConfig()
        self.mesh, self.reducer = mesh, reducer
        modules = list(modules)
        self._zero = zero or ZeroConfig()
        self._groups: dict[BufferKey, DataGroups] = {}
        self._counted: list[Tensor] | None = None
        self._device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        units = find_units(modules)
        params_at = (self._zero.offload.params_at, Path(self._zero.offload.path))
        self.buffers, slots = build_buffers(
            modules, self._split, bucket_mib, number_units(units), grad_dtype, params_at, seed,
            (mesh.layout, align) if (align := mixing_alignment(reducer, outer)) else None, releases_grads,
        )  # fmt: skip
        self.stage = max((buffer.split.stage for buffer in self.buffers), default=0)
        self._check_ties()
        self.weights = WeightGatherer(units, slots, self.buffers, lambda b: self.groups(b).shards, mesh.ledger)
        self.weights.overlaps, self.weights.gather = overlap.weights, gather or GatherConfig()
        for buffer in self.buffers:
            if name := copy_axis(mesh.layout, self._zero, self.weights.gather, buffer.key.data_axes):
                self.weights.copies.keep(buffer, mesh.group(name))
        self.trained = [buffer for buffer in self.buffers if buffer.key.trained]
        self.buckets = [bucket for buffer in self.trained for bucket in buffer.buckets]
        self._take_gradients(units, list(_own_weights(modules, slots)), overlap.gradients)
        # Callbacks for this rank's gradients of a bucket before they are summed.
        self.reduces: list[Callable[[Bucket, Tensor], None]] = []
        reducer.prepare(self.trained)

    def _take_gradients(self, units: list[GatedUnit], own_weights: list[OwnWeight], overlaps: bool) -> None:
        """Give every trained parameter a sink for its gradients."""
        # The number of contributions per micro-batch: one from each layer that adds its weight gradient itself.
        # Parameters that are not listed get one from autograd.
        uses = Counter(id(slot.parameter) for _, slot in own_weights)
        # For buckets of foreign modules, the chunk whose backward is the last that can contribute. Backward visits the
        # first chunk last; in reversed order, the first chunk's entry is set last and remains.
        late = {id(b): unit.chunk for unit in reversed(units) if unit.foreign for b in unit.buckets}
        whole = [bucket for bucket in self.buckets if bucket.stage < 2]
        self._once = OncePerStep(whole, self._launch, overlaps)
        scattered = [bucket for bucket in self.buckets if bucket.stage >= 2]
        self._each = EveryMicroBatch(scattered, self._launch, uses, late, overlaps)
        self.sinks, self._vectors = SinkTable(), VectorGradients()
        first = {id(b): unit for unit in reversed(units) for b in unit.buckets}
        # The reductions of a unit may start at its end in stage 3, because there all ranks must run the same units in
        # the same order anyway, to gather weights. Stage 2 has no such requirement.
        for unit in (unit for unit in units if unit.closes):
            own = [bucket for bucket in unit.buckets if first[id(bucket)] is unit]
            unit.on_done = partial(self._each.end_unit, own)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.sink = (self._once if bucket.stage < 2 else self._each).sink(self.sinks, bucket, slot)
                # Vector gradients can be collected and added later, except to buckets that are scattered in every
                # micro-batch, which must be complete by then.
                add = self._vectors.add if bucket.stage < 2 else Sink.add
                # Buckets of foreign modules are reduced when their unit's backward ends, so none of their gradients are
                # deferred by zero-bubble schedules.
                add = add if id(bucket) in late else partial(Sink.take, add=add)
                slot.parameter.register_post_accumulate_grad_hook(partial(_take_gradient, add, slot.sink))
        for handles, slot in own_weights:
            handles["weight"] = slot.sink.handle

    def groups(self, buffer: FlatBuffer) -> DataGroups:
        """Return the groups over which a buffer's gradients are summed."""
        return self._groups[buffer.key]

    def _split(self, key: BufferKey) -> Split:
        stage, *axes = shard_axes(self.mesh.layout, self._zero, key.data_axes, key.trained)
        shards, replicas = (self.mesh.group(name) if name else self.mesh.alone for name in axes)
        self._groups[key] = DataGroups(shards, replicas)
        return Split(stage, shards.size, shards.index, replicas.size, replicas.index)

    def begin(self, micro_batches: int, step: int = 1, scale: float = 1.0) -> None:
        """Begin a step, before its first micro-batch. `scale` is the factor of the gradients that will arrive."""
        self.reducer.begin_step(step, scale)
        self.weights.copies.forget()
        self._vectors.forget()
        self._once.begin(micro_batches)
        self._each.begin(micro_batches)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.sink.reset()

    def _launch(self, bucket: Bucket, out: Tensor) -> PendingReduction:
        """Begin to reduce a bucket: a reduce-scatter over its shards, or in stage 0 an all-reduce over its replicas."""
        shards, replicas = self.groups(bucket.buffer)
        grads, ledger, reducer = bucket.grads.tensor, self.mesh.ledger, self._reducer_of(bucket.buffer)
        for callback in self.reduces:
            callback(bucket, grads)
        with ledger.phase("reduce"), ledger.layer(None):
            if bucket.stage:
                return _Counted(reducer.reduce_scatter(bucket, out, grads, shards), ledger)
            return _Counted(reducer.all_reduce(bucket, grads, replicas), ledger)

    def _reducer_of(self, buffer: FlatBuffer) -> Reducer:
        return self.reducer if buffer.key.compressed or not self.reducer.mixes else PLAIN_REDUCER

    def gather(self, chunk: int, work: str) -> None:
        """Begin to gather the weights that a chunk's forward or backward (`work`) needs first."""
        self.weights.begin(chunk, work)

    def free(self, chunk: int) -> None:
        """Release the gathered weights of a chunk after its forward or backward."""
        self.weights.end(chunk)

    def finish_reductions(self, chunk: int) -> None:
        """Wait for all launched reductions and release whole gradients, after a chunk's backward."""
        self._each.end_backward(chunk)

    def finish(self) -> None:
        """Finish the reductions after a step's last backward: the remaining buckets, then further axes.

        Shards are also summed over their replicas and over the axes on which gradients are partial sums.
        """
        self._vectors.add_all()
        self._once.finish()
        self._each.finish()
        with self.mesh.ledger.phase("reduce"):
            for buffer in self.trained:
                replicas = self.groups(buffer).replicas
                reducer = self._reducer_of(buffer)
                if buffer.split.stage and not replicas.alone:
                    _wait([reducer.all_reduce(bucket, bucket.own_grads, replicas) for bucket in buffer.buckets])
            # Axis by axis, because all ranks need the same order, and the order of buffers may differ between stages.
            for axis in sorted({axis for buffer in self.trained for axis in buffer.key.partial}):
                group = self.mesh.group(axis)
                for buffer in (buffer for buffer in self.trained if axis in buffer.key.partial):
                    _wait([group.all_reduce(bucket.own_grads, wait=False) for bucket in buffer.buckets])

    def add_to_frozen(self, parameter: nn.Parameter, change: Tensor) -> None:
        """Add a change to a frozen parameter. Every rank that holds the parameter must compute the same change."""
        buffer, slot = next((b, s) for b in self.buffers for s in b.slots if s.parameter is parameter)
        bucket = buffer.buckets[slot.bucket]
        flat = change.flatten()
        if bucket.stage < 3:
            slot.view.add_(change)
            return
        # In stage 3 only the shard persists, and the node's copy of the weights becomes stale.
        self.weights.copies.forget(bucket)
        low, high = (min(max(at, slot.start), slot.stop) for at in bucket.share)
        own = slice(low - bucket.share[0], high - bucket.share[0])
        bucket.own_params[own] += flat[low - slot.start : high - slot.start].to(bucket.own_params.device)

    def reducer_states(self) -> Iterator[State | SideState]:
        """Yield the reducer's states as a checkpoint holds them."""
        yield from with_widest_rows(list(self._reducer_states()))

    def _reducer_states(self) -> Iterator[State | SideState]:
        states = list(self.reducer.states())
        names = {(name, buffer.key) for name, buffer, _ in states}
        for name, buffer, tensors in states:
            groups = self.groups(buffer)
            first = buffer.buckets[0]
            size = tensors[0].numel()
            # Ranks whose tensors cover different elements need no separate rows.
            disjoint = [] if size == first.stop - first.start else [groups.shards]
            disjoint += [groups.replicas] if size < first.share[1] - first.share[0] else []
            row_groups = [self.mesh.group(axis) for axis in buffer.key.partial]
            row_groups += [group for group in groups if not group.alone and group not in disjoint]
            absorbs = "" if (f"{name}.sums", buffer.key) in names else f"{REDUCER}{name}.sums"
            yield State(REDUCER + name, buffer, tensors, _row_in(row_groups), absorbs=absorbs)
        for name, buffer, held, draw in self.reducer.side_states():
            row_groups = [self.mesh.group(axis) for axis in buffer.key.partial]
            # The replicas of a shard sum gradients that each has already reduced, so each has a state.
            row_groups += [self.groups(buffer).replicas] if buffer.split.stage else []
            yield SideState(REDUCER + name, buffer, held, _row_in(row_groups), draw)

    def _check_ties(self) -> None:
        """Refuse tied weights that are trained on one stage and frozen on the other: the all-reduce would hang."""
        for record in (slot.record for buffer in self.buffers for slot in buffer.slots):
            if record.tied and "embedding" in record.copies and not is_meta(self._device):
                frozen = self.mesh.group("embedding").max_over_ranks(float(not record.trained), self._device)
                if frozen and record.trained:
                    raise UserError(
                        f"{record.name} is tied and frozen on one of its two stages only: freeze it in the embedding "
                        "and in the head, or set model.tied_embeddings=false"
                    )

    def holds_first(self, slot: Slot, apart: Sequence[str] = ()) -> bool:
        """Return True if this rank, or a data-parallel replica of it, is the first that holds this content.

        Ranks along the axes `apart` hold different contents.
        """
        return self.mesh.is_first(*(axis for axis in slot.record.copies if axis not in apart))

    def counts(self, buffer: FlatBuffer, slot: Slot) -> bool:
        """Return True if this rank counts its part of `slot` in sums over all parameters.

        Every element is counted on exactly one rank.
        """
        return self.groups(buffer).replicas.index <= 0 and self.holds_first(slot)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Return the sum of squares of the reduced gradients that this rank counts, for the gradient norm."""
        # The ranges that a rank counts never change, so they are looked up once.
        if self._counted is None:
            self._counted = [
                bucket.own_grads[start:stop]
                for buffer in self.trained
                for bucket, start, stop in buffer.runs(s for s in buffer.slots if self.counts(buffer, s))
            ]
        gradients = self._counted
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        narrow = [grad for grad in gradients if grad.element_size() == 2]
        others = [grad for grad in gradients if grad.element_size() > 2]
        sums = [_square_sum(part, wide) for part, wide in ((narrow, torch.float32), (others, None)) if part]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]


class _Counted:
    """A reduction in flight whose calls in `wait` are booked in the ledger's phase `reduce`, whatever phase it is."""

    def __init__(self, work: PendingReduction, ledger: Ledger) -> None:
        self._work, self._ledger = work, ledger

    def wait(self) -> None:
        with self._ledger.phase("reduce"), self._ledger.layer(None):
            self._work.wait()


def _row_in(groups: Sequence[Group]) -> StateRows:
    """Return this rank's index in the product of several groups, and the size of the product."""
    row, rows = 0, 1
    for group in groups:
        row = row * group.size + group.index
        rows = rows * group.size
    return StateRows(row, rows)


def _wait(works: Sequence[PendingReduction]) -> None:
    for work in works:
        work.wait()


def _square_sum(tensors: list[Tensor], wide: torch.dtype | None) -> Tensor:
    if is_host(tensors[0].device):
        # The CPU kernel adds element by element in float32, so short chunks keep the error small.
        chunks = [chunk for tensor in tensors for chunk in tensor.split(NORM_PIECE)]
        norms = list(torch._foreach_norm(chunks, dtype=wide))
    else:
        norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
    return torch.stack(norms).double().square().sum()


def _take_gradient(add: Callable[[Sink, Tensor], None], sink: Sink, parameter: Tensor) -> None:
    """Move a gradient that autograd accumulated into the flat buffer, and free the temporary."""
    grad = parameter.grad
    if grad is not None:
        parameter.grad = None
        add(sink, grad)


def _own_weights(modules: Sequence[nn.Module], slots: dict[int, Slot]) -> Iterator[OwnWeight]:
    """Yield the trained weights of layers that add their weight gradients themselves, with the layer's handles."""
    for layer in (layer for module in modules for layer in module.modules()):
        sinks, weight = getattr(layer, "sinks", None), getattr(layer, "weight", None)
        if isinstance(sinks, dict) and (slot := slots.get(id(weight))) and slot.record.trained:
            yield sinks, slot
