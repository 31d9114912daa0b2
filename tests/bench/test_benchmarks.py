"""Tests of the benchmark scripts: the names that they import exist, and each runs to its end on tiny sizes."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import BenchParser, finish, table, with_ranks
from tests.support.waiting import HANG_S

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILES = sorted([*FOLDER.glob("*.py"), *(FOLDER.parent / "examples").glob("*.py")])
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
SAID_WHY_NOT = "nothing was measured"


def is_there(module: str, name: str) -> bool:
    imported = importlib.import_module(module)
    return hasattr(imported, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_imported_exists(path: Path) -> None:
    """Every name that is imported from the package exists. Otherwise a rename would only fail in a benchmark run."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    wanted = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    missing = [pair for pair in wanted if pair[0] and pair[0].startswith("meshwright") and not is_there(*pair)]
    assert not missing


def test_quick_sizes_are_defaults_that_the_command_line_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["x", *words])
        parser = BenchParser("what it does")
        parser.add_argument("prefix")
        parser.add_argument("--steps", type=int, default=100)
        return parser.parse(prefix=None, steps=2)

    assert vars(parsed("a")) == {"quick": False, "json": None, "prefix": "a", "steps": 100}
    assert vars(parsed("--quick")) == {"quick": True, "json": None, "prefix": None, "steps": 2}
    assert vars(parsed("--quick", "a", "--steps", "7")) == {"quick": True, "json": None, "prefix": "a", "steps": 7}


def test_a_result_is_a_table_a_last_line_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"case": "a", "ms": 1.23456, "parts": [1]}, {"case": "bcd", "ms": 20.0, "more": True}]
    finish(argparse.Namespace(json=tmp_path / "x.json"), rows, rows=rows)
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == rows == json.loads((tmp_path / "x.json").read_text())
    assert lines == table(rows).splitlines() == ["case     ms  more", "   a  1.235      ", " bcd     20  True"]


@pytest.mark.wide
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_benchmark_runs(path: Path, tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, str(path), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=3 * HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert SAID_WHY_NOT in last or json.loads(last)


def long_text(size: int) -> str:
    return "x" * size


def test_a_result_may_be_larger_than_a_pipe_holds() -> None:
    assert with_ranks(1, long_text, 1 << 20) == "x" * (1 << 20)
