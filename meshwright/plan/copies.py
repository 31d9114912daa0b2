"""What copies of the ranks' shares in memory take: the bytes of one checkpoint. No torch."""

from __future__ import annotations

from meshwright.plan.job import Job
from meshwright.spec.model.graph import parameter_count

PAIRED = 4  # bytes of a master that is stored in two halves, and copied whole


def copied_bytes(job: Job) -> int:
    """Returns the bytes that all ranks together pass on to the next node with one copy (`checkpoint.memory_every`):
    masters and moments of every parameter, each once, since ranks that hold the same divide it. As many stay with the
    ranks' own node. What a compressed reduction keeps comes on top."""
    s = job.states
    master = PAIRED if s.paired else s.master or s.param
    return parameter_count(job.model) * (master + s.moment * s.moments)
