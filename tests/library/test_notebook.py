"""The example notebook: its cells compile, use names that the package has, and run in order."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def cells() -> list[str]:
    """Return the code of each code cell."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def executed(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does, and return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        return exec(compile(tree, "cell", "exec"), names)
    del tree.body[-1]
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_cells_compile_and_use_public_names() -> None:
    assert len(cells()) > 8
    nodes = [node for source in cells() for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "meshwright"}
    assert {"plan", "memory", "train", "load", "evaluate"} <= used <= set(meshwright.__all__)
    outputs = [cell["outputs"] for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(outputs), "clear the outputs before a commit"


@pytest.mark.wide
def test_the_notebook_runs() -> None:
    names: dict[str, Any] = {}
    shown = [executed(source, names) for source in cells()]
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) == 4 and all("<table>" in page for page in pages)
    assert names["result"].loss < names["result"].metrics["loss"][0]
    assert len(shown[-2]) == 2
