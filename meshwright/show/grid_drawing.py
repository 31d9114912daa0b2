"""Draw which ranks of a tensor-parallel grid hold which blocks at each step of a product y = x W^T.

There is a drawing and a table. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from meshwright.show.terminal import table
from meshwright.spec.layout.grid import COL, DEPTH, ROW, Grid, Roles

SIDE, GAP, TOP, LEFT = 150, 34, 62, 16  # size of a matrix, space between two, space above and left of all
OWN, GATHERED, OTHERS = "#3b6fb6", "#a9c4e6", "#f3f5f8"  # colours of blocks, as seen from rank 0
Axes = Sequence[str]


class GridMatrix(NamedTuple):
    """A matrix at one step of a product, with the grid axes that shard it, the slowest first."""

    name: str
    rows: tuple[str, ...]  # axes that shard its rows
    columns: tuple[str, ...]  # axes that shard its columns
    # The axes that sharded the rows and the columns before a gather. The drawing shows these smaller blocks.
    pieces: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    note: str = ""


def steps(roles: Roles) -> list[tuple[str, list[GridMatrix]]]:
    """Return each step of a product, as its title and its matrices. W is drawn as [in, out]."""
    r = roles
    x = GridMatrix("x", r.x.rows, (r.x.features,))
    weight = GridMatrix("W", (r.summed,) if r.summed else (), (r.y.features, r.weight))
    wide = GridMatrix(
        "x", r.rows, () if r.joins else (r.x.features,), (x.rows, x.columns), f"gathered over {r.gathered}"
    )
    whole = GridMatrix("W", weight.rows, (r.y.features,), (weight.rows, weight.columns), f"gathered over {r.weight}")
    y = GridMatrix("y", r.y.rows, (r.y.features,))
    summed = GridMatrix("y", r.rows, (r.y.features,), None, f"a sum over {r.summed}" if r.summed else "complete")
    last = [("each rank has", [y])] if r.summed else []
    return [("each rank holds", [x, weight]), ("it gathers", [wide, whole]), ("it multiplies", [summed]), *last]


def _place(grid: Grid, at: dict[str, int], axes: Axes) -> tuple[int, int]:
    """Return the index of a rank's shard along some axes, and the number of shards."""
    index, parts = 0, 1
    for axis in axes:
        size = grid.size(axis)
        index = index * size + at.get(axis, 0)
        parts *= size
    return index, parts


def places(grid: Grid) -> Iterator[dict[str, int]]:
    """Yield the coordinates of each tensor-parallel rank in the grid, rank 0 first."""
    for depth in range(grid.depth):
        for row in range(grid.row):
            for col in range(grid.col):
                yield {COL: col, ROW: row, DEPTH: depth}


def _holders(grid: Grid, rows: Axes, columns: Axes) -> dict[tuple[int, int], list[int]]:
    """Return the ranks that hold each block (row, column) of a matrix."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, at in enumerate(places(grid)):
        key = (_place(grid, at, rows)[0], _place(grid, at, columns)[0])
        holders.setdefault(key, []).append(rank)
    return holders


def _blocks(grid: Grid, matrix: GridMatrix, left: int, top: int) -> Iterator[str]:
    """Yield the SVG of a matrix: its blocks with the ranks that hold them. The blocks of rank 0 are filled."""
    rows, columns = matrix.pieces or (matrix.rows, matrix.columns)
    origin: dict[str, int] = {}
    blocks = (_place(grid, origin, rows)[1], _place(grid, origin, columns)[1])
    shards = (_place(grid, origin, matrix.rows)[1], _place(grid, origin, matrix.columns)[1])
    holders = _holders(grid, rows, columns)
    height, width = SIDE / blocks[0], SIDE / blocks[1]
    for r in range(blocks[0]):
        for c in range(blocks[1]):
            held_by_rank_0 = r < blocks[0] / shards[0] and c < blocks[1] / shards[1]
            if not held_by_rank_0:
                colour = OTHERS
            else:
                colour = OWN if (r, c) == (0, 0) or matrix.pieces is None else GATHERED
            ranks = holders.get((r, c), [])
            x, y = left + c * width, top + r * height
            yield f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="#8a94a3"/>'
            size = max(7, min(13, int(min(width / (1 + len(ranks)), height * 0.7))))
            ink = "white" if colour == OWN else "#26323f"
            label = " ".join(map(str, ranks))
            yield (
                f'<text x="{x + width / 2:g}" y="{y + height / 2 + size / 3:g}" text-anchor="middle" '
                f'font-size="{size}" fill="{ink}">{escape(label)}</text>'
            )


def draw(grid: Grid) -> str:
    """Return an SVG of the product that leaves the residual stream and of the one that returns to it.

    If both have the same roles, only one is drawn.
    """
    pairs = [("every product", grid.first)]
    if grid.second != grid.first:
        pairs = [("leaving the residual stream: queries, keys and values; up; the output layer", grid.first)]
        pairs.append(("coming back to it: attention's output; down", grid.second))
    row_height = TOP + SIDE + 2 * GAP
    out, width = [], 0.0
    for number, (title, roles) in enumerate(pairs):
        top, left = number * row_height + TOP, LEFT
        out.append(f'<text x="{LEFT}" y="{top - 40}" font-size="14" font-weight="bold">{escape(title)}</text>')
        for step, matrices in steps(roles):
            out.append(f'<text x="{left}" y="{top - 20}" fill="#5b6673">{escape(step)}</text>')
            for matrix in matrices:
                out.append(f'<text x="{left}" y="{top - 5}">{escape(matrix.name)}</text>')
                out += _blocks(grid, matrix, left, top)
                out.append(
                    f'<text x="{left}" y="{top + SIDE + 15}" font-size="11" fill="#5b6673">{escape(matrix.note)}</text>'
                )
                left += SIDE + GAP
        width = max(width, left)
    head = f"{grid}: y = x W, blocks by rank; filled: what rank 0 has, dark: its own"
    height = row_height * len(pairs) + 26
    return "".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" font-family="sans-serif" '
        'font-size="12">', f'<rect width="{width:g}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13" fill="#26323f">{escape(head)}</text><g transform="translate(0 26)">',
        *out, "</g></svg>\n",
    ])  # fmt: skip


def describe(grid: Grid) -> str:
    """Return a table of the shards that each rank holds between the products and inside them.

    The cells are rows and features of activations, and rows and columns of weights [out, in], each as shard/shards.
    """
    rows = [("rank", "col row depth", "stream", "inside", "up [out, in]", "down [out, in]")]
    for rank, at in enumerate(places(grid)):
        cells = [str(rank), f"{at[COL]} {at[ROW]} {at[DEPTH]}"]
        for cut in (grid.first.x, grid.first.y):
            cells.append(_pair(grid, at, cut.rows, (cut.features,)))
        for roles in (grid.first, grid.second):
            cells.append(_pair(grid, at, (roles.y.features, roles.weight), (roles.summed,) if roles.summed else ()))
        rows.append(tuple(cells))  # type: ignore[arg-type]
    return table(rows, left=(1, 2, 3, 4, 5))


def _pair(grid: Grid, at: dict[str, int], rows: Axes, columns: Axes) -> str:
    """Return the shard of a rank in both dimensions, as `1/2, 0/4`."""
    (r, of_rows), (c, of_columns) = _place(grid, at, rows), _place(grid, at, columns)
    return f"{r}/{of_rows}, {c}/{of_columns}"
