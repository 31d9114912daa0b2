"""What the planner says of a run: its bytes by axis, its memory, its step's time, and its pipeline. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.config.sections import Config
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import predict_step
from meshwright.plan.communication import unplanned_axes as unplanned_axes
from meshwright.plan.job import Job, job_of
from meshwright.plan.memory import Memory, largest
from meshwright.plan.whatif import SimulatedStep, step_of, step_spans
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.simulate import Simulation, simulate
from meshwright.spec.schedule.trace import spans_of

Spans = list[list[Any]]
MOST_KINDS = 16  # of steps, for which a mean is planned
KINDS = ("parameters", "gradients", "master", "optimizer", "activations", "buffers")


def planned_bytes(config: Config, world: int, samples: int, monitored: int, **at: int) -> dict[str, dict[str, int]]:
    """Calls and bytes by axis of one step, summed over all ranks: what metrics.jsonl calls `comm`."""
    others = max(0, monitored - len(config.monitored))  # the plan knows those of the objective itself
    found = predict_step(config, world, samples=samples, monitored=others, **at)
    return {axis: dict(traffic._asdict()) for axis, traffic in found.items()}


def step_kind(config: Config, step: int) -> dict[str, int]:
    """What the plan must know of a step's number: replicas synchronise in some steps, and ranks compare what they hold
    alike in every `faults.check_every`-th one."""
    every = config.faults.check_every
    if config.layout.replicas > 1:
        return {"step": step}
    return {"step": every} if every and step % every == 0 else {}


def planned_means(config: Config, world: int, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By axis, the wire bytes that are planned of the mean of these steps, all ranks together: only of axes that can be
    planned, and nothing where steps are of too many kinds, or some were skipped or summed in another way."""
    kinds = Counter((int(line.get("global_batch") or 0), len(line.get("monitored") or {}),
                     *step_kind(config, line["step"]).values()) for line in lines)  # fmt: skip
    found: dict[str, float] = defaultdict(float)
    warmup = config.comm.reduce.warmup_steps
    if len(kinds) > MOST_KINDS or any(line["step"] <= warmup or line.get("skipped") for line in lines):
        return {}
    try:
        for (samples, monitored, *at), count in kinds.items():
            named = dict(zip(("step",), at, strict=False))
            for axis, traffic in planned_bytes(config, world, samples, monitored, **named).items():
                found[axis] += traffic["wire_bytes"] * count / len(lines)
    except Exception:  # a run may have what the planner does not know, and its summary is shown nevertheless
        return {}
    return {axis: count for axis, count in found.items() if axis not in unplanned_axes(config)}


def hint_of(device: str, world: int, cluster: Cluster | None) -> str:
    """Why no seconds are predicted for a run on such devices, or only usual ones, and what to do for it."""
    measure = f"meshwright comm bench --nproc {world} --out here.yaml"
    why = f"{cluster.name} stands for any CPU" if cluster else f"no prediction for {device}"
    return f"{why}: measure this machine with `{measure}`, then give --cluster here.yaml"


def planned_memory(job: Job) -> dict[str, float]:
    memory: Memory = largest(job)
    return {kind: float(getattr(memory, kind)) for kind in KINDS} | {"peak": memory.peak}


def planned_step(config: Config, world: int, cluster: Cluster, node: int) -> tuple[dict[str, Any], SimulatedStep]:
    """The predicted seconds of a step by part, and the step itself."""
    job = job_of(config, world, cluster_node=node, host=cluster.device.units == 1)
    step = step_of(job, cluster)
    cost = step.cost
    exposed = {f"{name} exposed": axis.exposed for name, axis in cost.axes.items() if axis.exposed > 0}
    parts = {"compute": cost.compute_s, "bubble": cost.idle_s, **exposed, "optimizer": cost.optimizer_s}
    rest = cost.step_s - sum(parts.values())
    if rest > 0:
        parts["waits and the rest"] = rest
    found = {
        "cluster": cluster.name, "step_s": cost.step_s, "mfu": cost.mfu, "parts": parts, "bubble": cost.bubble,
        "tokens_per_s": job.tokens / cost.step_s,
    }  # fmt: skip
    return found, step


def simulated_spans(config: Config, traced: Spans, step: SimulatedStep | None) -> dict[str, Any] | None:
    """The timeline that the schedule has: with the planner's times, or with the mean times of the traced step."""
    if step is not None:
        spans = [[s.rank, s.track, s.name, s.start, s.end, s.args.get("chunk", 0)] for s in step_spans(step)]
        return {"how": "the planner's times", "spans": spans, "bubble": step.timeline.bubble}
    timeline = _with_means(config, traced)
    if timeline is None:
        return None
    spans = [[s.rank, s.track, s.name, s.start, s.end, s.args.get("chunk", 0)] for s in spans_of(timeline)]
    how = "the traced step's mean times, as if nothing else took any"
    return {"how": how, "spans": spans, "bubble": timeline.bubble}


def _with_means(config: Config, traced: Spans) -> Simulation | None:
    times: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for rank, track, name, start, end, chunk in traced:
        if track == "compute":
            times[rank, chunk, name[:1]].append(end - start)
    counts = {len(found) for found in times.values()}
    pp, chunks = config.layout.pp, config.layout.chunks
    letters = {letter for _, _, letter in times}
    whole = letters in ({"F", "B"}, {"F", "I", "W"}) and len(times) == len(letters) * pp * chunks
    if len(counts) != 1 or not whole:  # a trace of something else
        return None
    table = build(config.pipeline.schedule, pp, counts.pop(), chunks)

    def mean(*of: str) -> Any:
        return lambda rank, chunk: sum(sum(times[rank, chunk, each]) / len(times[rank, chunk, each]) for each in of)

    backward = sorted(letters - {"F"})
    return simulate(table, mean("F"), mean(*backward), 0.0, mean("W") if "W" in letters else None)


def bubble_of(spans: Sequence[Sequence[Any]], pp: int) -> float | None:
    """The idle share of the pipeline's time in a timeline, without what follows the last backward."""
    computed = [(start, end) for _, track, _, start, end, _ in spans if track == "compute"]
    if not computed or pp < 2:
        return None
    took = max(end for _, end in computed) - min(start for start, _ in computed)
    return 1.0 - sum(end - start for start, end in computed) / (pp * took) if took > 0 else None
