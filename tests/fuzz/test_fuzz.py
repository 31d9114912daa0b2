"""A thousand seeded hostile inputs: each one works, or ends with one sentence and exit code 2.

`python -m pytest tests/fuzz -m wide` tries them all. A failure names its kind and seed, and
`KINDS[kind](Random(f"{kind} {seed}"))` creates the same input again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.cases import KINDS
from tests.fuzz.running import verdict

QUICK, WIDE = 1, 84  # inputs of each kind


def complaints(kind: str, seeds: range, good: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Try the inputs of these seeds, each in a separate folder, and return complaints about how they ended."""
    found = []
    for seed in seeds:
        folder = here / str(seed)
        shutil.copytree(good, folder)
        monkeypatch.chdir(folder)
        words = KINDS[kind](Random(f"{kind} {seed}"))
        if wrong := verdict(words):
            found.append(f"{kind} {seed}: {[word[:60] for word in words]}: {wrong}")
        monkeypatch.chdir(here)
        shutil.rmtree(folder)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_some_inputs(kind: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not complaints(kind, range(QUICK), good, tmp_path, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_inputs(kind: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = complaints(kind, range(QUICK, QUICK + WIDE), good, tmp_path, monkeypatch)
    assert not found, "\n".join(found)
