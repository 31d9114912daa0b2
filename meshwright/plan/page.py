"""Writes the report of a plan as one HTML page: ranking, memory, traffic and timeline. No torch."""

from __future__ import annotations

from dataclasses import replace

from meshwright.config.rules import batch_unit
from meshwright.plan.account import axes_of, layout_of_cost, layout_words, memory_json
from meshwright.plan.cost import Cost, blocked_times, timeline_of
from meshwright.plan.explain import against, parts_of
from meshwright.plan.memory import GIB
from meshwright.plan.search import Candidate
from meshwright.show import html
from meshwright.show.schedule_drawing import timeline_svg
from meshwright.show.units import percent, seconds, size

MEMORY_COLOURS = {
    "parameters": "#3b6fb6", "gradients": "#5aa9a3", "master": "#8c6bb1", "optimizer": "#c2618d",
    "activations": "#e08e3c", "buffers": "#c9b13c", "temporary": "#b5533c", "allocator reserve": "#d8d8d8",
    "context and communicators": "#9a9a9a",
}  # fmt: skip
TIME_COLOURS = {
    "compute": "#3b6fb6", "optimizer": "#8c6bb1", "idle": "#d8d8d8", "tp": "#e08e3c", "cp": "#c9b13c",
    "ep": "#b5533c", "etp": "#d6a77a", "dp": "#c2618d", "edp": "#e3a6c0", "pp": "#5aa9a3",
    "embedding": "#7a4fa3", "waiting and the rest": "#9a9a9a",
}  # fmt: skip
SHOWN_MICRO_BATCHES = 24


def page(title: str, reasons: list[str], candidates: list[Candidate], limit_gib: float) -> str:
    """Return the HTML page of a ranking. `limit_gib` is the memory of the device."""
    best = candidates[0].cost
    sections = {
        "Ranking": _ranking(candidates),
        "Where a step's time goes": _times(candidates),
        f"Memory of the fullest rank (the device has {limit_gib:.1f} GiB)": _memory(candidates, limit_gib),
        "Communication of the best layout, per rank and step": _communication(best),
        "Pipeline of the best layout": _timeline(best),
    }
    return html.page(title, reasons, sections)


def ranking_cells(candidate: Candidate) -> tuple[str, ...]:
    """Return a candidate's layout, step, tokens/s/device, MFU, bubble and GiB, for the page and for the terminal."""
    cost = candidate.cost
    return (
        layout_words(layout_of_cost(cost)), seconds(cost.step_s), f"{cost.tokens_per_s_device:,.0f}",
        percent(cost.mfu), percent(cost.bubble), f"{candidate.memory_gib:.1f}",
    )  # fmt: skip


def _ranking(candidates: list[Candidate]) -> str:
    rows = [["#", "layout", "step", "tokens/s/device", "MFU", "bubble", "memory GiB", "loses against the best"]]
    for number, candidate in enumerate(candidates, 1):
        loses = "" if number == 1 else against(candidates[0].cost, candidate.cost)
        rows.append([str(number), *ranking_cells(candidate), loses])
    return html.table(rows, words=(1, 7), marked=1)


def _times(candidates: list[Candidate]) -> str:
    costs = [candidate.cost for candidate in candidates]
    longest = max(cost.step_s for cost in costs)
    return html.bars([(parts_of(cost), longest, seconds(cost.step_s)) for cost in costs], TIME_COLOURS, "s")


def _memory(candidates: list[Candidate], limit: float) -> str:
    rows = []
    for candidate in candidates:
        memory = memory_json(candidate.cost)
        parts = {name: value / GIB for name, value in memory["at_peak"].items() if name != "peak"}
        parts["allocator reserve"] = memory["device"]["reserve_gib"]
        parts["context and communicators"] = memory["device"]["context_gib"]
        rows.append((parts, max(limit, sum(parts.values())), f"{candidate.memory_gib:.1f} GiB"))
    return html.bars(rows, MEMORY_COLOURS, "GiB")


def _communication(cost: Cost) -> str:
    if not cost.traffic:
        return html.note("One rank sends nothing.")
    rows = [["axis", "on the wire", "time", "hidden"]]
    for name, traffic, axis in axes_of(cost):
        hidden = percent(axis.hidden / axis.seconds) if axis.seconds else "-"
        rows.append([name, size(traffic.wire_bytes), seconds(axis.seconds) if axis.seconds else "-", hidden])
    return html.table(rows)


def _timeline(cost: Cost) -> str:
    job, pp, total = cost.job, cost.job.layout.pp, cost.job.micro_batches
    if pp == 1:
        return html.note("There is one stage: micro-batches follow each other without a bubble.")
    # Some schedules take only multiples of pp.
    shown = max(2 * pp, SHOWN_MICRO_BATCHES // pp * pp)
    if total > shown:
        job = replace(job, samples=shown * batch_unit(job.config, job.world)[0])
    timeline = timeline_of(job, blocked_times(job, cost.chunk_times, cost.send_s), cost.send_s)
    drawn = html.embed_svg(timeline_svg(timeline))
    if total <= shown:
        return drawn
    left_out = f"The first {shown} of {total} micro-batches, as if there were no more; the middle repeats."
    return html.note(left_out) + drawn
