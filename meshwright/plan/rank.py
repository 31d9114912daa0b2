"""What one rank holds and does in a step, for `plan`, `cost`, `memory` and `dryrun`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.engine.sharding.server import rank_bytes
from meshwright.plan.communication import Traffic, by_line, mean_traffic, stage_calls
from meshwright.plan.job import Job
from meshwright.plan.memory import Memory, rank_memory, rank_parameters, rank_stage
from meshwright.spec.layout.layout import REPLICAS
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.table import action_counts

STATES = ("parameters", "gradients", "master", "optimizer")
MEMORY_KINDS = (*STATES, "activations", "buffers", "peak", "offloaded")
# The kinds of memory whose peak the dry run measures, by its name for them.
PEAK_KINDS = {"activations": "activations", "gathered": "buffers", "peak": "peak", "offloaded": "offloaded"}

Counts = dict[str, int]


@dataclass(frozen=True)
class RankFigures:
    """What a rank holds and does in a step. Planned figures are exact, except for `most`, which is nearly so."""

    parameters: int
    states: Counts  # bytes on the device by kind
    calls: dict[tuple[str, str, str], Counts]  # by phase, axis and op
    schedule: Counts  # by kind of action
    most: Counts  # the peak bytes of what is held for a while


@dataclass(frozen=True)
class Expected(RankFigures):
    """What the planner expects of a rank."""

    coordinate: dict[str, int]
    layers: list[int]
    micro_batches: int


def memory_bytes(memory: Memory) -> Counts:
    return {kind: int(getattr(memory, kind)) for kind in MEMORY_KINDS}


def bytes_at_peak(memory: Memory) -> Counts:
    """What is there at the moment of the peak, by kind; its sum, to the byte, is the peak."""
    found = {kind: int(getattr(memory, kind)) for kind in ("parameters", "master", "optimizer")}
    parts = ("gradients", "activations", "buffers")
    found |= {kind: int(getattr(memory.at_peak, kind)) for kind in parts}
    peak = int(memory.peak)
    return found | {"temporary": peak - sum(found.values()), "peak": peak}


def rank_json(job: Job, pp_rank: int) -> dict[str, Any]:
    """Describes a rank of a pipeline stage: its number, parameters, calls and bytes by axis, and memory."""
    traffic = mean_traffic(job, pp_rank)
    return {
        "rank": job.layout.rank_at(pp=pp_rank),
        "parameters": rank_parameters(job, pp_rank),
        "comm": {axis: each._asdict() for axis, each in traffic.items()},
        "memory": memory_bytes(rank_memory(job, pp_rank)),
    }


def expected(job: Job, rank: int) -> Expected:
    coordinate = job.layout.coordinate(rank)
    axes = ["tp", "cp", "dp", "pp"]
    if job.layout.replicas > 1:  # the last step of a round, which a dry run takes
        axes.append(REPLICAS)
        job = replace(job, step=job.config.train.local.steps, replica=coordinate[REPLICAS])
    if job.config.model.experts.count:
        coordinate, axes = coordinate | job.layout.expert_coordinate(rank), [*axes, "ep", "etp"]
    pp_rank, job = coordinate["pp"], replace(job, rank=rank)
    memory = memory_bytes(rank_memory(job, pp_rank))
    c = job.config
    calls = by_line(stage_calls(job, pp_rank))
    if servers := c.train.server.ranks:  # ranks differ there, and `calls` of the reducer is their mean
        for line, mean in calls.items():
            if (line.phase, line.op) == ("reduce", "all_to_all"):
                group = job.layout.group(line.axis, rank)
                own = rank_bytes(servers, len(group), group.index(rank), mean.payload_bytes // 2)
                calls[line] = Traffic(mean.calls, *own)
    table = build(c.pipeline.schedule, c.layout.pp, job.micro_batches, c.layout.chunks, rank_stage(job, pp_rank))
    return Expected(
        parameters=rank_parameters(job, pp_rank),
        states={kind: memory[kind] for kind in STATES},
        calls={line: traffic._asdict() for line, traffic in calls.items()},
        schedule=action_counts(table.ranks[pp_rank]),
        most={name: memory[kind] for name, kind in PEAK_KINDS.items()},
        coordinate={axis: coordinate[axis] for axis in axes},
        layers=[layer for stage in job.chunks[pp_rank] for layer in stage.layers],
        micro_batches=job.micro_batches,
    )
