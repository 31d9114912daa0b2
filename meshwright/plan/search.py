"""Searches the fastest layout of a model on a number of devices. No torch.

The search enumerates every valid layout (configs made from the given one by changing keys), keeps those that fit, and
ranks them by predicted step time. Two rules keep it fast without losing good layouts:

- With all else equal, recomputing less is never slower. So the first recompute mode that fits is taken. If a schedule
  fits without recomputation, slower schedules of the same layout are not tried.
- Layouts are examined in the order of the least seconds that they can take: those of their blocks and the bubble.
  Those with much more than the best whole step, or more than every step of a full ranking, are only counted.

Experts are divided in powers of two, and divided less only if that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from meshwright.config.memory import Place, RecomputeConfig, Recomputed
from meshwright.config.rules import EXPERT_RULES, RULES, TENSOR_PARALLEL_RULES, first_broken_rule
from meshwright.config.sections import Config
from meshwright.errors import UserError, divisors
from meshwright.plan.cluster import Cluster
from meshwright.plan.compute import setting_of, unit_time
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.flops import best_split
from meshwright.plan.grids import PLAIN, grids_of
from meshwright.plan.job import Job
from meshwright.plan.memory import GIB, largest, needed_gib, states_gib
from meshwright.spec.layout.layout import CUT_EXPERTS
from meshwright.spec.model.description import check_family, describe
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE, KINDS, default_kind, training_kinds
from meshwright.spec.schedule.table import PhaseTimes

RECOMPUTE = ("none", "selective", "full")
NOTHING_AGAIN = {"mode": "none", "offload": False, "pieces": 1}
PRUNE_RATIO = 1.3  # Layouts whose compute and bubble alone take this much longer than the best step are skipped.
BEST_ONLY_RATIO = 1.1  # The same if only the best layout is wanted. It covers the error of a closed formula.
REFINE_TOP = 12  # This number of layouts, the best by closed formulas, are timed again by their schedule tables.
RANKED_LAYOUTS = 8 * REFINE_TOP  # The number of layouts that are ranked.
MAX_DEVICES = 2**18  # A limit, because every group of a layout is examined if nodes don't align with the layout.
LIKELY_TP, LIKELY_PP = 4, 8  # Shapes near these tend to be fast, so they are tried first.
MIN_SAVED_SHARE = 0.05  # The share of the blocks' time that dividing experts less must save to be tried.


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its predicted cost and the memory that it needs."""

    cost: Cost
    memory_gib: float

    @property
    def job(self) -> Job:
        """The job of the layout."""
        return self.cost.job


@dataclass
class ShapeOutcome:
    """The result for all layouts with the same tp and pp."""

    best: Candidate | None = None
    least_seconds: float = float("inf")  # No layout that keeps the rules takes less.
    least_gib: float = float("inf")  # No layout that was found not to fit needs less.
    refused: str = ""  # The first rule that one of them breaks.


@dataclass
class SearchResult:
    """The ranking, best first, and the size of the search."""

    candidates: list[Candidate] = field(default_factory=list)
    layouts: int = 0  # Valid combinations.
    fitting: int = 0  # Combinations that fit, among those that were not skipped as too slow.
    nearest: tuple[float, Job] | None = None  # The least GiB needed by a layout that doesn't fit, and its job.
    broken: int = 0  # Combinations that break a config rule, which are not counted above.
    refused: str = ""  # The rule that the most promising one of these breaks.
    outcomes: dict[tuple[int, int], ShapeOutcome] = field(default_factory=dict)  # By tp and pp.


def _key(name: str, default: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True)
class SearchSpace:
    """The values that the search may choose for each config key. A tuple with one value fixes the choice."""

    zero: tuple[int, ...] = _key("zero.stage", (0, 1, 2, 3))
    recompute: tuple[str, ...] = _key("recompute.mode", RECOMPUTE)
    offload: tuple[bool, ...] = _key("recompute.offload", (False,))
    pieces: tuple[int, ...] = _key("recompute.pieces", (1,))
    orders: tuple[str, ...] = _key("layout.order", ("tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp"))
    cp: tuple[int, ...] = _key("layout.cp", (1,))
    ep: tuple[int, ...] = _key("layout.ep")  # Empty: powers of two.
    etp: tuple[int, ...] = _key("layout.etp")  # Empty: powers of two up to tp.
    tp: tuple[int, ...] = _key("layout.tp")  # Empty: all up to the node's devices.
    pp: tuple[int, ...] = _key("layout.pp")  # Empty: all.
    chunks: tuple[int, ...] = _key("layout.chunks", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12))
    micro_batch: tuple[int, ...] = _key("train.micro_batch", (1, 2, 4, 8, 16, 32))
    sequence_parallel: tuple[bool, ...] = _key("layout.sequence_parallel", (False, True))
    schedule: tuple[str, ...] = _key("pipeline.schedule")  # Empty: all.
    grids: tuple[tuple[int, ...], ...] = _key("layout.tp_grid", ((),))  # Empty: all grids, and tp along one axis.


# The field of `SearchSpace` that each searched config key sets.
SPACE_FIELDS = {each.metadata["key"]: each.name for each in fields(SearchSpace)}


def fixed_keys(words: Sequence[str]) -> list[str]:
    """Return the keys of these `a.b=c` words that fix a choice of the search."""
    chosen = [word for word in words if word != f"pipeline.schedule={AUTO_SCHEDULE}"]
    return [key for key in dict.fromkeys(word.partition("=")[0] for word in chosen) if key in SPACE_FIELDS]


def space_of(config: Config, fixed: Sequence[str] = ()) -> SearchSpace:
    """Return the search space in which the `fixed` keys keep their values from the config."""
    return SearchSpace(**{SPACE_FIELDS[key]: (attrgetter(key)(config),) for key in fixed})


def shapes(base: Job, space: SearchSpace, cluster: Cluster | None = None) -> Iterator[Job]:
    """Yield every valid combination of layout keys and micro-batches, with unsharded states.

    If a cluster is given, a division of experts is left out if another one is faster there and divides them as far.
    """
    # Replicas divide the devices among them first. The rest of the layout is chosen inside a replica.
    replicas = base.config.layout.replicas
    model = base.config.model
    batch = base.global_batch // replicas
    devices = base.world // replicas
    pipeline = {"split": (), "schedule": default_kind(1)}
    base = base.with_keys(zero={"stage": 0}, recompute=NOTHING_AGAIN, pipeline=pipeline)
    for cut in _tensor_cuts(base, space, divisors(devices)):
        tp = cut.config.layout.tp
        for cp in space.cp if not cut.config.layout.tp_grid else (1,):
            if devices % (tp * cp) or (cp > 1 and model.seq % (2 * cp)):
                continue
            for pp in divisors(devices // (tp * cp)):
                if pp > model.layers:
                    break
                if space.pp and pp not in space.pp:
                    continue
                dp = devices // (tp * cp * pp)
                plain = cut.with_keys(layout={"cp": cp, "pp": pp})
                if _unplaced(plain):
                    continue
                yield from _variants(plain, [n for n in space.micro_batch if batch % (dp * n) == 0], space, cluster)


def _unplaced(job: Job) -> str:
    """Return the reason why the family of a model that transformers builds refuses a job's tp or pp; empty if none."""
    o = job.config.layout
    try:
        if job.config.model.kind_facts.is_foreign:
            check_family(describe(job.config.model), o.tp, o.pp)
    except UserError as error:
        return str(error)
    return ""


def _tensor_cuts(base: Job, space: SearchSpace, sizes: Sequence[int]) -> Iterator[Job]:
    """Yield every way to shard layers over tensor-parallel ranks: along one axis, or over grids if these are searched.

    A grid may still break a rule about micro-batches, which are chosen later.
    """
    alone = {"pp": 1, "cp": 1, "ep": 1, "etp": 0, "chunks": 1, "sequence_parallel": False}
    o = base.config.layout
    own = {"tp_kind": o.tp_kind, "tp_keep_gathered": o.tp_keep_gathered}
    for tp in sizes:
        if not (tp in space.tp if space.tp else tp <= base.node_size):
            continue
        if space.grids:
            tried = [{"tp_grid": grid, **own} if grid else PLAIN for grid in space.grids if prod(grid or (tp,)) == tp]
        else:
            tried = [PLAIN, *(grid.keys for grid in grids_of(tp))]
        for keys in tried:
            cut = base.with_keys(layout=keys | {"tp": tp} | alone)
            if not first_broken_rule(cut.config, base.world, TENSOR_PARALLEL_RULES):
                yield cut


def _variants(plain: Job, micro: list[int], space: SearchSpace, cluster: Cluster | None) -> Iterator[Job]:
    """Yield one division into tp, cp and pp with these micro-batches and all other choices that may differ."""
    layout, seq = plain.layout, plain.config.model.seq
    # With one stage, or if stages and replicas both fill whole nodes, the order changes nothing.
    order_matters = layout.pp > 1 and layout.dp > 1 and layout.tp < plain.node_size
    may_split_sequences = layout.tp > 1 and not plain.config.layout.tp_grid
    for splits in space.sequence_parallel if may_split_sequences else (False,):
        sized = [plain.with_keys(train={"micro_batch": n}) for n in micro if not splits or n * seq % layout.tp == 0]
        for order in space.orders if order_matters else space.orders[:1]:
            cuts = _expert_cuts(sized, {"sequence_parallel": splits, "order": order}, space, cluster)
            yield from (shape for job in sized for keys in cuts for shape in _pipelines(job, keys, space))


def _pipelines(plain: Job, keys: dict[str, Any], space: SearchSpace) -> Iterator[Job]:
    """Yield a job with these layout keys under every number of chunks and every schedule to try."""
    model, pp = plain.config.model, plain.layout.pp
    split = best_split(model, pp)
    for chunks in space.chunks:
        if chunks > 1 and (pp == 1 or model.layers % (pp * chunks) or plain.micro_batches < pp):
            continue
        for schedule in _schedules(space.schedule, pp, plain.micro_batches, chunks, tuple(KINDS)):
            pipeline = {"schedule": schedule, "split": split if chunks == 1 else ()}
            yield plain.with_keys(layout=keys | {"chunks": chunks}, pipeline=pipeline)


@lru_cache(maxsize=10_000)
def _schedules(
    chosen: tuple[str, ...], pp: int, micro_batches: int, chunks: int, kinds: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the schedules to try, the fastest first.

    These are all schedules that accept this number of chunks, except those that by their formulas are neither faster
    than another one nor need less memory.
    """
    if chosen or pp == 1:
        return tuple(name for name in chosen or (default_kind(chunks),) if KINDS[name].takes(chunks))
    unknown: list[str] = []
    chosen_figures: dict[str, list[float]] = {}
    for name in dict.fromkeys([default_kind(chunks), *training_kinds(chunks)]):
        seconds, in_flight = KINDS[name].seconds, KINDS[name].in_flight
        if seconds is None or in_flight is None:
            unknown.append(name)
            continue
        # Attention has no weights, so at long sequences weight gradients take less time than input gradients.
        figures = [seconds([PhaseTimes(1.0, 2.0, weights)] * pp, micro_batches, chunks) for weights in (1.0, 0.5)]
        figures += [in_flight(pp, micro_batches, chunks, rank) for rank in range(pp)]
        if not any(all(a <= b for a, b in zip(other, figures, strict=True)) for other in chosen_figures.values()):
            chosen_figures[name] = figures
    return (*unknown, *sorted(chosen_figures, key=lambda name: chosen_figures[name][:2]))


def _expert_cuts(
    sized: list[Job], keys: dict[str, Any], space: SearchSpace, cluster: Cluster | None
) -> list[dict[str, Any]]:
    """Return `keys` with each division of experts, or alone if the model has no experts.

    `sized` is the same layout with each size of micro-batch. The smallest and the largest size decide which divisions
    are worth trying.
    """
    if not sized:
        return []
    experts, layout = sized[0].config.model.experts, sized[0].layout
    if not experts.count:
        return [keys]
    tried = []
    folded = layout.tp * layout.cp * layout.dp  # The ranks over which experts can be divided.
    for etp, ep in product(space.etp or _powers(layout.tp), space.ep or _powers(experts.count)):
        if folded % ((etp or layout.tp) * ep) == 0 and experts.count % ep == 0:
            tried.append(keys | {"ep": ep, "etp": etp})
    if cluster is None:
        return tried
    ends = sized if len(sized) == 1 else [sized[0], sized[-1]]
    chosen = [cut for job in ends for cut in _front(job, tried, cluster)]
    return [cut for number, cut in enumerate(chosen) if cut not in chosen[:number]]


def _front(plain: Job, cuts: list[dict[str, Any]], cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the divisions of experts that are worth trying, those that divide experts furthest first.

    Dividing experts less needs more memory and sums more gradients. So a division is only yielded if it is faster, by
    the share WORTHWHILE, than all that divide them further.
    """
    timed = []
    for number, cut in enumerate(cuts):
        job = plain.with_keys(layout=cut)
        if not first_broken_rule(job.config, job.world, EXPERT_RULES):
            timed.append((-job.layout.ep * job.layout.etp, _mixture_seconds(job, cluster), number))
    fastest = float("inf")
    for _, seconds, number in sorted(timed):
        if seconds < fastest * (1 - MIN_SAVED_SHARE):
            fastest = seconds
            yield cuts[number]


def divided_otherwise(job: Job) -> Iterator[Job]:
    """Yield the same layout with every other division of experts."""
    own = (job.layout.ep, job.layout.etp)
    for cut in _expert_cuts([job], {}, SearchSpace(), None):
        if (cut["ep"], cut["etp"]) != own:
            other = job.with_keys(layout=cut)
            if not first_broken_rule(other.config, job.world, EXPERT_RULES):
                yield other


def _powers(number: int) -> tuple[int, ...]:
    """Return the powers of two that divide a number."""
    return tuple(2**power for power in range(number.bit_length()) if number % 2**power == 0)


def _mixture_seconds(job: Job, cluster: Cluster) -> float:
    """Return the seconds of one micro-batch in all blocks with experts, including exposed communication."""
    where = setting_of(job, cluster, Recomputed.NOTHING)
    times = ((count, unit_time(block, where)) for block, count in job.model.kinds if block.has_experts)
    return sum(count * (time.whole_forward + time.whole_backward) for count, time in times)


# Called with the number of shapes that are done, the number of all shapes, and the best candidate so far.
Watch = Callable[[int, int, Candidate | None], None]

# The share of a device's memory that plans leave free, in per cent: drivers and fragments vary between machines.
MARGIN_PERCENT = 6.0


def usable_gib(cluster: Cluster, margin: float = MARGIN_PERCENT) -> float:
    """Return the memory that a plan may use of a device."""
    return cluster.device.memory_gib * (1 - margin / 100)


def search(
    base: Job,
    cluster: Cluster,
    fit_gib: float = 0.0,
    space: SearchSpace | None = None,
    best_only: bool = False,
    watch: Watch = lambda done, total, best: None,
) -> SearchResult:
    """Rank all layouts for the model, batch and devices of `base`.

    `fit_gib` limits the memory; 0 means the device's memory. Layouts that break a rule are not ranked. With
    `best_only`, layouts that can't be the best are not even counted. `watch` hears of the progress.
    """
    space = space or SearchSpace()
    limit = fit_gib or cluster.device.memory_gib
    result = SearchResult()
    base = base.with_keys(pipeline={"schedule": default_kind(1), "split": ()})
    if refused := _never(base, space):
        return replace(result, refused=refused)

    found = _Found(cluster, limit, space, result)
    order = _fastest_first(base, space, cluster)
    for number, (bound, shape) in enumerate(order):
        if best_only and bound.with_waits > BEST_ONLY_RATIO * found.best:
            break
        for zero in _stages(shape, space):
            if found.is_counted(shape, zero, bound) and not found.is_too_slow(bound):
                found.add(shape, zero)
        watch(number + 1, len(order), found.fastest)
    found.measure_the_nearest()

    rough = sorted(found.rough, key=lambda candidate: candidate.cost.step_s)
    refined = [replace(one, cost=predict_cost(one.job, cluster)) for one in rough[:REFINE_TOP]]
    refined += rough[REFINE_TOP:RANKED_LAYOUTS]
    result.candidates = sorted(refined, key=lambda candidate: candidate.cost.step_s)
    # The first layout of the ranking with a tp and a pp is the best outcome of both.
    for candidate in reversed(result.candidates):
        found.outcome(candidate.job).best = candidate
    return result


def _fastest_first(base: Job, space: SearchSpace, cluster: Cluster) -> list[tuple[Bound, Job]]:
    """Return all shapes with the least seconds that each can take, in the order of these.

    So the search ends its work at the first shape that can no longer be among the fastest.
    """
    found = [(_least_seconds(shape, cluster), shape) for shape in shapes(base, space, cluster)]
    return sorted(found, key=lambda each: (each[0], _promise(each[1])))


@dataclass
class _Found:
    """The candidates of a search so far, and what rules out others."""

    cluster: Cluster
    limit: float
    space: SearchSpace
    result: SearchResult
    rough: list[Candidate] = field(default_factory=list)
    fastest: Candidate | None = None
    # A heap of the negative step times of the best KEPT candidates, the longest first.
    shortest: list[float] = field(default_factory=list)
    # The smallest micro-batch of a layout that did not fit. Larger ones don't fit either.
    too_large: dict[object, int] = field(default_factory=dict)
    # Layouts whose states alone are too large, with their smallest micro-batch.
    too_heavy: dict[object, tuple[Job, int]] = field(default_factory=dict)
    served: set[object] = field(default_factory=set)  # Layouts that fit with a faster schedule without recomputation.
    refused_at: tuple[int, int, int] | None = None  # The promise of the shape that `result.refused` is about.

    @property
    def best(self) -> float:
        """The least seconds of a step so far."""
        return self.fastest.cost.step_s if self.fastest else float("inf")

    def is_too_slow(self, bound: Bound) -> bool:
        """Return whether a layout can't be in the ranking, or would be far down in it."""
        beyond = len(self.shortest) == RANKED_LAYOUTS and bound.with_waits > -self.shortest[0]
        return beyond or bound.computed > PRUNE_RATIO * self.best

    def outcome(self, shape: Job) -> ShapeOutcome:
        """Return the outcome of layouts with the shape's tp and pp."""
        return self.result.outcomes.setdefault((shape.layout.tp, shape.layout.pp), ShapeOutcome())

    def is_counted(self, shape: Job, zero: int, bound: Bound) -> bool:
        """Count the recompute modes of a shape, and return whether its layout keeps the config's rules."""
        modes, promise = len(self.space.recompute), _promise(shape)
        why, outcome = _refusal(shape, zero), self.outcome(shape)
        if not why:
            self.result.layouts += modes
            outcome.least_seconds = min(outcome.least_seconds, bound.with_waits)
            return True
        outcome.refused = outcome.refused or why
        self.result.broken += modes
        if self.refused_at is None or promise < self.refused_at:
            self.result.refused, self.refused_at = why, promise
        return False

    def add(self, shape: Job, zero: int) -> None:
        """Add the shape to the candidates, with the fastest recomputation that fits, if any does."""
        c = shape.config
        key, alike = (_without_batch(shape), zero), (c.layout, c.train.micro_batch, zero)
        if c.train.micro_batch >= self.too_large.get(key, MAX_DEVICES) or alike in self.served:
            return
        states, outcome = states_gib(shape.with_keys(zero={"stage": zero})), self.outcome(shape)
        if states > self.limit:
            self.too_heavy[key] = (shape, zero)
            outcome.least_gib = min(outcome.least_gib, states)
        fitting = None if key in self.too_heavy else self._first_that_fits(shape, zero)
        if fitting is None:
            self.too_large[key] = c.train.micro_batch
            return
        self.result.fitting += 1
        recomputes = fitting[0].config.recompute.mode != self.space.recompute[0]
        # A schedule without a formula comes first whatever its speed, so it does not rule out others.
        if not recomputes and KINDS[c.pipeline.schedule].seconds is not None:
            self.served.add(alike)
        candidate = Candidate(predict_cost(fitting[0], self.cluster, exact=False), fitting[1])
        self.rough.append(candidate)
        if candidate.cost.step_s < self.best:
            self.fastest = candidate
        if outcome.best is None or candidate.cost.step_s < outcome.best.cost.step_s:
            outcome.best = candidate
        heappush(self.shortest, -candidate.cost.step_s)
        if len(self.shortest) > RANKED_LAYOUTS:
            heappop(self.shortest)

    def measure_the_nearest(self) -> None:
        """Find the layout that is nearest to fitting, if none fits, among those whose states alone are too large."""
        if not self.rough:
            for shape, zero in self.too_heavy.values():
                self._first_that_fits(shape, zero)

    def _first_that_fits(self, shape: Job, zero: int) -> tuple[Job, float] | None:
        """Return (job, GiB) for the fastest recompute setting that fits, or None if none fits."""
        # The GiB of what does not fit are only needed while nothing does.
        enough = self.limit if self.rough else float("inf")

        def tried(keys: dict[str, Any]) -> tuple[Job, float]:
            job = shape.with_keys(zero={"stage": zero}, recompute=keys)
            return job, needed_gib(job, self.cluster, enough_gib=enough)

        def fits(job: Job, memory: float) -> bool:
            return memory <= self.limit and host_gib(job) <= self.cluster.node.host_gib

        first, *others = recompute_settings(self.space)
        job, memory = tried(first)
        # The last setting needs the least memory. If it does not fit, no other does.
        if memory > self.limit and others:
            job, memory = tried(others[-1])
            if memory <= self.limit:
                job, memory = next((each for each in map(tried, others[:-1]) if fits(*each)), (job, memory))
        if fits(job, memory):
            return job, memory
        if self.result.nearest is None or memory < self.result.nearest[0]:
            self.result.nearest = (memory, job)
        outcome = self.outcome(shape)
        outcome.least_gib = min(outcome.least_gib, memory)
        return None


def _never(base: Job, space: SearchSpace) -> str:
    """Return the reason why no layout of the space is possible, if it is known at once; otherwise an empty string."""
    least = base.with_keys(layout={"tp": min(space.tp, default=1), "pp": min(space.pp, default=1)})
    dense = not base.config.model.experts.count
    return (first_broken_rule(base.config, base.world, EXPERT_RULES) if dense else None) or _unplaced(least)


def _without_batch(shape: Job) -> object:
    """Return a key of all choices of a shape except its micro-batch."""
    c = shape.config
    return c.layout, c.pipeline.schedule


def _refusal(shape: Job, zero: int) -> str | None:
    """Return the reason why a candidate can't be trained, or None if it can."""
    tried = shape.with_keys(zero={"stage": zero}, layout={"node_size": shape.node_size})
    try:
        return first_broken_rule(tried.config, shape.world, RULES)
    except UserError as error:
        return str(error)


def _stages(shape: Job, space: SearchSpace) -> tuple[int, ...]:
    """Return the ZeRO stages to try. A single replica has nothing to shard, but offloaded weights need stage 3."""
    if shape.layout.dp * shape.layout.cp > 1 or (shape.config.model.experts.count and shape.layout.edp > 1):
        return space.zero
    return (3,) if shape.states.params_at is not Place.DEVICE and 3 in space.zero else (0,)


def _promise(shape: Job) -> tuple[int, int, int]:
    """Return a sort key by which shapes that tend to be fast come first, so that the bound prunes the others early."""
    c = shape.config
    return (abs(c.layout.tp - LIKELY_TP) + abs(c.layout.pp - LIKELY_PP), c.layout.chunks, c.train.micro_batch)


class Bound(NamedTuple):
    """Seconds that a step of a shape takes at least."""

    with_waits: float  # Of its blocks, evenly divided, and the bubble, with the communication inside blocks.
    computed: float  # The same without communication, except exchanges with the ranks of other experts.


def _least_seconds(shape: Job, cluster: Cluster) -> Bound:
    """Return lower bounds for a step of the shape."""
    where = setting_of(shape, cluster, Recomputed.NOTHING)
    forward = whole = weights = waited_forward = waited = 0.0
    for block, count in shape.model.kinds:
        time = unit_time(block, where)
        # Exchanges with the ranks of other experts are never hidden.
        exchanged = sum(use.forward + use.backward for use in time.axes if use.axis in CUT_EXPERTS)
        forward, weights = forward + count * time.forward, weights + count * time.weights
        whole += count * (time.compute_seconds + exchanged)
        waited_forward += count * time.whole_forward
        waited += count * (time.whole_forward + time.whole_backward)
    return Bound(_pipelined(shape, waited_forward, waited, weights), _pipelined(shape, forward, whole, weights))


def _pipelined(shape: Job, forward: float, whole: float, weights: float) -> float:
    """Return the seconds of a shape's pipeline whose stages divide these seconds of one micro-batch evenly."""
    pp, m, closed = shape.layout.pp, shape.micro_batches, KINDS[shape.config.pipeline.schedule].seconds
    if closed is None:
        return m * whole / pp
    # An incomplete group of micro-batches has gaps, which a formula may overstate. So full groups are timed.
    full = -(-m // pp) * pp
    each = PhaseTimes(forward / pp, (whole - forward) / pp, weights / pp)
    return closed([each] * pp, full, shape.config.layout.chunks) - (full - m) * each.whole


@lru_cache(maxsize=64)
def recompute_settings(space: SearchSpace) -> list[dict[str, Any]]:
    """Return the recompute settings to try, from the fastest to the one that needs the least memory.

    Offloading, and then MLPs in more chunks, are only added to the mode that recomputes most.
    """
    combinations = [(pieces, offload) for pieces in space.pieces for offload in space.offload]
    settings = [(mode, *combinations[0]) for mode in space.recompute]
    settings += [(space.recompute[-1], *combination) for combination in combinations[1:]]
    # Only modes that recompute whole blocks have inputs to offload.
    blocks = {mode for mode in space.recompute if RecomputeConfig(mode).blocks}
    keys = [{"mode": mode, "pieces": pieces, "offload": offload} for mode, pieces, offload in settings]
    return [each for each in keys if each["mode"] in blocks or not each["offload"]]


def host_gib(job: Job) -> float:
    """Return the GiB of a node's host memory that the offloaded activations of its ranks take."""
    if not job.config.recompute.offload:
        return 0.0
    return largest(job).offloaded * min(job.node_size, job.world) / GIB
