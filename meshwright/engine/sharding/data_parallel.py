"""Data parallelism on contiguous buffers, for every ZeRO stage: gradients are reduced bucket by bucket while backward
still runs, and weights are gathered before they are needed.

Stage 0: every rank owns whole buckets, and a bucket is summed once per step, over the axes that its records name.
Stage 1: a rank owns its share of each bucket, so the sum is scattered, and after the update the weights are gathered.
Stage 2: whole gradients exist for one micro-batch only: a bucket is scattered once per micro-batch and added up there.
Stage 3: whole weights exist while a unit uses them: see `weights`.

Each buffer has a stage and groups of its own, since its records say over which ranks their gradients are summed.
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
from meshwright.config.sections import ZeroConfig
from meshwright.engine.sharding.buffers import (
    REDUCER,
    Bucket,
    BufferKey,
    FlatBuffer,
    Rows,
    SideState,
    Slot,
    State,
    build_buffers,
    with_widest_rows,
)  # fmt: skip
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, PendingReduction, Reducer, ReducerPlan, mixing
from meshwright.engine.sharding.reduction import EveryMicroBatch, OncePerStep
from meshwright.engine.sharding.weights import GatedUnit, WeightGatherer, find_units, number_units
from meshwright.errors import UserError
from meshwright.nn.weight_grad import Sink, SinkTable, VectorGradients
from meshwright.spec.traffic.ledger import Ledger
from meshwright.spec.traffic.placement import Split, copy_axis, shard_axes

OwnWeight = tuple[dict[str, Tensor], Slot]  # the handles of a layer, and where its weight lies

NORM_PIECE = 1 << 15


class DataGroups(NamedTuple):
    """The ranks that divide a buffer among them, and those that hold the same share of it."""

    shards: Group
    replicas: Group


class DataParallel:
    """The gradients of one rank's chunks, from the first contribution of a step to the reduced sum. `buffers` are all
    of them, `trained` those with gradients, `buckets` the latter's buckets."""

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
        """Moves the modules' parameters into buffers. `seed` initialises those that have no memory yet. `outer`: how
        parameters are summed over `layout.replicas`, if at all. `releases_grads`: gradients in stages 0 and 1 have
        memory only from a step's backward to its update, which needs steps of one micro-batch."""
        overlap = overlap or OverlapConfig()
        self.mesh, self.reducer = mesh, reducer
        modules, self._zero = list(modules), zero or ZeroConfig()
        self._groups: dict[BufferKey, DataGroups] = {}
        self._counted: list[Tensor] | None = None
        self._device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        units = find_units(modules)
        params_at = (self._zero.offload.params, Path(self._zero.offload.path))
        self.buffers, slots = build_buffers(
            modules, self._split, bucket_mib, number_units(units), grad_dtype, params_at, seed,
            (mesh.layout, align) if (align := mixing(reducer, outer)) else None, releases_grads,
        )  # fmt: skip
        self.stage = max((buffer.split.stage for buffer in self.buffers), default=0)
        self._check_ties()
        self.weights = WeightGatherer(units, slots, self.buffers, lambda each: self.groups(each).shards, mesh.ledger)
        self.weights.overlaps, self.weights.gather = overlap.weights, gather or GatherConfig()
        for buffer in self.buffers:
            if name := copy_axis(mesh.layout, self._zero, self.weights.gather, buffer.key.data_axes):
                self.weights.copies.keep(buffer, mesh.group(name))
        self.trained = [buffer for buffer in self.buffers if buffer.key.trained]
        self.buckets = [bucket for buffer in self.trained for bucket in buffer.buckets]
        self._take_gradients(units, list(_own_weights(modules, slots)), overlap.gradients)
        # Called with this rank's own gradients of a bucket, before they are summed.
        self.reduces: Callable[[Bucket, Tensor], None] = lambda bucket, grads: None
        reducer.prepare(self.trained)

    def _take_gradients(self, units: list[GatedUnit], own_weights: list[OwnWeight], overlaps: bool) -> None:
        """Give every trained parameter the sink that its gradients go into."""
        # Contributions per micro-batch: one from each layer that adds its own; autograd makes one to those not listed.
        uses = Counter(id(slot.parameter) for _, slot in own_weights)
        # The chunk whose backward is the last that can fill a foreign module's bucket: the first, so it is set last.
        late = {id(b): unit.chunk for unit in reversed(units) if unit.foreign for b in unit.buckets}
        whole = [bucket for bucket in self.buckets if bucket.stage < 2]
        self._once = OncePerStep(whole, self._launch, overlaps)
        scattered = [bucket for bucket in self.buckets if bucket.stage >= 2]
        self._each = EveryMicroBatch(scattered, self._launch, uses, late, overlaps)
        self.sinks, self._vectors = SinkTable(), VectorGradients()
        first = {id(b): unit for unit in reversed(units) for b in unit.buckets}
        # Stage 3's gathers already need all ranks to run the same units in the same order. Stage 2 must not.
        for unit in (unit for unit in units if unit.closes):
            own = [bucket for bucket in unit.buckets if first[id(bucket)] is unit]
            unit.on_done = partial(self._each.end_unit, own)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.sink = (self._once if bucket.stage < 2 else self._each).sink(self.sinks, bucket, slot)
                # A bucket that is scattered in every micro-batch must be complete at its end: its gradients don't wait.
                add = self._vectors.add if bucket.stage < 2 else Sink.add
                # Buckets of foreign modules are reduced when their unit's backward ends: nothing of them is deferred.
                add = add if id(bucket) in late else partial(Sink.take, add=add)
                slot.parameter.register_post_accumulate_grad_hook(partial(_take_gradient, add, slot.sink))
        for handles, slot in own_weights:
            handles["weight"] = slot.sink.handle

    def groups(self, buffer: FlatBuffer) -> DataGroups:
        """Returns the groups over which a buffer's gradients are summed."""
        return self._groups[buffer.key]

    def _split(self, key: BufferKey) -> Split:
        stage, *axes = shard_axes(self.mesh.layout, self._zero, key.data_axes, key.trained)
        shards, replicas = (self.mesh.group(name) if name else self.mesh.alone for name in axes)
        self._groups[key] = DataGroups(shards, replicas)
        return Split(stage, shards.size, shards.index, replicas.size, replicas.index)

    def begin(self, micro_batches: int, step: int = 1, scale: float = 1.0) -> None:
        """Begins a step; called before its first micro-batch. Gradients will come multiplied by `scale`."""
        self.reducer.begin_step(step, scale)
        self.weights.copies.forget()
        self._vectors.forget()
        self._once.begin(micro_batches)
        self._each.begin(micro_batches)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.sink.reset()

    def _launch(self, bucket: Bucket, out: Tensor) -> PendingReduction:
        """Begins the reduction of a bucket: over the ranks that share it or, where each holds it whole, over all."""
        shards, replicas = self.groups(bucket.buffer)
        grads, ledger, reducer = bucket.grads.tensor, self.mesh.ledger, self._reducer_of(bucket.buffer)
        self.reduces(bucket, grads)
        with ledger.phase("reduce"), ledger.layer(None):
            if bucket.stage:
                return _Counted(reducer.reduce_scatter(bucket, out, grads, shards), ledger)
            return _Counted(reducer.all_reduce(bucket, grads, replicas), ledger)

    def _reducer_of(self, buffer: FlatBuffer) -> Reducer:
        return self.reducer if buffer.key.compressed or not self.reducer.mixes else PLAIN_REDUCER

    def gather(self, chunk: int, work: str) -> None:
        """Begins to gather the weights that a chunk's forward or backward (`work`) needs first."""
        self.weights.begin(chunk, work)

    def free(self, chunk: int) -> None:
        """Releases the gathered weights of a chunk after its forward or backward."""
        self.weights.end(chunk)

    def finish_reductions(self, chunk: int) -> None:
        """Waits for all launched reductions and releases whole gradients; called after a chunk's backward."""
        self._each.end_backward(chunk)

    def finish(self) -> None:
        """Reduces what is left, and the owned shares over the further axes; called after a step's last backward."""
        self._vectors.add_all()
        self._once.finish()
        self._each.finish()
        with self.mesh.ledger.phase("reduce"):
            for buffer in self.trained:
                replicas, reducer = self.groups(buffer).replicas, self._reducer_of(buffer)
                if buffer.split.stage and not replicas.alone:
                    _wait([reducer.all_reduce(bucket, bucket.own_grads, replicas) for bucket in buffer.buckets])
            # Axis by axis in one order for all ranks: buffers may stand in another order on another stage.
            for axis in sorted({axis for buffer in self.trained for axis in buffer.key.partial}):
                group = self.mesh.group(axis)
                for buffer in (each for each in self.trained if axis in each.key.partial):
                    _wait([group.all_reduce(bucket.own_grads, wait=False) for bucket in buffer.buckets])

    def add_to_frozen(self, parameter: nn.Parameter, change: Tensor) -> None:
        """Adds to a frozen parameter what every rank that holds it has computed alike."""
        buffer, slot = next((b, s) for b in self.buffers for s in b.slots if s.parameter is parameter)
        bucket, flat = buffer.buckets[slot.bucket], change.flatten()
        if bucket.stage < 3:
            slot.view.add_(change)
            return
        self.weights.copies.forget(bucket)
        low, high = (min(max(at, slot.start), slot.stop) for at in bucket.share)
        own = slice(low - bucket.share[0], high - bucket.share[0])
        bucket.own_params[own] += flat[low - slot.start : high - slot.start].to(bucket.own_params.device)

    def reducer_states(self) -> Iterator[State | SideState]:
        """Yields the reducer's states, as a checkpoint holds them."""
        yield from with_widest_rows(list(self._reducer_states()))

    def _reducer_states(self) -> Iterator[State | SideState]:
        found = list(self.reducer.states())
        names = {(name, buffer.key) for name, buffer, _ in found}
        for name, buffer, tensors in found:
            groups, first, size = self.groups(buffer), buffer.buckets[0], tensors[0].numel()
            apart = [] if size == first.stop - first.start else [groups.shards]  # who has a share of its own
            apart += [groups.replicas] if size < first.share[1] - first.share[0] else []  # or a part of one
            several = [self.mesh.group(axis) for axis in buffer.key.partial]
            several += [group for group in groups if not group.alone and group not in apart]
            absorbs = "" if (f"{name}.sums", buffer.key) in names else f"{REDUCER}{name}.sums"
            yield State(REDUCER + name, buffer, tensors, _row_in(several), absorbs=absorbs)
        for name, buffer, held, draw in self.reducer.side_states():
            several = [self.mesh.group(axis) for axis in buffer.key.partial]
            several += [self.groups(buffer).replicas] if buffer.split.stage else []  # which sum what each has reduced
            yield SideState(REDUCER + name, buffer, held, _row_in(several), draw)

    def _check_ties(self) -> None:
        """Refuses a tie that is trained here and frozen on the stage of its other end, which would wait forever."""
        for record in (slot.record for buffer in self.buffers for slot in buffer.slots):
            if record.tied and "embedding" in record.copies and self._device.type != "meta":
                frozen = self.mesh.group("embedding").agreed(float(not record.trained), self._device)
                if frozen and record.trained:
                    raise UserError(
                        f"{record.name} is tied and frozen on one of its two stages only: freeze it in the embedding "
                        "and in the head, or set model.tied_embeddings=false"
                    )

    def holds_first(self, slot: Slot, apart: Sequence[str] = ()) -> bool:
        """Whether this rank, or a data-parallel replica of it, is the first that holds this content. Ranks along the
        axes `apart` hold contents of their own."""
        return self.mesh.is_first(*(axis for axis in slot.record.copies if axis not in apart))

    def counts(self, buffer: FlatBuffer, slot: Slot) -> bool:
        """Whether this rank counts what it owns of `slot` in sums over all parameters (each element exactly once)."""
        return self.groups(buffer).replicas.index <= 0 and self.holds_first(slot)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Returns the sum of squares of the reduced gradients that this rank counts, for the grad norm, in float64."""
        if self._counted is None:  # found once: which ranges a rank counts never changes
            self._counted = [
                bucket.own_grads[start:stop]
                for buffer in self.trained
                for bucket, start, stop in buffer.runs(s for s in buffer.slots if self.counts(buffer, s))
            ]
        pieces = self._counted
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        narrow = [piece for piece in pieces if piece.element_size() == 2]
        others = [piece for piece in pieces if piece.element_size() > 2]
        sums = [_square_sum(part, wide) for part, wide in ((narrow, torch.float32), (others, None)) if part]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]


class _Counted:
    """A reduction under way whose calls in `wait` are counted in the phase `reduce`, whatever is computed then."""

    def __init__(self, work: PendingReduction, ledger: Ledger) -> None:
        self._work, self._ledger = work, ledger

    def wait(self) -> None:
        with self._ledger.phase("reduce"), self._ledger.layer(None):
            self._work.wait()


def _row_in(groups: Sequence[Group]) -> Rows:
    """Returns this rank's number among the ranks of several groups, and how many they are."""
    row, rows = 0, 1
    for group in groups:
        row, rows = row * group.size + group.index, rows * group.size
    return Rows(row, rows)


def _wait(works: Sequence[PendingReduction]) -> None:
    for work in works:
        work.wait()


def _square_sum(pieces: list[Tensor], wide: torch.dtype | None) -> Tensor:
    if pieces[0].device.type == "cpu":  # its kernel sums one by one in float32, so short pieces keep the error small
        pieces = [part for piece in pieces for part in piece.split(NORM_PIECE)]
        norms = list(torch._foreach_norm(pieces, dtype=wide))
    else:
        norms = [torch.linalg.vector_norm(piece, dtype=wide) for piece in pieces]
    return torch.stack(norms).double().square().sum()


def _take_gradient(add: Callable[[Sink, Tensor], None], sink: Sink, parameter: Tensor) -> None:
    """Moves a gradient that came through autograd into the flat buffer, and drops the temporary."""
    grad = parameter.grad
    if grad is not None:
        parameter.grad = None
        add(sink, grad)


def _own_weights(modules: Sequence[nn.Module], slots: dict[int, Slot]) -> Iterator[OwnWeight]:
    """Yield the trained weights of layers that add their own weight gradients, each with its layer's handles."""
    for layer in (layer for module in modules for layer in module.modules()):
        sinks, weight = getattr(layer, "sinks", None), getattr(layer, "weight", None)
        if isinstance(sinks, dict) and (slot := slots.get(id(weight))) and slot.record.trained:
            yield sinks, slot
