"""Every row of the tables in docs/faults.md and tests/cli/test_everyday.py names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["docs/faults.md", "tests/cli/test_everyday.py"])
def test_every_row_names_tests_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", row)
        assert named and len(named) == len(re.findall(r"`[^`]*test_\w+`", row)), row
        file = page if page.endswith(".py") else ""
        for path, function in named:
            # A test without a file belongs to the file named before it.
            file = path or file
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, function)
