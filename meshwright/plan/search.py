"""The search: it enumerates every valid layout of a model on a number of devices (configs, made from the given one by
changing keys), keeps those that fit, and ranks them by predicted step time. Two rules keep it fast without losing
anything: with all else equal, recomputing less is never slower, so the first mode that fits is taken; and a layout
whose compute and bubble alone take much longer than the best whole step is skipped. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from meshwright.config.rules import RULES, TENSOR_PARALLEL_RULES, first_broken_rule
from meshwright.config.sections import Config
from meshwright.errors import UserError, divisors
from meshwright.layout.layout import LARGEST_WORLD
from meshwright.plan.cluster import Cluster
from meshwright.plan.compute import setting_of, unit_time
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.flops import best_split
from meshwright.plan.job import Job
from meshwright.plan.memory import needed_gib
from meshwright.schedule.kinds import KINDS, default_kind

RECOMPUTE = ("none", "selective", "full")
PRUNE_RATIO = 1.5  # layouts whose compute and bubble alone take this much longer than the best step are skipped
BEST_ONLY_RATIO = 1.1  # the same where only the best is wanted: the error of a closed formula
REFINE_TOP = 12  # the best this many by closed formulas are timed again by their own schedule tables
LIKELY_TP, LIKELY_PP = 4, 8  # shapes near these tend to be fast, so they are tried first


@dataclass(frozen=True)
class Candidate:
    cost: Cost
    memory_gib: float

    @property
    def job(self) -> Job:
        return self.cost.job


@dataclass
class SearchResult:
    """The ranking, best first, and the size of the search."""

    candidates: list[Candidate] = field(default_factory=list)
    layouts: int = 0  # valid combinations
    fitting: int = 0
    nearest: tuple[float, Job] | None = None  # the least GiB needed by a layout that doesn't fit, and its job
    broken: int = 0  # combinations that break a config rule, not counted above
    refused: str = ""  # the rule that the most promising one of them breaks


def _key(name: str, default: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True)
class SearchSpace:
    """The values that the search may choose, by config key; a tuple with one value fixes the choice."""

    zero: tuple[int, ...] = _key("zero.stage", (0, 1, 2, 3))
    recompute: tuple[str, ...] = _key("recompute.mode", RECOMPUTE)
    orders: tuple[str, ...] = _key("layout.order", ("tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp"))
    cp: tuple[int, ...] = _key("layout.cp", (1,))
    tp: tuple[int, ...] = _key("layout.tp")  # empty: all up to the node's devices
    pp: tuple[int, ...] = _key("layout.pp")  # empty: all
    chunks: tuple[int, ...] = _key("layout.chunks", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12))
    micro_batch: tuple[int, ...] = _key("train.micro_batch", (1, 2, 4, 8, 16, 32))
    sequence_parallel: tuple[bool, ...] = _key("layout.sequence_parallel", (False, True))
    schedule: tuple[str, ...] = _key("pipeline.schedule")  # empty: the default for so many chunks


# The field of `SearchSpace` that each searched config key sets.
SPACE_FIELDS = {each.metadata["key"]: each.name for each in fields(SearchSpace)}


def fixed_keys(words: Sequence[str]) -> list[str]:
    """Returns the keys of these `a.b=c` words that fix a choice of the search."""
    return [key for key in dict.fromkeys(word.partition("=")[0] for word in words) if key in SPACE_FIELDS]


def space_of(config: Config, fixed: Sequence[str] = ()) -> SearchSpace:
    """Returns the search space in which the `fixed` keys keep their values from the config."""
    return SearchSpace(**{SPACE_FIELDS[key]: (attrgetter(key)(config),) for key in fixed})


def shapes(base: Job, space: SearchSpace) -> Iterator[Job]:
    """Yields every valid combination of keys of the layout and micro-batches, with unsharded states."""
    model, batch, devices = base.config.model, base.global_batch, base.world
    pipeline = {"split": (), "schedule": default_kind(1)}
    base = base.replaced(zero={"stage": 0}, recompute={"mode": "none"}, pipeline=pipeline)
    for tp in divisors(devices):
        cut = base.replaced(layout={"tp": tp, "pp": 1, "cp": 1, "chunks": 1, "sequence_parallel": False})
        allowed = tp in space.tp if space.tp else tp <= base.node_size
        if not allowed or first_broken_rule(cut.config, devices, TENSOR_PARALLEL_RULES):
            continue
        for cp in space.cp:
            if devices % (tp * cp) or (cp > 1 and model.seq % (2 * cp)):
                continue
            for pp in divisors(devices // (tp * cp)):
                if pp > model.layers:
                    break
                if space.pp and pp not in space.pp:
                    continue
                dp = devices // (tp * cp * pp)
                for micro in space.micro_batch:
                    if batch % (dp * micro) == 0 and dp * cp % base.config.layout.ep == 0:
                        plain = cut.replaced(layout={"cp": cp, "pp": pp}, train={"micro_batch": micro})
                        yield from _variants(plain, space)


def _variants(plain: Job, space: SearchSpace) -> Iterator[Job]:
    c, layout = plain.config, plain.layout
    model, pp, tp = c.model, layout.pp, layout.tp
    split = best_split(model, pp)
    for chunks in space.chunks:
        if chunks > 1 and (pp == 1 or model.layers % (pp * chunks) or plain.micro_batches < pp):
            continue
        schedule = space.schedule[0] if space.schedule else default_kind(chunks)
        if not KINDS[schedule].takes(chunks):
            continue
        pipeline = {"schedule": schedule, "split": split if chunks == 1 else ()}
        for parts in space.sequence_parallel if tp > 1 else (False,):
            if parts and c.train.micro_batch * model.seq % tp:
                continue
            # With one stage, or where stages and replicas both fill whole nodes, the order changes nothing.
            orders = space.orders if pp > 1 and layout.dp > 1 and tp < plain.node_size else space.orders[:1]
            for order in orders:
                keys = {"chunks": chunks, "sequence_parallel": parts, "order": order}
                yield plain.replaced(layout=keys, pipeline=pipeline)


def search(
    base: Job, cluster: Cluster, fit_gib: float = 0.0, space: SearchSpace | None = None, best_only: bool = False
) -> SearchResult:
    """Ranks all layouts of `base`'s model and batch on its devices; `fit_gib` 0 means the device's own memory. Layouts
    that break a rule are not ranked. With `best_only`, layouts that can't be the best are not even counted."""
    space = space or SearchSpace()
    limit = fit_gib or cluster.device.memory_gib
    found = SearchResult()
    best = float("inf")
    rough: list[Candidate] = []
    for shape in sorted(shapes(base, space), key=_promise):
        bound = _least_seconds(shape, cluster)
        if best_only and bound > BEST_ONLY_RATIO * best:
            continue
        for zero in _stages(shape, space):
            why = _refused(shape, zero)
            if why:
                found.broken += len(space.recompute)
                found.refused = found.refused or why
                continue
            found.layouts += len(space.recompute)
            fitting = _first_that_fits(shape, zero, cluster, limit, space, found)
            if fitting is None:
                continue
            found.fitting += 1
            if bound > PRUNE_RATIO * best:
                continue
            rough.append(Candidate(predict_cost(fitting[0], cluster, exact=False), fitting[1]))
            best = min(best, rough[-1].cost.step_s)
    rough.sort(key=lambda candidate: candidate.cost.step_s)
    refined = [replace(one, cost=predict_cost(one.job, cluster)) for one in rough[:REFINE_TOP]]
    refined += rough[REFINE_TOP : 8 * REFINE_TOP]
    found.candidates = sorted(refined, key=lambda candidate: candidate.cost.step_s)
    return found


def _refused(shape: Job, zero: int) -> str | None:
    """Returns the reason why a candidate can't be trained, if there is one."""
    tried = shape.replaced(zero={"stage": zero}, layout={"node_size": shape.node_size})
    try:
        return first_broken_rule(tried.config, shape.world, RULES)
    except UserError as error:
        return str(error)


def _stages(shape: Job, space: SearchSpace) -> tuple[int, ...]:
    """Returns the ZeRO stages to try: a single replica has nothing to shard, but offloaded weights need stage 3."""
    if shape.layout.dp * shape.layout.cp > 1:
        return space.zero
    return (3,) if shape.states.params_on != "device" and 3 in space.zero else (0,)


def _promise(shape: Job) -> tuple[int, int, int]:
    """Returns a sort key by which shapes that tend to be fast come first, so that the bound soon prunes the others."""
    c = shape.config
    return (abs(c.layout.tp - LIKELY_TP) + abs(c.layout.pp - LIKELY_PP), c.layout.chunks, c.train.micro_batch)


def _least_seconds(shape: Job, cluster: Cluster) -> float:
    """Returns a lower bound for a step of the shape: its blocks' compute, evenly divided, and the bubble of that."""
    where = setting_of(shape, cluster, recompute="none")
    blocks = sum(count * unit_time(block, where).computed for block, count in shape.model.kinds)
    pp = shape.layout.pp
    return (shape.micro_batches + (pp - 1) / shape.config.layout.chunks) * blocks / pp


def _first_that_fits(
    shape: Job, zero: int, cluster: Cluster, limit: float, space: SearchSpace, found: SearchResult
) -> tuple[Job, float] | None:
    for mode in space.recompute:
        tried = shape.replaced(zero={"stage": zero}, recompute={"mode": mode})
        memory = needed_gib(tried, cluster)
        if memory <= limit:
            return tried, memory
        if found.nearest is None or memory < found.nearest[0]:
            found.nearest = (memory, tried)
    return None


def why_nothing(
    base: Job, cluster: Cluster, found: SearchResult, limit: float, space: SearchSpace, fixed: Sequence[str]
) -> UserError:
    """Returns the error for a model that fits nowhere: the rule that all layouts break, or the nearest layout, what it
    lacks, and what would help. `fixed` are the `a.b=c` words that left only `space`."""
    devices, batch = base.world, base.global_batch
    under = f" with {', '.join(fixed)}" if fixed else ""
    if found.nearest is None:
        if found.refused:
            return UserError(found.refused)
        keys = " and ".join(word.partition("=")[0] for word in fixed)
        return UserError(
            f"no layout{under} divides {devices} devices, a global batch of {batch} and this model: "
            + (f"leave {keys} open, or " if keys else "")
            + "change --devices or --global-batch, e.g. to a power of two"
        )
    needed, job = found.nearest
    c, enough = job.config, ""
    # The part of the space that needs the least memory: the most sharding and the most recomputation.
    least = replace(space, zero=space.zero[-1:], recompute=space.recompute[-1:])
    for factor in (factor for factor in (2, 4, 8, 16, 32, 64) if devices * factor <= LARGEST_WORLD):
        grown = replace(base.replaced(train={"global_batch": batch * factor}), world=devices * factor)
        if search(grown, cluster, limit, least).candidates:
            enough = f", or {devices * factor} of these devices with a global batch of {batch * factor}"
            break
    return UserError(
        f"the model fits nowhere on {devices} x {cluster.device.name}{under}: the nearest layout (tp={c.layout.tp}, "
        f"pp={c.layout.pp}, dp={job.layout.dp}, micro-batch {c.train.micro_batch}, zero {c.zero.stage}, recompute "
        f"{c.recompute.mode}) needs {needed:.1f} GiB of {limit:.1f}, {needed - limit:.1f} GiB too much: use devices "
        f"with more memory{enough}" + (f"; others break a rule: {found.refused}" if found.refused else "")
    )
