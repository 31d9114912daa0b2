"""CPU seconds of every test and its processes, for `pytest --cpu=FILE`.

Wall time depends on how busy the machine is, and CPU seconds show the cost of a test. Ranks are grandchildren behind a
fork server, so the clock of this process does not include them: the whole tree below it is read from /proc.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.processes import process_table, tree_below

_TICK = os.sysconf("SC_CLK_TCK")


def tree_seconds() -> float:
    """Return user and system seconds of this process and all its descendants, ended ones included."""
    # The time of a process that ends while the table is read counts in its parent's entry.
    table = process_table()
    mine = (os.getpid(), *tree_below(os.getpid(), table))
    return sum(sum(map(int, table[process][11:15])) for process in mine if process in table) / _TICK


class CpuSeconds:
    """A plugin that writes one JSON line per test: its name and its CPU seconds, fixtures included."""

    def __init__(self, path: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        self.path = path.with_name(f"{path.name}.{worker}") if worker else path
        self.path.write_text("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = tree_seconds()
        result = yield
        line = {"test": item.nodeid, "seconds": round(tree_seconds() - before, 2)}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result
