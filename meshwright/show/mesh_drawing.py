"""Draw a mesh as SVG: one panel of all ranks per axis, in which each group of ranks has one colour. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshwright.errors import UserError, plural
from meshwright.show.schedule_drawing import SVG_STYLE
from meshwright.spec.layout.layout import Layout

MOST = 256  # ranks of a drawing
CELL, GAP, LEFT, TOP, BETWEEN = 30, 4, 20, 104, 44
COLOURS = (
    "#9ec3e6", "#f4c592", "#a9d8c6", "#e6a9c0", "#c5b3e0", "#e3d78f", "#b8c4cf", "#f2aa9b",
    "#8fd0dc", "#c9dd9a", "#d9b99b", "#a5b4f0", "#e0bfe6", "#9fd19f", "#f0d0b0", "#b5b5d9",
)  # fmt: skip
# For each axis, its name, how a group divides the work, and what its ranks send each other.
AXES = {
    "tp": ("tensor parallelism", "matrices are sharded: partial results are summed in every layer"),
    "cp": ("context parallelism", "sequences are sharded: keys and values are exchanged"),
    "ep": ("expert parallelism", "experts are distributed: tokens are sent to them"),
    "dp": ("data parallelism", "the same weights, different samples: gradients are summed"),
    "pp": ("pipeline parallelism", "layers are divided into stages: hidden states are passed on"),
}


def mesh_svg(layout: Layout) -> str:
    """Return one SVG document, in which ranks are in the order of their numbers, if possible one stage per row."""
    if layout.world > MOST:
        raise UserError(f"{layout.world} ranks are more than a drawing shows well: draw at most {MOST} with --svg")
    axes = [axis for axis in AXES if getattr(layout, axis) > 1] or ["dp"]
    columns = _columns(layout)
    rows = -(-layout.world // columns)
    panel = max(columns * (CELL + GAP), 330) + BETWEEN
    across = min(len(axes), 2)
    down = -(-len(axes) // across)
    tall = rows * (CELL + GAP) + 70
    width = LEFT + across * panel
    height = TOP - 30 + down * tall
    sizes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in axes)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img">',
        f"<title>{escape(f'{layout.world} ranks: {sizes}')}</title>",
        f"<style>{SVG_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#fff"/>',
        f'<text class="title" x="{LEFT}" y="34">{plural(layout.world, "rank")}: {sizes}</text>',
        f'<text class="sub" x="{LEFT}" y="56">Ranks of one colour are one group of that axis.</text>',
    ]
    for number, axis in enumerate(axes):
        x = LEFT + number % across * panel
        y = TOP + number // across * tall
        body += _panel(layout, axis, x, y, columns)
    return "\n".join([*body, "</svg>"]) + "\n"


def _columns(layout: Layout) -> int:
    """Return the number of ranks in a row: those of a stage, or of a node, or 8, but at most 16."""
    stage = layout.world // layout.pp
    wanted = stage if layout.pp > 1 and stage <= 16 else layout.node_size or 8
    return min(layout.world, wanted, 16)


def _panel(layout: Layout, axis: str, x: int, y: int, columns: int) -> Iterator[str]:
    name, meaning = AXES[axis]
    groups = layout.groups(axis)
    yield f'<text x="{x}" y="{y - 6}" font-weight="600">{axis}: {name}, {plural(len(groups), "group")}</text>'
    yield f'<text class="sub" x="{x}" y="{y + 12}" style="font-size:11.5px">{escape(meaning)}</text>'
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    for rank in range(layout.world):
        left = x + rank % columns * (CELL + GAP)
        top = y + 22 + rank // columns * (CELL + GAP)
        number = group_of[rank]
        yield (
            f'<g class="b"><title>rank {rank}: {axis} group {" ".join(map(str, groups[number]))}</title>'
            f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="4" '
            f'fill="{COLOURS[number % len(COLOURS)]}"/>'
            f'<text class="n" x="{left + CELL / 2:g}" y="{top + CELL / 2:g}">{rank}</text></g>'
        )
