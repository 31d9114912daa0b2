"""Random models on random layouts against one process: fifty new cases for every commit, and the fuzzer's guarantees.

`python -m tests.fuzz.layouts --seed S --case K` repeats a case that failed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.layout_cases import SHARING, draw
from tests.fuzz.layout_runs import Outcome, _ended, _far

ROOT = Path(__file__).parent.parent.parent
CASES = 50
LIMIT_S = 280  # no case begins after this time, so a loaded machine runs fewer cases


def seed_of_commit() -> str:
    """Return the first letters of the commit's hash, or a fixed seed outside a repository."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout.strip() or "1"


@pytest.mark.wide
def test_fifty_cases_of_this_commit() -> None:
    """The cases run in a separate process that forks ranks, because a process with threads must not fork."""
    seed = seed_of_commit()
    words = [sys.executable, "-m", "tests.fuzz.layouts", "--seed", seed, "--cases", str(CASES)]
    found = subprocess.run(  # noqa: S603
        [*words, "--seconds", str(LIMIT_S)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_case_is_drawn_again_by_its_number() -> None:
    assert draw("a", 7) == draw("a", 7)
    assert draw("a", 7).sections != draw("a", 8).sections != draw("b", 8).sections


def test_cases_cover_what_a_config_allows() -> None:
    drawn = [draw("cover", number) for number in range(600)]
    models = [case.sections["model"] for case in drawn]
    assert {model.get("kind", "gpt") for model in models} == {"gpt", "bert", "t5", "glm", "hf"}
    assert {case.then for case in drawn} == {"", "same", "other", "SIGTERM"}
    assert {case.sections.get("data", {}).get("objective") for case in drawn} == {None, "chat", "preference"}
    assert {case.world for case in drawn} >= {2, 3, 4, 6, 8}
    layouts = [case.sections["layout"] for case in drawn]
    for key in ("tp", "cp", "pp", "ep", "etp", "chunks", "tp_grid", "replicas", "sequence_parallel", "node_size"):
        assert any(key in layout for layout in layouts), key
    assert any("experts" in model for model in models) and any("latent" in model for model in models)
    assert all(set(case.sections) >= {"model", "train", "layout"} for case in drawn)
    assert any(case.sections["comm"].get("reduce") for case in drawn) and "zero" in SHARING


def test_how_ranks_end_is_told_apart(tmp_path: Path) -> None:
    def ended(*reports: str, codes: dict[int, int], left: tuple[int, ...] = ()) -> Outcome:
        for rank, text in enumerate(reports):
            (tmp_path / f"end-{rank}").write_text(text)
        return _ended(tmp_path, codes, list(left))

    assert ended('[0, ""]', '[0, ""]', codes={0: 0, 1: 0}).how == "ok"
    assert ended('[2, "tp=3 is odd"]', '[1, "Traceback"]', codes={0: 2, 1: 1}) == ("refused", "tp=3 is odd")
    assert ended('[0, ""]', '[1, "Traceback"]', codes={0: 0, 1: 1}).how == "traceback"
    assert ended('[0, ""]', '[0, ""]', codes={0: 0}, left=(1,)).how == "hang"
    assert ended('[0, ""]', codes={0: 0, 7: -9}).how == "traceback"


def test_what_is_off_is_found() -> None:
    assert not _far({"a": [1.0, 2]}, {"a": [1.0 + 1e-12, 2]}, exactly=False)
    assert _far({"a": [1.0, 2]}, {"a": [1.0 + 1e-12, 2]}, exactly=True)
    assert _far({"a": 1.0}, {"a": 1.0 + 1e-6}, exactly=False) and _far({"a": 1.0}, {}, exactly=False)
