"""One of several shards of all tests, for `pytest --shard 2/6`, and the failures of a run, for `pytest
--failures=FILE`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


def shard_of(text: str) -> tuple[int, int]:
    """Return (number, count) of a text such as `2/6`."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard {text}: give a number and a count, such as 2/6")
    return int(number), int(count)


def files_of_shard(tests: Counter[str], number: int, count: int) -> set[str]:
    """Return the files of one shard. The largest file is assigned first, to the shard that has the fewest tests so
    far.
    """
    loads, mine = [0] * count, set()
    for name, size in sorted(tests.items(), key=lambda each: (-each[1], each[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == number - 1:
            mine.add(name)
    return mine


def keep_shard(config: pytest.Config, items: list[pytest.Item], text: str) -> None:
    """Deselect the tests of the other shards. Files stay whole, so that the fixtures of each are created once."""
    file_of = {item: item.nodeid.split("::")[0] for item in items}
    mine = files_of_shard(Counter(file_of.values()), *shard_of(text))
    config.hook.pytest_deselected(items=[item for item in items if file_of[item] not in mine])
    items[:] = [item for item in items if file_of[item] in mine]


class Failures:
    """A plugin that appends the name of every failed test to a file at once, because a run may be cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")
