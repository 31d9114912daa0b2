"""Simulates one step on every pipeline rank, also with a slow link, a slow rank or missing nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.config.rules import batch_unit
from meshwright.errors import UserError, nearest, plural
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import Cost, blocked_times, predict_cost, timeline_of
from meshwright.plan.job import Job
from meshwright.spec.schedule.simulate import Simulation
from meshwright.spec.schedule.trace import REDUCED, UPDATED, Span, spans_of

WHOLE_TABLE = 10**9  # A table of any size is simulated, since it is drawn.


@dataclass(frozen=True)
class Change:
    """One hypothetical change of a step, as `--what-if` gives it."""

    kind: str
    # The share of the speed that is left, the number of missing nodes, or the busiest rank's rows over the mean.
    factor: float
    rank: int = -1  # The slow pipeline rank.

    def __str__(self) -> str:
        return CHANGES[self.kind].words(self)


class ChangeKind(NamedTuple):
    """One kind of change: its value in an example, its words, its check and its effect on the job or the cluster.

    `check` gets the words that an error message begins with. A kind that `slows_rank` changes the timeline alone.
    """

    example: str
    words: Callable[[Change], str]
    check: Callable[[str, Change], None]
    apply: Callable[[Change, Job, Cluster], tuple[Job, Cluster]]
    slows_rank: bool = False


def _slowed(name: str) -> Callable[[Change], str]:
    return lambda change: f"{name.format(rank=change.rank)} at {100 * change.factor:.0f} % speed"


def _is_share(given: str, change: Change) -> None:
    if not 0 < change.factor <= 1:
        raise UserError(f"{given}: the share of the speed that is left must be above 0 and at most 1")


def _names_rank(given: str, change: Change) -> None:
    if change.rank < 0:
        raise UserError(f"{given} must name the pipeline rank, e.g. slow-rank=3:0.7")
    _is_share(given, change)


def _counts_nodes(given: str, change: Change) -> None:
    if not 1 <= change.factor < math.inf or change.factor != int(change.factor):
        raise UserError(f"{given}: give a whole number of nodes, at least 1")


def _slow_link(change: Change, job: Job, cluster: Cluster) -> tuple[Job, Cluster]:
    rate = cluster.node.link_gb_s * change.factor
    return job, replace(cluster, node=replace(cluster.node, link_gb_s=rate))


def _slow_network(change: Change, job: Job, cluster: Cluster) -> tuple[Job, Cluster]:
    rate = cluster.network.node_gb_s * change.factor
    return job, replace(cluster, network=replace(cluster.network, node_gb_s=rate))


def _slow_rank(change: Change, job: Job, cluster: Cluster) -> tuple[Job, Cluster]:
    if change.rank >= job.layout.pp:
        raise UserError(f"there is no pipeline rank {change.rank}: choose 0 to {job.layout.pp - 1}")
    return job, cluster


CHANGES = {
    "slow-link": ChangeKind("0.5", _slowed("the links inside nodes"), _is_share, _slow_link),
    "slow-network": ChangeKind("0.5", _slowed("the network between nodes"), _is_share, _slow_network),
    "slow-rank": ChangeKind("3:0.7", _slowed("pipeline rank {rank}"), _names_rank, _slow_rank, slows_rank=True),
    "fewer-nodes": ChangeKind(
        "1", lambda change: f"{plural(round(change.factor), 'node')} fewer", _counts_nodes,
        lambda change, job, cluster: (without_nodes(job, int(change.factor)), cluster),
    ),
    "imbalance": ChangeKind(
        "1.3", lambda change: f"the busiest rank's experts have {change.factor:g} x the mean rows",
        lambda given, change: check_imbalance(given, change.factor),
        lambda change, job, cluster: (with_imbalance(job, change.factor), cluster),
    ),
}  # fmt: skip


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
    if kind not in CHANGES:
        raise UserError(
            f"--what-if '{text}'{nearest(kind, CHANGES)}: "
            "write slow-link=0.5, slow-network=0.5, slow-rank=3:0.7, fewer-nodes=1 or imbalance=1.3"
        )
    facts = CHANGES[kind]
    rank, _, factor = value.rpartition(":") if facts.slows_rank else ("", "", value)
    try:
        change = Change(kind, float(factor), int(rank) if rank else -1)
    except ValueError:
        raise UserError(f"--what-if '{text}' needs a number after '=', e.g. {kind}={facts.example}") from None
    facts.check(f"--what-if '{text}'", change)
    return change


def step_of(job: Job, cluster: Cluster, changes: Sequence[Change] = ()) -> SimulatedStep:
    """Simulate the step with all `changes` applied."""
    slow: dict[int, float] = {}
    for change in changes:
        job, cluster = CHANGES[change.kind].apply(change, job, cluster)
        if CHANGES[change.kind].slows_rank:
            slow[change.rank] = change.factor
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
