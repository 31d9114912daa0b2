"""The loss curve of a run, drawn in braille dots. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rich.text import Text

from meshwright.show.units import ticks
from meshwright.watch.run_parts import BAD

ROWS = 16
GUTTER = 9  # columns that the labels and the axis take
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell's dots, by row and column

Point = tuple[float, float]  # step, loss


def finite(points: Iterable[Point]) -> list[Point]:
    return [p for p in points if math.isfinite(p[1])]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Returns a centred mean over a window of a fortieth of the points."""
    reach = len(points) // 80
    sums = list(accumulate((loss for _, loss in points), initial=0.0))
    out = []
    for i, (step, _) in enumerate(points):
        low, high = max(0, i - reach), min(len(points), i + reach + 1)
        out.append((step, (sums[high] - sums[low]) / (high - low)))
    return out


class Canvas:
    """A canvas of braille dots, two by four per cell, over a range of steps and one of losses."""

    def __init__(self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.columns, self.rows, self.x, self.y = columns, rows, x, y
        self.dots: dict[tuple[int, int], int] = defaultdict(int)

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """Returns the position in dots, from the left and from the top."""
        (left, right), (low, high) = self.x, self.y
        across = (step - left) / (right - left) if right > left else 0.5
        return across * (2 * self.columns - 1), (high - loss) / (high - low) * (4 * self.rows - 1)

    def dot(self, x: float, y: float) -> None:
        column, row = round(x), round(y)
        if 0 <= column < 2 * self.columns and 0 <= row < 4 * self.rows:
            self.dots[row // 4, column // 2] |= DOTS[row % 4][column % 2]

    def line(self, points: Sequence[Point]) -> None:
        places = [self.place(*p) for p in points]
        for (x0, y0), (x1, y1) in zip(places, places[1:], strict=False):
            pieces = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
            for i in range(pieces + 1):
                self.dot(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces)
        for x, y in places[:1]:
            self.dot(x, y)


def curve(train: Sequence[Point], valid: Sequence[Point], width: int, colour: bool) -> list[Text]:
    """Draws the smoothed training loss as a line, validation as diamonds and, in colour, a dot for every step."""
    good, marks = finite(train), finite(valid)
    if not good and not marks:
        return [Text("no loss was finite", "bad")]
    line = smoothed(good)
    losses = [loss for _, loss in (*line, *marks)]
    spread = max(losses) - min(losses) or abs(losses[0]) * 0.1 or 1.0
    reach = (min(losses) - 0.03 * spread, max(losses) + 0.03 * spread)
    ends = [step for step, _ in (*train, *valid)]
    columns, steps = width - GUTTER - 1, (min(ends), max(ends))
    drawn, each = Canvas(columns, ROWS, steps, reach), Canvas(columns, ROWS, steps, reach)
    drawn.line(line)
    for point in good if colour else ():
        each.dot(*each.place(*point))
    diamonds = {(round(y) // 4, round(x) // 2) for x, y in (drawn.place(*point) for point in marks)}
    title = Text(" " * GUTTER).append("loss  ", "bold").append(f"{'━' if len(good) > 1 else '•'} training", "curve")
    if marks:
        title.append("  ◆ validation", "valid")
    bad = {round(drawn.place(s, 0.0)[0]) // 2 for s, loss in train if not math.isfinite(loss)}
    return [title.append("  by step", "dim"), *_rows(drawn, each, diamonds), *_step_axis(drawn, bad)]


def _rows(drawn: Canvas, each: Canvas, diamonds: set[tuple[int, int]]) -> list[Text]:
    losses = ticks(*drawn.y, 5)
    labels = {round(drawn.place(0, loss)[1]) // 4: f"{loss:.{_digits(losses)}f}" for loss in losses}
    lines = []
    for row in range(drawn.rows):
        text = Text().append(f"{labels.get(row, ''):>{GUTTER - 2}} {'┤' if row in labels else '│'}", "dim")
        for column in range(drawn.columns):
            at = (row, column)
            if at in diamonds:
                text.append("◆", "valid")
            elif at in drawn.dots:
                text.append(chr(0x2800 + drawn.dots[at]), "curve")
            else:
                text.append(chr(0x2800 + each.dots[at]) if at in each.dots else " ", "dim")
        lines.append(text)
    return lines


def _step_axis(canvas: Canvas, bad: set[int]) -> list[Text]:
    """Draws the axis with ticks, a cross where a loss was not finite, and the step numbers below."""
    left, right = canvas.x
    steps = ticks(left, right, max(2, canvas.columns // 10))
    at = {round(canvas.place(t, 0.0)[0]) // 2: f"{int(t):,}" for t in steps if t == int(t)}
    rule = Text().append(" " * (GUTTER - 1) + "└", "dim")
    labels = " " * GUTTER
    for column in range(canvas.columns):
        rule.append(BAD if column in bad else "┬" if column in at else "─", "bad" if column in bad else "dim")
        start = GUTTER + min(column, canvas.columns - len(at.get(column, "")))
        if column in at and len(labels) <= start:
            labels = labels.ljust(start) + at[column] + " "
    return [rule, Text(labels, "dim")]


def _digits(values: Sequence[float]) -> int:
    """Returns the number of decimals that distinguishes neighbouring ticks."""
    gap = abs(values[1] - values[0]) if len(values) > 1 else 0.01
    return min(6, max(0, -math.floor(math.log10(gap) + 1e-9)))
