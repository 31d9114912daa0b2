"""What our own program allocates on a rank: its states, to the byte, from the records of its parameters in training's
flat buffers, what it keeps for backward, and the most that is there at once. No torch."""

from __future__ import annotations

from meshwright.config.sections import Config
from meshwright.plan.activations import activations, passing, rows_grad
from meshwright.plan.communication import Job, job_of, packed, parameters
from meshwright.plan.memory import Memory
from meshwright.plan.workload import States, Workload, workload_of
from meshwright.sharding.placement import RING, divided, piece_size

FILLING = 3  # whole buckets of gradients from stage 2 on: one that is filled, two on their way


def bucket_sizes(job: Job, pp_rank: int) -> list[list[int]]:
    """Elements of every bucket, padding included, in the order of backward, by buffer."""
    c = job.config
    params = [(param, c.train.precision) for param in parameters(job, job.held(pp_rank))]
    buffers = packed(params, job.layout, c.comm.bucket_mib, c.zero, c.train.grad_dtype)
    return [[stop - start for start, stop in buffer.buckets] for buffer in buffers]


def rank_memory(config: Config, world: int, rank: int) -> tuple[Workload, Memory]:
    """One rank's memory, its states to the byte."""
    w = workload_of(config, world)
    pp_rank = w.layout.coordinate(rank)["pp"]
    return w, exact(config, w, pp_rank)


def away(config: Config, place: str) -> bool:
    """Whether what lives in `place` is not on the device: a CPU's own memory is."""
    return place == "disk" or (place == "cpu" and config.run.device != "cpu")


def ring_bytes(config: Config, s: States, shares: list[int]) -> int:
    """On the device, the pieces of one buffer's states that are updated: where these live elsewhere or are kept in
    another precision than they are updated in."""
    wide = max(4, s.param)
    elsewhere = away(config, s.optimizer_on)
    kinds = [s.master] * (s.master > 0) + [s.moment] * s.moments
    brought = sum(elsewhere or size != wide for size in kinds)
    if not s.master:  # the weights are their own masters; on a CPU they are at hand even in a file
        brought += s.param != wide or (s.params_on != "device" and config.run.device != "cpu")
    return brought * RING * piece_size(int(config.zero.offload.buffer_mib * 2**20 // wide), shares) * wide


def exact(config: Config, w: Workload, pp_rank: int) -> Memory:
    """What our own program allocates on a rank: states and activations to the byte, buffers and the peak nearly so."""
    s = w.states
    job = job_of(config, w.world)
    sizes = bucket_sizes(job, pp_rank)
    whole = sum(map(sum, sizes))
    zero, axes, _ = divided(job.layout, config.zero)
    shards = job.layout.size(axes) if axes else 1
    own = whole // shards
    parameters = (own if zero == 3 else whole) * s.param
    gradients = (own if zero >= 2 else whole) * s.grad
    master = (own if zero >= 1 else whole) * s.master
    optimizer = (own if zero >= 1 else whole) * s.moment * s.moments
    if away(config, s.optimizer_on):
        master = optimizer = 0
    if away(config, s.params_on) and zero == 3:
        parameters = 0
    kept = activations(config, job, pp_rank)
    # Gradients of the bucket that is filled and of those on their way; weights of the unit in use and of the next. Most
    # activations are there when backward begins, so it is the first buckets that meet them.
    def flying(counts: list[int]) -> int:
        parts = 2 * max(counts[:2]) // shards if job.micro_batches > 1 else 0
        weights = sum(counts[:2]) * s.param if zero == 3 else 0
        return weights + ((sum(counts[:FILLING]) + parts) * s.grad if zero >= 2 else 0)

    rings = sum(ring_bytes(config, s, [n // shards for n in counts]) for counts in sizes)
    buffers = max(flying(counts[at:]) for counts in sizes for at in range(len(counts))) + rings
    first = max(flying(counts) for counts in sizes)
    lasting = parameters + gradients + master + optimizer
    peak = max(
        lasting + kept + first + rings + passing(config, job, pp_rank),
        lasting + buffers + rows_grad(job, pp_rank),  # the last buckets, when no activations are left
    )
    return Memory(pp_rank, parameters, gradients, master, optimizer, kept, buffers, peak)
