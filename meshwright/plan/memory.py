"""Predicts the memory of one rank in a step, by kind, and the peak of the bytes allocated at once. No torch.

For Meshwright's own stacks, states are exact to the byte, and activations and the peak nearly so (`meshwright dryrun`
checks them). Other programs store the same tensors in other ways, which their stack describes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.config.memory import Place
from meshwright.config.precision import PRECISIONS
from meshwright.plan.activations import rank_activations
from meshwright.plan.cluster import Cluster
from meshwright.plan.gathered import UnitBytes, whole_bytes
from meshwright.plan.held import packing_of, records_once, unit_records
from meshwright.plan.job import Job, remember
from meshwright.plan.matrices import matrix_bytes, owned_state_bytes, whole_state_bytes
from meshwright.plan.stack import BYTES
from meshwright.spec.model.part import SINGLE_RANK
from meshwright.spec.schedule.table import MEANING, WEIGHT
from meshwright.spec.traffic.communicators import Communicator, communicators
from meshwright.spec.traffic.fragments import fragment_bounds
from meshwright.spec.traffic.placement import RING, UpdateKind, copy_axis, piece_size, update_kind

GIB = 2**30
DEEPSPEED_LIVE, DEEPSPEED_BUCKET = 1e9, 5e8  # DeepSpeed's stage3_max_live_parameters and reduce_bucket_size
# The device memory of an NCCL communicator, from the sizes in its source. A connection has about 9 MiB of buffers in
# each channel (4 MiB for large messages, 5 for small ones), and a ring with trees has three to five connections. So 16
# to 24 channels take 0.4 to 0.9 GiB, and two to four channels 0.05 to 0.2 GiB. Links inside a node need fewer buffers.
# This was not measured: nvidia-smi before and after `Mesh.warm_up` would show it.
COMMUNICATOR_GIB, SMALL_COMMUNICATOR_GIB = 0.8, 0.1
PAIRED = 4  # Bytes of a master weight that is stored in two halves and copied whole.
PROGRAM_GIB = 0.5  # Python and torch in a process without an accelerator.


class MemoryMoment(NamedTuple):
    """The bytes at one moment of a step.

    Bytes that are allocated all the time are left out, except for the gradients of `Memory.at_peak`.
    """

    total: float
    activations: float = 0.0
    buffers: float = 0.0
    gradients: float = 0.0  # Gradients that are not allocated all the time.
    temporary: float = 0.0  # Workspace of kernels and the loss, and reduced gradients on their way to a sum.

    @classmethod
    def of(cls, *parts: float) -> MemoryMoment:
        """Return the moment with these parts, in the order of the fields after `total`."""
        return cls(sum(parts), *parts)


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank by kind: the maximum of each kind over a step."""

    pp_rank: int
    parameters: float
    gradients: float
    master: float
    optimizer: float
    activations: float  # Of all micro-batches in flight.
    buffers: float  # Gathered weights, whole gradients, and chunks of offloaded states in flight.
    peak: float  # The most that is allocated at once in a step.
    offloaded: float  # Activations in host memory.
    at_peak: MemoryMoment  # The moment of the peak. Parameters, masters and moments are allocated all the time.

    @property
    def states(self) -> float:
        """The bytes of parameters, gradients, masters and optimizer states."""
        return self.parameters + self.gradients + self.master + self.optimizer


class BufferSizes(NamedTuple):
    """The sizes of one flat buffer."""

    buckets: list[int]  # The elements of each bucket, padding included, in the order of backward.
    stage: int  # The effective stage of ZeRO.
    shards: int  # The number of ranks that shard it.
    trained: bool
    element: int = 0  # Bytes of an element, if they differ from those of other weights.
    mixed: bool = False  # True if its gradients are summed by a reducer that mixes elements.
    outer_mixed: bool = False  # True if the sums of replicas also use such a reducer.
    ranks: int = 1  # The number of ranks that sum its gradients.
    node: int = 0  # The number of ranks of a node that keep a copy of its weights.
    update: UpdateKind = UpdateKind()  # The rule that updates it.


@remember("zero")
def buffer_sizes(job: Job, pp_rank: int) -> list[BufferSizes]:
    """Return the sizes of the flat buffers of a rank."""
    sizes = []
    layout = job.layout
    usual = BYTES[job.config.train.precision]
    for one in packing_of(job, pp_rank).buffers:
        stage, axes, _ = one.division(layout, job.config.zero)
        ranks = layout.size(one.data_axes)
        element = 0 if one.weight == usual else one.weight
        sizes.append(BufferSizes(
            one.buckets, stage, layout.size(axes) if axes else 1, one.trained, element, one.mixed and ranks > 1,
            one.mixed and not one.partial, ranks, node_copy_ranks(job, one.data_axes), one.update,
        ))  # fmt: skip
    return sizes


def node_copy_ranks(job: Job, data_axes: str) -> int:
    """Return the number of ranks that share a node's copy of the weights, or 0 if nodes keep none."""
    axis = copy_axis(job.layout, job.config.zero, job.config.comm.gather, data_axes)
    return job.layout.size(axis) if axis else 0


def rank_stage(job: Job, pp_rank: int) -> int:
    """Return the highest ZeRO stage of a rank's buffers. Those of experts may be sharded when others are not."""
    return max(one.stage for one in buffer_sizes(job, pp_rank))


@remember()
def rank_parameters(job: Job, pp_rank: int, trained: bool = False) -> int:
    """Return the number of parameters of a rank of this pipeline stage before ZeRO shards them.

    Tied parameters count once. With `trained`, only trained parameters count.
    """
    records = records_once(job.rank_units(pp_rank), job.at)
    return sum(count * record.values.numel for record, count in records if record.trained or not trained)


def copied_bytes(job: Job) -> int:
    """Return the bytes that all ranks together send to the next node for one copy (`checkpoint.memory_every`).

    These are the masters and moments of every parameter, each once, since ranks that hold the same values divide them.
    The same number of bytes is kept on the ranks' own nodes. The state of a compressed reduction is not included.
    """
    s = job.states
    master = PAIRED if s.paired else s.master or s.param
    records = job.model.records(SINGLE_RANK).values()
    return whole_state_bytes(job) + sum(
        record.values.numel * (master + sum(s.of_rule(update_kind(record)))) for record in records
    )


def is_offloaded(job: Job, place: Place) -> bool:
    """Return True if states kept in `place` are off the device. For a CPU, host memory is the device."""
    return place is Place.DISK or (place is Place.HOST and not job.host)


def ring_bytes(job: Job, sizes: BufferSizes) -> int:
    """Return the device bytes of the chunks in which one buffer's states are updated.

    States pass through such chunks if they are offloaded, or stored in another precision than they are updated in. An
    accelerator's fused kernel takes any precision and needs no chunks.
    """
    s, wide = job.states, max(4, job.states.param)
    elsewhere = is_offloaded(job, s.optimizer_at)
    if s.fused and wide == 4 and s.params_at is Place.DEVICE and not (job.host or elsewhere):
        return 0
    kinds = [*[s.master] * (s.master > 0 and not s.paired), *s.of_rule(sizes.update)]
    brought = sum(elsewhere or size != wide for size in kinds)
    # Without masters the weights themselves are updated. A CPU reads them in place, even from a file.
    if not s.master:
        brought += s.param != wide or (s.params_at is not Place.DEVICE and not job.host)
    shares = [n // sizes.shards for n in sizes.buckets]
    return brought * RING * piece_size(int(job.config.zero.offload.buffer_mib * 2**20 // wide), shares) * wide


def _states(job: Job, sizes: BufferSizes) -> tuple[float, float, float, float]:
    """Return the bytes of a buffer's parameters, gradients, masters and moments that persist between steps."""
    s = job.states
    zero = sizes.stage
    whole = sum(sizes.buckets)
    own = whole / sizes.shards if job.stack.states else whole // sizes.shards
    parameters = 0.0
    if s.keeps_param or zero <= 2:
        parameters = (own if zero == 3 else whole) * (sizes.element or s.param)
    parameters += whole // sizes.node * (sizes.element or s.param) if sizes.node else 0.0
    gradients = (own if zero >= 2 else whole) * (s.grad + s.grad_copy)
    gradients += (own if zero >= 1 else whole) * s.step_copy
    shards = sizes.shards if zero else 1
    gathered = whole // sizes.ranks if sizes.ranks > shards else 0
    gradients += job.sums.state_bytes(whole, s.grad, gathered) if sizes.mixed or not job.sums.mixes else 0
    master = (own if zero >= 1 else whole) * s.master
    optimizer = (own if zero >= 1 else whole) * sum(s.of_rule(sizes.update)) + outer_bytes(job, sizes)
    if is_offloaded(job, s.optimizer_at):
        master = optimizer = 0.0
        if s.buckets and zero >= 2:
            # DeepSpeed copies gradients to the host in the precision of the parameters.
            gradients = own * s.param
    if is_offloaded(job, s.params_at) and zero == 3:
        parameters = 0.0
    return (parameters, gradients, master, optimizer) if sizes.trained else (parameters, 0.0, 0.0, 0.0)


def outer_bytes(job: Job, sizes: BufferSizes) -> int:
    """Return the bytes that replicas keep to synchronise a buffer.

    These are the outer parameters, their momentum, sums that arrive with a delay, and the remainder that compression
    left out.
    """
    local, replicas = job.config.train.local, job.layout.replicas
    if replicas == 1:
        return 0
    shares = [bucket // (sizes.shards if sizes.stage else 1) for bucket in sizes.buckets]
    padded = sum(fragment_bounds(share, 1, replicas)[-1][1] for share in shares)
    wide = max(4, job.states.param)
    kept = job.outer_sums.state_bytes(padded, wide) if sizes.outer_mixed else 0
    return (sum(shares) * (1 + local.has_momentum) + padded * (local.delay > 0)) * wide + kept


def rank_states(job: Job, pp_rank: int) -> tuple[float, float, float, float]:
    """Return the bytes of a rank's parameters, gradients, masters and moments that persist between steps."""
    parameters, gradients, master, optimizer = (
        sum(each) for each in zip(*(_states(job, one) for one in buffer_sizes(job, pp_rank)), strict=True)
    )
    return parameters, gradients, master, optimizer + owned_state_bytes(job, pp_rank)


def rank_memory(job: Job, pp_rank: int) -> Memory:
    """Return the memory of one rank of a pipeline stage."""
    sizes, states = buffer_sizes(job, pp_rank), rank_states(job, pp_rank)
    held = job.chunks[pp_rank]
    chunks, forwards, before, offloaded = rank_activations(job, pp_rank)
    kept = max(forwards)
    # Gradients that are allocated while activations are freed are counted at each moment. The update needs all of them.
    later = job.states.grad * sum(sum(one.buckets) for one in sizes if one.stage < 2 and one.trained)
    later *= job.releases_gradients
    most = max(MemoryMoment.of(total, 0.0, 0.0, chunk.loss) for total, chunk in zip(forwards, chunks, strict=True))
    buffers = 0.0
    for number, (chunk, whole) in enumerate(zip(chunks, whole_bytes(job, pp_rank), strict=True)):
        following = [0.0, *(each.weights for each in whole[:-1])]  # Weights of the next unit, gathered ahead.
        in_flight = [each.gradients + each.weights + ahead for each, ahead in zip(whole, following, strict=True)]
        buffers = max(buffers, *in_flight)
        head = whole[-1]
        # The head's gradients are computed with the loss, and its weights are the last that forward gathers. The
        # gradient of a tied table is kept until backward begins, and then added to the table's gradient.
        with_loss = in_flight[-1] - following[-1] - head.tied
        most = max(most, MemoryMoment.of(forwards[number], with_loss, head.lasting, chunk.loss + head.shares))
        most = max(most, MemoryMoment.of(forwards[number], in_flight[-1], head.lasting, head.shares))
        for op, total in before[number].items():
            uses = MEANING[op].uses_weights
            adds = WEIGHT in MEANING[op].produces
            for moment in chunk.backward[op]:
                kept = max(kept, total + moment.kept)
                rows = _rows_gradient(job) if held[number].first and moment.unit == 0 and adds else 0.0
                weights = whole[moment.unit].weights + following[moment.unit] if uses else 0.0
                # Before weight gradients are computed, there are only the head's, which the loss has computed.
                without_units = head if held[number].last else UnitBytes()
                present = whole[moment.unit] if adds else without_units
                working = moment.working + rows + present.shares
                most = max(
                    most, MemoryMoment.of(total + moment.kept, weights + present.gradients, present.lasting, working)
                )

    more: float  # Bytes that are added to every moment.
    if job.stack.own:
        more = sum(ring_bytes(job, one) for one in sizes if one.trained)
        buffers += more
    else:
        more = gathered_bytes(job, pp_rank)
        buffers = more + most.total - kept
    # At the update all gradients are allocated and no activations.
    most = max(most, MemoryMoment.of(0.0, 0.0, later, matrix_bytes(job, pp_rank)))
    peak = sum(states) + most.total - later + more
    gradients = most.gradients + states[1] - later
    at_peak = most._replace(total=peak, buffers=most.buffers + more, gradients=gradients)
    return Memory(pp_rank, *states, kept, buffers, peak, offloaded, at_peak)


def _rows_gradient(job: Job) -> float:
    """Return the bytes of the embedding's whole gradient, which is a temporary if gradients are not summed in fp32."""
    if PRECISIONS[job.config.train.grad_dtype].is_wide:
        return 0.0
    return float(max(record.numel for record in unit_records(job.model.embedding, job.at)) * job.states.param)


def gathered_bytes(job: Job, pp_rank: int) -> float:
    """Return the bytes that other programs gather, reduce, send and receive at once.

    These are the weights of two layers and one layer's gradient, or DeepSpeed's fixed buckets, and the activations that
    pass between stages.
    """
    s, zero = job.states, job.sharding_over()[0]
    params = rank_parameters(job, pp_rank)
    layer = 0
    layers = 0
    for unit, count in job.rank_units(pp_rank):
        if unit.stackable:
            size = sum(record.numel for record in unit_records(unit, job.at))
            layer = max(layer, size)
            layers = layers + count * size
    ends = params - layers
    passed = 4 * job.batch.rows(job.at) * job.model.hidden * job.batch.element if job.layout.pp > 1 else 0
    # The embedding, the head and a gradient are also live.
    if s.buckets and zero == 3:
        return (min(params, DEEPSPEED_LIVE) + min(params, DEEPSPEED_BUCKET)) * s.param + 1.5 * ends * s.param + passed
    if s.buckets and zero:
        return 2 * min(params, DEEPSPEED_BUCKET) * s.param + passed
    if zero == 3:
        return 2 * layer * s.param + layer * s.grad + ends * s.param + passed
    return passed + (2 * layer * s.grad if zero == 2 else 0.0)


def _different_ranks(job: Job) -> list[int]:
    """Return the pipeline ranks that may have the highest peak.

    Among ranks with equal layers, that is the first or the last, depending on how a schedule fills the pipeline.
    """
    last = {first: rank for rank, first in enumerate(job.representative_ranks)}
    return sorted({*last, *last.values()})


def largest(job: Job, enough: float = math.inf) -> Memory:
    """Return the memory of the pipeline rank with the highest peak, or of the first one whose peak is above `enough`
    bytes."""
    most: Memory | None = None
    for rank in _different_ranks(job):
        memory = rank_memory(job, rank)
        if most is None or memory.peak > most.peak:
            most = memory
        if memory.peak > enough:
            break
    assert most is not None
    return most


def states_gib(job: Job) -> float:
    """Return the GiB of the states alone, on the rank that has the most of them."""
    return max(sum(rank_states(job, rank)) for rank in set(job.representative_ranks)) / GIB


class DeviceMemory(NamedTuple):
    """The GiB that a step needs on a device, in the parts that `plan`, `cost` and `memory` print."""

    tensors: float  # Allocated at the peak.
    reserve: float  # Held by the allocator beyond that.
    context: float  # Outside the allocator: the device's context and communicators.

    @property
    def total(self) -> float:
        """All GiB that the step needs."""
        return sum(self)

    def as_json(self) -> dict[str, float]:
        """Return the parts and their total by key."""
        parts = {"tensors_gib": self.tensors, "reserve_gib": self.reserve, "context_gib": self.context}
        return parts | {"total_gib": self.total}

    def words(self) -> str:
        """Describe the parts as a sum."""
        return (
            f"tensors at the peak {self.tensors:.1f} + allocator reserve {self.reserve:.1f} + context and "
            f"communicators {self.context:.1f}"
        )


def device_memory(job: Job, cluster: Cluster, memory: Memory | None = None) -> DeviceMemory:
    """Return the memory that a step needs on a device, for the given rank or the one with the highest peak."""
    memory = memory or largest(job)
    # The allocator reserves more than the peak: activations of many sizes are allocated and freed, which leaves gaps.
    reserve = (job.stack.cache - 1.0) * (memory.peak - memory.states)
    return DeviceMemory(memory.peak / GIB, reserve / GIB, context_gib(job, cluster))


def needed_gib(job: Job, cluster: Cluster, memory: Memory | None = None, enough_gib: float = math.inf) -> float:
    """Return the GiB of device memory that a step needs, including the context and communication buffers.

    Above `enough_gib`, the result may be less than the need, which then is above it too.
    """
    if memory is None:
        memory = largest(job, (enough_gib - context_gib(job, cluster)) * GIB)
    return device_memory(job, cluster, memory).total


def context_gib(job: Job, cluster: Cluster) -> float:
    """Return the GiB outside the allocator: context and communication buffers, or on a CPU the program itself."""
    if cluster.device.units == 1:
        return PROGRAM_GIB
    return job.stack.base_gib + communicators_gib(job)


@remember("zero")
def communicators_gib(job: Job) -> float:
    """Return the GiB of the communicators of the rank that has the most of them."""
    # The communicators of another program are not known. Assume one for each axis.
    if not job.stack.own:
        return COMMUNICATOR_GIB * sum(job.layout.size(axis) > 1 for axis in ("tp", "pp", "dp-cp"))
    # Ranks differ by their stage alone: the first and the last share an embedding, and the others have two neighbours.
    stages = {0, min(1, job.layout.pp - 1), job.layout.pp - 1, *job.layout.first_and_last}
    ranks = [job.layout.rank_at(pp=stage) for stage in stages]
    return max(sum(map(_gib, communicators(job.config, job.layout, rank))) for rank in ranks)


def _gib(communicator: Communicator) -> float:
    return SMALL_COMMUNICATOR_GIB if communicator.is_small else COMMUNICATOR_GIB
