"""Tests of docs/checkpoints.md: the reader that it shows works, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.checkpoint.runs import complete, newest, tensors, tiny
from tests.support.waiting import HANG_S

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_anyone_can_read_it_with_safetensors_and_json(tmp_path: Path) -> None:
    path = newest(complete(2, tiny(tmp_path / "run", train={"steps": 2}, layout={"tp": 2})))
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    body = source + "\nnp.savez(sys.argv[2], **tensors)\nassert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", body, str(path), str(tmp_path / "read.npz")],
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 {'param/")
    expected = tensors(path)
    with np.load(tmp_path / "read.npz") as read:
        assert set(read.files) == set(expected)
        assert all(read[name].tobytes() == values.tobytes() for name, values in expected.items())


def test_every_promise_names_tests_that_exist() -> None:
    """Each paragraph of the page that begins with a guarantee names one or more tests, by file and function."""
    tests = Path(__file__).parents[1]
    promises = PAGE.split("## Guarantees")[1].split("A folder that not all ranks share")[0]
    paragraphs = [text for text in promises.split("\n\n") if text.startswith("**")]
    assert len(paragraphs) > 15
    for text in paragraphs:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
        assert named, text
        assert len(named) == len(re.findall(r"\btest_\w+\.py\b", text)), f"a file without a test in it: {text}"
        for file, function in named:
            path = tests.parent / file if "/" in file else tests / "checkpoint" / file
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, function)
    assert all((tests.parent / file).is_file() for file in re.findall(r"`(benchmarks/\w+\.py)`", PAGE))
