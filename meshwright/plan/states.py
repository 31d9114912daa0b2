"""The exact size of a rank's states: the records of its parameters in training's flat buffers. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.config.sections import Config
from meshwright.layout.params import ParamRecord
from meshwright.models.description import GPTDescription, Stage, layout_of, stages
from meshwright.pipeline.table import looped
from meshwright.plan.activations import activations, passing
from meshwright.plan.communication import job_of
from meshwright.plan.memory import Memory
from meshwright.plan.workload import Workload, workload_of
from meshwright.sharding.placement import backward_order, bucket_elements, divided, place

FILLING = 3  # whole buckets of gradients from stage 2 on: one that is filled, two on their way


def held_stages(config: Config, pp_rank: int) -> list[Stage]:
    """The chunks of a pipeline rank, in the order of the layers."""
    c = config
    every = stages(c.model.layers, c.layout.pp * c.layout.chunks, c.pipeline.split)
    placement = looped(c.layout.pp, c.layout.chunks)
    return [stage for stage, (rank, _) in zip(every, placement, strict=True) if rank == pp_rank]


def records(config: Config, pp_rank: int) -> Iterator[tuple[ParamRecord, tuple[int, str]]]:
    """A rank's parameters in the order of forward with the unit (embedding, block, head) each belongs to."""
    c = config
    description = GPTDescription(c.model, c.layout.tp, 0, c.layout.sequence_parallel, c.layout.pp)
    tied: set[str] = set()
    for stage in held_stages(config, pp_rank):
        for name, record in description.stage(stage).items():
            if record.tied not in tied:
                words = name.split(".")
                yield record, (stage.index, ".".join(words[:2]) if words[0] == "blocks" else words[0])
            tied |= {record.tied} - {""}


def bucket_sizes(config: Config, w: Workload, pp_rank: int) -> list[list[int]]:
    """Elements of every bucket, padding included, in the order of backward, by buffer."""
    layout = layout_of(config, w.world, w.node_size)
    keyed = backward_order(records(config, pp_rank), lambda item: (item[0].data_axes, item[0].partial))
    found = []
    for (data_axes, _), items in keyed.items():
        ranks = layout.size(data_axes)
        full = bucket_elements(config.comm.bucket_mib * 2**20, w.states.grad)
        groups: Mapping[object, list[int]]
        if w.parallel.zero == 3:
            units: dict[object, list[int]] = {}
            for record, unit in items:
                units.setdefault(unit, []).append(record.numel)
            groups, full = units, 2**62
        else:
            groups = {None: [record.numel for record, _ in items]}
        placed = [place(sizes, ranks, full)[1] for sizes in groups.values()]
        found.append([stop - start for buckets in placed for start, stop in buckets])
    return found


def rank_memory(
    config: Config, world: int, rank: int, extras: Mapping[str, str] | None = None
) -> tuple[Workload, Memory]:
    """One rank's memory, its states to the byte."""
    w = workload_of(config, world, config.layout.node_size, extras)
    pp_rank = w.layout.coordinate(rank)["pp"]
    return w, exact(config, w, pp_rank)


def exact(config: Config, w: Workload, pp_rank: int) -> Memory:
    """What our own program allocates on a rank: states and activations to the byte, buffers and the peak nearly so."""
    p, s = w.parallel, w.states
    sizes = bucket_sizes(config, w, pp_rank)
    whole = sum(map(sum, sizes))
    shards = p.shard_ranks
    zero = divided(layout_of(config, w.world, w.node_size), config.zero)[0]
    own = whole // shards
    parameters = (own if zero == 3 else whole) * s.param
    gradients = (own if zero >= 2 else whole) * s.grad
    master = (own if zero >= 1 else whole) * s.master
    optimizer = (own if zero >= 1 else whole) * s.moment * s.moments
    if s.optimizer_on != "device":
        master = optimizer = 0
    if s.params_on != "device" and zero == 3:
        parameters = 0
    job = job_of(config, w.world)
    kept = activations(config, job, pp_rank)
    # Gradients of the bucket that is filled and of those on their way; weights of the unit in use and of the next. Most
    # activations are there when backward begins, so it is the first buckets that meet them.
    def flying(counts: list[int]) -> int:
        parts = 2 * max(counts[:2]) // shards if job.micro_batches > 1 else 0
        weights = sum(counts[:2]) * s.param if zero == 3 else 0
        return weights + ((sum(counts[:FILLING]) + parts) * s.grad if zero >= 2 else 0)

    buffers = max(flying(counts[at:]) for counts in sizes for at in range(len(counts)))
    first = max(flying(counts) for counts in sizes)
    peak = parameters + gradients + master + optimizer + kept + first + passing(config, job, pp_rank)
    return Memory(pp_rank, parameters, gradients, master, optimizer, kept, buffers, peak)
