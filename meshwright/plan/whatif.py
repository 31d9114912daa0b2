"""Simulates one step on every pipeline rank, also with a slow link, a slow rank or missing nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.config.rules import batch_unit
from meshwright.errors import UserError, nearest, plural
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import Cost, blocked_times, predict_cost, timeline_of
from meshwright.plan.job import Job
from meshwright.spec.schedule.simulate import Simulation
from meshwright.spec.schedule.trace import REDUCED, UPDATED, Span, spans_of

WHOLE_TABLE = 10**9  # A table of any size is simulated, since it is drawn.
CHANGE_KINDS = ("slow-link", "slow-network", "slow-rank", "fewer-nodes", "imbalance")


@dataclass(frozen=True)
class Change:
    """One hypothetical change of a step, as `--what-if` gives it."""

    kind: str
    # The share of the speed that is left, the number of missing nodes, or the busiest rank's rows over the mean.
    factor: float
    rank: int = -1  # The slow pipeline rank.

    def __str__(self) -> str:
        if self.kind == "fewer-nodes":
            return f"{plural(round(self.factor), 'node')} fewer"
        if self.kind == "imbalance":
            return f"the busiest rank's experts have {self.factor:g} x the mean rows"
        what = {"slow-link": "the links inside nodes", "slow-network": "the network between nodes"}
        return f"{what.get(self.kind, f'pipeline rank {self.rank}')} at {100 * self.factor:.0f} % speed"


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step: its predicted cost, the timeline of its pipeline, and its total seconds."""

    cost: Cost
    timeline: Simulation
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of all devices."""
        return self.cost.job.tokens / self.seconds


def parse_change(text: str) -> Change:
    """Parse `slow-link=0.5`, `slow-network=0.5`, `slow-rank=3:0.7`, `fewer-nodes=1` or `imbalance=1.3`."""
    kind, _, value = text.partition("=")
    if kind not in CHANGE_KINDS:
        raise UserError(
            f"--what-if '{text}'{nearest(kind, CHANGE_KINDS)}: "
            "write slow-link=0.5, slow-network=0.5, slow-rank=3:0.7, fewer-nodes=1 or imbalance=1.3"
        )
    rank, _, factor = value.rpartition(":") if kind == "slow-rank" else ("", "", value)
    try:
        change = Change(kind, float(factor), int(rank) if rank else -1)
    except ValueError:
        example = {"slow-rank": "3:0.7", "fewer-nodes": "1", "imbalance": "1.3"}.get(kind, "0.5")
        raise UserError(f"--what-if '{text}' needs a number after '=', e.g. {kind}={example}") from None
    if kind == "slow-rank" and change.rank < 0:
        raise UserError(f"--what-if '{text}' must name the pipeline rank, e.g. slow-rank=3:0.7")
    if kind == "fewer-nodes":
        if not 1 <= change.factor < math.inf or change.factor != int(change.factor):
            raise UserError(f"--what-if '{text}': give a whole number of nodes, at least 1")
    elif kind == "imbalance":
        check_imbalance(f"--what-if '{text}'", change.factor)
    elif not 0 < change.factor <= 1:
        raise UserError(f"--what-if '{text}': the share of the speed that is left must be above 0 and at most 1")
    return change


def step_of(job: Job, cluster: Cluster, changes: Sequence[Change] = ()) -> SimulatedStep:
    """Simulate the step with all `changes` applied."""
    slow: dict[int, float] = {}
    for change in changes:
        if change.kind == "slow-link":
            cluster = replace(cluster, node=replace(cluster.node, link_gb_s=cluster.node.link_gb_s * change.factor))
        elif change.kind == "slow-network":
            rate = cluster.network.node_gb_s * change.factor
            cluster = replace(cluster, network=replace(cluster.network, node_gb_s=rate))
        elif change.kind == "slow-rank":
            if change.rank >= job.layout.pp:
                raise UserError(f"there is no pipeline rank {change.rank}: choose 0 to {job.layout.pp - 1}")
            slow[change.rank] = change.factor
        elif change.kind == "imbalance":
            job = with_imbalance(job, change.factor)
        else:
            job = without_nodes(job, int(change.factor))
    cost = predict_cost(job, cluster, largest=WHOLE_TABLE)
    # A slow rank changes the timeline alone, so the step grows by the difference of the makespans.
    timeline = _timeline(cost, slow)
    usual = timeline if not slow else _timeline(cost, {})
    return SimulatedStep(cost, timeline, cost.step_s + timeline.makespan - usual.makespan)


def check_imbalance(given: str, factor: float) -> None:
    """Raise an error unless the busiest rank's rows over the mean are finite and at least 1.

    The error message begins with `given`.
    """
    if not 1 <= factor < math.inf:
        raise UserError(f"{given}: the busiest rank's rows over the mean are at least 1, e.g. 1.3")


def with_imbalance(job: Job, factor: float) -> Job:
    """Return the job in which the busiest rank's experts get `factor` times the mean rows."""
    ep, experts = job.layout.ep, job.config.model.experts
    if not experts.count or ep == 1:
        why = "the model has no experts" if not experts.count else "every rank computes its own rows with layout.ep=1"
        raise UserError(f"an imbalance of {factor:g} changes nothing, since {why}: leave it out")
    if experts.capacity is not None:
        raise UserError(f"an imbalance of {factor:g} changes nothing, since the capacity fixes the rows: leave it out")
    if factor > ep:
        raise UserError(f"an imbalance of {factor:g} is more than ep={ep}, where one rank has all rows: give less")
    return replace(job, imbalance=factor)


def without_nodes(job: Job, nodes: int) -> Job:
    """Return the same layout on fewer nodes.

    Fewer data-parallel ranks share a batch, which is rounded down to a multiple that they can divide.
    """
    config, node = job.config, job.node_size
    unit = config.layout.least_world
    world = (job.world - nodes * node) // unit * unit
    if world < unit:
        raise UserError(
            f"without {nodes} nodes of {node} too few of {job.world} devices are left for tp x cp x pp = {unit}: "
            "remove fewer"
        )
    samples = batch_unit(config, world)[0]
    batch = job.global_batch // samples * samples
    fewer = replace(job.with_keys(train={"global_batch": batch}, layout={"node_size": node}), world=world)
    # The layout is built, and its sizes checked, when it is first read.
    try:
        assert fewer.layout.world == world
    except UserError as error:
        raise UserError(f"without {nodes} nodes: {error}") from None
    return fewer


def _timeline(cost: Cost, slow: dict[int, float]) -> Simulation:
    return timeline_of(cost.job, blocked_times(cost.job, cost.chunk_times, cost.send_s, slow), cost.send_s)


def step_spans(step: SimulatedStep) -> list[Span]:
    """Return the pipeline's spans, followed on every rank by the exposed reduction and the optimizer's update."""
    spans = list(spans_of(step.timeline))
    end = step.timeline.makespan
    axes = step.cost.axes
    reduced = [name for name in ("dp", "edp") if name in axes]
    # From ZeRO stage 2 on, every micro-batch includes its reduction.
    after = reduced and step.cost.job.config.zero.stage < 2
    later = [(REDUCED, sum(axes[name].exposed_seconds for name in reduced))] if after else []
    later += [("tied embedding", axes["embedding"].exposed_seconds)] if "embedding" in axes else []
    later.append((UPDATED, step.cost.optimizer_s))
    for rank in range(step.cost.job.layout.pp):
        at = end
        for name, seconds in later:
            spans.append(Span(rank, "step", name, at, at + seconds))
            at += seconds
    return spans
