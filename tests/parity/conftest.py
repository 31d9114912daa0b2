from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases import Case
from tests.parity.launches import Launches, summary

_LAUNCHES = pytest.StashKey[list[Launches]]()


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Launches:
    """Return the launches of the selected cases of one file. Cases of other files may be run by another worker."""
    items = [item for item in request.session.items if item.path == request.path]
    specs = (getattr(item, "callspec", None) for item in items)
    cases = (spec.params.get("case") for spec in specs if spec is not None)
    found = Launches(case for case in cases if isinstance(case, Case))
    request.config.stash.setdefault(_LAUNCHES, []).append(found)
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    outcomes = [ranks for each in config.stash.get(_LAUNCHES, []) for ranks in each.done.values()]
    if outcomes:
        terminalreporter.write_line(summary(outcomes))
