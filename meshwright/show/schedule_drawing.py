"""Draw a simulated schedule: as a timeline for the terminal, and as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low
from string import ascii_lowercase
from typing import NamedTuple
from xml.sax.saxutils import escape

from meshwright.errors import plural
from meshwright.show.units import ticks
from meshwright.spec.schedule.simulate import Simulation, Timed
from meshwright.spec.schedule.table import MEANING, Op, Table

SINGLE_CHUNK = 0.3  # the shade of a single chunk, as a position between the lightest and the darkest one

Colour = tuple[int, int, int]


class OpStyle(NamedTuple):
    """The characters and colours with which an op is drawn."""

    fill: str  # character in output without colour
    backgrounds: tuple[int, ...]  # terminal colours (of 256), which the chunks take in turn
    fills: tuple[Colour, Colour]  # SVG colours of the first and the last chunk


OP_STYLES = {
    Op.FORWARD: OpStyle("-", (117, 75, 69, 111), ((169, 208, 247), (38, 98, 173))),
    Op.BACKWARD: OpStyle("=", (222, 214, 208, 179), ((255, 212, 158), (196, 92, 22))),
    Op.INPUT_GRAD: OpStyle("=", (222, 214, 208, 179), ((255, 212, 158), (196, 92, 22))),
    Op.WEIGHT_GRAD: OpStyle("%", (157, 114, 71, 108), ((190, 230, 180), (46, 125, 50))),
}
BLOCK_SEAM = " ~ "

Window = tuple[int, int]  # the columns [start, stop) of a timeline


def timeline_text(simulation: Simulation, width: int, colour: bool = False) -> str:
    """Draw one row per rank, an axis and a legend, `width` columns wide (at least 40).

    A block begins with the number of its micro-batch if that fits. With colour, the background distinguishes forward,
    backward and the chunks. Otherwise the drawing is plain ASCII, and fill characters distinguish them. If a timeline
    is too long for the width, only its beginning and its end are drawn; in between, the pattern repeats.
    """
    pp = simulation.table.pp
    margin = len(f"rank {pp - 1} ")
    scale, windows = _windows(simulation, max(width, 40) - margin - 1)
    lines = []
    for rank in range(pp):
        parts = (_row(simulation, rank, scale, window, colour) for window in windows)
        lines.append(f"rank {rank}".ljust(margin) + BLOCK_SEAM.join(parts))
    axes = [_text_axis(simulation, scale, window, len(windows)) for window in windows]
    lines.append(" " * margin + BLOCK_SEAM.join(rule for rule, _ in axes))
    lines.append(" " * margin + (" " * len(BLOCK_SEAM)).join(labels for _, labels in axes).rstrip())
    left_out = "   ~ left out" if len(windows) > 1 else ""
    return "\n".join([*lines, _legend(simulation.table, colour) + left_out])


def _computes(simulation: Simulation, rank: int) -> Iterator[Timed]:
    """Return the actions of a rank that are not sends or receives."""
    return (timed for timed in simulation.ranks[rank] if timed.action.peer is None)


def _unit(simulation: Simulation) -> float:
    """Return the length of a typical short block (the lower median of all that take any time), or 0 if none does."""
    spans = [t.end - t.start for rank in range(simulation.table.pp) for t in _computes(simulation, rank)]
    spans = [span for span in spans if span > 1e-9 * simulation.makespan]
    return median_low(spans) if spans else 0.0


def _windows(simulation: Simulation, room: int) -> tuple[float, list[Window]]:
    """Return the columns per unit of time, and the ranges of columns to show.

    The whole timeline is shown with up to 8 columns per typical block. If there is less than one, both ends are shown.
    """
    unit = _unit(simulation)
    if not unit:
        return 0.0, [(0, 0)]
    per_block = min(8, int(room * unit / simulation.makespan + 1e-9))
    if per_block:
        scale = per_block / unit
        return scale, [(0, round(simulation.makespan * scale))]
    # A typical block has room for its micro-batch's number and one fill character.
    scale = (len(str(simulation.table.micro_batches - 1)) + 1) / unit
    columns = round(simulation.makespan * scale)
    half = (room - len(BLOCK_SEAM)) // 2
    return scale, [(0, half), (columns - half, columns)]


def _row(simulation: Simulation, rank: int, scale: float, window: Window, colour: bool) -> str:
    row, idle, (at, stop) = "", " " if colour else ".", window
    for timed in _computes(simulation, rank):
        first, last = max(round(timed.start * scale), at), min(round(timed.end * scale), stop)
        if last > first:
            block = _block(timed, last - first, simulation.table.chunks, colour)
            row += idle * (first - at) + block
            at = last
    return row + idle * (stop - at)


def _glyph(op: Op, chunk: int, chunks: int) -> str:
    """Return the fill character of a block.

    With several chunks, it is a letter for the chunk: in lower case for forward and in upper case for backward. Ops
    that pass nothing on to another stage have the same fill for all chunks.
    """
    direction = MEANING[op].direction
    if chunks == 1 or not direction:
        return OP_STYLES[op].fill
    letter = ascii_lowercase[chunk % len(ascii_lowercase)]
    return letter if direction > 0 else letter.upper()


def _paint(op: Op, chunk: int, text: str) -> str:
    shades = OP_STYLES[op].backgrounds
    return f"\x1b[38;5;16;48;5;{shades[chunk % len(shades)]}m{text}\x1b[0m"


def _block(timed: Timed, width: int, chunks: int, colour: bool) -> str:
    action = timed.action
    label = str(timed.action.micro_batch)
    if colour:
        text = label if len(label) <= width else ""
        edge = "|" if len(text) < width and width > 1 else ""
        return _paint(action.op, action.chunk, text.ljust(width - len(edge)) + edge)
    text = label if len(label) < width else ""
    return text.ljust(width, _glyph(action.op, action.chunk, chunks))


def _text_axis(simulation: Simulation, scale: float, window: Window, windows: int) -> tuple[str, str]:
    """Draw an axis with its ticks, and the times below it.

    Both are one column longer than the window if that includes the end of the timeline.
    """
    start, stop = window
    width = stop - start + (stop == round(simulation.makespan * scale))
    rule, labels = "-" * width, ""
    share = min(1.0, windows * width / max(1.0, simulation.makespan * scale))  # of the timeline that is shown
    for tick in ticks(0.0, simulation.makespan, max(2, windows * width // 10) / share):
        column = round(tick * scale) - start
        text = f"{tick:g}"
        if 0 <= column < width:
            rule = rule[:column] + "+" + rule[column + 1 :]
            # A label that would touch the one before it, or reach past the axis, is left out.
            if (len(labels) < column or not labels) and column + len(text) <= width:
                labels = labels.ljust(column) + text
    return rule, labels.ljust(width)


def _legend(table: Table, colour: bool) -> str:
    parts = []
    for op in table.computes:
        samples = (
            _paint(op, chunk, " 3 ") if colour else "3" + 2 * _glyph(op, chunk, table.chunks)
            for chunk in range(table.chunks)
        )
        parts.append(f"{op.value} {' '.join(samples)}")
    parts.append("idle" if colour else "idle ...")
    parts.append("(micro-batch 3" + (f", chunks 0 to {table.chunks - 1})" if table.chunks > 1 else ")"))
    return "   ".join(parts)


LEFT, RIGHT, TOP, ROW, GAP, DIGIT = 84, 92, 104, 32, 7, 7.2
SVG_STYLE = """
text{font-family:system-ui,'Segoe UI','Helvetica Neue',Arial,sans-serif;font-size:12px;fill:#2b3440}
.title{font-size:19px;font-weight:600}.sub{font-size:13px;fill:#5b6673}
.rank{text-anchor:end;font-weight:600}.peak{fill:#5b6673}.tick{text-anchor:middle;fill:#7a8490;font-size:11px}
.n{text-anchor:middle;dominant-baseline:central;font-size:12px;pointer-events:none}
.grid{stroke:#d9dee5;stroke-width:1}.band{fill:#eef1f5}.b rect{stroke:#fff;stroke-width:1}
.b:hover rect{stroke:#111;stroke-width:1.5}
"""


def timeline_svg(simulation: Simulation) -> str:
    """Return the timeline as one SVG document without external references. Blocks have tooltips that describe them."""
    table, unit = simulation.table, _unit(simulation)
    digits = len(str(table.micro_batches - 1))
    wanted = simulation.makespan / unit * (DIGIT * digits + 9) if unit else 0.0
    chart = min(max(wanted, 760.0), 3600.0)
    width = LEFT + chart + RIGHT
    height = TOP + table.pp * (ROW + GAP) + 42
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title(table))}</title>",
        f"<style>{SVG_STYLE}{_svg_shades(table)}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="#fff"/>',
        *_svg_heading(simulation),
        *_svg_axis(simulation, chart),
        *(part for rank in range(table.pp) for part in _svg_rank(simulation, rank, chart)),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def title(table: Table) -> str:
    """Return a few words that describe a table."""
    chunks = f" x {table.chunks} chunks" if table.chunks > 1 else ""
    return f"{table.kind}, {plural(table.pp, 'rank')}{chunks}, {plural(table.micro_batches, 'micro-batch')}"


def _svg_heading(simulation: Simulation) -> Iterator[str]:
    """Draw the title, the figures and the legend."""
    table = simulation.table
    yield f'<text class="title" x="20" y="34">{escape(title(table))}</text>'
    yield (
        f'<text class="sub" x="20" y="56">makespan {simulation.makespan:g} · '
        f"bubble {100 * simulation.bubble:.2f} % · peak activations "
        f"{max(simulation.peak_activations):g} micro-batches</text>"
    )
    x = 20.0
    for op in table.computes:
        yield f'<text x="{x:g}" y="84">{op.value}</text>'
        x += 10 + DIGIT * len(op.value)
        for chunk in range(table.chunks):
            yield f'<rect class="{_shade(op, chunk)}" x="{x:g}" y="72" width="22" height="16" rx="3"/>'
            if table.chunks > 1:
                yield f'<text class="n {_shade(op, chunk)}t" x="{x + 11:g}" y="80">{chunk}</text>'
            x += 25
        x += 20
    if table.chunks > 1:
        yield f'<text class="sub" x="{x:g}" y="84">shade: chunk</text>'
        x += 108
    yield f'<rect class="band" x="{x:g}" y="72" width="22" height="16" rx="3"/>'
    yield f'<text x="{x + 28:g}" y="84">idle</text>'
    yield f'<text class="sub" x="{x + 72:g}" y="84">number: micro-batch</text>'


def _svg_axis(simulation: Simulation, chart: float) -> Iterator[str]:
    bottom = TOP + simulation.table.pp * (ROW + GAP)
    for tick in ticks(0.0, simulation.makespan, max(2, int(chart // 70))):
        x = LEFT + (tick / simulation.makespan * chart if simulation.makespan else 0.0)
        yield f'<line class="grid" x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{bottom + 4}"/>'
        yield f'<text class="tick" x="{x:.2f}" y="{bottom + 19}">{tick:g}</text>'
    yield f'<text class="tick" x="{LEFT + chart / 2:.2f}" y="{bottom + 35}">time</text>'


def _svg_rank(simulation: Simulation, rank: int, chart: float) -> Iterator[str]:
    table = simulation.table
    y = TOP + rank * (ROW + GAP)
    middle = y + ROW / 2
    scale = chart / simulation.makespan if simulation.makespan else 0.0
    yield f'<rect class="band" x="{LEFT}" y="{y}" width="{chart:g}" height="{ROW}" rx="4"/>'
    yield f'<text class="rank" x="{LEFT - 12}" y="{middle + 4:g}">rank {rank}</text>'
    for timed in _computes(simulation, rank):
        action = timed.action
        x = LEFT + timed.start * scale
        width = (timed.end - timed.start) * scale
        number = str(action.micro_batch)
        shade = _shade(action.op, action.chunk)
        tooltip = f"{action.op.value} of micro-batch {number}, stage {table.stage(rank, action.chunk)}"
        where = f"rank {rank}" + (f", chunk {action.chunk}" if table.chunks > 1 else "")
        label = ""
        if width >= DIGIT * len(number) + 3:
            label = f'<text class="n {shade}t" x="{x + width / 2:.2f}" y="{middle:g}">{number}</text>'
        yield (
            f'<g class="b"><title>{tooltip} ({where}): {timed.start:g} to {timed.end:g}</title>'
            f'<rect class="{shade}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" rx="3"/>'
            f"{label}</g>"
        )
    peak = f"peak {simulation.peak_activations[rank]:.4g}"
    yield f'<text class="peak" x="{LEFT + chart + 12:g}" y="{middle + 4:g}">{peak}</text>'


def _shade(op: Op, chunk: int) -> str:
    """Return the CSS class of a block. With a `t` appended, it is the class of the text on it."""
    return f"{MEANING[op].letter.lower()}{chunk}"


def _svg_shades(table: Table) -> str:
    rules, chunks = [], table.chunks
    for op in table.computes:
        light, dark = OP_STYLES[op].fills
        for chunk in range(chunks):
            part = chunk / (chunks - 1) if chunks > 1 else SINGLE_CHUNK
            red, green, blue = (round(a + (b - a) * part) for a, b in zip(light, dark, strict=True))
            # Text is dark on light colours and white on dark ones, by the colour's luma (Rec. 601).
            ink = "#17202b" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"
            name = _shade(op, chunk)
            rules.append(f".{name}{{fill:#{red:02x}{green:02x}{blue:02x}}}.{name}t{{fill:{ink}}}")
    return "\n".join(rules)
