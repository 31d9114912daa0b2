"""Build HTML pages that load nothing from other sites: tables, bars with a legend, drawings. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d5dbe1; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #e6eaee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.marked { background: #eef5ff; }
td.words, th.words { text-align: left; white-space: normal; }
.bar { display: flex; height: 1.15rem; background: #f0f2f4; position: relative; }
.bar span { display: block; height: 100%; } .legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -1px; }
.drawing { overflow-x: auto; border: 1px solid #e6eaee; padding: .5rem; } p.note { color: #5a6672; }
"""


def page(title: str, intro: Iterable[str], sections: Mapping[str, str]) -> str:
    """Return a page with paragraphs of text, and sections of HTML by heading."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in intro)]
    body += [f"<h2>{escape(heading)}</h2>{section}" for heading, section in sections.items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{PAGE_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def table(rows: Sequence[Sequence[str]], words: tuple[int, ...] = (), marked: int | None = None) -> str:
    """Return a table of text, whose first row is the header.

    The text in the columns `words` may wrap, and the row `marked` is highlighted.
    """

    def cell(text: str, column: int, tag: str) -> str:
        kind = ' class="words"' if column in words else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    lines = []
    for number, row in enumerate(rows):
        cells = "".join(cell(text, column, "td" if number else "th") for column, text in enumerate(row))
        kind = ' class="marked"' if number == marked else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def bars(rows: Iterable[tuple[Mapping[str, float], float, str]], colours: Mapping[str, str], unit: str) -> str:
    """Return a legend and one stacked bar per row, numbered from 1. A row is (parts, value of a full bar, label)."""
    legend = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    lines = []
    for number, (parts, whole, label) in enumerate(rows, 1):
        spans = (
            f'<span style="width:{100 * value / whole:.3f}%;background:{colours[name]}" '
            f'title="{escape(name)} {value:.3g} {unit}"></span>'
            for name, value in parts.items()
            if value > 0
        )
        lines.append(
            f'<tr><td style="width:3rem">{number}</td><td class="words"><div class="bar">{"".join(spans)}</div></td>'
            f'<td style="width:6rem">{escape(label)}</td></tr>'
        )
    return f'<p class="legend">{"".join(legend)}</p><table>{"".join(lines)}</table>'


def embed_svg(svg: str) -> str:
    """Return HTML that embeds an SVG in the page."""
    return f'<div class="drawing">{svg}</div>'
