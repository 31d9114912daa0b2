"""Why a layout is the best, where the runners-up lose time, and the config that trains the best. No torch."""

from __future__ import annotations

from typing import Any

from meshwright.config.load import config_from, to_mapping
from meshwright.config.yaml_text import dump_yaml
from meshwright.plan.account import balance_words, layout_of_cost, layout_words
from meshwright.plan.cost import Cost
from meshwright.plan.job import ranks_per_node
from meshwright.plan.search import Candidate
from meshwright.show.units import percent, seconds

# The keys that a written config always names, even where they have their default.
ALWAYS_WRITTEN = {
    "layout": ("tp", "pp", "cp", "chunks", "order", "sequence_parallel", "node_size"), "pipeline": ("schedule",),
    "train": ("global_batch", "micro_batch", "precision"), "zero": ("stage",), "recompute": ("mode",),
}  # fmt: skip


def parts_of(cost: Cost) -> dict[str, float]:
    """Returns where a step's seconds go; they add up to the step."""
    found = {"compute": cost.compute_s, "optimizer": cost.optimizer_s, "idle": cost.idle_s}
    for name in ("tp", "cp", "dp", "pp", "embedding"):
        found[name] = cost.axes[name].exposed if name in cost.axes else 0.0
    return found | {"waiting and the rest": max(0.0, cost.step_s - sum(found.values()))}


def against(best: Cost, other: Cost) -> str:
    """Says where `other` loses time against `best`, the largest parts first."""
    mine, its = parts_of(best), parts_of(other)
    lost = sorted(((its[name] - mine[name], name) for name in mine), reverse=True)
    worse = [f"{name} +{seconds(gap)}" for gap, name in lost if gap > 0.002 * best.step_s][:3]
    better = [f"{name} -{seconds(-gap)}" for gap, name in reversed(lost) if gap < -0.002 * best.step_s][:2]
    text = ", ".join(worse) or "nothing much"
    return text + (f" (wins {', '.join(better)})" if better else "")


def why_best(candidates: list[Candidate], found_layouts: int, fitting: int) -> list[str]:
    """Returns a few sentences about the best of a ranking."""
    best = candidates[0]
    cost, job, c = best.cost, best.job, best.job.config
    shares = sorted(((value / cost.step_s, name) for name, value in parts_of(cost).items()), reverse=True)
    spent = ", ".join(f"{name} {percent(share)}" for share, name in shares if share > 0.004)
    lines = [
        f"{found_layouts:,} combinations were looked at, {fitting:,} layouts fit; "
        f"the best takes {seconds(cost.step_s)} per step at {percent(cost.mfu)} MFU in {c.train.precision}.",
        f"The busiest rank's time: {spent}.",
    ]
    tp, pp = c.layout.tp, c.layout.pp
    if tp > 1:
        place = "stays inside a node" if ranks_per_node(job.layout, "tp") == tp else "crosses nodes"
        lines.append(f"tp={tp} {place} and cuts a layer's states and activations by {tp}.")
    if c.layout.cp > 1:
        lines.append(f"cp={c.layout.cp} shares sequences by {balance_words(job)}.")
    if pp > 1:
        lines.append(
            f"pp={pp} with {job.micro_batches} micro-batches has a bubble of {percent(cost.bubble)}, the idle share of "
            f"all its ranks; stages pass on {seconds(cost.axes['pp'].seconds)} of sends."
        )
    zero, shards, _ = job.sharding
    if zero:
        what = {1: "the optimizer states", 2: "optimizer states and gradients", 3: "all states"}[zero]
        lines.append(f"ZeRO stage {zero} divides {what} among {shards} ranks.")
    mode = {"none": "Nothing is recomputed", "selective": "Only attention's core is recomputed"}
    room = cost.cluster.device.memory_gib - best.memory_gib
    left = f"{room:.1f} GiB of the device stay free" if room >= 0 else f"{-room:.1f} GiB more than the device has"
    lines.append(f"{mode.get(c.recompute.mode, 'Blocks are recomputed')}; {left}.")
    return lines


def yaml_of(best: Candidate) -> str:
    """Returns a config for `meshwright train`: the plan's choices, and all other keys that are not at defaults."""
    job = best.job.replaced(layout={"node_size": best.job.node_size})
    wanted = to_mapping(job.config)
    least = {key: wanted["model"][key] for key in (["preset"] if job.config.model.preset else wanted["model"])}
    raw: dict[str, Any] = {"model": least, "data": {"prefixes": wanted["data"]["prefixes"]}}
    usual = to_mapping(config_from(raw))
    for section, values in wanted.items():
        chosen = ALWAYS_WRITTEN.get(section, ())
        other = {key: value for key, value in values.items() if key in chosen or value != usual[section][key]}
        if other:
            raw[section] = {**raw.get(section, {}), **other}
    head = f"# {layout_words(layout_of_cost(best.cost))}\n# on {job.world} x {best.cost.cluster.device.name}: "
    head += f"{seconds(best.cost.step_s)} per step, {best.memory_gib:.1f} GiB, predicted. Add your token files.\n"
    return head + dump_yaml(raw)
