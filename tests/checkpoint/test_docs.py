"""docs/checkpoints.md: its reader works, and the tests that it names are there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.checkpoint.runs import complete, newest, tensors, tiny

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_anyone_can_read_it_with_safetensors_and_json(tmp_path: Path) -> None:
    path = newest(complete(2, tiny(tmp_path / "run", train={"steps": 2}, layout={"tp": 2})))
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    body = source + "\nnp.savez(sys.argv[2], **tensors)\nassert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", body, str(path), str(tmp_path / "read.npz")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 {'param/")
    expected = tensors(path)
    with np.load(tmp_path / "read.npz") as read:
        assert set(read.files) == set(expected)
        assert all(read[name].tobytes() == values.tobytes() for name, values in expected.items())


def test_every_promise_names_tests_that_exist() -> None:
    folder = Path(__file__).parent
    known = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("test_*.py")}
    files = set(re.findall(r"test_\w+\.py", PAGE))
    assert files and files <= set(known)
    functions = {
        node.name for text in known.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    }
    assert set(re.findall(r"::(test_\w+)", PAGE)) <= functions
