"""Writes the report of a plan as an HTML page: question, answer, pictures, and the refused layouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.config.rules import batch_unit
from meshwright.plan.account import axes_of, layout_of_cost, layout_words, memory_json, plain_words, whole_run
from meshwright.plan.cost import Cost, blocked_times, timeline_of
from meshwright.plan.explain import against, parts_of
from meshwright.plan.memory import GIB
from meshwright.plan.question import Question
from meshwright.plan.search import Candidate, ShapeOutcome
from meshwright.plan.variants import slider_cells
from meshwright.plan.whatif import SimulatedStep, step_spans
from meshwright.show import layout_drawing, page_file
from meshwright.show.units import percent, seconds

SCRIPTS = page_file.PageScripts(page_file.FOLDER / "plan.js")
SHOWN_MICRO_BATCHES = 24
SHOWN_STAGES, SHOWN_RANKS = 8, 32  # The picture of the mesh has at most this many stages, and ranks of a replica there.
SHOWN_DEVICES = 128  # Further data-parallel replicas are left out.
# Measured on published runs: docs/planner.md#against-published-runs.
EXPECTED_ERROR = (
    "Over 308 published runs of dense models, the predicted step time is off by 5.8 % in the mean, and by 12.3 % for "
    "a source that the constants were not fitted to. The order of two layouts within a few per cent of each other is "
    "not certain: measure both."
)


def page(
    question: Question,
    reasons: Sequence[str],
    shown: Sequence[Candidate],
    outcomes: Mapping[tuple[int, int], ShapeOutcome],
    asked: Sequence[Mapping[str, str]] = (),
) -> str:
    """Return the HTML page of a ranking. `asked` has the answers to questions about other layouts."""
    best = shown[0].cost
    document = {
        "title": question.title, "facts": dict(question.facts), "assumptions": dict(question.assumptions),
        "limit_gib": question.limit_gib, "device_gib": best.cluster.device.memory_gib, "reasons": list(reasons),
        "answer": answer_json(best, question.tokens), "mesh": _mesh(best), "step": _step(best),
        "ranking": [_row(candidate, shown[0]) for candidate in shown], "communication": _communication(best),
        "outcomes": _outcomes(outcomes, best, question.limit_gib), "asked": list(asked), "error": EXPECTED_ERROR,
        "sliders": slider_cells(shown, question.limit_gib, question.tokens),
    }  # fmt: skip
    return page_file.page(question.title, document, SCRIPTS)


def ranking_cells(candidate: Candidate) -> tuple[str, ...]:
    """Return a candidate's layout, step, tokens/s/device, MFU, bubble and GiB, as the terminal shows them."""
    cost = candidate.cost
    return (
        layout_words(layout_of_cost(cost)), seconds(cost.step_s), f"{cost.tokens_per_s_device:,.0f}",
        percent(cost.mfu), percent(cost.bubble), f"{candidate.memory_gib:.1f}",
    )  # fmt: skip


def answer_json(cost: Cost, tokens: float | None) -> dict[str, Any]:
    """Return the figures of the best layout, and with `tokens` the days, energy and dollars of the whole run."""
    run = whole_run(cost, tokens) if tokens else {}
    return {
        "layout": layout_words(layout_of_cost(cost)), "words": plain_words(cost.job.config, cost.job.world),
        "step_s": cost.step_s, "tokens_per_s": cost.tokens_per_s_device * cost.job.world,
        "tokens_per_s_device": cost.tokens_per_s_device, "mfu": cost.mfu, "hfu": cost.hfu,
        **{key: run.get(key) for key in ("days", "energy_mwh", "cost_usd", "device_hours", "steps")},
    }  # fmt: skip


def _row(candidate: Candidate, best: Candidate) -> dict[str, Any]:
    cost, memory = candidate.cost, memory_json(candidate.cost)
    kinds = {name: value / GIB for name, value in memory["at_peak"].items() if name != "peak"}
    kinds["allocator reserve"] = memory["device"]["reserve_gib"]
    kinds["context and communicators"] = memory["device"]["context_gib"]
    return {
        "layout": layout_words(layout_of_cost(cost)), "step_s": cost.step_s, "mfu": cost.mfu, "bubble": cost.bubble,
        "tokens_per_s_device": cost.tokens_per_s_device, "memory_gib": candidate.memory_gib,
        "loses": "" if candidate is best else against(best.cost, cost), "parts": parts_of(cost), "memory": kinds,
    }  # fmt: skip


def _communication(cost: Cost) -> list[dict[str, Any]]:
    return [
        {"axis": name, "bytes": traffic.wire_bytes, "seconds": axis.seconds, "exposed_seconds": axis.exposed_seconds}
        for name, traffic, axis in axes_of(cost)
    ]


def _mesh(cost: Cost) -> dict[str, Any]:
    """Return the ranks by data-parallel replica and stage, and the drawing of all groups as text."""
    layout, node = cost.job.layout, cost.job.node_size
    stages = layout_drawing.elide(layout.pp, SHOWN_STAGES)
    ranks = layout_drawing.elide(layout.tp * layout.cp, SHOWN_RANKS)
    copies = max(1, min(layout.dp, SHOWN_DEVICES // (len(stages) * len(ranks))))

    def rank(number: int | None, replica: int, stage: int | None) -> int | None:
        if number is None or stage is None:
            return None
        return layout.rank_at(tp=number % layout.tp, cp=number // layout.tp, dp=replica, pp=stage)

    found = [[[rank(n, replica, stage) for n in ranks] for stage in stages] for replica in range(copies)]
    layers = [sum(len(stage.layers) for stage in stages) for stages in cost.job.chunks]
    return {
        "sizes": {axis: layout.axis_size(axis) for axis in ("tp", "cp", "ep", "dp", "pp")}, "world": layout.world,
        "node": node, "replicas": found, "numbers": stages, "layers": layers,
        "drawing": layout_drawing.draw(replace(layout, node_size=node)),
    }  # fmt: skip


def _step(cost: Cost) -> dict[str, Any]:
    """Return the timeline of the step, or of its first micro-batches if it has many."""
    job, pp, total = cost.job, cost.job.layout.pp, cost.job.micro_batches
    # Some schedules take only multiples of pp.
    shown = max(2 * pp, SHOWN_MICRO_BATCHES // pp * pp) if pp > 1 else SHOWN_MICRO_BATCHES
    if total > shown:
        job = replace(job, samples=shown * batch_unit(job.config, job.world)[0])
    timeline = timeline_of(job, blocked_times(job, cost.chunk_times, cost.send_s), cost.send_s)
    step = SimulatedStep(cost, timeline, cost.step_s)
    spans = [[s.rank, s.track, s.name, s.start, s.end, s.args.get("chunk", 0)] for s in step_spans(step)]
    return {"spans": spans, "shown": min(shown, total), "micro_batches": total, "bubble": cost.bubble}


def _outcomes(outcomes: Mapping[tuple[int, int], ShapeOutcome], best: Cost, limit: float) -> dict[str, Any]:
    """Return the grid of tp and pp: the best step of each cell, or the reason why there is none."""
    tps, pps = sorted({tp for tp, _ in outcomes}), sorted({pp for _, pp in outcomes})
    cells = [[outcome_json(outcomes.get((tp, pp)), best, limit) for pp in pps] for tp in tps]
    return {"tp": tps, "pp": pps, "cells": cells}


def outcome_json(outcome: ShapeOutcome | None, best: Cost, limit: float) -> dict[str, Any]:
    """Return what came of the layouts with one tp and pp: its `kind`, a short text, and a sentence."""
    if outcome is None:
        return {"kind": "none", "text": "", "why": "No layout with this tp and pp divides the devices and the batch."}
    if outcome.best is not None:
        cost = outcome.best.cost
        slower = cost.step_s / best.step_s
        words = layout_words(layout_of_cost(cost))
        lost = f"{against(best, cost)}." if slower > 1.001 else "this is the best."
        why = f"{seconds(cost.step_s)} with {words}: {lost}"
        return {"kind": "fits", "text": seconds(cost.step_s), "ratio": slower, "why": why}
    if outcome.least_gib < float("inf"):
        gib = outcome.least_gib
        why = f"It does not fit: it needs at least {gib:.1f} GiB, and the plan may use {limit:.1f}."
        return {"kind": "memory", "text": f"{gib:.0f} GiB", "why": why}
    if outcome.least_seconds < float("inf"):
        least = seconds(outcome.least_seconds)
        why = f"It is too slow to be examined: its blocks and the bubble alone take {least}."
        return {"kind": "slow", "text": f"> {least}", "ratio": outcome.least_seconds / best.step_s, "why": why}
    return {"kind": "refused", "text": "no", "why": f"It breaks a rule: {outcome.refused}."}
