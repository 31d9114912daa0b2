"""Prints the summary of a run from the files of its folder alone, without importing torch.

It shows the loss curve, the speed, the time spent in each phase, and the bytes sent over each axis.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.config.sections import Config
from meshwright.errors import UserError, plural
from meshwright.record.run_folder import RunRecord, read_run, traffic_per_step
from meshwright.record.run_notes import KINDS, read_events
from meshwright.record.speed import pace_of_lines
from meshwright.show.layout_drawing import written
from meshwright.show.terminal import PLAIN_WIDTH, console_for, has_colour, is_terminal, printable, show
from meshwright.show.units import clock, count, decimals, percent, seconds, size
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.description import describe
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.schedule.kinds import placement_of
from meshwright.spec.traffic.counts import COUNTED, LEARNED, PHASES
from meshwright.watch.loss_curve import Point, curve, finite
from meshwright.watch.run_parts import RunView, head, lined, phase_bar

PAGE_LABEL_WIDTH = 12  # Columns for the labels.
MIN_WIDTH, MAX_WIDTH = 40, 120
MOST_FAULTS = 6  # The summary lists at most this many faults.

# The data sent over each axis, for the reader of the summary.
CARGO = {
    "tp": "activations and their gradients, in every layer",
    "tp.kv": "gradients of the key-value heads that several ranks hold",
    "cp": "keys and values, in every layer",
    "dp": "gradients, and with ZeRO the weights that each rank updated",
    "dp-cp": "gradients",
    "pp": "activations to the next stage, their gradients back",
    "ep": "tokens to their experts and back",
    EP_NODE: "tokens on their way to experts and back, inside the node",
    EP_ACROSS: "tokens on their way to experts and back, between nodes",
    "embedding": "gradients of the tied embedding, between first and last stage",
    "position_embedding": "gradients of the position embedding",
    "replicas": "changes of the replicas' parameters, and their losses",
    "world": "loss, gradient norm and the counts of this table",
}


class Look(NamedTuple):
    """The abilities of the stream that a summary is printed to."""

    terminal: bool
    colour: bool


# Maps (config, number of ranks, lines of metrics.jsonl) to the planned mean wire bytes of these steps by axis.
Plan = Callable[[Config, int, Sequence[Mapping[str, Any]]], Mapping[str, float]]


def summary(
    run_dir: str | Path, stream: TextIO | None = None, plan: Plan | None = None, full: bool = True
) -> None:  # fmt: skip
    """Print the summary of a run. Without `full` it fits on a screen."""
    stream = sys.stdout if stream is None else stream
    width = max(MIN_WIDTH, min(console_for(stream).width, MAX_WIDTH))
    look = Look(is_terminal(stream), has_colour(stream))
    show(console_for(stream, width), *page(read_run(run_dir), width, look, plan, full))


def page(
    run: RunRecord, width: int, look: Look, plan: Plan | None = None, full: bool = True
) -> Iterator[RenderableType]:  # fmt: skip
    """Yield the parts of a summary. Without `full`, the explanations of axes and the bytes by link are left out."""
    config = dataclasses.replace(run.config, run=dataclasses.replace(run.config.run, dir=str(run.path)))
    yield head(config, run.world, width, own_model=run.own_model)
    yield ""
    if not run.steps:
        yield Text("no step was finished", "bad")
        return
    train = [(float(s["step"]), float(s["loss"])) for s in run.steps]
    valid = [(float(v["step"]), float(v["loss"])) for v in run.validations]
    yield from curve(train, valid, width, look.colour)
    yield ""
    yield _losses(train, valid)
    yield ""
    figures = _grid()
    events = read_events(run.path)
    view = RunView(run.steps[-1]["step"], config.train.steps, pace=pace_of_lines(run.steps, events), events=events)
    parts = (_speed(run, view), _seen(run), _links(run), _phases(run, width, look), _skipped(run), _faults(view))
    for label, text in itertools.chain(*parts):
        figures.add_row(Text(label, "dim"), text)
    yield figures
    yield ""
    yield from _traffic(run, width, plan, full)


def _grid(*right: str) -> Table:
    """Return an empty table without rules: a column of labels, then right-aligned columns.

    `right` gives the headings of all columns, that of the labels first.
    """
    grid = Table(box=None, show_header=bool(right), header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(right[0] if right else "", min_width=PAGE_LABEL_WIDTH - 2, no_wrap=True)
    for name in right[1:]:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def _losses(train: Sequence[Point], valid: Sequence[Point]) -> Table:
    grid = _grid("loss", "first", "last", "lowest")
    grid.add_column("")
    for name, points, style in (("training", train, "loss"), ("validation", valid, "valid")):
        if not points:
            grid.add_row(name, Text("none", "dim"))
            continue
        step, low = min(finite(points), key=lambda p: p[1], default=(math.nan, math.nan))
        first, last, lowest = (decimals(loss, 4) for loss in (points[0][1], points[-1][1], low))
        when = Text(f"at step {int(step):,}" if math.isfinite(step) else "", "dim")
        grid.add_row(name, first, Text(last, style), lowest, when)
    return grid


def _links(run: RunRecord) -> Iterator[tuple[str, Text]]:
    """Warn that steps took longer because slow links were emulated, if they were."""
    emulate = run.config.comm.emulate
    if emulate.on:
        yield "links", Text(emulate.words(run.config.layout.node_size or run.world or 1), "bad")


def _since(run: RunRecord) -> str:
    return f" since step {run.since:,}" if run.since else ""


def _speed(run: RunRecord, view: RunView) -> Iterator[tuple[str, Text]]:
    if not run.recent:
        yield "speed", Text(f"no step was finished since the layout changed at step {run.since:,}")
        return
    pace = view.pace
    assert pace is not None
    rate = pace.tokens_per_s
    per_rank = f"   {count(rate / run.world)} per rank" if run.world and run.world > 1 else ""
    steps = f"in the mean of the last {plural(pace.count, 'step')}" if pace.count > 1 else "in the last step"
    speed = f"{per_rank}   {seconds(pace.step_s)} per step"
    yield "speed", Text.assemble((f"{count(rate)} tokens/s", "bold"), speed, (f"   {steps}", "dim"))


def _seen(run: RunRecord) -> Iterator[tuple[str, Text]]:
    times = [float(s.get("step_time_s") or 0.0) for s in run.steps]
    tokens, samples = (sum(int(s.get(key) or 0) for s in run.steps) for key in ("tokens", "global_batch"))
    words = ""
    for unit in (unit for unit in COUNTED if any(unit in s for s in run.steps)):
        # A line without the unit is of a step whose loss is a mean over all tokens.
        counted = sum(int(s.get(unit, s.get("tokens")) or 0) for s in run.steps)
        words = f"   {count(counted)} learned" if unit == LEARNED else f"   {counted:,} {unit}"
    parameters = run.own_model.get("parameters") or parameter_count(describe(run.config.model))
    seen = f"{count(tokens)} tokens ({tokens / parameters:.3g} per parameter)"
    took = f"{plural(len(run.steps), 'step')} in {clock(sum(times))} without validation"
    yield "seen", Text.assemble((seen, "bold"), f"{words}   {plural(samples, 'sample')}   {took}")


def _phases(run: RunRecord, width: int, look: Look) -> Iterator[tuple[str, Text]]:
    names = [p for p in PHASES if any(p in s.get("phases", {}) for s in run.recent)]
    spent = {p: sum(float(s.get("phases", {}).get(p, 0.0)) for s in run.recent) for p in names}
    if spent:
        total = sum(float(s.get("step_time_s") or 0.0) for s in run.recent)
        room = min(width, PLAIN_WIDTH) - PAGE_LABEL_WIDTH
        bar, legend = phase_bar(spent, total, room, look.colour)
        # Without colour the bar is a row of letters, which is no help in a file.
        if look.terminal:
            yield "time", bar
        yield "" if look.terminal else "time", lined(legend, room, "  ")


def _faults(view: RunView) -> Iterator[tuple[str, Text]]:
    """List the faults of the run, the newest first."""
    events = view.noted(*KINDS)
    for label, event in zip(["faults", *[""] * (MOST_FAULTS - 1)], reversed(events), strict=False):
        at = "" if event.get("step") is None else f"step {event['step']}: "
        yield label, Text(printable(f"{at}{event.get('text', '')}"), "bad")
    if len(events) > MOST_FAULTS:
        yield "", Text(f"and {len(events) - MOST_FAULTS} before (see events.jsonl)", "dim")


def _skipped(run: RunRecord) -> Iterator[tuple[str, Text]]:
    skipped = [str(s["step"]) for s in run.steps if s.get("skipped")]
    wrong = [str(s["step"]) for s in run.steps if not s.get("skipped") and not math.isfinite(s["loss"])]
    for name, steps in (("skipped", skipped), ("not finite", wrong)):
        if steps:
            numbers = ", ".join(steps[:12]) + (", …" if len(steps) > 12 else "")
            share = f" of {len(run.steps):,}" if len(run.steps) > 1 else ""
            yield name, Text.assemble((f"{plural(len(steps), 'step')}{share}", "bad"), f": {numbers}")
    if not skipped and not wrong:
        yield "skipped", Text("none")


def _traffic(run: RunRecord, width: int, plan: Plan | None, full: bool) -> Iterator[RenderableType]:
    """Show the bytes of a mean step by axis of the layout and, for a small world, also by link."""
    axes = traffic_per_step(run.recent)
    if not run.recent:
        return
    if not axes:
        yield Text.assemble(("nothing was sent: ", "bold"), "a single rank communicates with nobody")
        return
    ranks = f" of {plural(run.world, 'rank')} together" if run.world else ""
    yield Text.assemble(("communication ", "bold"), (f"(a mean step{_since(run)}{ranks})", "dim"))
    order = sorted(axes, key=lambda axis: -axes[axis]["wire_bytes"])
    planned = plan(run.config, run.world, run.recent) if plan and run.world else {}
    yield _axis_table(run, {axis: axes[axis] for axis in order}, planned)
    if not full:
        return
    yield Text("payload: the whole tensor, on every rank that takes part; wire: what they send, by rings", "dim")
    yield ""
    notes = _grid()
    for axis in order:
        for number, note in enumerate(_axis_notes(run, axis, width - PAGE_LABEL_WIDTH)):
            notes.add_row("" if number else axis, Text(note, "dim"))
    yield notes
    if run.layout and 5 + 10 * run.layout.world <= width:
        yield from _matrix(links(run.config, run.layout, axes), run.layout.world)


def _axis_table(run: RunRecord, axes: Mapping[str, Mapping[str, float]], planned: Mapping[str, float]) -> Table:
    total, payload, calls = (sum(c[key] for c in axes.values()) for key in ("wire_bytes", "payload_bytes", "calls"))
    grid = _grid("axis", "calls", "payload", "on the wire", "per rank", "share", *["planned"] * bool(planned))
    for axis, counts in axes.items():
        takers = sum(map(len, _groups(run.layout, axis)))
        share = counts["wire_bytes"] / total if total else 0.0
        grid.add_row(
            Text(axis, "title"), count(counts["calls"]), size(counts["payload_bytes"]),
            Text(size(counts["wire_bytes"]), "bold"), size(counts["wire_bytes"] / takers) if takers else "",
            "<0.1 %" if 0 < share < 0.0005 else percent(share),
            *[_planned(counts["wire_bytes"], planned.get(axis))] * bool(planned),
        )  # fmt: skip
    grid.add_row("all", count(calls), size(payload), size(total), style="bold")
    return grid


def _planned(sent: float, planned: float | None) -> Text:
    if planned is None:
        return Text("not known", "dim")
    same = math.isclose(sent, planned, rel_tol=1e-9)
    return Text(size(planned) if same else f"{size(planned)}: not equal", "good" if same else "bad")


def _groups(layout: Layout | None, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return an axis's groups of at least two ranks; none if the layout does not have this axis."""
    try:
        return tuple(group for group in layout.groups(axis) if len(group) > 1) if layout else ()
    except UserError:
        return ()


def _axis_notes(run: RunRecord, axis: str, width: int) -> Iterator[str]:
    """Describe the data sent over an axis and the ranks that it is sent between."""
    if axis in CARGO:
        yield CARGO[axis]
    groups = _groups(run.layout, axis)
    if groups:
        chain = axis == "pp"
        words = f"{plural(len(groups), 'pipeline' if chain else 'group')} of {len(groups[0])}:"
        yield _written(words, groups, "⇄" if chain else " ", width)
        if chain and run.config.layout.chunks > 1:
            yield f"{run.config.layout.chunks} chunks per rank: the last stage also sends to the first, and back"


def _written(words: str, groups: Sequence[Sequence[int]], between: str, width: int) -> str:
    """Format as many groups with their ranks as fit into `width`. The last group is always shown."""
    # (groups, ranks per group) to show, from everything to the least.
    limits = [(len(groups), max(3, *map(len, groups))), *((most, 8) for most in (12, 8, 6, 4, 3)), (3, 4)]
    texts = [" ".join([words, *written(groups, *limit, between)]) for limit in limits]
    return next((text for text in texts if len(text) <= width), texts[-1])


def links(config: Config, layout: Layout, axes: Mapping[str, Mapping[str, float]]) -> dict[tuple[int, int], float]:
    """Return the wire bytes per step for each pair (from rank, to rank).

    A collective is a ring around its group; a pipeline sends from stage to stage and back. The run's folder has only
    the sum for each axis, which is spread evenly over the axis's links.
    """
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for axis, counts in axes.items():
        pairs: list[tuple[int, int]] = []
        for group in _groups(layout, axis):
            if axis == "pp":
                placement = placement_of(config.pipeline.schedule, layout.pp, config.layout.chunks)
                places = [group[rank] for rank, _ in placement]
                # Neighbouring chunks may be on the same rank, which sends nothing between them.
                forward = [(a, b) for a, b in zip(places, places[1:], strict=False) if a != b]
                pairs += [*forward, *((b, a) for a, b in forward)]
            else:
                pairs += zip(group, (*group[1:], group[0]), strict=True)
        for pair in pairs:
            sent[pair] += counts["wire_bytes"] / len(pairs)
    return dict(sent)


def _cell_style(sent: float, most: float) -> str:
    if sent > 0.5 * most:
        return "most"
    return "forward" if sent > 0.01 * most else "dim"


def _matrix(sent: Mapping[tuple[int, int], float], world: int) -> Iterator[RenderableType]:
    if not sent:
        return
    yield ""
    note = "(rings; the bytes of an axis are spread evenly over its links)"
    yield Text.assemble(("from rank (row) to rank (column) ", "bold"), (note, "dim"))
    grid = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", *map(str, range(world))):
        grid.add_column(name, justify="right", no_wrap=True)
    most = max(sent.values())
    for rank in range(world):
        cells = [sent.get((rank, to), 0.0) for to in range(world)]
        styles = (_cell_style(cell, most) for cell in cells)
        texts = (Text(size(cell) if cell else "·", style) for cell, style in zip(cells, styles, strict=True))
        grid.add_row(Text(str(rank), "dim"), *texts)
    yield grid
