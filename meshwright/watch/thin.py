"""Fewer points that show the same: of every stretch of steps the mean, the least and the most. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
