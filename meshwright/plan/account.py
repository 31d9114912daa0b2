"""A predicted step told in full: as JSON, as tables for people, and as the days and money of a whole run. No torch."""

from __future__ import annotations

from typing import Any

from meshwright.plan.cost import Cost
from meshwright.plan.flops import model_flops, total_params
from meshwright.plan.memory import GIB, Memory, context_gib, largest, peak_gib
from meshwright.plan.show import count, percent, seconds, size, table
from meshwright.plan.workload import config_mode

DAY = 86400.0


def layout_of_cost(cost: Cost) -> dict[str, Any]:
    """The choices that a plan makes, by the names of --layout."""
    w, p = cost.workload, cost.workload.parallel
    return {
        "tp": p.tp, "pp": p.pp, "dp": p.dp, "cp": p.cp, "chunks": p.chunks, "order": p.order,
        "sequence_parallel": p.sequence_parallel, "schedule": p.schedule, "micro_batch": w.micro_batch,
        "zero": p.zero, "recompute": config_mode(w.recompute), "split": list(w.split),
    }  # fmt: skip


def layout_words(layout: dict[str, Any]) -> str:
    """A layout in a few words; what is left at its plainest goes unsaid."""
    plain = {"split": [], "cp": 1, "chunks": 1, "order": "tp-cp-ep-dp-pp", "schedule": "1f1b"}
    names = {"sequence_parallel": "sp", "micro_batch": "micro-batch"}
    return ", ".join(
        f"{names.get(key, key)} {_value(value)}" for key, value in layout.items() if plain.get(key) != value
    )


def _value(value: Any) -> str:
    """A value in a few letters; a split as runs of equal stages."""
    if not isinstance(value, list):
        return str(value).lower()
    runs: list[list[int]] = []
    for layers in value:
        if runs and runs[-1][0] == layers:
            runs[-1][1] += 1
        else:
            runs.append([layers, 1])
    return "+".join(f"{times}x{layers}" if times > 1 else str(layers) for layers, times in runs)


def whole_run(cost: Cost, tokens: float) -> dict[str, float]:
    """time = tokens x FLOPs per token / (one device's rate x devices x parallel efficiency), each factor."""
    w, p = cost.workload, cost.workload.parallel
    per_token = model_flops(w.model, 1.0)
    # What a device would take for its share of the step if it computed all the time, no stage longer than another.
    work = sum(s.forward + s.backward for s in cost.stages) * w.micro_batches / p.pp
    alone = max(1e-12, min(cost.compute_s, work))
    rate = per_token * w.tokens / w.world / alone
    efficiency = alone / cost.step_s
    days = tokens * per_token / (rate * w.world * efficiency) / DAY
    device_hours = days * 24 * w.world
    return {
        "tokens": tokens, "flops_per_token": per_token, "device_flops_per_s": rate, "devices": w.world,
        "parallel_efficiency": efficiency, "days": days, "steps": tokens / w.tokens, "device_hours": device_hours,
        "energy_mwh": device_hours * cost.cluster.device.power_w / 1e6,
        "cost_usd": device_hours * cost.cluster.device.price_hour,
    }  # fmt: skip


def memory_json(memory: Memory, cost: Cost) -> dict[str, Any]:
    w = cost.workload
    return {
        "pp_rank": memory.pp_rank, "parameters": memory.parameters, "gradients": memory.gradients,
        "master": memory.master, "optimizer": memory.optimizer, "activations": memory.activations,
        "buffers": memory.buffers, "peak": memory.peak,
        "context": context_gib(w, cost.stack, cost.cluster) * GIB,
        "device_gib": cost.cluster.device.memory_gib, "needed_gib": peak_gib(w, cost.stack, cost.cluster),
    }  # fmt: skip


def as_json(cost: Cost, tokens: float | None = None) -> dict[str, Any]:
    w = cost.workload
    found: dict[str, Any] = {
        "cluster": cost.cluster.name, "stack": cost.stack.name, "devices": w.world, "layout": layout_of_cost(cost),
        "parameters": total_params(w.model), "global_batch": w.global_batch, "seq": w.model.seq,
        "micro_batches": w.micro_batches, "step_time_s": cost.step_s,
        "tokens_per_s": cost.tokens_per_s_device * w.world, "tokens_per_s_per_device": cost.tokens_per_s_device,
        "mfu": cost.mfu, "hfu": cost.hfu, "bubble": cost.bubble, "bubble_s": cost.bubble_s,
        "bubble_from": "table" if cost.simulated else "formula", "compute_s": cost.compute_s,
        "optimizer_s": cost.optimizer_s,
        "comm": {
            name: {
                "wire_bytes": axis.wire_bytes, "seconds": axis.seconds, "hidden_s": axis.hidden,
                "exposed_s": axis.exposed,
            }
            for name, axis in cost.axes.items()
        },
        "stages": [
            {"forward_s": s.forward, "backward_s": s.backward, "forward_flops": s.flops, "parameters": s.params}
            for s in cost.stages
        ],
        "memory": memory_json(largest(w, cost.stack), cost),
    }  # fmt: skip
    if tokens:
        found["run"] = whole_run(cost, tokens)
    return found


def report(cost: Cost, tokens: float | None = None) -> str:
    """The same, for people."""
    w, p = cost.workload, cost.workload.parallel
    m = as_json(cost, tokens)
    words = layout_words(m["layout"])
    lines = [
        f"{count(total_params(w.model))} parameters on {w.world} x {cost.cluster.device.name}: {words}",
        f"global batch {w.global_batch} x {w.model.seq} tokens, {w.micro_batches} micro-batches, {w.precision}, "
        f"stack {cost.stack.name}",
        "",
        f"  step time        {seconds(cost.step_s)}",
        f"  tokens/s         {m['tokens_per_s']:,.0f}  ({cost.tokens_per_s_device:,.0f} a device)",
        f"  MFU / HFU        {percent(cost.mfu)} / {percent(cost.hfu)}",
        f"  compute          {seconds(cost.compute_s)} (busiest stage)",
        f"  bubble           {percent(cost.bubble)} ({seconds(cost.bubble_s)}, by the {m['bubble_from']})",
        f"  optimizer        {seconds(cost.optimizer_s)}",
        "",
    ]
    rows = [("communication (one rank, one step)", "wire", "time", "hidden")]
    for name, axis in cost.axes.items():
        hidden = percent(axis.hidden / axis.seconds) if axis.seconds else "-"
        rows.append((name, size(axis.wire_bytes), seconds(axis.seconds), hidden))
    lines += [table(rows) if cost.axes else "  no communication", ""]
    stages = [("stage (one micro-batch)", "forward", "backward", "TFLOP forward", "parameters")]
    shown = range(p.pp) if p.pp <= 6 else (0, 1, p.pp - 2, p.pp - 1)
    for rank in shown:
        s = cost.stages[rank]
        stages.append((f"{rank}", seconds(s.forward), seconds(s.backward), f"{s.flops / 1e12:.3g}", count(s.params)))
    lines += [table(stages), "", _memory_lines(m["memory"])]
    if tokens:
        lines += ["", _run_lines(m["run"])]
    return "\n".join(lines)


def _memory_lines(memory: dict[str, Any]) -> str:
    kinds = ("parameters", "gradients", "master", "optimizer", "activations", "buffers", "context")
    parts = ", ".join(f"{kind} {memory[kind] / GIB:.1f}" for kind in kinds)
    verdict = "fits" if memory["needed_gib"] <= memory["device_gib"] else "DOES NOT FIT"
    return (
        f"  memory GiB       {memory['needed_gib']:.1f} of {memory['device_gib']:.1f}: {verdict} "
        f"(pipeline rank {memory['pp_rank']})\n                   {parts}"
    )


def _run_lines(run: dict[str, float]) -> str:
    return (
        f"  whole run        {run['tokens']:.3g} tokens x {run['flops_per_token']:.3g} FLOP/token / "
        f"({run['device_flops_per_s'] / 1e12:.1f} TFLOP/s x {run['devices']:.0f} devices x "
        f"{percent(run['parallel_efficiency'])} parallel efficiency) = {run['days']:.1f} days\n"
        f"                   {run['steps']:,.0f} steps, {run['device_hours']:,.0f} device hours, "
        f"{run['energy_mwh']:,.0f} MWh of the devices, {run['cost_usd']:,.0f} USD at the cluster file's price"
    )
