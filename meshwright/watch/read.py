"""What a run's folder holds, read for its page: small files, and lines of JSON that may be cut off. No torch.

Everything here may be written at this moment, by another version or by hand: what can't be read is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.outside import parse_json, read_json

MOST_LINES_BYTES = 32 << 20  # of events, validations and layers, the last so many bytes
MOST_SPANS = 6000  # of a trace


def read_small(path: Path) -> dict[str, Any]:
    """A JSON document, or nothing."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are JSON objects, each step's last one where they have steps."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MOST_LINES_BYTES))
            texts = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for text in texts:
        try:
            value = parse_json(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a mapping, by name."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): float(n) for name, n in items if is_number(n)}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_trace(path: Path) -> dict[str, Any] | None:
    """The spans of a measured step: [rank, track, name, start, end, chunk] in seconds."""
    document = read_small(path)
    events = document.get("traceEvents")
    spans = []
    for event in events if isinstance(events, list) else []:
        if not (isinstance(event, dict) and event.get("ph") == "X" and is_number(event.get("ts"))):
            continue
        start, took = event["ts"] / 1e6, event.get("dur", 0)
        chunk = event.get("args", {}).get("chunk", 0) if isinstance(event.get("args"), dict) else 0
        if is_number(took):
            name, track = str(event.get("name", "")), str(event.get("cat", ""))
            spans.append([event.get("pid", 0), track, name, start, start + took / 1e6, chunk])
    other = document.get("otherData")
    other = other if isinstance(other, dict) else {}
    step = other.get("step") if isinstance(other.get("step"), int) else None
    return {"name": str(other.get("name", "")), "step": step, "spans": spans[:MOST_SPANS]} if spans else None
