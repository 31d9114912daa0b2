"""What one rank will hold and do in a step, from the config alone: the plan beside `meshwright dryrun`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.sections import Config
from meshwright.pipeline.schedules import build
from meshwright.pipeline.table import action_counts
from meshwright.plan.communication import by_line, job_of, parameters, stage_calls
from meshwright.plan.states import rank_memory
from meshwright.sharding.placement import divided

STATES = ("parameters", "gradients", "master", "optimizer")
# What is held at once for a while, by the planner's name for it.
MOST = {"activations": "activations", "gathered": "buffers", "peak": "peak"}

Counts = dict[str, int]


@dataclass(frozen=True)
class Expected:
    """Exact: `parameters`, `states` in bytes by kind, `calls` by phase, axis and op, `schedule` by kind of action.
    Nearly so: `most`, the bytes that are held at once."""

    coordinate: dict[str, int]
    layers: list[int]
    micro_batches: int
    parameters: int
    states: Counts
    calls: dict[tuple[str, str, str], Counts]
    schedule: Counts
    most: Counts


def expected(config: Config, world: int, rank: int) -> Expected:
    job = job_of(config, world)
    coordinate = job.layout.coordinate(rank)
    pp_rank = coordinate["pp"]
    held = job.held(pp_rank)
    _, memory = rank_memory(config, world, rank)
    lines = by_line(stage_calls(job, pp_rank))
    c = config.layout
    stage = divided(job.layout, config.zero)[0]
    table = build(config.pipeline.schedule, c.pp, job.micro_batches, c.chunks, stage)
    return Expected(
        coordinate={axis: coordinate[axis] for axis in ("tp", "cp", "dp", "pp")},
        layers=[layer for part in held for layer in part.layers],
        micro_batches=job.micro_batches,
        parameters=sum(param.record.numel for param in parameters(job, held)),
        states={kind: int(getattr(memory, kind)) for kind in STATES},
        calls={(line.phase, line.axis, line.op): t._asdict() for line, t in lines.items()},
        schedule=action_counts(table.ranks[pp_rank]),
        most={name: int(getattr(memory, kind)) for name, kind in MOST.items()},
    )
