"""Explains the best layout and the time that the runners-up lose, and writes the config that trains it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.config.load import config_from, to_mapping
from meshwright.config.rules import first_broken_rule
from meshwright.config.yaml_text import dump_yaml
from meshwright.errors import UserError, plural
from meshwright.plan.account import balance_words, layout_of_cost, layout_words
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import TIMED_AXES, Cost, predict_cost
from meshwright.plan.grids import PLAIN
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.memory import needed_gib
from meshwright.plan.search import MAX_DEVICES, Candidate, SearchResult, SearchSpace, divided_otherwise, search
from meshwright.show.units import percent, seconds, size
from meshwright.spec.model.experts import EXPERT_DATA_AXES

# The keys that a written config always names, even if they have their default.
ALWAYS_WRITTEN = {
    "layout": ("tp", "pp", "cp", "chunks", "order", "sequence_parallel", "node_size"), "pipeline": ("schedule",),
    "train": ("global_batch", "micro_batch", "precision"), "zero": ("stage",), "recompute": ("mode",),
}  # fmt: skip


def parts_of(cost: Cost) -> dict[str, float]:
    """Return the seconds of a step by the work that takes them. They add up to the step."""
    parts = {"compute": cost.compute_s, "optimizer": cost.optimizer_s, "idle": cost.idle_s}
    for name in TIMED_AXES:
        parts[name] = cost.axes[name].exposed_seconds if name in cost.axes else 0.0
    return parts | {"waiting and the rest": max(0.0, cost.step_s - sum(parts.values()))}


def against(best: Cost, other: Cost) -> str:
    """Describe the parts of a step in which `other` loses time against `best`, the largest first."""
    mine, its = parts_of(best), parts_of(other)
    lost = sorted(((its[name] - mine[name], name) for name in mine), reverse=True)
    worse = [f"{name} +{seconds(gap)}" for gap, name in lost if gap > 0.002 * best.step_s][:3]
    better = [f"{name} -{seconds(-gap)}" for gap, name in reversed(lost) if gap < -0.002 * best.step_s][:2]
    text = ", ".join(worse) or "nothing much"
    return text + (f" (wins {', '.join(better)})" if better else "")


def why_best(candidates: list[Candidate], found_layouts: int, fitting: int) -> list[str]:
    """Return a few sentences about the best candidate of a ranking."""
    best = candidates[0]
    cost, job, config = best.cost, best.job, best.job.config
    shares = sorted(((value / cost.step_s, name) for name, value in parts_of(cost).items()), reverse=True)
    spent = ", ".join(f"{name} {percent(share)}" for share, name in shares if share > 0.004)
    lines = [
        f"{found_layouts:,} combinations were examined, and {fitting:,} of the potentially fast ones fit; "
        f"the best takes {seconds(cost.step_s)} per step at {percent(cost.mfu)} MFU in {config.train.precision}.",
        f"The busiest rank's time: {spent}.",
    ]
    tp, pp = config.layout.tp, config.layout.pp
    if tp > 1:
        place = "stays inside a node" if ranks_per_node(job.layout, "tp") == tp else "crosses nodes"
        lines.append(f"tp={tp} {place} and cuts a layer's states and activations by {tp}.")
        lines += _about_grid(best)
    if config.layout.cp > 1:
        lines.append(f"cp={config.layout.cp} shares sequences by {balance_words(job)}.")
    if pp > 1:
        lines.append(
            f"pp={pp} with {plural(job.micro_batches, 'micro-batch')} has a bubble of {percent(cost.bubble)}, the idle "
            f"share of all its ranks; sends between stages take {seconds(cost.axes['pp'].seconds)}."
        )
    lines += [*_about_experts(best), *_about_states(job)]
    mode = {"none": "Nothing is recomputed", "selective": "Only attention's core is recomputed"}
    room = cost.cluster.device.memory_gib - best.memory_gib
    left = f"{room:.1f} GiB of the device stay free" if room >= 0 else f"{-room:.1f} GiB more than the device has"
    again = mode.get(config.recompute.mode, "Blocks are recomputed")
    if config.recompute.offload:
        again += f" and their inputs, {size(cost.memory.offloaded)} of a rank, are in host memory"
    if config.recompute.pieces > 1:
        again += f"; MLPs run in {config.recompute.pieces} pieces, each computed again"
    lines.append(f"{again}; {left}.")
    return lines


def _about_states(job: Job) -> Iterator[str]:
    """Yield a sentence about the states that ZeRO shards, and the number of ranks that share them."""
    zero = job.config.zero.stage
    usual = job.sharding_over()
    experts = job.sharding_over(EXPERT_DATA_AXES)
    parts = [f"among {usual[1]} ranks"] if usual[0] else []
    if job.config.model.experts.count and experts != usual and experts[0]:
        parts.append(f"those of experts among {experts[1]}" + (" ranks" if not parts else ""))
    if parts:
        what = {1: "the optimizer states", 2: "optimizer states and gradients", 3: "all states"}[zero]
        yield f"ZeRO stage {zero} divides {what} {', '.join(parts)}."


def _about_grid(best: Candidate) -> Iterator[str]:
    """Yield a sentence about the gain of a tensor-parallel grid over the same ranks along one axis."""
    cost, layout = best.cost, best.job.config.layout
    if layout.grid is None:
        return
    others = [best.job.with_keys(layout=PLAIN | {"sequence_parallel": split}) for split in (False, True)]
    possible = [job for job in others if not first_broken_rule(job.config, job.world)]
    fitting = [job for job in possible if needed_gib(job, cost.cluster) <= cost.cluster.device.memory_gib]
    if fitting:
        other = min((predict_cost(job, cost.cluster) for job in fitting), key=lambda one: one.step_s)
        more = percent(other.step_s / cost.step_s - 1)
        yield (
            f"Along one axis instead of the grid {layout.grid}, with all else the same, it takes {more} more: "
            f"{against(cost, other)}."
        )
    elif possible:
        yield f"Along one axis instead of the grid {layout.grid} it would not fit."
    else:
        yield f"The grid {layout.grid} divides what tp={layout.tp} along one axis does not."


def _about_experts(best: Candidate) -> Iterator[str]:
    """Yield sentences about the best layout's division of experts, and the loss with any other division."""
    cost, layout, experts = best.cost, best.job.layout, best.job.config.model.experts
    if not experts.count:
        return
    cut = "Experts are whole" if layout.etp == 1 else f"etp={layout.etp} cuts each expert"
    if layout.ep > 1:
        place = "stays inside a node" if ranks_per_node(layout, "ep") == layout.ep else "crosses nodes"
        took = cost.axes["ep"].seconds if "ep" in cost.axes else 0.0
        exchange = f"exchanging rows takes {seconds(took)}, {percent(took / cost.step_s)} of the step"
        yield f"{cut}; ep={layout.ep} {place} and leaves {experts.count // layout.ep} to a rank: {exchange}."
    else:
        yield f"{cut}; with ep=1 every rank has all of them, and no rows are exchanged."
    others = [(needed_gib(job, cost.cluster), job) for job in divided_otherwise(best.job)]
    fitting = [predict_cost(job, cost.cluster) for gib, job in others if gib <= cost.cluster.device.memory_gib]
    if fitting:
        other = min(fitting, key=lambda one: one.step_s)
        name = _cut_words(other.job)
        more = percent(other.step_s / cost.step_s - 1)
        lost = f"with all else the same it takes {more} more, lost on {against(cost, other)}"
        yield f"Of other ways that fit, {name} is the fastest: {lost}."
    elif others:
        gib, job = min(others, key=lambda pair: pair[0])
        yield f"No other way fits with all else the same: {_cut_words(job)} needs {gib:.1f} GiB."


def _cut_words(job: Job) -> str:
    return f"ep={job.layout.ep} and etp={job.layout.etp}"


def yaml_of(best: Candidate) -> str:
    """Return a config for `meshwright train`: the plan's choices, and all other keys that are not at their defaults."""
    job = best.job.with_keys(layout={"node_size": best.job.node_size})
    wanted = to_mapping(job.config)
    least = {key: wanted["model"][key] for key in (["preset"] if job.config.model.preset else wanted["model"])}
    raw: dict[str, Any] = {"model": least, "data": {"prefixes": wanted["data"]["prefixes"]}}
    defaults = to_mapping(config_from(raw))
    for section, values in wanted.items():
        always = ALWAYS_WRITTEN.get(section, ())
        written = {key: value for key, value in values.items() if key in always or value != defaults[section][key]}
        if written:
            raw[section] = {**raw.get(section, {}), **written}
    head = f"# {layout_words(layout_of_cost(best.cost))}\n# on {job.world} x {best.cost.cluster.device.name}: "
    head += f"{seconds(best.cost.step_s)} per step, {best.memory_gib:.1f} GiB, predicted. Add your token files.\n"
    return head + dump_yaml(raw)


def no_fit_error(
    base: Job, cluster: Cluster, result: SearchResult, limit: float, space: SearchSpace, fixed: Sequence[str]
) -> UserError:
    """Return the error for a model that fits nowhere.

    The error names the rule that all layouts break, or the layout nearest to fitting, the memory that it lacks and a
    remedy. `fixed` are the `a.b=c` words that restricted the search to `space`.
    """
    devices, batch = base.world, base.global_batch
    under = f" with {', '.join(fixed)}" if fixed else ""
    if result.nearest is None:
        if result.refused:
            return UserError(result.refused)
        keys = " and ".join(word.partition("=")[0] for word in fixed)
        return UserError(
            f"no layout{under} divides {devices} devices, a global batch of {batch} and this model: "
            + (f"leave {keys} open, or " if keys else "")
            + "change --devices or --global-batch, e.g. to a power of two"
        )
    needed, job = result.nearest
    config, enough = job.config, ""
    # The part of the space that needs the least memory: the most sharding and the most recomputation.
    least = replace(space, zero=space.zero[-1:], recompute=space.recompute[-1:])
    for factor in (factor for factor in (2, 4, 8, 16, 32, 64) if devices * factor <= MAX_DEVICES):
        grown = replace(base.with_keys(train={"global_batch": batch * factor}), world=devices * factor)
        if search(grown, cluster, limit, least).candidates:
            enough = f", or {devices * factor} of these devices with a global batch of {batch * factor}"
            break
    offloaded = " and offloaded" if config.recompute.offload else ""
    others = f"; others break a rule: {result.refused}" if result.refused else ""
    return UserError(
        f"the model fits nowhere on {devices} x {cluster.device.name}{under}: the nearest layout "
        f"(tp={config.layout.tp}, pp={config.layout.pp}, dp={job.layout.dp}, micro-batch {config.train.micro_batch}, "
        f"zero {config.zero.stage}, recompute {config.recompute.mode}{offloaded}) needs {needed:.1f} GiB of "
        f"{limit:.1f}, {needed - limit:.1f} GiB too much: use devices with more memory{enough}{others}"
    )
