"""Tests of `meshwright layout`: its JSON, its drawing, its error messages, and that it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.support.waiting import HANG_S

KEYS = [
    *["tp", "cp", "ep", "dp", "pp", "dp-cp", "tp-cp", "tp-dp", "tp-dp-cp", "tp-pp"],
    *["tp-ep", "tp-ep-pp", "edp", "embedding", "position_embedding"],
]


def layout(options: str) -> int:
    return main(["layout", *options.split()])


@pytest.fixture(autouse=True)
def hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_json_of_16_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout("--world 16 --tp 4 --pp 2 --json") == 0
    captured = capsys.readouterr()
    groups = json.loads(captured.out)
    assert list(groups) == KEYS
    assert groups["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups["tp"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups["pp"] == [[rank, rank + 8] for rank in range(8)]
    assert groups["tp-pp"] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert groups["tp-dp-cp"] == [list(range(8)), list(range(8, 16))]
    assert groups["embedding"] == groups["pp"]
    assert groups["position_embedding"] == [[rank] for rank in range(8)]
    assert captured.err == ""


def test_a_config_says_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    model = "model: {layers: 4, hidden: 64, heads: 4, vocab: 96, seq: 16}"
    file.write_text(f"{model}\nlayout: {{tp: 4}}\ndata: {{prefixes: [x]}}\n")
    assert layout("--world 16 --tp 4 --pp 2 --json") == 0
    groups = json.loads(capsys.readouterr().out)
    assert layout(f"{file} --world 16 layout.pp=2 --json") == 0
    assert json.loads(capsys.readouterr().out) == groups
    assert layout(f"{file} --world 16 --pp 2") == 2
    assert "give layout.pp=... instead of --pp" in capsys.readouterr().err


def test_a_recipe_knows_its_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "gpt-neox-20b", "--json"]) == 0
    assert sum(len(group) for group in json.loads(capsys.readouterr().out)["tp"]) == 96


def test_drawing_shows_stages_nodes_and_what_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout("--world 16 --tp 4 --pp 2 --node-size 4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:10] == [
        "      stage 0                    stage 1",
        "  tp    0    1    2    3           0    1    2    3",
        "     ┌───────────────────┐      ┌───────────────────┐",
        "dp 0 │  0    1    2    3 │ n0   │  8    9   10   11 │ n2",
        "     ├───────────────────┤      ├───────────────────┤",
        "dp 1 │  4    5    6    7 │ n1   │ 12   13   14   15 │ n3",
        "     └───────────────────┘      └───────────────────┘",
    ]
    text = "\n".join(lines)
    assert "4 groups of 4, none crosses a node\n" in text
    assert "8 groups of 2, all cross a node\n" in text
    assert "[0 1 2 3 8 9 10 11] [4 5 6 7 12 13 14 15]" in text
    assert all(f"\n{key} " in text for key in KEYS)


def test_drawing_walls_inside_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout("--world 6 --tp 3 --node-size 2") == 0
    assert capsys.readouterr().out.splitlines()[5:10] == [
        "     ┌─────────┬────┐",
        "dp 0 │  0    1 │  2 │ n0,1",
        "     ├────┬────┴────┤",
        "dp 1 │  3 │  4    5 │ n1,2",
        "     └────┴─────────┘",
    ]


def test_experts_get_a_drawing_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout("--world 24 --tp 2 --pp 2 --cp 2 --ep 3") == 0
    text = capsys.readouterr().out
    assert "dp 2 cp 1 │ 10   11 │   │ 22   23 │" in text
    assert "tp 2 x ep 3 x edp 2 x pp 2" in text
    assert "edp 1 ep 0 │  6    7 │   │ 18   19 │" in text


def test_thousands_of_ranks_are_quick_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--world 16384 --tp 8 --pp 16 --cp 2 --ep 64 --node-size 8"
    # The processor time does not depend on how busy the machine is.
    start = time.process_time()
    assert layout(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert layout(options + " --json") == 0
    assert time.process_time() - start < 5
    assert len(lines) < 100
    assert max(map(len, lines)) <= 100
    assert any("stage 15" in line for line in lines)
    groups = json.loads(capsys.readouterr().out)
    assert all(len(groups[key]) * len(groups[key][0]) == 16384 for key in KEYS[:-2])


def test_an_order_that_parts_the_views_is_noted_beside_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout("--world 8 --cp 2 --ep 2 --pp 2 --order cp-pp-dp-ep --json") == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)) == KEYS
    assert "put tp first and pp last" in captured.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--world 16 --tp 3 --pp 2", "world=16 is not divisible by tp*cp*pp=3*1*2=6"),
        ("--world 16 --ep 3", "ep=3 does not divide dp*cp=16*1=16"),
        ("--world 16 --order tp-xx", "unknown axis 'xx'"),
        ("--tp 2", "give --devices"),
        ("--world 4 --tp 4 --ep 2", "choose ep=1, or etp=1 (layout.etp=1)"),
    ],
)
def test_a_mistake_is_one_sentence(options: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert layout(options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert len(captured.err.splitlines()) == 1


def test_command_does_not_import_torch_and_falls_back_to_ascii() -> None:
    code = (
        "import sys; from meshwright.cli.main import main; "
        "status = main('layout --world 16 --tp 4 --pp 2 --node-size 4'.split()); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "dp 1 |  4    5    6    7 | n1" in done.stdout


def test_replicas_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout("--world 8 --tp 2 --replicas 2 --json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert result["replicas"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout("--world 8 --tp 2 --replicas 2") == 0
    shown = capsys.readouterr().out
    assert "x replicas 2" in shown and "[0 4] [1 5] [2 6] [3 7]" in shown
