"""Line charts as SVG. Both axes are logarithmic unless a chart says otherwise. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from meshwright.errors import UserError
from meshwright.show.units import count, ticks

LINE_COLOURS = ("#3b6fb6", "#e08e3c", "#5aa9a3", "#c2618d", "#8c6bb1", "#7a7a7a")
MOST_DOTS = 60  # a line with more points has no dots on them
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 80, 150, 44, 52


@dataclass(frozen=True)
class Chart:
    """The data of a line chart: lines by name, each a list of positive (x, y). `label` formats a value of x."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    label: Callable[[float], str] = count
    linear: bool = False  # y begins at zero and is not logarithmic
    even: bool = False  # x is not logarithmic either, as with the steps of a run

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The visible range of the data: least x, greatest x, least y, greatest y."""
        points = [point for line in self.lines.values() for point in line]
        xs, ys = [p[0] for p in points] or [1.0], [p[1] for p in points] or [1.0]
        if self.linear:
            return min(xs), max(max(xs), min(xs) * 1.01), 0.0, 1.05 * max(ys)
        margin = min(1.2, (max(ys) / min(ys)) ** 0.1) if max(ys) > min(ys) else 1.2
        return min(xs), max(max(xs), min(xs) * 1.01), min(ys) / margin, max(ys) * margin

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position in the drawing of a point of the data."""
        x0, x1, y0, y1 = self.box
        across = (x - x0) / (x1 - x0) if self.even else math.log(x / x0) / math.log(x1 / x0)
        up = (y - y0) / (y1 - y0) if self.linear else math.log(y / y0) / math.log(y1 / y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def check_svg(option: str, path: Path | None) -> None:
    """Raise a UserError if `path` has the suffix of another image format. Charts are always SVG."""
    if path is not None and path.suffix.lower() in (".png", ".jpg", ".jpeg", ".pdf", ".gif", ".webp"):
        raise UserError(f"{option} {path}: charts are written as SVG, so name it {path.with_suffix('.svg')}")


def _short(label: str) -> str:
    """Drop zeros at the end of the decimals: `1.00k` becomes `1k`."""
    return re.sub(r"(\.\d*?)0+(?=\D*$)", lambda match: match[1].rstrip("."), label)


def _marks(low: float, high: float) -> list[float]:
    """Return the values of a logarithmic axis that get a line.

    There are two in each power of ten, or equal steps if that gives fewer than two lines.
    """
    marks = [10.0**n * factor for n in range(-12, 15) for factor in (1, 3) if low <= 10.0**n * factor <= high]
    if len(marks) > 1:
        return marks
    step = 10.0 ** math.floor(math.log10(high - low))
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def svg(chart: Chart) -> str:
    """Return the chart as one SVG document."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(chart.title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x)}</text>',
        f'<text x="14" y="{TOP - 6}">{escape(chart.y)}</text>',
    ]  # fmt: skip
    x0, _, y0, y1 = chart.box
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    xs = sorted({x for line in chart.lines.values() for x, _ in line})
    # At most eight vertical lines, so that their labels don't overlap.
    for x in ticks(xs[0], xs[-1], 8) if chart.even and xs else xs[:: max(1, -(-len(xs) // 8))]:
        px, _ = chart.at(x, y0)
        label = escape(_short(chart.label(x)))
        out.append(f'<path d="M{px:.1f} {TOP}V{bottom}" stroke="#e6eaee"/>')
        out.append(f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for y in ticks(y0, y1, 6) if chart.linear else _marks(y0, y1):
        _, py = chart.at(x0, y)
        label = _short(count(y)) if y >= 1 else f"{y:g}"
        out.append(f'<path d="M{LEFT} {py:.1f}H{right}" stroke="#e6eaee"/>')
        out.append(f'<text x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{label}</text>')
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        # Earlier lines are wider, so that lines that coincide can all be seen.
        width = 1.6 + 0.9 * max(0, min(len(chart.lines), len(LINE_COLOURS)) - 1 - number)
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in (chart.at(*point) for point in line))
        if path:
            out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')
        for px, py in (chart.at(*point) for point in line) if len(line) <= MOST_DOTS else ():
            out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{1 + width / 2:g}" fill="{colour}"/>')
        out.append(f'<text x="{right + 12}" y="{TOP + 16 + 20 * number}" fill="{colour}">{escape(name)}</text>')
    return "".join([*out, "</svg>\n"])


def stack_charts(charts: Sequence[Chart]) -> str:
    """Return charts below each other as one SVG document."""
    inner = "".join(
        svg(chart).replace("<svg ", f'<svg y="{HEIGHT * number}" ', 1) for number, chart in enumerate(charts)
    )
    size = f'width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inner}</svg>\n'
