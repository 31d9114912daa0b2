from __future__ import annotations

import os
from typing import Any

import pytest

from tests.nccl.lanes import Verdict
from tests.nccl.runner import CHECKS, Runner, table
from tests.nccl.transports import TRANSPORTS, Transport

_VERDICTS = pytest.StashKey[dict[str, Verdict]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "of tests/nccl (default: nccl, where there is a GPU)"
    parser.addoption("--transport", choices=list(TRANSPORTS), help=words)


@pytest.fixture(scope="session")
def transport(request: pytest.FixtureRequest) -> Transport:
    """Return the transport that the option or MESHWRIGHT_NCCL_SUITE names, by default NCCL. By default the tests are
    skipped without a GPU.
    """
    from meshwright.device import accelerator_count

    chosen = request.config.getoption("--transport", None) or os.environ.get("MESHWRIGHT_NCCL_SUITE")
    if not chosen and not accelerator_count():
        pytest.skip("there is no GPU here; --transport gloo runs the same cases without one")
    return TRANSPORTS[chosen or "nccl"]


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest, transport: Transport) -> dict[str, Verdict]:
    """Return the verdicts on all cases of this test run. They run together, so that they share worlds and run side by
    side.
    """
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    given = (spec.params.get("case") for spec in specs if spec is not None)
    cases = [case for case in given if type(case) in CHECKS]
    found = {verdict.name: verdict for verdict in Runner(transport).run(cases)}
    request.config.stash[_VERDICTS] = found
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(_VERDICTS, None)
    if found:
        terminalreporter.write_line(table(list(found.values())))
