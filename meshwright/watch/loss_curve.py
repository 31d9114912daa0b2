"""Draws the loss curve of a run in braille dots. It does not import torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rich.text import Text

from meshwright.show.units import ticks
from meshwright.watch.run_parts import BAD

ROWS = 16
GUTTER = 9  # Columns for the labels and the axis.
# The bit of each dot in a braille character (Unicode block U+2800), by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

Point = tuple[float, float]  # (step, loss)


def finite(points: Iterable[Point]) -> list[Point]:
    return [p for p in points if math.isfinite(p[1])]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the points with each loss replaced by a centred mean over about a fortieth of all points."""
    reach = len(points) // 80
    # Prefix sums give each window's sum in constant time.
    sums = list(accumulate((loss for _, loss in points), initial=0.0))
    out = []
    for i, (step, _) in enumerate(points):
        low, high = max(0, i - reach), min(len(points), i + reach + 1)
        out.append((step, (sums[high] - sums[low]) / (high - low)))
    return out


class Canvas:
    """A canvas of braille dots over a range of steps (`x`) and losses (`y`). A cell is two dots wide and four high."""

    def __init__(self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.columns, self.rows, self.x, self.y = columns, rows, x, y
        self.dots: dict[tuple[int, int], int] = defaultdict(int)

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """Return the position of a point in dots, from the left and from the top."""
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
            parts = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
            for i in range(parts + 1):
                self.dot(x0 + (x1 - x0) * i / parts, y0 + (y1 - y0) * i / parts)
        # A single point has no segment, so it is drawn here.
        for x, y in places[:1]:
            self.dot(x, y)


def curve(train: Sequence[Point], valid: Sequence[Point], width: int, colour: bool) -> list[Text]:
    """Draw the smoothed training loss as a line and validation losses as diamonds.

    In colour, also draw a dot for every step behind them.
    """
    good, marks = finite(train), finite(valid)
    if not good and not marks:
        return [Text("no loss was finite", "bad")]
    line = smoothed(good)
    losses = [loss for _, loss in (*line, *marks)]
    # Equal losses would make an empty range, which the canvas divides by.
    spread = max(losses) - min(losses) or abs(losses[0]) * 0.1 or 1.0
    reach = (min(losses) - 0.03 * spread, max(losses) + 0.03 * spread)
    all_steps = [step for step, _ in (*train, *valid)]
    columns, steps = width - GUTTER - 1, (min(all_steps), max(all_steps))

    smooth, raw = Canvas(columns, ROWS, steps, reach), Canvas(columns, ROWS, steps, reach)
    smooth.line(line)
    for point in good if colour else ():
        raw.dot(*raw.place(*point))
    diamonds = {(round(y) // 4, round(x) // 2) for x, y in (smooth.place(*point) for point in marks)}

    title = Text(" " * GUTTER).append("loss  ", "bold").append(f"{'━' if len(good) > 1 else '•'} training", "curve")
    if marks:
        title.append("  ◆ validation", "valid")
    bad = {round(smooth.place(s, 0.0)[0]) // 2 for s, loss in train if not math.isfinite(loss)}
    return [title.append("  by step", "dim"), *_rows(smooth, raw, diamonds), *_step_axis(smooth, bad)]


def _rows(smooth: Canvas, raw: Canvas, diamonds: set[tuple[int, int]]) -> list[Text]:
    """Draw the plot's rows: in each cell a diamond, else the smoothed line, else the dots of single steps."""
    losses = ticks(*smooth.y, 5)
    labels = {round(smooth.place(0, loss)[1]) // 4: f"{loss:.{_digits(losses)}f}" for loss in losses}
    lines = []
    for row in range(smooth.rows):
        text = Text().append(f"{labels.get(row, ''):>{GUTTER - 2}} {'┤' if row in labels else '│'}", "dim")
        for column in range(smooth.columns):
            at = (row, column)
            if at in diamonds:
                text.append("◆", "valid")
            elif at in smooth.dots:
                text.append(chr(0x2800 + smooth.dots[at]), "curve")
            else:
                text.append(chr(0x2800 + raw.dots[at]) if at in raw.dots else " ", "dim")
        lines.append(text)
    return lines


def _step_axis(canvas: Canvas, bad: set[int]) -> list[Text]:
    """Draw the axis of steps with ticks and step numbers. A cross marks each column in which a loss is not finite."""
    left, right = canvas.x
    steps = ticks(left, right, max(2, canvas.columns // 10))
    numbers = {round(canvas.place(t, 0.0)[0]) // 2: f"{int(t):,}" for t in steps if t == int(t)}
    rule = Text().append(" " * (GUTTER - 1) + "└", "dim")
    labels = " " * GUTTER
    for column in range(canvas.columns):
        if column in bad:
            rule.append(BAD, "bad")
        else:
            rule.append("┬" if column in numbers else "─", "dim")
        start = GUTTER + min(column, canvas.columns - len(numbers.get(column, "")))
        # A number that would touch the one before it is left out.
        if column in numbers and len(labels) <= start:
            labels = labels.ljust(start) + numbers[column] + " "
    return [rule, Text(labels, "dim")]


def _digits(values: Sequence[float]) -> int:
    """Return the number of decimals that neighbouring ticks need to be distinct."""
    gap = abs(values[1] - values[0]) if len(values) > 1 else 0.01
    return min(6, max(0, -math.floor(math.log10(gap) + 1e-9)))
