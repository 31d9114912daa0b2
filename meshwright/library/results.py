"""The form in which the functions of `import meshwright` return results: values, a table of them, and a drawing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape

from meshwright.show.chart import LINE_COLOURS
from meshwright.show.terminal import table

# Notebooks have styles for tables, and none for anything else.
_BAR = "display:flex;height:1.1rem;width:100%;min-width:24rem;background:#e6eaee"
_SWATCH = "display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem"


class Result(ABC):
    """A result that prints as a table, and that a notebook shows as a table with a drawing."""

    @abstractmethod
    def title(self) -> str:
        """Return a line that says what this is the result of."""

    @abstractmethod
    def table(self) -> Sequence[Sequence[str]]:
        """Return the rows of the table, of which the first is the header."""

    def notes(self) -> Sequence[str]:
        """Return lines that stand below the table."""
        return ()

    def drawing(self) -> str:
        """Return a drawing for notebooks as SVG or HTML, or an empty string."""
        return ""

    def __repr__(self) -> str:
        return "\n".join([self.title(), table(self.table()), *self.notes()])

    def _repr_html_(self) -> str:
        head, *body = self.table()
        rows = [_row("th", head), *(_row("td", cells) for cells in body)]
        notes = "".join(f"<p>{escape(line)}</p>" for line in self.notes())
        return f"<p><b>{escape(self.title())}</b></p><table>{''.join(rows)}</table>{notes}{self.drawing()}"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def stacked_bars(rows: Sequence[tuple[Mapping[str, float], str]], whole: float, unit: str) -> str:
    """Return a legend and one bar for each row as HTML. A row is the values of its parts and its label, and a full bar
    is `whole`."""
    names = list(dict.fromkeys(name for parts, _ in rows for name, value in parts.items() if value > 0))
    colours = {name: LINE_COLOURS[n % len(LINE_COLOURS)] for n, name in enumerate(names)}
    legend = "&ensp; ".join(
        f'<span><i style="{_SWATCH};background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    bars = []
    for parts, label in rows:
        spans = "".join(
            f'<span style="width:{100 * parts[name] / whole:.3f}%;background:{colour}" '
            f'title="{escape(name)} {parts[name]:.3g} {unit}"></span>'
            for name, colour in colours.items() if parts.get(name, 0.0) > 0
        )  # fmt: skip
        bars.append(f'<tr><td><div style="{_BAR}">{spans}</div></td><td>{escape(label)}</td></tr>')
    return f"<p>{legend}</p><table>{''.join(bars)}</table>"
