"""The pages docs/correctness.md and docs/systems.md name tests that exist."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.docs.pages import ROOT


def named_tests() -> list[str]:
    text = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
    return re.findall(r"`(tests/[\w/]+\.py::[^`]+)`", text)


def test_the_named_tests_exist() -> None:
    named = named_tests()
    assert len(named) >= 12
    files = sorted({name.partition("::")[0] for name in named})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", *files], cwd=ROOT, capture_output=True, text=True
    )
    collected = set(done.stdout.split())
    # The page may name a parametrised test without its parameters.
    collected |= {name.partition("[")[0] for name in collected}
    assert [name for name in named if name not in collected] == [], done.stderr[-2000:]


def test_the_named_test_files_exist() -> None:
    text = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert len(named) >= 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
