"""The report of a plan as one HTML file without any outside request: ranking, memory, traffic, timeline. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape

from meshwright.pipeline.draw import timeline_svg
from meshwright.plan.account import axes_of, layout_of_cost, layout_words, memory_json
from meshwright.plan.cost import Cost, blocked_times, timeline_of
from meshwright.plan.explain import against, parts_of
from meshwright.plan.job import Job
from meshwright.plan.memory import GIB
from meshwright.plan.search import Candidate
from meshwright.plan.show import percent, seconds, size

COLOURS = {
    "parameters": "#3b6fb6", "gradients": "#5aa9a3", "master": "#8c6bb1", "optimizer": "#c2618d",
    "activations": "#e08e3c", "buffers": "#c9b13c", "context": "#9a9a9a",
}  # fmt: skip
PARTS = {
    "compute": "#3b6fb6", "optimizer": "#8c6bb1", "idle": "#d8d8d8", "tp": "#e08e3c", "cp": "#c9b13c",
    "dp": "#c2618d", "pp": "#5aa9a3", "embedding": "#7a4fa3", "waiting and the rest": "#9a9a9a",
}  # fmt: skip
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d5dbe1; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #e6eaee; }
th:first-child, td:first-child { text-align: left; } tr.best { background: #eef5ff; } td.words { text-align: left; }
td { white-space: nowrap; } .ranking td:nth-child(2), .ranking th:nth-child(2), .ranking td:last-child,
.ranking th:last-child { text-align: left; white-space: normal; }
.bar { display: flex; height: 1.15rem; background: #f0f2f4; position: relative; }
.bar span { display: block; height: 100%; } .legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -1px; }
.drawing { overflow-x: auto; border: 1px solid #e6eaee; padding: .5rem; } p.note { color: #5a6672; }
"""
SHOWN_MICRO_BATCHES = 24


def page(title: str, reasons: list[str], candidates: list[Candidate], limit_gib: float) -> str:
    best = candidates[0].cost
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in reasons),
        "<h2>Ranking</h2>",
        _ranking(candidates),
        "<h2>Where a step's time goes</h2>",
        _legend(PARTS),
        _times(candidates),
        f"<h2>Memory of the fullest rank (the device has {limit_gib:.1f} GiB)</h2>",
        _legend(COLOURS),
        _memory(candidates, limit_gib),
        "<h2>Communication of the best layout, one rank and step</h2>",
        _communication(best),
        "<h2>Pipeline of the best layout</h2>",
        _timeline(best),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _row(cells: list[str], tag: str = "td", kind: str = "") -> str:
    return f"<tr{kind}>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _ranking(candidates: list[Candidate]) -> str:
    head = ["#", "layout", "step", "tokens/s/device", "MFU", "bubble", "memory GiB", "loses against the best"]
    rows = [_row(head, "th")]
    for number, candidate in enumerate(candidates, 1):
        cost = candidate.cost
        lost = "" if number == 1 else escape(against(candidates[0].cost, cost))
        cells = [
            str(number), escape(layout_words(layout_of_cost(cost))), seconds(cost.step_s),
            f"{cost.tokens_per_s_device:,.0f}", percent(cost.mfu), percent(cost.bubble),
            f"{candidate.memory_gib:.1f}", lost,
        ]  # fmt: skip
        rows.append(_row(cells, kind=' class="best"' if number == 1 else ""))
    return f'<table class="ranking">{"".join(rows)}</table>'


def _legend(colours: dict[str, str]) -> str:
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<p class="legend">{"".join(items)}</p>'


def _bar(parts: dict[str, float], colours: dict[str, str], whole: float) -> str:
    spans = (
        f'<span style="width:{100 * value / whole:.3f}%;background:{colours[name]}" '
        f'title="{escape(name)} {value:.3g}"></span>'
        for name, value in parts.items()
        if value > 0
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def _times(candidates: list[Candidate]) -> str:
    longest = max(candidate.cost.step_s for candidate in candidates)
    rows = []
    for number, candidate in enumerate(candidates, 1):
        bar = _bar(parts_of(candidate.cost), PARTS, longest)
        rows.append(
            f'<tr><td style="width:3rem">{number}</td><td class="words">{bar}</td>'
            f'<td style="width:6rem">{seconds(candidate.cost.step_s)}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _memory(candidates: list[Candidate], limit: float) -> str:
    rows = []
    for number, candidate in enumerate(candidates, 1):
        cost = candidate.cost
        found = memory_json(cost)
        parts = {name: found[name] / GIB for name in COLOURS}
        bar = _bar(parts, COLOURS, max(limit, sum(parts.values())))
        rows.append(
            f'<tr><td style="width:3rem">{number}</td><td class="words">{bar}</td>'
            f'<td style="width:6rem">{candidate.memory_gib:.1f} GiB</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _communication(cost: Cost) -> str:
    if not cost.traffic:
        return "<p>One rank sends nothing.</p>"
    rows = [_row(["axis", "on the wire", "time", "hidden"], "th")]
    for name, traffic, axis in axes_of(cost):
        hidden = percent(axis.hidden / axis.seconds) if axis.seconds else "-"
        rows.append(_row([name, size(traffic.wire_bytes), seconds(axis.seconds) if axis.seconds else "-", hidden]))
    return f"<table>{''.join(rows)}</table>"


def shortened(job: Job) -> Job:
    """The same pipeline with few enough micro-batches to draw; a multiple of pp stays one."""
    pp = job.layout.pp
    shown = max(2 * pp, SHOWN_MICRO_BATCHES // pp * pp)
    if job.micro_batches <= shown:
        return job
    return replace(job, samples=shown * job.dp * job.config.train.micro_batch)


def _timeline(cost: Cost) -> str:
    if cost.job.layout.pp == 1:
        return "<p>There is one stage: micro-batches follow each other without a bubble.</p>"
    job = shortened(cost.job)
    svg = timeline_svg(timeline_of(job, blocked_times(job, cost.chunk_times, cost.send_s), cost.send_s))
    note = ""
    if job.micro_batches < cost.job.micro_batches:
        note = (
            f'<p class="note">The first {job.micro_batches} of {cost.job.micro_batches} micro-batches, as if there '
            "were no more; the middle repeats.</p>"
        )
    return f'{note}<div class="drawing">{re.sub(r"<[?]xml.*?[?]>", "", svg)}</div>'
