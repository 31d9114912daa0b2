"""Draw a layout as text: the grid of ranks, in which walls separate nodes, and every kind of group below it.

Each pipeline stage is a panel. Its rows are dp and cp, and its columns are tp (edp and ep, and etp for experts). Large
worlds are abbreviated: the first rows, columns, stages and groups are shown, and the last one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from meshwright.errors import plural
from meshwright.spec.layout.layout import Layout

CORNERS = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"  # indexed by the sum of the walls that meet at a corner: up 1, down 2, left 4, right 8
GAP = "   "
SMALL_WORLD = 64  # up to this many ranks every group is written out
DRAWN_WORLD = 256  # up to this many ranks the grid is drawn in full, unless it is very long in one direction


def elide(count: int, limit: int) -> list[int | None]:
    """Return the indices 0 to count - 1, with one None in place of the omitted ones if there are more than `limit`."""
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


def draw(layout: Layout, width: int = 100) -> str:
    """Draw the whole page: the sizes of the world, its grid, its expert grid if that differs, and its groups."""
    lines = [_heading(layout), ""]
    lines += _view(layout, ("dp", "cp"), width)
    if layout.ep > 1 or layout.etp != layout.tp:
        sizes = _sizes(layout, ("etp", "ep", "edp", "pp"))
        lines += ["", f"the same ranks as the experts see them: {sizes}", ""]
        lines += _view(layout, ("edp", "ep"), width)
    lines += ["", *describe_groups(layout, width)]
    return "\n".join(lines)


def _sizes(layout: Layout, axes: Iterable[str]) -> str:
    return " x ".join(f"{axis} {layout.axis_size(axis)}" for axis in axes)


def _heading(layout: Layout) -> str:
    axes = ("tp", "cp", "dp", "pp", *(("replicas",) if layout.replicas > 1 else ()))
    text = f"world {layout.world} = {_sizes(layout, axes)}, order {layout.order}"
    text += ", the first replica is drawn" if layout.replicas > 1 else ""
    if layout.node_size is None:
        return text
    nodes = -(-layout.world // layout.node_size)
    return f"{text}\n{plural(nodes, 'node')} of {layout.node_size}, walls between nodes, n0 is node 0"


def _view(layout: Layout, rows: tuple[str, str], width: int) -> list[str]:
    """Draw the panels of one view, as many side by side as fit. `rows` are the slow and the fast axis of the rows."""
    drawn = layout.world <= DRAWN_WORLD
    (slow, fast), across = rows, "etp" if "ep" in rows else "tp"
    size = layout.axis_size(fast)
    shown = elide(layout.axis_size(slow) * size, 16 if drawn else 6)
    columns = elide(layout.axis_size(across), 16 if drawn else 4)

    def label(row: int | None) -> str:
        if row is None:
            return "⋮"
        return f"{slow} {row // size}" + (f" {fast} {row % size}" if size > 1 else "")

    def rank(row: int | None, column: int | None, stage: int) -> int | None:
        if row is None or column is None:
            return None
        return layout.rank_at(**{across: column, slow: row // size, fast: row % size, "pp": stage})

    def panel(stage: int | None) -> list[str]:
        if stage is None:
            return [" … ", *[""] * (2 * len(shown) + 2)]
        names = ["…" if column is None else str(column) for column in columns]
        return _panel(layout, f"stage {stage}", names, [[rank(row, col, stage) for col in columns] for row in shown])

    left = ["", across, *(text for row in shown for text in ("", label(row))), ""]
    room = width - max(map(len, left)) - 1 - len(GAP)
    beside = max(1, room // (max(map(len, panel(layout.pp - 1))) + len(GAP)))
    bands: list[list[int | None]] = [[]]
    for stage in elide(layout.pp, 8 if drawn else max(3, min(beside + 1, 8))):
        if stage is not None and sum(other is not None for other in bands[-1]) == beside:
            bands.append([])
        bands[-1].append(stage)
    lines: list[str] = []
    for band in bands:
        lines += [""] * bool(lines) + _beside(left, [panel(stage) for stage in band])
    return lines


def _beside(left: list[str], panels: Sequence[list[str]]) -> list[str]:
    """Put panels side by side, with the row labels at their left.

    Every second line is for walls and is omitted if it has none.
    """
    gutter = max(map(len, left))
    widths = [max(map(len, panel)) for panel in panels]
    lines = []
    for number, (label, *texts) in enumerate(zip(left, *panels, strict=True)):
        if number == 0 or number % 2 or any("─" in text for text in texts):
            padded = (text.ljust(size) for text, size in zip(texts, widths, strict=True))
            lines.append(f"{label:>{gutter}} {GAP.join(padded)}".rstrip())
    return lines


def _wall(layout: Layout, one: int | None, other: int | None) -> bool:
    """Return whether two neighbouring cells are on different nodes."""
    return one is not None and other is not None and layout.crosses_node((one, other))


def _panel(layout: Layout, title: str, columns: list[str], rows: list[list[int | None]]) -> list[str]:
    """Draw one stage: its title, column numbers, then its ranks by row and column (None for omitted ones).

    A line of walls is above every row and below the last.
    """
    height = len(rows)
    width = len(columns)
    cell = max(len(str(layout.world - 1)), 2)
    between = zip(rows, rows[1:], strict=False)
    across = [[_wall(layout, *pair) for pair in zip(*pairs, strict=True)] for pairs in between]
    across = [[True] * width, *across, [True] * width]
    # An omitted column has no ranks to compare. Its wall continues if both neighbouring columns have one.
    for wall in across:
        for col in range(1, width - 1):
            if columns[col] == "…":
                wall[col] = wall[col - 1] and wall[col + 1]
    upright = [
        [col in (0, width) or _wall(layout, cells[col - 1], cells[col]) for col in range(width + 1)] for cells in rows
    ]
    lines = [" " + title, " " + "".join(f" {name:>{cell}}  " for name in columns).rstrip()]
    for row in range(height + 1):
        lines.append(_wall_line(across, upright, row, cell))
        if row < height:
            cells = rows[row]
            text = "".join(f"{'│' if upright[row][col] else ' '} {_text(cells, col):>{cell}} " for col in range(width))
            lines.append(f"{text}│{_nodes(layout, cells)}")
    return lines


def _text(cells: list[int | None], col: int) -> str:
    rank = cells[col]
    if rank is not None:
        return str(rank)
    return "⋮" if all(other is None for other in cells) else "…"


def _wall_line(across: list[list[bool]], upright: list[list[bool]], row: int, cell: int) -> str:
    """Draw the line above `row`, in which each corner shows the walls that meet there."""
    height, width = len(upright), len(across[0])
    text = ""
    for col in range(width + 1):
        up = row > 0 and upright[row - 1][col]
        down = row < height and upright[row][col]
        left = col > 0 and across[row][col - 1]
        right = col < width and across[row][col]
        text += CORNERS[up + 2 * down + 4 * left + 8 * right]
        if col < width:
            text += ("─" if right else " ") * (cell + 2)
    return text


def _nodes(layout: Layout, cells: list[int | None]) -> str:
    """Return the nodes that a row is on: ` n0`, ` n0,1` or ` n0…7`."""
    if layout.node_size is None:
        return ""
    nodes = sorted({rank // layout.node_size for rank in cells if rank is not None})
    if len(nodes) < 2 or (len(nodes) == 2 and None not in cells):
        return " n" + ",".join(map(str, nodes)) if nodes else ""
    return f" n{nodes[0]}…{nodes[-1]}"


def describe_groups(layout: Layout, width: int = 100) -> list[str]:
    """Describe every kind of group: their number and size, how many of them span nodes, and their ranks."""
    lines: list[str] = []
    seen: dict[tuple[tuple[int, ...], ...], str] = {}
    names = layout.group_kinds
    indent = max(len(name) for name in names) + 2
    for name in names:
        groups = layout.groups(name)
        count, size = len(groups), len(groups[0])
        text = f"{name:<{indent}}{plural(count, 'group')} of {size}"
        if size > 1 and layout.node_size is not None:
            text += f", {_node_crossings(layout, groups)}"
        same = seen.setdefault(groups, name)
        if size == 1 and count == layout.world:
            lines.append(f"{text}, every rank alone")
        elif same != name:
            lines.append(f"{text}, the same as {same}")
        else:
            limits = (count, size) if layout.world <= SMALL_WORLD else (4, 8)
            # textwrap breaks lines only at plain spaces, so no-break spaces keep each group on one line.
            joined = " ".join(group.replace(" ", "\xa0") for group in written(groups, *limits))
            wrapped = textwrap.fill(
                joined, width, initial_indent=" " * indent, subsequent_indent=" " * indent, break_long_words=False
            )
            lines += [text, wrapped.replace("\xa0", " ")]
    if layout.world > SMALL_WORLD:
        lines += ["", "… stands for what is left out: --json lists every group"]
    return lines


def _node_crossings(layout: Layout, groups: Sequence[tuple[int, ...]]) -> str:
    """Return words that say how many groups span nodes."""
    crossing = sum(map(layout.crosses_node, groups))
    if crossing in (0, len(groups)):
        if len(groups) == 1:
            return "crosses a node" if crossing else "inside a node"
        return "all cross a node" if crossing else "none crosses a node"
    return f"{crossing} cross{'es' * (crossing == 1)} a node"


def written(groups: Sequence[Sequence[int]], most: int, longest: int, between: str = " ") -> list[str]:
    """Format groups as `[0 4]`, `[1 5]`, ...: at most `most` groups of at most `longest` ranks, with `…` for others.

    Brackets are used only if ranks are separated by a space (`between`).
    """
    texts = []
    for index in elide(len(groups), most):
        if index is None:
            texts.append("…")
            continue
        group = groups[index]
        ranks = between.join("…" if at is None else str(group[at]) for at in elide(len(group), longest))
        texts.append(f"[{ranks}]" if between == " " else ranks)
    return texts
