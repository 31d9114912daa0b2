"""The form of docstrings, comments and names holds everywhere, and the checker sees what breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.english import FOLDERS, ROOT, complaints, duplicate_classes, sources

# Texts that the checker must reject, by the rule that each of them breaks.
BAD = {
    "a function described by a noun": 'def f():\n    """The highest number."""\n',
    "a fragment with what": 'def f():\n    """What happens beside training."""\n',
    "a fragment with those": 'class A:\n    """Those that wait."""\n',
    "a fragment with whether": 'def f():\n    """Whether it fits."""\n',
    "a module that begins with of": '"""Of a file, the lines."""\n',
    "what is as a noun": 'def f():\n    """Return the sum, and what is left."""\n',
    "laid to": "# the ranks that it is laid to\n",
    "is told": "# every rank is told the folder\n",
    "so many": "x = 1  # groups of so many\n",
    "besides": "# the module and what it needs besides\n",
    "somebody": "# somebody removed the file\n",
    "goes on": "# the run goes on without it\n",
    "a conditional expression inside another": "a = 1 if x else 2 if y else 3\n",
    "a conditional expression in a call inside another": "a = f(1 if x else 2) if y else 3\n",
}

GOOD = {
    "an imperative": 'def f():\n    """Return the highest number."""\n',
    "a noun for a class": 'class A:\n    """A callback that runs around each training step."""\n',
    "a noun for a property": 'class A:\n    @property\n    def size(self):\n        """The number of bytes."""\n',
    "a quoted word": "# `is told` is a key of the store\n",
    "two conditional expressions": "a = 1 if x else 2\nb = 1 if y else 2\n",
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_keep_to_the_rules(folder: str) -> None:
    found = []
    for path in sources([ROOT / folder]):
        for line, complaint in complaints(path.read_text(encoding="utf-8"), in_tests=folder == "tests"):
            found.append(f"{path.relative_to(ROOT)}:{line}: {complaint}")
    assert found == []


def test_public_classes_of_the_package_have_names_of_their_own() -> None:
    assert duplicate_classes(sources([ROOT / "meshwright"])) == {}


@pytest.mark.parametrize("rule", BAD)
def test_the_checker_rejects(rule: str) -> None:
    assert complaints(BAD[rule])


@pytest.mark.parametrize("text", GOOD)
def test_the_checker_accepts(text: str) -> None:
    assert complaints(GOOD[text]) == []


def test_the_docstring_of_a_test_may_be_any_sentence() -> None:
    source = 'def test_it():\n    """The ring closes."""\n'
    assert complaints(source) and not complaints(source, in_tests=True)


def test_the_checker_finds_classes_of_one_name(tmp_path: Path) -> None:
    for name, source in {"a.py": "class Piece: ...", "b.py": "class Piece: ...", "c.py": "class _Piece: ..."}.items():
        (tmp_path / name).write_text(source)
    assert duplicate_classes(sources([tmp_path])) == {"Piece": [tmp_path / "a.py", tmp_path / "b.py"]}
