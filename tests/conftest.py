"""Options and settings shared by all tests.

A test gives the same result in any order, on any worker, at any time since the machine was started, and under any load.
`make test-trust` runs the quick tests under each of these conditions.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clock import sitecustomize as clock
from tests.support.cpu import CpuSeconds
from tests.support.order import seed_of, shuffle, slowest_first
from tests.support.sharding import Failures, keep_shard, shard_of

# A machine that only runs GPU tests may lack hypothesis, which those tests do not use.
try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # A slow example means a busy machine, not wrong code, so there is no deadline. Every run draws the same examples: a
    # failure can be repeated, and a change is not blamed for an example that another draw found.
    settings.register_profile(
        "meshwright", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    settings.load_profile("meshwright")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Files are given with an equals sign. Pytest takes a path after a space for a path of tests, and looks for its
    # settings there before it knows these options.
    parser.addoption("--cpu", metavar="FILE", help="write the CPU seconds of every test, as lines of JSON: --cpu=FILE")
    parser.addoption("--shuffle", metavar="SEED", help="run in the random order of this seed, or of a `random` one")
    parser.addoption("--shard", metavar="N/M", help="run the N-th of M parts of the tests")
    parser.addoption("--failures", metavar="FILE", help="write the names of failed tests at once: --failures=FILE")
    parser.addoption("--clock-offset", metavar="SECONDS", help="shift time.monotonic of the tests and their processes")


def pytest_configure(config: pytest.Config) -> None:
    # `nohup` ignores SIGHUP, and children inherit that, so a request by SIGHUP would never reach the run under test.
    # A handler is not inherited: children start with the default action, and pytest itself survives its terminal.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    # Options are checked here because an error in a worker of pytest-xdist is reported as INTERNALERROR.
    if part := config.getoption("--shard"):
        shard_of(part)
    if seed := config.getoption("--shuffle"):
        of_worker = getattr(config, "workerinput", {})
        config.option.shuffle = of_worker.get("shuffle") or str(seed_of(seed))
    if offset := config.getoption("--clock-offset"):
        paths = [str(Path(clock.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {clock.VARIABLE: offset, "PYTHONPATH": os.pathsep.join(paths)}
        clock.shift()
    if file := config.getoption("--cpu"):
        config.pluginmanager.register(CpuSeconds(Path(file)), "cpu-seconds")
    if (file := config.getoption("--failures")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(file)), "failures")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the seed to a worker of pytest-xdist. Workers parse the command line again, and all must use one order."""
    node.workerinput["shuffle"] = node.config.getoption("--shuffle")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed, offset = config.getoption("--shuffle"), config.getoption("--clock-offset")
    conditions = [f"--shuffle {seed}"] * bool(seed) + [f"--clock-offset {offset}"] * bool(offset)
    return f"conditions: {' '.join(conditions)}" if conditions else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--shard"):
        keep_shard(config, items, part)
    if seed := config.getoption("--shuffle"):
        shuffle(items, int(seed))
    elif hasattr(config, "workerinput"):
        slowest_first(items)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the commands that repeat the failed tests under the same conditions."""
    failed = dict.fromkeys(r.nodeid for kind in ("failed", "error") for r in terminalreporter.stats.get(kind, []))
    options = ("--shuffle", "--clock-offset")
    given = " ".join(f"{name} {value}" for name in options if (value := config.getoption(name)))
    for test in failed:
        terminalreporter.write_line(f"again: {sys.executable} -m pytest {given}{' ' * bool(given)}'{test}'")


def pytest_collection_finish() -> None:
    # The half million objects of collected tests are never garbage. Every training run collects garbage when it begins,
    # and scanning them took a quarter of a second each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed every global generator, so that a test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        # torch.manual_seed records the whole stack for every type of device that may be used later, which takes half a
        # millisecond.
        seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
        seed(0)
