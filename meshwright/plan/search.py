"""The search: every valid layout of a model on a number of devices, those that fit, ranked by predicted step time.

Two things keep it quick and lose nothing: with all else equal, recomputing less is never slower, so the first mode that
fits is the one; and a layout whose compute and bubble alone take much longer than the best whole step is not looked at.
No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.config.sections import Config, ModelConfig
from meshwright.errors import UserError
from meshwright.plan.cluster import Cluster
from meshwright.plan.compute import block_part
from meshwright.plan.cost import Cost, cut_of, place_of, predict_cost
from meshwright.plan.memory import peak_gib
from meshwright.plan.stack import Stack
from meshwright.plan.workload import Parallel, Workload, best_split, config_mode, own_mode, sharing_on_node

RECOMPUTE = ("none", "core", "full")
ORDERS = ("tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp")
SLOWER = 1.5  # layouts whose compute and bubble alone take this much longer than the best step are not looked at
NEAR = 1.1  # the same where only the best is asked for: as far as a closed formula may be off
REFINED = 12  # of the best by closed formulas, timed again by their own schedule tables
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)

# The sentence of the rule that a workload breaks, if it breaks one.
Broken = Callable[[Workload], str | None]


@dataclass(frozen=True)
class Candidate:
    cost: Cost
    memory_gib: float

    @property
    def workload(self) -> Workload:
        return self.cost.workload


@dataclass
class Found:
    """The ranking, best first, and how large the search was."""

    candidates: list[Candidate] = field(default_factory=list)
    layouts: int = 0  # combinations that are valid
    fitting: int = 0
    timed: int = 0
    nearest: tuple[float, Workload] | None = None  # of those that don't fit, the least needed GiB
    broken: int = 0  # combinations that break a rule of the config, not counted above
    refused: str = ""  # the rule that the most promising of them breaks


@dataclass(frozen=True)
class Space:
    """What may be chosen; a tuple with one value fixes it."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    orders: tuple[str, ...] = ORDERS
    cp: tuple[int, ...] = (1,)
    tp: tuple[int, ...] = ()  # empty: all up to the node's devices
    pp: tuple[int, ...] = ()  # empty: all
    chunks: tuple[int, ...] = CHUNKS
    micro_batch: tuple[int, ...] = MICRO_BATCHES
    sequence_parallel: tuple[bool, ...] = (False, True)
    schedule: tuple[str, ...] = ()  # empty: interleaved with chunks, else 1f1b


# Config keys that hold a choice fixed, with the field of `Space` they set.
FIXES = {
    "layout.tp": "tp", "layout.pp": "pp", "layout.cp": "cp", "layout.chunks": "chunks", "layout.order": "orders",
    "layout.sequence_parallel": "sequence_parallel", "train.micro_batch": "micro_batch", "zero.stage": "zero",
    "recompute.mode": "recompute", "pipeline.schedule": "schedule",
}  # fmt: skip


def fixed_keys(words: Sequence[str]) -> list[str]:
    """The keys of these `a.b=c` words that hold a choice fixed."""
    return [key for key in dict.fromkeys(word.partition("=")[0] for word in words) if key in FIXES]


def space_of(config: Config, fixed: Sequence[str] = ()) -> Space:
    """What is left to choose when these keys stay as the config has them."""
    values: dict[str, Any] = {}
    for key in fixed:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        values[FIXES[key]] = (own_mode(value) if key == "recompute.mode" else value,)
    return Space(**values)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def splits_heads(model: ModelConfig, tp: int) -> bool:
    kv = model.kv_heads
    return model.heads % tp == 0 and model.ffn % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def shapes(base: Workload, devices: int, space: Space) -> Iterator[Workload]:
    """Every valid tp, cp, pp, chunks, micro-batch, sequence parallelism and order, states not sharded."""
    model, batch = base.model, base.global_batch
    for tp in divisors(devices):
        allowed = tp in space.tp if space.tp else tp <= base.node_size
        if not allowed or not splits_heads(model, tp):
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
                    if batch % (dp * micro):
                        continue
                    yield from _variants(base, Parallel(devices, tp, pp, cp), micro, space)


def _variants(base: Workload, plain: Parallel, micro: int, space: Space) -> Iterator[Workload]:
    model, pp = base.model, plain.pp
    split = best_split(model, pp)
    count = base.global_batch // (plain.dp * micro)
    for chunks in space.chunks:
        if chunks > 1 and (pp == 1 or model.layers % (pp * chunks) or count < pp):
            continue
        schedule = space.schedule[0] if space.schedule else "interleaved" if chunks > 1 else "1f1b"
        if chunks > 1 and schedule != "interleaved":
            continue
        for parts in space.sequence_parallel if plain.tp > 1 else (False,):
            if parts and micro * model.seq % plain.tp:
                continue
            # With one stage, or stages and replicas that both fill whole nodes alike, the order changes nothing.
            orders = space.orders if pp > 1 and plain.dp > 1 and plain.tp < base.node_size else space.orders[:1]
            for order in orders:
                parallel = replace(plain, chunks=chunks, schedule=schedule, sequence_parallel=parts, order=order)
                if base.parallel.shard:
                    parallel = sharing_on_node(parallel, base.node_size)
                yield replace(base, parallel=parallel, micro_batch=micro, split=split if chunks == 1 else ())


def search(
    base: Workload, cluster: Cluster, stack: Stack, devices: int, fit_gib: float = 0.0, space: Space | None = None,
    broken: Broken | None = None, best_only: bool = False,
) -> Found:  # fmt: skip
    """All layouts of `base`'s model and batch on `devices`; `fit_gib` 0: the device's own memory. What `broken` has a
    sentence for is not ranked, nor does its time cut others. `best_only`: what can't be the best is not even counted.
    """
    space = space or Space()
    limit = fit_gib or cluster.device.memory_gib
    found = Found()
    best = float("inf")
    rough: list[Candidate] = []
    ordered = sorted(shapes(base, devices, space), key=_promise)
    for shape in ordered:
        bound = _least_seconds(shape, cluster, stack)
        if best_only and bound > NEAR * best:
            continue
        for zero in _stages(shape, space):
            tried = shape.with_parallel(zero=zero)
            why = broken(tried) if broken else None
            if why:
                found.broken += len(space.recompute)
                found.refused = found.refused or why
                continue
            found.layouts += len(space.recompute)
            fitting = _first_that_fits(tried, cluster, stack, limit, space, found)
            if fitting is None:
                continue
            found.fitting += 1
            if bound > SLOWER * best:
                continue
            workload, memory = fitting
            found.timed += 1
            rough.append(Candidate(predict_cost(workload, cluster, stack, exact=False), memory))
            best = min(best, rough[-1].cost.step_s)
    rough.sort(key=lambda candidate: candidate.cost.step_s)
    refined = [replace(one, cost=predict_cost(one.workload, cluster, stack)) for one in rough[:REFINED]]
    refined += rough[REFINED : 8 * REFINED]
    found.candidates = sorted(refined, key=lambda candidate: candidate.cost.step_s)
    return found


def _stages(w: Workload, space: Space) -> tuple[int, ...]:
    """One copy of the states has nothing to divide; weights that live elsewhere are stage 3's even so."""
    if w.parallel.dp * w.parallel.cp > 1:
        return space.zero
    return (3,) if w.states.params_on != "device" and 3 in space.zero else (0,)


def _promise(w: Workload) -> tuple[int, int, int]:
    """Shapes that tend to be quick come first, so that the bound soon cuts the others."""
    p = w.parallel
    return (abs(p.tp - 4) + abs(p.pp - 8), p.chunks, w.micro_batch)


def _least_seconds(w: Workload, cluster: Cluster, stack: Stack) -> float:
    """Less than this no step of the shape can take: its blocks' compute, evenly dealt out, and the bubble of that."""
    p = w.parallel
    block = block_part(w.model, cut_of(w), place_of(w), cluster, stack, w.precision, "none")
    passes = w.micro_batches + (p.pp - 1) / p.chunks
    return passes * w.model.layers / p.pp * (block.forward + block.backward)


def _first_that_fits(
    w: Workload, cluster: Cluster, stack: Stack, limit: float, space: Space, found: Found
) -> tuple[Workload, float] | None:
    for mode in space.recompute:
        tried = replace(w, recompute=mode)
        memory = peak_gib(tried, stack, cluster)
        if memory <= limit:
            return tried, memory
        if found.nearest is None or memory < found.nearest[0]:
            found.nearest = (memory, tried)
    return None


def why_nothing(
    base: Workload, cluster: Cluster, stack: Stack, devices: int, found: Found, limit: float,
    space: Space | None = None, fixed: Sequence[str] = (), broken: Broken | None = None,
) -> UserError:  # fmt: skip
    """The one sentence for a model that fits nowhere: the rule that all break, or the nearest layout, what is missing,
    and what would help. `fixed` are the `a.b=c` words that left only `space`."""
    under = f" with {', '.join(fixed)}" if fixed else ""
    if found.nearest is None:
        if found.refused:
            return UserError(found.refused)
        keys = " and ".join(word.partition("=")[0] for word in fixed)
        return UserError(
            f"no layout{under} divides {devices} devices, a global batch of {base.global_batch} and this model: "
            + (f"leave {keys} open, or " if keys else "")
            + "change --devices or --global-batch, e.g. to a power of two"
        )
    needed, w = found.nearest
    p = w.parallel
    enough = ""
    least = _least_memory(space or Space())
    for factor in (2, 4, 8, 16, 32, 64):
        grown = replace(base, global_batch=base.global_batch * factor)
        if search(grown, cluster, stack, devices * factor, limit, least, broken).candidates:
            enough = f", or {devices * factor} of these devices with a global batch of {base.global_batch * factor}"
            break
    mode = config_mode(w.recompute)
    return UserError(
        f"the model fits nowhere on {devices} x {cluster.device.name}{under}: the nearest layout (tp={p.tp}, "
        f"pp={p.pp}, dp={p.dp}, micro-batch {w.micro_batch}, zero {p.zero}, recompute {mode}) needs {needed:.1f} GiB "
        f"of {limit:.1f}, {needed - limit:.1f} GiB too much: use devices with more memory{enough}"
        + (f"; others break a rule: {found.refused}" if found.refused else "")
    )


def _least_memory(space: Space) -> Space:
    """The part of a space that needs the least: states cut furthest, the most recomputed."""
    return replace(space, zero=space.zero[-1:], recompute=space.recompute[-1:])
