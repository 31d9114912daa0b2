"""metrics.jsonl as columns of numbers, read as it grows. A line is a kilobyte and a run has a hundred thousand of them:
the numbers that every chart needs stand first in a line and are taken out without parsing the rest. No torch."""

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
_FRONT = re.compile(rb'\{"step": (\d+)' + b"".join(rb', "%s": %s' % (name.encode(), _VALUE) for name in COLUMNS[1:]))
_WORDS = ((b"null", b"nan"), (b"true", b"1"), (b"false", b"0"))

Table = NDArray[np.float64]  # [lines, columns]


class MetricsFile:
    """The columns so far, and where each line stands in the file. `refresh` reads what was added since; a file that was
    replaced, as when a resumed run takes its lost steps out, is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._blocks: list[Table] = []
        self._starts: list[NDArray[np.int64]] = []
        self._read, self._inode = 0, -1
        self._whole: tuple[Table, NDArray[np.int64]] | None = None

    def refresh(self) -> bool:
        """Reads what is new; returns whether there was anything."""
        try:
            with self.path.open("rb") as file:
                found = file.seek(0, 2), os.fstat(file.fileno()).st_ino
                if found[0] < self._read or found[1] != self._inode:
                    self._forget()
                    self._inode = found[1]
                file.seek(self._read)
                added = file.read()
        except OSError:
            return False
        whole = added.rfind(b"\n") + 1
        if not whole:
            return False
        self._take(added[:whole])
        self._read += whole
        self._whole = None
        return True

    def _take(self, text: bytes) -> None:
        at, fronts, starts, odd = 0, [], [], []
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
        table = _numbers(fronts)
        for at, line in odd:  # of another version, or by hand
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
        """All lines; of a step that was written twice, the later one."""
        if self._whole is None:
            table = np.concatenate([np.empty((0, len(COLUMNS))), *self._blocks])
            starts = np.concatenate([np.empty(0, np.int64), *self._starts])
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
        """At most so many whole lines of those from number `since` on, evenly spaced, the last one among them."""
        starts = self._all()[1][since:]
        count = len(starts)
        chosen = sorted({round(i) for i in np.linspace(0, count - 1, min(most, count))}) if count else []
        found: list[dict[str, Any]] = []
        if not chosen:
            return found
        with self.path.open("rb") as file:
            for number in chosen:
                file.seek(int(starts[number]))
                try:
                    line = parse_json(file.readline().decode("utf-8", "replace"))
                except ValueError:
                    continue
                if isinstance(line, dict):
                    found.append(line)
        return found


def _numbers(fronts: list[bytes]) -> Table:
    """Parses the numbers of all lines at once."""
    text = b" ".join(fronts)
    for word, number in _WORDS:
        text = text.replace(word, number)
    try:
        values = np.array(list(map(float, text.split())))  # numpy's own parser takes twice as long
    except ValueError:
        values = np.empty(0)
    if values.size != len(fronts) * len(COLUMNS):  # some line has something else there
        return np.concatenate([_numbers([one]) for one in fronts]) if len(fronts) > 1 else np.empty((0, len(COLUMNS)))
    return values.reshape(-1, len(COLUMNS))


def _parsed(text: bytes) -> list[float] | None:
    try:
        line = parse_json(text.decode("utf-8", "replace"))
        return [math.nan if line.get(name) is None else float(line[name]) for name in COLUMNS]
    except (ValueError, TypeError, AttributeError):
        return None


MOST_POINTS = 1000
DIGITS = 6

Column = NDArray[np.float64]


def thinned(columns: Mapping[str, Column], spread: tuple[str, ...], most: int = MOST_POINTS) -> dict[str, Any]:
    """Columns of at most `most` points: the last value of each stretch and, of those in `spread`, `mean`, `lo` and `hi`
    over its finite values (null where there is none) and how many are not finite."""
    count = len(next(iter(columns.values())))
    starts = np.unique(np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64))
    ends = np.append(starts[1:], count) - 1
    found: dict[str, Any] = {}
    for name, column in columns.items():
        if name not in spread:
            found[name] = plain(column[ends] if count else column)
        elif count:
            found[name] = _spread(column, starts, ends)
    return found


def _spread(column: Column, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> dict[str, Any]:
    finite = np.isfinite(column)
    number = np.add.reduceat(finite.astype(np.float64), starts)
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
    """Numbers for JSON, of six digits (whole ones as they are); what is not finite is null."""
    return [_number(value) for value in column.tolist()]


def _number(value: float) -> float | int | None:
    if value != value or value in (float("inf"), float("-inf")):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.{DIGITS}g}")
