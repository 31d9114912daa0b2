"""The planner's predictions for a run: bytes by axis, memory, time of a step, and pipeline timeline. No torch."""

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
# `planned_means` plans every kind of step separately, which takes time, so it gives up above this number of kinds.
MOST_KINDS = 16
KINDS = ("parameters", "gradients", "master", "optimizer", "activations", "buffers")


def planned_bytes(config: Config, world: int, samples: int, monitored: int, **at: int) -> dict[str, dict[str, int]]:
    """Return the planned calls and bytes of one step by axis, summed over all ranks, like `comm` in metrics.jsonl.

    `samples` is the step's global batch, `monitored` its number of monitored values. `at` may give its `step` number.
    """
    # The planner itself adds the values that the training objective monitors.
    others = max(0, monitored - len(config.monitored_names))
    predicted = predict_step(config, world, samples=samples, monitored=others, **at)
    return {axis: dict(traffic._asdict()) for axis, traffic in predicted.items()}


def step_kind(config: Config, step: int) -> dict[str, int]:
    """Return the `step` argument that the planner needs to tell this step from others; empty if all steps are alike.

    Replicas synchronise only in some steps. In every `faults.check_every`-th step, ranks also compare the values that
    they hold in common. All such steps send the same bytes, so the first one stands for all of them.
    """
    every = config.faults.check_every
    if config.layout.replicas > 1:
        return {"step": step}
    return {"step": every} if every and step % every == 0 else {}


def planned_means(config: Config, world: int, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the planned mean wire bytes of these steps by axis, all ranks together.

    Axes that can't be planned are left out. The result is empty if the steps are of too many kinds, if one was skipped,
    or if one was in the warm-up of `comm.reduce`, which sums gradients in another way.
    """
    kinds = Counter((int(line.get("global_batch") or 0), len(line.get("monitored") or {}),
                     *step_kind(config, line["step"]).values()) for line in lines)  # fmt: skip
    mean_bytes: dict[str, float] = defaultdict(float)
    warmup = config.comm.reduce.warmup_steps
    if len(kinds) > MOST_KINDS or any(line["step"] <= warmup or line.get("skipped") for line in lines):
        return {}
    try:
        for (samples, monitored, *at), count in kinds.items():
            named = dict(zip(("step",), at, strict=False))
            for axis, traffic in planned_bytes(config, world, samples, monitored, **named).items():
                mean_bytes[axis] += traffic["wire_bytes"] * count / len(lines)
    except Exception:
        # The run may use a feature that the planner does not know. Its summary must be shown all the same.
        return {}
    return {axis: count for axis, count in mean_bytes.items() if axis not in unplanned_axes(config)}


def hint_of(device: str, world: int, cluster: Cluster | None) -> str:
    """Return a sentence that explains how to get a prediction of step times for this machine.

    It is shown if no cluster is known for the device, or only one with the figures of a typical CPU (`cluster`).
    """
    measure = f"meshwright comm bench --nproc {world} --out here.yaml"
    why = f"{cluster.name} stands for any CPU" if cluster else f"no prediction for {device}"
    return f"{why}: measure this machine with `{measure}`, then give --cluster here.yaml"


def planned_memory(job: Job) -> dict[str, float]:
    memory: Memory = largest(job)
    return {kind: float(getattr(memory, kind)) for kind in KINDS} | {"peak": memory.peak}


def planned_step(config: Config, world: int, cluster: Cluster, node: int) -> tuple[dict[str, Any], SimulatedStep]:
    """Return the predicted figures of a step, with its seconds by part, and the simulated step itself."""
    job = job_of(config, world, cluster_node=node, host=cluster.device.units == 1)
    step = step_of(job, cluster)
    cost = step.cost
    exposed = {f"{name} exposed": axis.exposed_seconds for name, axis in cost.axes.items() if axis.exposed_seconds > 0}
    parts = {"compute": cost.compute_s, "bubble": cost.idle_s, **exposed, "optimizer": cost.optimizer_s}
    rest = cost.step_s - sum(parts.values())
    if rest > 0:
        parts["waits and the rest"] = rest
    figures = {
        "cluster": cluster.name, "step_s": cost.step_s, "mfu": cost.mfu, "parts": parts, "bubble": cost.bubble,
        "tokens_per_s": job.tokens / cost.step_s,
    }  # fmt: skip
    return figures, step


def simulated_spans(config: Config, traced: Spans, step: SimulatedStep | None) -> dict[str, Any] | None:
    """Return the schedule's timeline, to be drawn beside the traced one; None if it can't be simulated.

    It uses the planner's times if there is a planned `step`, otherwise the mean times in the traced step.
    """
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
    """Simulate the config's schedule, where each kind of action of a chunk takes its mean time in the traced step."""
    times: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for rank, track, name, start, end, chunk in traced:
        if track == "compute":
            times[rank, chunk, name[:1]].append(end - start)
    counts = {len(durations) for durations in times.values()}
    pp, chunks = config.layout.pp, config.layout.chunks
    letters = {letter for _, _, letter in times}

    # Every chunk must have all its actions, each once per micro-batch. Otherwise the trace is of something else.
    complete = letters in ({"F", "B"}, {"F", "I", "W"}) and len(times) == len(letters) * pp * chunks
    if len(counts) != 1 or not complete:
        return None
    table = build(config.pipeline.schedule, pp, counts.pop(), chunks)

    def mean(*kinds: str) -> Any:
        return lambda rank, chunk: sum(sum(times[rank, chunk, k]) / len(times[rank, chunk, k]) for k in kinds)

    backward = sorted(letters - {"F"})
    return simulate(table, mean("F"), mean(*backward), 0.0, mean("W") if "W" in letters else None)


def bubble_of(spans: Sequence[Sequence[Any]], pp: int) -> float | None:
    """Return the idle share of the pipeline's time in a timeline, from its first to its last computation."""
    computed = [(start, end) for _, track, _, start, end, _ in spans if track == "compute"]
    if not computed or pp < 2:
        return None
    took = max(end for _, end in computed) - min(start for start, _ in computed)
    return 1.0 - sum(end - start for start, end in computed) / (pp * took) if took > 0 else None
