from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases import Case
from tests.parity.launches import Launches

_LAUNCHES = pytest.StashKey[Launches]()


@pytest.fixture(scope="session")
def launches(request: pytest.FixtureRequest) -> Launches:
    """Of the cases of this test run: those that were deselected cost nothing."""
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    cases = (spec.params.get("case") for spec in specs if spec is not None)
    found = request.config.stash[_LAUNCHES] = Launches(case for case in cases if isinstance(case, Case))
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(_LAUNCHES, None)
    if found is not None and found.done:
        terminalreporter.write_line(found.summary())
