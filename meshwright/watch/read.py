"""Reads the files of a run's folder for its page, without importing torch: small JSON files, JSON lines and traces.

A run may be writing these files at this moment, and another version or a user may have written them. Content that can't
be read is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.outside import parse_json, read_json

MOST_LINES_BYTES = 32 << 20  # Of events, validations and layers, only this many bytes at the end are read.
MOST_SPANS = 6000  # Further spans of a trace are left out.


def read_small(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if it can't be read."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are JSON objects."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            # This may start in the middle of a line, which then fails to parse and is left out.
            file.seek(max(0, size - MOST_LINES_BYTES))
            texts = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    lines = []
    for text in texts:
        try:
            value = parse_json(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines


def numbers(value: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping by name; empty if `value` is not a mapping."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): float(n) for name, n in items if is_number(n)}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_trace(path: Path) -> dict[str, Any] | None:
    """Return a traced step's name, number and spans: [rank, track, name, start, end, chunk], with times in seconds.

    The file is a Chrome trace, whose times are in microseconds. Return None if it has no spans.
    """
    document = read_small(path)
    events = document.get("traceEvents")
    spans = []
    for event in events if isinstance(events, list) else []:
        if not (isinstance(event, dict) and event.get("ph") == "X" and is_number(event.get("ts"))):
            continue
        start = event["ts"] / 1e6
        took = event.get("dur", 0)
        chunk = event.get("args", {}).get("chunk", 0) if isinstance(event.get("args"), dict) else 0
        if is_number(took):
            name, track = str(event.get("name", "")), str(event.get("cat", ""))
            spans.append([event.get("pid", 0), track, name, start, start + took / 1e6, chunk])
    other = document.get("otherData")
    other = other if isinstance(other, dict) else {}
    step = other.get("step") if isinstance(other.get("step"), int) else None
    return {"name": str(other.get("name", "")), "step": step, "spans": spans[:MOST_SPANS]} if spans else None
