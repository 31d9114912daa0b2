"""Bar charts: a few values for each of several names, as SVG and as text. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.show.chart import LINE_COLOURS
from meshwright.show.terminal import table

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 760, 190, 90, 44, 13, 10
CELLS = 40  # characters of the longest bar


@dataclass(frozen=True)
class BarChart:
    """The data of a bar chart."""

    title: str
    names: Sequence[str]
    groups: Mapping[str, Sequence[float]]  # for each quantity, its value for each of the names
    unit: str = ""

    @property
    def longest(self) -> float:
        """The largest value, or 1 if all are 0, as other bars are drawn relative to it."""
        return max((value for values in self.groups.values() for value in values), default=0.0) or 1.0


def bars_svg(bars: BarChart) -> str:
    """Return the bars as one SVG document."""
    row_height = BAR * len(bars.groups) + GAP
    height = TOP + row_height * len(bars.names) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(bars.title)}</text>',
    ]  # fmt: skip
    for number, name in enumerate(bars.names):
        y = TOP + number * row_height
        middle = y + (row_height - GAP) / 2 + 4
        out.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for place, values in enumerate(bars.groups.values()):
            width = max(1.0, values[number] / bars.longest * (WIDTH - LEFT - RIGHT))
            top = y + place * BAR
            colour = LINE_COLOURS[place % len(LINE_COLOURS)]
            out.append(f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR - 1}" fill="{colour}"/>')
            label = f"{values[number]:.4g} {bars.unit}".strip()
            out.append(f'<text x="{LEFT + width + 5:.1f}" y="{top + 10}" font-size="10">{escape(label)}</text>')
    x = LEFT
    for place, name in enumerate(bars.groups):
        colour = LINE_COLOURS[place % len(LINE_COLOURS)]
        out.append(f'<text x="{x}" y="{height - 10}" fill="{colour}">{escape(name)}</text>')
        x += 9 * len(name) + 20
    return "".join([*out, "</svg>\n"])


def bars_text(bars: BarChart) -> str:
    """Return the bars as lines of text, one for each name and group."""
    rows = [("", "", "", bars.unit)]
    for number, name in enumerate(bars.names):
        for place, (group, values) in enumerate(bars.groups.items()):
            cells = round(values[number] / bars.longest * CELLS)
            rows.append(("" if place else name, group, "█" * cells, f"{values[number]:.4g}"))
    return f"{bars.title}\n{table(rows, left=(0, 1, 2))}"
