"""The bytes of one rank in a step, by kind, and the peak of what is allocated at once. No torch. For Meshwright's own
stacks states are exact to the byte, and activations and peak nearly so (`meshwright dryrun` checks them). Other
programs keep the same tensors in their own ways, which their stack describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.plan.activations import rank_activations
from meshwright.plan.cluster import Cluster
from meshwright.plan.gathered import Whole, whole_bytes
from meshwright.plan.held import packing_of, records_once, unit_records
from meshwright.plan.job import Job, remembered
from meshwright.plan.matrices import matrix_bytes
from meshwright.plan.stack import BYTES
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.model.part import ALONE
from meshwright.spec.schedule.table import MEANING, WEIGHT
from meshwright.spec.traffic.communicators import Communicator, communicators
from meshwright.spec.traffic.fragments import fragment_bounds
from meshwright.spec.traffic.placement import RING, copy_axis, piece_size

GIB = 2**30
DEEPSPEED_LIVE, DEEPSPEED_BUCKET = 1e9, 5e8  # DeepSpeed's stage3_max_live_parameters and reduce_bucket_size
# Device memory of an NCCL communicator, from the sizes in its source: a connection has about 9 MiB of buffers in each
# channel (4 MiB for large messages, 5 for small ones), and a ring with trees has three to five connections. So 16 to 24
# channels take 0.4 to 0.9 GiB, where a node's links need fewer buffers, and two to four channels 0.05 to 0.2 GiB. Not
# measured: nvidia-smi before and after `Mesh.warm_up` would tell.
COMMUNICATOR_GIB, SMALL_COMMUNICATOR_GIB = 0.8, 0.1
PAIRED = 4  # bytes of a master that is stored in two halves, and copied whole
PROGRAM_GIB = 0.5  # Python and torch in a process without an accelerator


class Moment(NamedTuple):
    """The bytes at one moment of a step, those that are always there left out of all but an `at_peak`'s gradients."""

    total: float
    activations: float = 0.0
    buffers: float = 0.0
    gradients: float = 0.0  # those of them that are not there all the time
    temporary: float = 0.0  # what kernels and the loss work with, and reduced gradients on their way to a sum

    @classmethod
    def of(cls, *parts: float) -> Moment:
        return cls(sum(parts), *parts)


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank, by kind: the most of each."""

    pp_rank: int
    parameters: float
    gradients: float
    master: float
    optimizer: float
    activations: float  # all micro-batches in flight
    buffers: float  # gathered weights, whole gradients, and pieces of states in flight
    peak: float  # the most that is allocated at once in a step
    offloaded: float  # activations in host memory
    at_peak: Moment  # the moment of the peak; parameters, masters and moments are always there

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.master + self.optimizer


class BufferSizes(NamedTuple):
    """The sizes of one flat buffer."""

    buckets: list[int]  # elements, padding included, in the order of backward
    stage: int  # of ZeRO
    shards: int  # ranks that shard it
    trained: bool
    element: int = 0  # bytes, where they are not those of other weights
    mixed: bool = False  # a reducer that mixes elements sums its gradients
    outer_mixed: bool = False  # and what replicas sum of it
    ranks: int = 1  # that sum its gradients
    node: int = 0  # ranks of a node that keep a copy of its weights
    matrices: bool = False  # the optimizer updates its matrices as wholes


@remembered("zero")
def buffer_sizes(job: Job, pp_rank: int) -> list[BufferSizes]:
    """Returns the flat buffers of a rank."""
    found, layout, usual = [], job.layout, BYTES[job.config.train.precision]
    for one in packing_of(job, pp_rank).buffers:
        stage, axes, _ = one.division(layout, job.config.zero)
        ranks, element = layout.size(one.data_axes), 0 if one.weight == usual else one.weight
        found.append(BufferSizes(
            one.buckets, stage, layout.size(axes) if axes else 1, one.trained, element, one.mixed and ranks > 1,
            one.mixed and not one.partial, ranks, node_copy_ranks(job, one.data_axes), one.matrices,
        ))  # fmt: skip
    return found


def node_copy_ranks(job: Job, data_axes: str) -> int:
    axis = copy_axis(job.layout, job.config.zero, job.config.comm.gather, data_axes)
    return job.layout.size(axis) if axis else 0


def rank_stage(job: Job, pp_rank: int) -> int:
    """Returns the highest ZeRO stage of a rank's buffers: those of experts may be divided where others are not."""
    return max(one.stage for one in buffer_sizes(job, pp_rank))


@remembered()
def rank_parameters(job: Job, pp_rank: int, trained: bool = False) -> int:
    """Returns the parameters of a rank at this pipeline rank, or those that are trained, before ZeRO shards them; tied
    ones count once."""
    records = records_once(job.rank_units(pp_rank), job.at)
    return sum(count * record.values.numel for record, count in records if record.trained or not trained)


def copied_bytes(job: Job) -> int:
    """Returns the bytes that all ranks together pass on to the next node with one copy (`checkpoint.memory_every`):
    masters and moments of every parameter, each once, since ranks that hold the same divide it. As many stay with the
    ranks' own node. What a compressed reduction keeps comes on top."""
    s = job.states
    master = PAIRED if s.paired else s.master or s.param
    matrices = sum(record.numel for record in job.model.records(ALONE).values() if record.matrices)
    others = parameter_count(job.model) - matrices
    return others * (master + sum(s.rule)) + matrices * (master + sum(s.matrix_rule))


def is_offloaded(job: Job, place: str) -> bool:
    """Returns whether states kept in `place` are off the device; a CPU's own memory is its device."""
    return place == "disk" or (place == "cpu" and not job.host)


def ring_bytes(job: Job, sizes: BufferSizes) -> int:
    """Returns the device bytes of the pieces of one buffer's states that are being updated, where the states are
    offloaded or stored in another precision than they are updated in; an accelerator's kernel takes any."""
    s, wide = job.states, max(4, job.states.param)
    elsewhere = is_offloaded(job, s.optimizer_on)
    if s.fused and wide == 4 and s.params_on == "device" and not (job.host or elsewhere):
        return 0
    kinds = [*[s.master] * (s.master > 0 and not s.paired), *s.of_rule(sizes.matrices)]
    brought = sum(elsewhere or size != wide for size in kinds)
    if not s.master:  # the weights are their own masters; a CPU reads them in place, even from a file
        brought += s.param != wide or (s.params_on != "device" and not job.host)
    shares = [n // sizes.shards for n in sizes.buckets]
    return brought * RING * piece_size(int(job.config.zero.offload.buffer_mib * 2**20 // wide), shares) * wide


def _states(job: Job, sizes: BufferSizes) -> tuple[float, float, float, float]:
    """Returns the bytes of a buffer's parameters, gradients, masters and moments that persist between steps."""
    s, zero, whole = job.states, sizes.stage, sum(sizes.buckets)
    own = whole / sizes.shards if job.stack.states else whole // sizes.shards
    parameters = (own if zero == 3 else whole) * (sizes.element or s.param) if s.keeps_param or zero <= 2 else 0.0
    parameters += whole // sizes.node * (sizes.element or s.param) if sizes.node else 0.0
    gradients = (own if zero >= 2 else whole) * (s.grad + s.grad_copy)
    gradients += (own if zero >= 1 else whole) * s.step_copy
    gathered = whole // sizes.ranks if sizes.ranks > (sizes.shards if zero else 1) else 0
    gradients += job.sums.state_bytes(whole, s.grad, gathered) if sizes.mixed or not job.sums.mixes else 0
    master = (own if zero >= 1 else whole) * s.master
    optimizer = (own if zero >= 1 else whole) * sum(s.of_rule(sizes.matrices)) + outer_bytes(job, sizes)
    if is_offloaded(job, s.optimizer_on):
        master = optimizer = 0.0
        if s.buckets and zero >= 2:
            gradients = own * s.param  # DeepSpeed copies them to the host in this precision
    if is_offloaded(job, s.params_on) and zero == 3:
        parameters = 0.0
    return (parameters, gradients, master, optimizer) if sizes.trained else (parameters, 0.0, 0.0, 0.0)


def outer_bytes(job: Job, sizes: BufferSizes) -> int:
    """Returns the bytes of what replicas keep to synchronise a buffer: the outer parameters, their momentum, what
    arrives with a delay and what compression left out."""
    local, replicas = job.config.train.local, job.layout.replicas
    if replicas == 1:
        return 0
    shares = [bucket // (sizes.shards if sizes.stage else 1) for bucket in sizes.buckets]
    padded, wide = sum(fragment_bounds(share, 1, replicas)[-1][1] for share in shares), max(4, job.states.param)
    kept = job.outer_sums.state_bytes(padded, wide) if sizes.outer_mixed else 0
    return (sum(shares) * (1 + (local.outer == "nesterov")) + padded * (local.delay > 0)) * wide + kept


def rank_states(job: Job, pp_rank: int) -> tuple[float, float, float, float]:
    """Returns the bytes of a rank's parameters, gradients, masters and moments that persist between steps."""
    parameters, gradients, master, optimizer = (
        sum(each) for each in zip(*(_states(job, one) for one in buffer_sizes(job, pp_rank)), strict=True)
    )
    return parameters, gradients, master, optimizer


def rank_memory(job: Job, pp_rank: int) -> Memory:
    """Returns the memory of one rank of a pipeline stage."""
    sizes, states = buffer_sizes(job, pp_rank), rank_states(job, pp_rank)
    held = job.chunks[pp_rank]
    chunks, forwards, before, away = rank_activations(job, pp_rank)
    kept = max(forwards)
    # Gradients that come while activations go are counted where they are there; an update needs all of them.
    later = job.states.grad * sum(sum(one.buckets) for one in sizes if one.stage < 2 and one.trained)
    later *= job.releases_gradients
    most = max(Moment.of(total, 0.0, 0.0, chunk.loss) for total, chunk in zip(forwards, chunks, strict=True))
    buffers = 0.0
    for number, (chunk, whole) in enumerate(zip(chunks, whole_bytes(job, pp_rank), strict=True)):
        following = [0.0, *(each.weights for each in whole[:-1])]  # those of the next unit are gathered ahead
        flying = [each.gradients + each.weights + ahead for each, ahead in zip(whole, following, strict=True)]
        buffers = max(buffers, *flying)
        head = whole[-1]
        # The head's gradients are computed with the loss, and its weights are the last that forward gathers. A shared
        # table's are kept until backward begins, and are then added to the table's place.
        with_loss = flying[-1] - following[-1] - head.tied
        most = max(most, Moment.of(forwards[number], with_loss, head.lasting, chunk.loss + head.shares))
        most = max(most, Moment.of(forwards[number], flying[-1], head.lasting, head.shares))
        for op, total in before[number].items():
            uses, adds = MEANING[op].uses_weights, WEIGHT in MEANING[op].produces
            for moment in chunk.backward[op]:
                kept = max(kept, total + moment.kept)
                rows = _rows_gradient(job) if held[number].first and moment.unit == 0 and adds else 0.0
                weights = whole[moment.unit].weights + following[moment.unit] if uses else 0.0
                # Before weight gradients are computed, there are only those that the loss has computed.
                come = whole[moment.unit] if adds else head if held[number].last else Whole()
                working = moment.working + rows + come.shares
                most = max(most, Moment.of(total + moment.kept, weights + come.gradients, come.lasting, working))
    more: float  # in all moments
    if job.stack.own:
        more = sum(ring_bytes(job, one) for one in sizes if one.trained)
        buffers += more
    else:
        more = gathered_bytes(job, pp_rank)
        buffers = more + most.total - kept
    most = max(most, Moment.of(0.0, 0.0, later, matrix_bytes(job, pp_rank)))  # at the update all gradients are there
    peak = sum(states) + most.total - later + more
    gradients = most.gradients + states[1] - later
    at_peak = most._replace(total=peak, buffers=most.buffers + more, gradients=gradients)
    return Memory(pp_rank, *states, kept, buffers, peak, away, at_peak)


def _rows_gradient(job: Job) -> float:
    """Returns the bytes of the embedding's whole gradient, a temporary where gradients are not summed in fp32."""
    if job.config.train.grad_dtype == "fp32":
        return 0.0
    return float(max(record.numel for record in unit_records(job.model.embedding, job.at)) * job.states.param)


def gathered_bytes(job: Job, pp_rank: int) -> float:
    """Returns what other programs gather, reduce, send and receive at once: two layers and one layer's gradient, or
    fixed buckets; and the activations that pass between stages."""
    s, zero = job.states, job.sharding()[0]
    params, layer, layers = rank_parameters(job, pp_rank), 0, 0
    for unit, count in job.rank_units(pp_rank):
        if unit.stackable:
            size = sum(record.numel for record in unit_records(unit, job.at))
            layer, layers = max(layer, size), layers + count * size
    ends = params - layers
    passed = 4 * job.batch.rows(job.at) * job.model.hidden * job.batch.element if job.layout.pp > 1 else 0
    if s.buckets and zero == 3:  # both ends and a gradient are also live
        return (min(params, DEEPSPEED_LIVE) + min(params, DEEPSPEED_BUCKET)) * s.param + 1.5 * ends * s.param + passed
    if s.buckets and zero:
        return 2 * min(params, DEEPSPEED_BUCKET) * s.param + passed
    if zero == 3:
        return 2 * layer * s.param + layer * s.grad + ends * s.param + passed
    return passed + (2 * layer * s.grad if zero == 2 else 0.0)


def _different_ranks(job: Job) -> list[int]:
    """Returns the pipeline ranks to compare: of those with equal layers, the first or the last has the most in flight,
    whichever way a schedule fills the pipeline."""
    last = {first: rank for rank, first in enumerate(job.representative_ranks)}
    return sorted({*last, *last.values()})


def largest(job: Job) -> Memory:
    """Returns the memory of the pipeline rank with the highest peak."""
    return max((rank_memory(job, rank) for rank in _different_ranks(job)), key=lambda memory: memory.peak)


def states_gib(job: Job) -> float:
    """Returns the GiB of the states alone, on the rank that has the most of them."""
    return max(sum(rank_states(job, rank)) for rank in set(job.representative_ranks)) / GIB


class DeviceMemory(NamedTuple):
    """The GiB that a step needs of a device, in the parts that `plan`, `cost` and `memory` print."""

    tensors: float  # allocated at the peak
    reserve: float  # what the allocator holds beyond that
    context: float  # outside the allocator: the device's context and communicators

    @property
    def total(self) -> float:
        return sum(self)

    def as_json(self) -> dict[str, float]:
        parts = {"tensors_gib": self.tensors, "reserve_gib": self.reserve, "context_gib": self.context}
        return parts | {"total_gib": self.total}

    def words(self) -> str:
        return (
            f"tensors at the peak {self.tensors:.1f} + allocator reserve {self.reserve:.1f} + context and "
            f"communicators {self.context:.1f}"
        )


def device_memory(job: Job, cluster: Cluster, memory: Memory | None = None) -> DeviceMemory:
    """Returns what a step needs of a device, of one rank or of the one with the highest peak."""
    memory = memory or largest(job)
    # The allocator reserves more than the peak: activations of many sizes come and go, which leaves gaps.
    reserve = (job.stack.cache - 1.0) * (memory.peak - memory.states)
    return DeviceMemory(memory.peak / GIB, reserve / GIB, context_gib(job, cluster))


def needed_gib(job: Job, cluster: Cluster, memory: Memory | None = None) -> float:
    """Returns the GiB of device memory that a step needs, including the context and communication buffers."""
    return device_memory(job, cluster, memory).total


def context_gib(job: Job, cluster: Cluster) -> float:
    """Returns the GiB outside the allocator: context and communication buffers, or on a CPU the program itself."""
    if cluster.device.units == 1:
        return PROGRAM_GIB
    return job.stack.base_gib + communicators_gib(job)


@remembered("zero")
def communicators_gib(job: Job) -> float:
    """Returns the GiB of the communicators of the rank that has the most of them."""
    if not job.stack.own:  # another program's are not known: one for each axis
        return COMMUNICATOR_GIB * sum(job.layout.size(axis) > 1 for axis in ("tp", "pp", "dp-cp"))
    # Ranks differ by their stage alone: the ends share an embedding, and the others have two neighbours.
    stages = {0, min(1, job.layout.pp - 1), job.layout.pp - 1, *job.layout.first_and_last}
    ranks = [job.layout.rank_at(pp=stage) for stage in stages]
    return max(sum(map(_gib, communicators(job.config, job.layout, rank))) for rank in ranks)


def _gib(communicator: Communicator) -> float:
    return SMALL_COMMUNICATOR_GIB if communicator.is_small else COMMUNICATOR_GIB
