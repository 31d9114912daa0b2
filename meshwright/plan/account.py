"""Reports a predicted step as JSON and as text tables, and the days and cost of a whole run. No torch."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from meshwright.config.memory import Recomputed
from meshwright.config.sections import Config
from meshwright.errors import plural
from meshwright.plan.communication import Traffic, mean_of_all_ranks
from meshwright.plan.cost import Cost
from meshwright.plan.flops import model_flops
from meshwright.plan.job import Job
from meshwright.plan.memory import GIB, device_memory
from meshwright.plan.rank import bytes_at_peak, rank_json
from meshwright.plan.reduction import AxisTime
from meshwright.show.terminal import table
from meshwright.show.units import count, percent, seconds, size
from meshwright.spec.layout.layout import whole_axis
from meshwright.spec.layout.rows import balance, causal_pairs
from meshwright.spec.model.graph import active_parameters, parameter_count
from meshwright.spec.schedule.kinds import default_kind

DAY = 86400.0
SHARDED = {1: "optimizer states", 2: "optimizer states and gradients", 3: "optimizer states, gradients and weights"}


def layout_of_cost(cost: Cost) -> dict[str, Any]:
    """Return the choices that a plan makes, by the names that --layout uses."""
    config, layout = cost.job.config, cost.job.layout
    return {
        **({"replicas": layout.replicas} if layout.replicas > 1 else {}),
        "tp": config.layout.tp, **({"tp_grid": str(config.layout.grid)} if config.layout.grid else {}),
        "pp": config.layout.pp, "dp": layout.dp, "cp": config.layout.cp,
        **({"ep": layout.ep, "etp": layout.etp} if config.model.experts.count else {}), "chunks": config.layout.chunks,
        "order": config.layout.order, "sequence_parallel": config.layout.sequence_parallel and config.layout.tp > 1,
        "schedule": config.pipeline.schedule, "micro_batch": config.train.micro_batch, "zero": config.zero.stage,
        "recompute": config.recompute.mode, "offload": config.recompute.offload, "pieces": config.recompute.pieces,
        "split": list(config.pipeline.split),
    }  # fmt: skip


def layout_words(layout: dict[str, Any]) -> str:
    """Describe a layout in a few words, without the keys that have their defaults."""
    plain: dict[str, Any] = {"split": [], "cp": 1, "chunks": 1, "order": "tp-cp-ep-dp-pp", "schedule": default_kind(1)}
    plain |= {"offload": False, "pieces": 1}
    names = {"sequence_parallel": "sp", "micro_batch": "micro-batch", "tp_grid": "grid"}
    return ", ".join(
        f"{names.get(key, key)} {_value(value)}" for key, value in layout.items() if plain.get(key) != value
    )


def plain_words(config: Config, ranks: int) -> str:
    """Describe the ranks' work, with each key's name: `each batch is divided over 2 copies of the model (dp)`."""
    layout = config.layout
    copies = ranks // (layout.tp * layout.pp * layout.cp)
    clauses = []
    if layout.tp > 1:
        clauses.append(f"{layout.tp} ranks share each layer (tp)")
    if layout.cp > 1:
        clauses.append(f"{layout.cp} ranks share each sequence (cp)")
    if layout.pp > 1:
        clauses.append(f"the layers are divided into {layout.pp} stages (pp)")
    if copies > 1:
        divided = f", which divide {SHARDED[config.zero.stage]} (ZeRO {config.zero.stage})" if config.zero.stage else ""
        clauses.append(f"each batch is divided over {copies} copies of the model (dp){divided}")
    if layout.ep > 1:
        clauses.append(f"the experts are divided over {layout.ep} ranks (ep)")
    if not clauses:
        clauses.append("one rank computes everything")
    clauses.append(f"{plural(config.train.micro_batch, 'sequence')} at a time (micro-batch)")
    if config.recompute.part is not Recomputed.NOTHING:
        clauses.append(f"backward computes activations again (recompute {config.recompute.mode})")
    return "; ".join(clauses)


def _value(value: Any) -> str:
    """Format a value briefly. A split is written as runs of equal stages, such as 2x5+4."""
    if not isinstance(value, list):
        return str(value).lower()
    runs = ((layers, len(list(stages))) for layers, stages in groupby(value))
    return "+".join(f"{times}x{layers}" if times > 1 else str(layers) for layers, times in runs)


def parameters_words(job: Job) -> str:
    """Describe the size of a model and, for a mixture of experts, the number of parameters that a token uses."""
    words = f"{count(parameter_count(job.model))} parameters"
    if not job.config.model.experts.count:
        return words
    return f"{words} (a token uses {count(active_parameters(job.model))})"


def experts_json(job: Job) -> dict[str, Any]:
    """Return the division of a mixture of experts under the key `experts`, or nothing for dense models."""
    e, layout = job.config.model.experts, job.layout
    if not e.count:
        return {}
    here = {"count": e.count, "top_k": e.top_k, "ep": layout.ep, "etp": layout.etp, "edp": layout.edp}
    return {"experts": here | {"per_rank": e.count // layout.ep}}


def experts_words(job: Job) -> str:
    """Describe the division of a mixture of experts in words. The text is empty for dense models."""
    experts = experts_json(job).get("experts")
    if not experts:
        return ""
    words = f"{experts['count']} experts, {experts['top_k']} for a token; ep {experts['ep']}, etp {experts['etp']}: "
    words += f"{count(experts['per_rank'])} on a rank"
    return words + (f" ({experts['edp']} copies)" if experts["edp"] > 1 else "")


def whole_run(cost: Cost, tokens: float) -> dict[str, float]:
    """Return each factor of time = tokens x FLOPs per token / (rate of one device x devices x parallel efficiency)."""
    job = cost.job
    per_token = model_flops(job.config.model, 1.0)
    # The time of a device's share of the step if it computed all the time and all stages were equally long.
    work = sum(s.forward + s.backward for s in cost.stages) * job.micro_batches / job.layout.pp
    alone = max(1e-12, min(cost.compute_s, work))
    rate = per_token * job.tokens / job.world / alone
    efficiency = alone / cost.step_s
    days = tokens * per_token / (rate * job.world * efficiency) / DAY
    device_hours = days * 24 * job.world
    return {
        "tokens": tokens, "flops_per_token": per_token, "device_flops_per_s": rate, "devices": job.world,
        "parallel_efficiency": efficiency, "days": days, "steps": tokens / job.tokens, "device_hours": device_hours,
        "energy_mwh": device_hours * cost.cluster.device.power_w / 1e6,
        "cost_usd": device_hours * cost.cluster.device.price_hour,
    }  # fmt: skip


def memory_json(cost: Cost) -> dict[str, Any]:
    """Return the bytes of the rank with the highest memory peak, and the total that its device needs."""
    device = device_memory(cost.job, cost.cluster, cost.memory)
    return {
        **rank_json(cost.job, cost.memory.pp_rank)["memory"], "pp_rank": cost.memory.pp_rank,
        "at_peak": bytes_at_peak(cost.memory), "device": device.as_json(), "context": device.context * GIB,
        "device_gib": cost.cluster.device.memory_gib, "needed_gib": device.total,
    }  # fmt: skip


def as_json(cost: Cost, tokens: float | None = None) -> dict[str, Any]:
    """Return all figures of a predicted step and, with `tokens`, of a whole run."""
    job = cost.job
    figures: dict[str, Any] = {
        "cluster": cost.cluster.name, "stack": job.stack.name, "devices": job.world, "layout": layout_of_cost(cost),
        "precision": job.config.train.precision, "parameters": parameter_count(job.model),
        "active_parameters": active_parameters(job.model), **experts_json(job), "imbalance": job.imbalance,
        "global_batch": job.global_batch, "seq": job.config.model.seq,
        "micro_batches": job.micro_batches, "step_time_s": cost.step_s,
        "tokens_per_s": cost.tokens_per_s_device * job.world, "tokens_per_s_per_device": cost.tokens_per_s_device,
        "mfu": cost.mfu, "hfu": cost.hfu, "bubble": cost.bubble, "bubble_s": cost.bubble_s, "idle_s": cost.idle_s,
        "barrier_s": cost.barrier_s,
        "bubble_from": "table" if cost.simulated else "formula", "compute_s": cost.compute_s,
        "optimizer_s": cost.optimizer_s,
        "comm": {
            name: traffic._asdict() | {"seconds": t.seconds, "hidden_s": t.hidden, "exposed_s": t.exposed_seconds}
            for name, traffic, t in axes_of(cost)
        },
        "stages": [
            {"forward_s": s.forward, "backward_s": s.backward, "forward_flops": s.flops, "parameters": s.params}
            for s in cost.stages
        ],
        "memory": memory_json(cost),
        "rank": rank_json(job, cost.memory.pp_rank),
        "ledger": {axis: traffic._asdict() for axis, traffic in mean_of_all_ranks(job).items()},
    }  # fmt: skip
    if job.layout.cp > 1:
        figures["context"] = context_balance(job)
    if tokens:
        figures["run"] = whole_run(cost, tokens)
    return figures


def context_balance(job: Job) -> dict[str, Any]:
    """Describe the division of a sequence over cp ranks, and its balance.

    `pairs` counts the visible pairs of a query and a key on the busiest rank, and `balance` is that number over the
    mean. Document boundaries are ignored, since only the data know them.
    """
    c, cp = job.config, job.layout.cp
    pairs = causal_pairs(c.context.order, c.model.seq, cp)
    # Other programs are assumed to pass keys and values around a ring.
    kind = c.context_kind if job.stack.own else "ring"
    context = {"kind": kind, "order": c.context.order, "pairs": int(pairs.max()), "balance": balance(pairs)}
    return context | ({"inner": c.context.inner} if c.context.inner else {})


def balance_words(job: Job) -> str:
    """Describe the division of a sequence over cp ranks in words."""
    context = context_balance(job)
    return (
        f"{context['kind']} in {context['order']} order: the busiest of {job.layout.cp} ranks has {context['pairs']:,} "
        f"causal pairs of a sequence, {context['balance']:.3f} times the mean"
    )


def axes_of(cost: Cost) -> list[tuple[str, Traffic, AxisTime]]:
    """Return (axis, traffic, time) of one rank for each axis.

    Time is only known for whole axes: axes that shard states are timed as part of dp, and parts of cp as cp.
    """
    timed = {name: name.removesuffix(".inner").removesuffix(".outer") for name in cost.traffic}
    timed |= {name: "dp" for name in timed if name.startswith(("dp", "cp-dp")) and "pp" not in name.split("-")}
    return [(name, traffic, cost.axes.get(timed[name], AxisTime())) for name, traffic in cost.traffic.items()]


def report(cost: Cost, tokens: float | None = None, full: bool = True) -> str:
    """Return the figures of `as_json` as text; with `full` also the tables of the communication and the stages."""
    job, config = cost.job, cost.job.config
    m = as_json(cost, tokens)
    words, fits = experts_words(job), m["memory"]["needed_gib"] <= m["memory"]["device_gib"]
    lines = [
        f"{parameters_words(job)} on {job.world} x {cost.cluster.device.name}: {layout_words(m['layout'])}",
        *([words] if words else []),
        f"global batch {job.global_batch} x {config.model.seq} tokens, {plural(job.micro_batches, 'micro-batch')}, "
        f"{config.train.precision}, stack {job.stack.name}",
        "",
        # A step that does not fit has no speed, so this comes first.
        *([] if fits else [_memory_lines(cost), ""]),
        f"  step time        {seconds(cost.step_s)}",
        f"  tokens/s         {m['tokens_per_s']:,.0f}  ({cost.tokens_per_s_device:,.0f} per device)",
        f"  MFU / HFU        {percent(cost.mfu)} / {percent(cost.hfu)}",
        f"  compute          {seconds(cost.compute_s)} (busiest stage)",
        f"  bubble           {percent(cost.bubble)} ({seconds(cost.bubble_s)}, by the {m['bubble_from']}; "
        f"the busiest stage idles {seconds(cost.idle_s)})",
        *([f"  barrier          {seconds(cost.barrier_s)} of it, until the last stage has its gradient norm"]
          if cost.barrier_s else []),
        f"  optimizer        {seconds(cost.optimizer_s)}",
        *([f"  context          {balance_words(job)}"] if job.layout.cp > 1 else []),
        "",
    ]
    lines += [_memory_lines(cost), ""] if fits else []
    if tokens:
        lines += [_run_lines(m["run"]), ""]
    return "\n".join([*lines, *(_tables(cost, m) if full else _about_ep(cost))]).rstrip()


def _tables(cost: Cost, m: dict[str, Any]) -> list[str]:
    """Return the tables of a step's communication and of its stages. `m` is what `as_json` returns."""
    rows = [(f"communication of a rank of stage {cost.memory.pp_rank}", "calls", "wire", "time", "hidden", "all ranks")]
    for name, traffic, axis in axes_of(cost):
        hidden = percent(axis.hidden / axis.seconds) if axis.seconds else "-"
        time = seconds(axis.seconds) if axis.seconds else "-"
        all_ranks = size(m["ledger"][name]["wire_bytes"])
        rows.append((name, f"{traffic.calls:,}", size(traffic.wire_bytes), time, hidden, all_ranks))
    lines = [table(rows) if cost.traffic else "  no communication", *_about_ep(cost), ""]

    stages = [("stage (one micro-batch)", "forward", "backward", "TFLOP forward", "parameters")]
    pp = cost.job.layout.pp
    # A long pipeline shows only the two stages at each end.
    for rank in range(pp) if pp <= 6 else (0, 1, pp - 2, pp - 1):
        s = cost.stages[rank]
        stages.append((f"{rank}", seconds(s.forward), seconds(s.backward), f"{s.flops / 1e12:.3g}", count(s.params)))
    return [*lines, table(stages)]


def _about_ep(cost: Cost) -> list[str]:
    """State the assumption behind the bytes over ep."""
    if not any(whole_axis(axis) == "ep" for axis in cost.traffic):
        return []
    if cost.job.config.model.experts.capacity is not None:
        return ["  The capacity fixes the bytes over ep."]
    lines = ["  Bytes over ep are those of balanced experts: what a rank sends depends on what its tokens choose."]
    if cost.job.imbalance > 1:
        text = f"{cost.job.imbalance:g} times the mean rows, in time and memory."
        lines.append(f"  The busiest rank's experts are assumed to have {text}")
    return lines


def _memory_lines(cost: Cost) -> str:
    device = device_memory(cost.job, cost.cluster, cost.memory)
    limit = cost.cluster.device.memory_gib
    parts = bytes_at_peak(cost.memory)
    peak = ", ".join(f"{kind} {parts[kind] / GIB:.1f}" for kind in parts if kind != "peak")
    verdict = "fits" if device.total <= limit else "DOES NOT FIT"
    return (
        f"  memory GiB       {device.total:.1f} of {limit:.1f}: {verdict} (pipeline rank {cost.memory.pp_rank})\n"
        f"                   {device.words()}\n                   at the peak: {peak}"
    )


def _run_lines(run: dict[str, float]) -> str:
    return (
        f"  whole run        {run['tokens']:.3g} tokens x {run['flops_per_token']:.3g} FLOP/token / "
        f"({run['device_flops_per_s'] / 1e12:.1f} TFLOP/s x {run['devices']:.0f} devices x "
        f"{percent(run['parallel_efficiency'])} parallel efficiency) = {run['days']:.1f} days\n"
        f"                   {run['steps']:,.0f} steps, {run['device_hours']:,.0f} device hours, "
        f"{run['energy_mwh']:,.0f} MWh of the devices, {run['cost_usd']:,.0f} USD at the cluster file's price"
    )
