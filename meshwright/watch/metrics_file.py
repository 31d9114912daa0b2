"""Reads metrics.jsonl into columns of numbers as the file grows, without importing torch.

A line is about a kilobyte and a run may have a hundred thousand of them. The numbers that every chart needs come first
in each line, so they are extracted without parsing the rest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.outside import parse_json

COLUMNS = ("step", "time", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "global_batch", "step_time_s")
_VALUE = rb"([^,{}\[\]]+)"
# Matches the start of a line as this version writes it: the columns in order, each with a plain value.
_FRONT = re.compile(rb'\{"step": (\d+)' + b"".join(rb', "%s": %s' % (name.encode(), _VALUE) for name in COLUMNS[1:]))
_WORDS = ((b"null", b"nan"), (b"true", b"1"), (b"false", b"0"))

Table = NDArray[np.float64]  # [lines, columns]


class MetricsFile:
    """The columns read so far, and the byte offset of each line.

    `refresh` reads the lines added since the last call. A file that was replaced is read again from the start: a
    resumed run replaces it to remove the steps that were lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._blocks: list[Table] = []
        self._starts: list[NDArray[np.int64]] = []
        self._read = 0  # Bytes read so far, always up to the end of a line.
        self._inode = -1
        self._whole: tuple[Table, NDArray[np.int64]] | None = None

    def refresh(self) -> bool:
        """Read the lines added since the last call. Return whether there were any."""
        try:
            with self.path.open("rb") as file:
                size, inode = file.seek(0, 2), os.fstat(file.fileno()).st_ino
                if size < self._read or inode != self._inode:
                    self._forget()
                    self._inode = inode
                file.seek(self._read)
                added = file.read()
        except OSError:
            return False
        # The run may be writing the last line now: it is read by a later call, when it is complete.
        complete = added.rfind(b"\n") + 1
        if not complete:
            return False
        self._take(added[:complete])
        self._read += complete
        self._whole = None
        return True

    def _take(self, text: bytes) -> None:
        """Append the columns and offsets of some complete lines."""
        at = 0
        fronts, starts, odd = [], [], []
        match, find = _FRONT.match, text.find
        while at < len(text):
            front = match(text, at)
            end = find(b"\n", front.end() if front else at)
            if front:
                fronts.append(b" ".join(front.groups()))
                starts.append(self._read + at)
            else:
                odd.append((at, text[at:end]))
            at = end + 1
        table, numeric = _numbers(fronts)
        starts = [starts[i] for i in numeric]
        # Lines written by another version or by hand are parsed as JSON, then sorted back into their places.
        for at, line in odd:
            row = _parsed(line)
            if row is not None:
                table = np.concatenate([table, [row]])
                starts.append(self._read + at)
        if odd:
            order = np.argsort(starts)
            table, starts = table[order], [starts[i] for i in order]
        self._blocks.append(table)
        self._starts.append(np.array(starts, np.int64))

    def _all(self) -> tuple[Table, NDArray[np.int64]]:
        """Return the columns and offsets of all lines. If a step was written more than once, its last line counts."""
        if self._whole is None:
            table = np.concatenate([np.empty((0, len(COLUMNS))), *self._blocks])
            starts = np.concatenate([np.empty(0, np.int64), *self._starts])
            # The smallest step number in the lines after each line. A line whose step is not below it was trained
            # again later, after the run went back.
            later = np.append(np.minimum.accumulate(table[::-1, 0])[::-1][1:], np.inf) if len(table) else table[:, 0]
            kept = table[:, 0] < later
            self._whole = table[kept], starts[kept]
            self._blocks, self._starts = [self._whole[0]], [self._whole[1]]
        return self._whole

    def __len__(self) -> int:
        return len(self._all()[0])

    @property
    def columns(self) -> dict[str, NDArray[np.float64]]:
        return dict(zip(COLUMNS, self._all()[0].T, strict=True))

    def lines(self, most: int, since: int = 0) -> list[dict[str, Any]]:
        """Return at most `most` parsed lines, evenly spaced from line number `since` to the last one, inclusive."""
        starts = self._all()[1][since:]
        count = len(starts)
        chosen = sorted({round(i) for i in np.linspace(0, count - 1, min(most, count))}) if count else []
        parsed: list[dict[str, Any]] = []
        if not chosen:
            return parsed
        with self.path.open("rb") as file:
            for number in chosen:
                file.seek(int(starts[number]))
                try:
                    line = parse_json(file.readline().decode("utf-8", "replace"))
                except ValueError:
                    continue
                if isinstance(line, dict):
                    parsed.append(line)
        return parsed


def _numbers(fronts: list[bytes]) -> tuple[Table, list[int]]:
    """Parse the columns of all lines at once. Return them and the indices of their lines.

    Lines in which a value is not a number are left out.
    """
    text = b" ".join(fronts)
    for word, number in _WORDS:
        text = text.replace(word, number)
    try:
        # numpy's own parser takes twice as long.
        values = np.array(list(map(float, text.split())))
    except ValueError:
        values = np.empty(0)
    if values.size == len(fronts) * len(COLUMNS):
        return values.reshape(-1, len(COLUMNS)), list(range(len(fronts)))
    if len(fronts) == 1:
        return np.empty((0, len(COLUMNS))), []
    # Some line has a value that is not a number: parse line by line to find out which.
    single = [_numbers([front])[0] for front in fronts]
    return np.concatenate(single), [number for number, row in enumerate(single) if len(row)]


def _parsed(text: bytes) -> list[float] | None:
    try:
        line = parse_json(text.decode("utf-8", "replace"))
        return [math.nan if line.get(name) is None else float(line[name]) for name in COLUMNS]
    except (ValueError, TypeError, AttributeError):
        return None


MOST_POINTS = 1000
DIGITS = 6  # Significant digits of a number in the page's JSON.

Column = NDArray[np.float64]


def thinned(columns: Mapping[str, Column], spread: tuple[str, ...], most: int = MOST_POINTS) -> dict[str, Any]:
    """Reduce columns to at most `most` points each, one for every interval of lines.

    A point is the last value in its interval. For the columns named in `spread` it is instead the `mean`, lowest (`lo`)
    and highest (`hi`) finite value in the interval (null if there is none), and the number of values that are not
    finite (`lost`). `lo` and `hi` are omitted if every interval is a single line, and `lost` if all values are finite.
    """
    count = len(next(iter(columns.values())))
    starts = np.unique(np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64))
    ends = np.append(starts[1:], count) - 1
    points: dict[str, Any] = {}
    for name, column in columns.items():
        if name not in spread:
            points[name] = plain(column[ends] if count else column)
        elif count:
            points[name] = _spread(column, starts, ends)
    return points


def _spread(column: Column, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> dict[str, Any]:
    finite = np.isfinite(column)
    number = np.add.reduceat(finite.astype(np.float64), starts)
    # An interval without finite values divides zero by zero; `plain` turns the NaN into null.
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(finite, column, 0.0), starts) / number
    low = np.minimum.reduceat(np.where(finite, column, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, column, -np.inf), starts)
    lost = (ends - starts + 1) - number
    out: dict[str, Any] = {"mean": plain(mean)}
    if np.any(ends > starts):
        out |= {"lo": plain(low), "hi": plain(high)}
    if lost.any():
        out["lost"] = [int(n) for n in lost]
    return out


def plain(column: Column) -> list[float | int | None]:
    """Return a column's numbers for JSON: integers exactly, others with six digits, and null if not finite."""
    return [_number(value) for value in column.tolist()]


def _number(value: float) -> float | int | None:
    if value != value or value in (float("inf"), float("-inf")):
        return None
    # A float64 represents every integer exactly only below 2**53.
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.{DIGITS}g}")
