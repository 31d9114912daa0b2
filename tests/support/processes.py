"""The processes of this machine and their parents, read from /proc (Linux)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def process_table() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat from the state on, for every process. The second one is the parent's
    number.
    """
    found: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command before these fields is in brackets and may contain spaces.
            found[int(entry.name)] = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # the process has ended meanwhile
    return found


def tree_below(process: int, table: Mapping[int, list[str]] | None = None) -> list[int]:
    """Return all descendants of a process, whichever of its threads started them."""
    children: dict[int, list[int]] = {}
    for each, fields in (process_table() if table is None else table).items():
        children.setdefault(int(fields[1]), []).append(each)
    found: list[int] = []
    open_ = [process]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def named_below(process: int, name: str) -> list[int]:
    """Return the descendants of a process whose command line begins with `name`."""
    found = []
    for each in tree_below(process):
        try:
            command = Path(f"/proc/{each}/cmdline").read_bytes()
        except OSError:
            continue  # the process has ended meanwhile
        if command.startswith(name.encode()):
            found.append(each)
    return found
