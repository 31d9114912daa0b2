"""Tests of the command `meshwright schedule`: its drawing, its JSON, its error messages."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.support.waiting import HANG_S

SIZES = ["schedule", "--pp", "4", "--micro-batches", "8"]


def test_drawing_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--kind", "1f1b"]) == 0
    out = capsys.readouterr().out
    for text in ("rank 3", "makespan          33", "0.272727 (27.27 %)", "peak activations  4", "deadlock"):
        assert text in out
    assert "\x1b" not in out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "timeline.svg"
    options = ["--kind", "interleaved", "--chunks", "2", "--json", "--svg", str(svg)]
    assert main([*SIZES, *options]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert list(document) == ["makespan", "bubble", "peak_activations", "actions"]
    assert document["bubble"] == pytest.approx(3 / 19, abs=1e-9)
    assert document["makespan"] == pytest.approx(28.5)
    assert document["peak_activations"] == [5.5, 4.5, 3.5, 2.5]
    for actions in document["actions"]:
        computes = [action for action in actions if action["op"] in ("forward", "backward")]
        assert len({(a["op"], a["micro_batch"], a["chunk"]) for a in computes}) == len(computes) == 32
        assert set(computes[0]) == {"op", "micro_batch", "chunk", "start", "end"}
        assert all(a["end"] <= b["start"] + 1e-9 for a, b in zip(computes, computes[1:], strict=False))
    ElementTree.parse(svg)
    assert str(svg) in captured.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kind", "1f1n"], "did you mean '1f1b'"),
        (["--kind", "gpipe", "--chunks", "2"], "use interleaved"),
        (["--pp", "0"], "pp=0"),
        (["--forward", "-1"], "forward time -1"),
        (["--backward", "nan"], "backward time nan"),
        (["--send", "inf"], "send time inf"),
        (["--send", "fast"], "invalid float value"),
        (["--svg", "no/such/folder/x.svg"], "there is no folder no: make it, or choose another file"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1


def test_needs_no_torch() -> None:
    code = f"import sys; from meshwright.cli.main import main; main({SIZES!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=HANG_S)
