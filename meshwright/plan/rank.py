"""Predicts the figures of one rank in a step for `plan`, `cost`, `memory` and `dryrun`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.plan.communication import Traffic, by_line, mean_traffic, stage_calls
from meshwright.plan.job import Job
from meshwright.plan.memory import Memory, rank_memory, rank_parameters, rank_stage
from meshwright.spec.layout.layout import REPLICAS
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.table import action_counts

STATES = ("parameters", "gradients", "master", "optimizer")
MEMORY_KINDS = (*STATES, "activations", "buffers", "peak", "offloaded")
# The kinds of memory whose peak the dry run measures, by the dry run's name for them.
PEAK_KINDS = {"activations": "activations", "gathered": "buffers", "peak": "peak", "offloaded": "offloaded"}

Counts = dict[str, int]


@dataclass(frozen=True)
class PlannedRank:
    """The memory, calls and actions of a rank in a step. Planned figures are exact, except for `most`."""

    parameters: int
    states: Counts  # Bytes on the device by kind.
    calls: dict[tuple[str, str, str], Counts]  # By (phase, axis, op).
    schedule: Counts  # By kind of action.
    most: Counts  # The peak bytes of memory that is held only for a part of the step; planned nearly exactly.


@dataclass(frozen=True)
class ExpectedRank(PlannedRank):
    """The figures that the planner expects of a rank, with its place in the layout."""

    coordinate: dict[str, int]
    layers: list[int]
    micro_batches: int


def memory_bytes(memory: Memory) -> Counts:
    """Return the bytes of each kind of memory as integers."""
    return {kind: int(getattr(memory, kind)) for kind in MEMORY_KINDS}


def bytes_at_peak(memory: Memory) -> Counts:
    """Return the bytes at the moment of the peak by kind, and the peak, which is exactly their sum."""
    counts = {kind: int(getattr(memory, kind)) for kind in ("parameters", "master", "optimizer")}
    parts = ("gradients", "activations", "buffers")
    counts |= {kind: int(getattr(memory.at_peak, kind)) for kind in parts}
    peak = int(memory.peak)
    return counts | {"temporary": peak - sum(counts.values()), "peak": peak}


def rank_json(job: Job, pp_rank: int) -> dict[str, Any]:
    """Describe a rank of a pipeline stage: its number, parameters, calls and bytes by axis, and memory."""
    traffic = mean_traffic(job, pp_rank)
    return {
        "rank": job.layout.rank_at(pp=pp_rank),
        "parameters": rank_parameters(job, pp_rank),
        "comm": {axis: each._asdict() for axis, each in traffic.items()},
        "memory": memory_bytes(rank_memory(job, pp_rank)),
    }


def planned_rank(job: Job, rank: int) -> ExpectedRank:
    """Return the figures that the planner expects of a rank in one step."""
    coordinate = job.layout.coordinate(rank)
    axes = ["tp", "cp", "dp", "pp"]
    # A dry run of replicas takes the last step of a round.
    if job.layout.replicas > 1:
        axes.append(REPLICAS)
        job = replace(job, step=job.config.train.local.steps, replica=coordinate[REPLICAS])
    if job.config.model.experts.count:
        coordinate = coordinate | job.layout.expert_coordinate(rank)
        axes = [*axes, "ep", "etp"]
    pp_rank = coordinate["pp"]
    job = replace(job, rank=rank)
    memory = memory_bytes(rank_memory(job, pp_rank))
    config = job.config
    calls = by_line(stage_calls(job, pp_rank))
    # The ranks of a group may send different amounts, and the reducer's calls are their mean.
    for line, mean in calls.items():
        if line.phase == "reduce":
            group = job.layout.group(line.axis, rank)
            sent = (mean.payload_bytes, mean.wire_bytes)
            calls[line] = Traffic(mean.calls, *job.sums.of_rank(line.op, sent, len(group), group.index(rank)))
    table = build(
        config.pipeline.schedule, config.layout.pp, job.micro_batches, config.layout.chunks, rank_stage(job, pp_rank)
    )
    return ExpectedRank(
        parameters=rank_parameters(job, pp_rank),
        states={kind: memory[kind] for kind in STATES},
        calls={line: traffic._asdict() for line, traffic in calls.items()},
        schedule=action_counts(table.ranks[pp_rank]),
        most={name: memory[kind] for name, kind in PEAK_KINDS.items()},
        coordinate={axis: coordinate[axis] for axis in axes},
        layers=[layer for stage in job.chunks[pp_rank] for layer in stage.layers],
        micro_batches=job.micro_batches,
    )
