"""Chooses the pipeline schedule of a layout by the predicted times and memory of its model. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.config.rules import first_broken_rule
from meshwright.config.sections import Config
from meshwright.errors import UserError, plural
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import predict_cost, together
from meshwright.plan.flops import best_split
from meshwright.plan.job import Job
from meshwright.plan.memory import needed_gib
from meshwright.plan.search import Candidate, SearchSpace
from meshwright.show.units import percent, seconds
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE, default_kind, training_kinds

# A gain below this share of a step is less than the predictions' error. It is not worth more memory.
WORTHWHILE = 0.01


@dataclass(frozen=True)
class Choice:
    """The schedules of a layout that fit, the chosen one and then the fastest first, and those that would be faster but
    don't fit."""

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    limit_gib: float

    @property
    def best(self) -> Candidate:
        return self.fitting[0]

    @property
    def config(self) -> Config:
        """The config with the best schedule and its number of chunks."""
        return self.best.job.config

    def why(self) -> str:
        """Return one line about the best schedule: its gain, its memory, and the times on which both rest."""
        best, cost = self.best, self.best.cost
        if cost.job.layout.pp == 1:
            return f"{_name(best)}: one stage has no pipeline to schedule"
        # Without another schedule that fits, there is nothing to compare with.
        plain = next((one for one in self.fitting if _kind(one) == default_kind(1)), self.fitting[-1])
        gain = plain.cost.step_s / cost.step_s - 1
        if best is plain:
            compared = "no schedule that fits is faster"
        else:
            compared = f"{_name(plain)} takes {percent(gain)} more"
        words = f"{_name(best)}: {seconds(cost.step_s)} a step predicted, {compared}; it needs {best.memory_gib:.1f} "
        words += f"of {self.limit_gib:.1f} GiB; forward : input gradient : weight gradient = {ratio(best)}"
        if self.too_large:
            other = self.too_large[0]
            words += f"; {_name(other)} would take {seconds(other.cost.step_s)}, but needs {other.memory_gib:.1f} GiB"
        return words


def _kind(one: Candidate) -> str:
    return one.job.config.pipeline.schedule


def _name(one: Candidate) -> str:
    chunks = one.job.config.layout.chunks
    return _kind(one) + (f" with {plural(chunks, 'chunk')} per rank" if chunks > 1 else "")


def ratio(one: Candidate) -> str:
    """Return the predicted ratio of forward, input gradient and weight gradient on the slowest pipeline rank."""
    rank = max(map(together, one.cost.chunk_times), key=lambda each: each.whole)
    inputs = rank.backward - rank.weights
    return f"1 : {inputs / rank.forward:.2f} : {rank.weights / rank.forward:.2f}"


def alternatives(job: Job, split: tuple[int, ...] = ()) -> Iterator[Job]:
    """Yield the job with every schedule and number of chunks that its layout allows. `split` divides the layers if a
    rank has one chunk."""
    c, pp = job.config, job.layout.pp
    for chunks in SearchSpace().chunks if pp > 1 else (1,):
        if chunks > 1 and (c.model.layers % (pp * chunks) or job.micro_batches < pp):
            continue
        for kind in training_kinds(chunks) if pp > 1 else (default_kind(chunks),):
            pipeline = {"schedule": kind, "split": split if chunks == 1 else ()}
            tried = job.with_keys(layout={"chunks": chunks}, pipeline=pipeline)
            if first_broken_rule(tried.config, job.world) is None:
                yield tried


def _timed(job: Job, cluster: Cluster) -> Candidate:
    return Candidate(predict_cost(job, cluster), needed_gib(job, cluster))


def choose_schedule(job: Job, cluster: Cluster, limit_gib: float) -> Choice:
    """Time every schedule of a layout by its table, and return those that fit into `limit_gib`.

    Of schedules that are as fast as the fastest one, but for WORTHWHILE, the one that needs the least memory is best.
    """
    # The layout of a job needs a schedule that has stages.
    job = job.with_keys(pipeline={"schedule": default_kind(job.config.layout.chunks)})
    c = job.config
    # The default of one chunk leaves their number open. A split belongs to a number of stages.
    is_open = c.layout.chunks == 1 and not c.pipeline.split
    tried = [
        _timed(one, cluster) for one in alternatives(job, c.pipeline.split)
        if is_open or one.config.layout.chunks == c.layout.chunks
    ]  # fmt: skip
    tried.sort(key=lambda one: one.cost.step_s)
    fitting = [one for one in tried if one.memory_gib <= limit_gib]
    if not tried:
        why = first_broken_rule(c, job.world)
        raise UserError(why or f"no schedule takes layout.chunks={c.layout.chunks} with this split: set one of them")
    if not fitting:
        least = min(tried, key=lambda one: one.memory_gib)
        raise UserError(
            f"pipeline.schedule={AUTO_SCHEDULE}: no schedule fits into {limit_gib:.1f} GiB, the smallest is "
            f"{_name(least)} with {least.memory_gib:.1f} GiB: shard more (layout.tp, zero.stage) or set recompute.mode"
        )
    alike = [one for one in fitting if one.cost.step_s <= (1 + WORTHWHILE) * fitting[0].cost.step_s]
    best = min(alike, key=lambda one: one.memory_gib)
    faster = (one for one in tried if one.memory_gib > limit_gib and one.cost.step_s < best.cost.step_s)
    return Choice((best, *(one for one in fitting if one is not best)), tuple(faster), limit_gib)


def against_others(best: Candidate, limit_gib: float) -> Choice:
    """Return the choice of a plan's schedule, compared with all others of the same layout."""
    job, cluster = best.job, best.cost.cluster
    split = best_split(job.config.model, job.layout.pp)
    own = (_kind(best), job.config.layout.chunks)
    others = [_timed(one, cluster) for one in alternatives(job, split)
              if (one.config.pipeline.schedule, one.config.layout.chunks) != own]  # fmt: skip
    others.sort(key=lambda one: one.cost.step_s)
    fitting = tuple(one for one in others if one.memory_gib <= limit_gib)
    faster = tuple(one for one in others if one.memory_gib > limit_gib and one.cost.step_s < best.cost.step_s)
    return Choice((best, *fitting), faster, limit_gib)
