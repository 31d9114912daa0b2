"""The live display, its plain lines and the summary of a run folder, on streams that pretend to be terminals."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from meshwright.config.load import config_from, load_config, to_mapping
from meshwright.config.sections import Config
from meshwright.config.step_schedules import consumed_after
from meshwright.engine.step import StepResult
from meshwright.errors import UserError, plural
from meshwright.launch import launch
from meshwright.record.run_folder import RunFolder, read_run, traffic_per_step
from meshwright.show.terminal import console_for, show
from meshwright.show.units import clock, count, seconds, size, ticks
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import describe, split_layers
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.model.part import SINGLE_RANK
from meshwright.watch import live as module
from meshwright.watch.live import Display
from meshwright.watch.planned import planned_means
from meshwright.watch.run_page import links, summary
from meshwright.watch.run_parts import head, sparkline
from tests.support.waiting import HANG_S, until
from tests.watch.made import WORLD, faulty, healthy, relaid

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW, UP, ERASE = "\x1b[?25l", "\x1b[?25h", "\x1b[1A", "\x1b[2K"
COMM = {
    "tp": {"calls": 64, "payload_bytes": 6400, "wire_bytes": 6400},
    "dp": {"calls": 8, "payload_bytes": 80000, "wire_bytes": 80000},
    "pp": {"calls": 32, "payload_bytes": 32000, "wire_bytes": 32000},
    "embedding": {"calls": 8, "payload_bytes": 800, "wire_bytes": 800},
    "world": {"calls": 16, "payload_bytes": 1600, "wire_bytes": 2800},
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Screen:
    """The lines that a terminal of `columns` would show, by the few control sequences that the display uses."""

    def __init__(self, text: str, columns: int) -> None:
        self.lines, self.row, self.columns = [""], 0, columns
        for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)", text):
            self._take(part)

    def _take(self, part: str) -> None:
        if part == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")
        elif part == UP:
            self.row -= 1
            assert self.row >= 0
        elif part == ERASE:
            self.lines[self.row] = ""
        elif part and not part.startswith(("\x1b", "\r")):
            self.lines[self.row] += part
            assert len(self.lines[self.row]) <= self.columns, self.lines[self.row]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def config(**sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100, "seq": 32},
        "data": {"prefixes": ["tokens"]},
        "layout": {"tp": 2, "pp": 2},
        "train": {"steps": 20, "global_batch": 8},
        "run": {"dir": "runs/test", "log_every": 5},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return config_from(raw)


def result(step: int, **changes: Any) -> StepResult:
    phases = {"data": 0.01, "forward": 0.3, "backward": 0.5, "reduce": 0.1, "optimizer": 0.05}
    values: dict[str, Any] = {
        "step": step, "loss": 10.0 - 0.1 * step, "grad_norm": 1.02, "lr": 3e-4, "loss_scale": None, "skipped": False,
        "tokens": 256, "counted": 256, "global_batch": 8, "phases": phases, "comm": COMM, "step_time_s": 1.0,
    }  # fmt: skip
    return StepResult(**values | changes)


def bad(step: int) -> StepResult:
    return result(step, loss=math.nan, grad_norm=math.inf, skipped=True, loss_scale=65536.0)


def play(stream: io.StringIO, c: Config, results: list[StepResult], **more: Any) -> str:
    """Return the output for a run that takes no time, by a clock that stands still."""
    still = SimpleNamespace(monotonic=lambda: 1000.0)
    with mock.patch.object(module, "time", still), Display(c, 8, stream, **more) as display:
        display.started(None)
        for r in results:
            display.stepped(r)
        display.validated({"step": results[-1].step if results else 0, "loss": 5.4321, "tokens": 1, "samples": 1})
        display.finished()
    return stream.getvalue()


def test_plain_lines_come_every_few_steps_and_last() -> None:
    text = play(io.StringIO(), config(train={"steps": 12}), [result(n) for n in range(1, 13)])
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("step")]
    assert [line.split("/")[0].split()[-1] for line in lines] == ["5", "10", "12"]
    assert lines[0].startswith("step  5/12  loss 9.5000  norm 1.02  lr 3.0e-04  256 tok/s  eta ")
    assert "validation at step 12  loss 5.4321" in text
    assert text.splitlines()[-1].startswith("finished 12 steps in 0:00: runs/test")


def test_head_says_what_runs_where_and_how() -> None:
    text = play(io.StringIO(), config(), [result(1)])
    number = count(parameter_count(describe(config().model)))
    for words in (f"{number} parameters", "8 ranks = dp 2 × tp 2 × pp 2", "[0 1] [2 3] → [4 5] [6 7]", "1f1b", "fp32",
                  "256 tokens per step", "runs/test"):  # fmt: skip
        assert words in text


def test_the_head_names_what_is_not_usual() -> None:
    """The head names experts, adapters with the number of trained weights, grids and other kinds of models."""
    experts = config(model={"experts": {"count": 4, "top_k": 2}}, layout={"ep": 2})
    text = play(io.StringIO(), experts, [result(1)])
    assert "4 experts, 2 a token" in text and "experts over ep 2" in text
    tuned = config(tune={"kind": "lora", "rank": 2, "base": "x", "targets": ["q"]}, layout={"tp": 1, "pp": 1})
    trained = 4 * 2 * (64 + 64)  # A and B of four layers
    assert f"lora of rank 2 trains {count(trained)}" in play(io.StringIO(), tuned, [result(1)])
    grid = config(layout={"tp": 4, "pp": 1, "tp_grid": [2, 2]})
    assert "tp 4 × pp 1 (2d 2x2 grid)" in play(io.StringIO(), grid, [result(1)])


@pytest.mark.parametrize("columns", [76, 80])
def test_a_line_of_the_head_ends_between_two_facts(columns: int) -> None:
    """A line never ends within a fact, or after the dot that follows one."""
    run = config(model={"experts": {"count": 4}}, layout={"cp": 2, "ep": 2}, run={"dir": "runs/a-rather-long-name"})
    facts: dict[int, list[str]] = {}
    for width in (columns, 300):
        show(console_for(out := io.StringIO(), width), head(run, 16, width, "cpu"))
        assert max(map(len, out.getvalue().splitlines())) <= width
        facts[width] = re.split(r" · |  +|\n *", out.getvalue().strip())
    assert facts[columns] == facts[300]


def test_parameters_equal_the_sum_over_stages() -> None:
    for tied in (True, False):
        c = config(model={"tied_embeddings": tied})
        records = [r for s in split_layers(4, 2) for r in describe(c.model).records(SINGLE_RANK, s).values()]
        twice = 100 * 64 if tied else 0
        assert parameter_count(describe(c.model)) == sum(r.numel for r in records) - twice


def test_skipped_and_infinite_steps_are_told_off_the_rhythm() -> None:
    text = play(io.StringIO(), config(), [result(1), bad(2), result(3, loss=math.inf)])
    assert re.search(r"step  2/20  loss nan  norm inf .* scale 65.5k  SKIPPED", text)
    assert re.search(r"step  3/20  loss inf .* LOSS NOT FINITE", text)
    assert "stopped at step 3 of 20, 1 skipped after 0:00, saved in runs/test; run the same command to continue" in text


def test_ranks_that_make_room_for_more_do_not_say_that_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_folder", tmp_path)
    assert "run the same command" in play(io.StringIO(), config(), [result(1)])
    (tmp_path / launch.REGROUP).touch()
    text = play(io.StringIO(), config(), [result(1)])
    assert "saved in runs/test; continues on more ranks" in text and "run the same command" not in text


@pytest.mark.parametrize("columns", [12, 30, 50, 80, 100, 200])
def test_the_live_block_is_redrawn_in_place_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with Display(config(), 8, stream) as display:
        display.started(None)
        assert display.live is not None
        for n in range(1, 21):
            display.stepped(result(n, monitored={"accuracy": 0.5, "bad\x1b[2Jname": 1.0}))
            display.live.refresh()
    screen = Screen(stream.getvalue().split(HIDE)[1], columns)
    block, labels = screen.lines[:-1], ["step", "loss", "speed", "update", "time"]
    # Each line appears once, however often it was drawn.
    assert [line[:8].strip() for line in block if line[:8].strip()] == labels
    if columns >= 30:  # nothing is cut: words that do not fit are in the next line
        text = " ".join(" ".join(block).split())
        assert "…" not in text
        for words in ("20/20", "100 %", "left", "256 tok/s", "1.00 s per step", "160 of 160 samples", "batch 8",
                      "norm 1.02", "accuracy 0.5", "forward 30 %", "backward 50 %"):  # fmt: skip
            assert words in text, words
    if columns >= 80:
        assert len(block) == 6
        assert "20/20" in block[0] and "100 %" in block[0] and "left" in block[0]
        assert "256 tok/s" in block[2] and "160 of 160 samples" in block[2] and "batch 8" in block[2]
        assert "norm 1.02" in block[3] and "accuracy 0.5" in block[3] and "bad?[2Jname" in block[3]
        assert "forward 30 %" in block[5] and "backward 50 %" in block[5]


def test_what_happens_scrolls_away_above_the_block() -> None:
    screen = Screen(play(Terminal(), config(), [result(1), bad(2)]).split(HIDE)[1], 100)
    complaint = "the gradient was not finite, the update was skipped (loss scale 65.5k)"
    assert screen.lines[0] == f"× step 2  loss nan  {complaint}"
    assert screen.lines[1] == "validation at step 2  loss 5.4321"
    assert screen.lines[2].startswith("step") and "validation 5.4321 at step 2" in screen.lines[3]
    assert "×" in screen.lines[3] and "× 1 skipped" in screen.lines[5]
    assert screen.lines[8].startswith("stopped at step 2 of 20, 1 skipped after 0:00, saved in runs/test; run the same")


def test_redraws_are_few_and_the_last_state_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redraws depend on time alone, and no time passes here."""
    monkeypatch.setattr(module, "REDRAWS_PER_SECOND", 1 / HANG_S)
    text = play(Terminal(), config(train={"steps": 500}), [result(n) for n in range(1, 501)])
    assert text.count("tok/s") < 5
    assert "500/500" in text.split(UP)[-1]


def test_the_clock_goes_on_during_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REDRAWS_PER_SECOND", 100)
    stream = Terminal()
    with Display(config(), 8, stream) as display:
        display.started(None)
        until(lambda: stream.getvalue().count("computing the first step") > 3)


def test_a_file_hears_of_a_long_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.02)
    stream = io.StringIO()
    with Display(config(), 8, stream) as display:
        display.started(None)
        until(lambda: stream.getvalue().count("computing the first step, of up to") >= 2)
        reports = stream.getvalue().count("computing the first step, of up to")
        display.stepped(result(1))
    time.sleep(0.3)
    assert 2 <= reports <= stream.getvalue().count("computing the first step") <= reports + 1, "and nothing after it"


def test_the_block_is_redrawn_while_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that redraws reads values that steps write, and steps print above its block. Neither waits forever."""
    monkeypatch.setattr(module, "REDRAWS_PER_SECOND", 10000)
    display = Display(config(train={"steps": 400}), 8, Terminal())
    display.started(None)
    steps = threading.Thread(target=lambda: [display.stepped(bad(n)) for n in range(1, 401)], daemon=True)
    steps.start()
    steps.join(HANG_S)
    assert not steps.is_alive(), "the run waits for its display"
    display.close()
    assert display.skipped == 400


def test_the_cursor_comes_back_whatever_happens() -> None:
    stream = Terminal()
    with pytest.raises(RuntimeError), Display(config(), 8, stream) as display:
        display.started(None)
        assert HIDE in stream.getvalue() and SHOW not in stream.getvalue()
        raise RuntimeError
    display.close()
    assert stream.getvalue().count(SHOW) == 1 and stream.getvalue().endswith(SHOW)


def test_a_terminal_that_goes_away_does_not_stop_the_run() -> None:
    for stream in (Terminal(), io.StringIO()):
        with Display(config(), 8, stream) as display:
            display.started(None)
            stream.close()
            for n in range(1, 8):
                display.stepped(result(n))
            display.validated({"step": 7, "loss": 1.0})
            display.finished()


def test_streams_without_unicode_and_dumb_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with Display(config(), 8, stream) as display:
        display.started(None)
        display.stepped(result(1))
    assert " 1/20  -" in ANSI.sub("", raw.getvalue().decode("ascii"))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in play(Terminal(), config(), [result(5)])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    text = play(Terminal(), config(), [result(5)])
    assert HIDE in text and "\x1b[1m" not in text and "dfff" in text


def test_a_resumed_run_counts_the_samples_before() -> None:
    text = ANSI.sub("", play(Terminal(), config(train={"steps": 20, "ramp": [4, 4, 40]}), [result(15, global_batch=8)]))
    expected = consumed_after(config(train={"steps": 20, "ramp": [4, 4, 40]}), 14) + 8
    assert f"{expected} of" in text


def test_units() -> None:
    assert [count(n) for n in (0, 7.25, 950, 999.9, 12300, 5.29e6, 1e12)] == [
        "0", "7.2", "950", "1.00k", "12.3k", "5.29M", "1.00T",
    ]  # fmt: skip
    assert [size(n) for n in (0, 512, 1536, 2**20, 3.5 * 2**30)] == ["0 B", "512 B", "1.50 KiB", "1.00 MiB", "3.50 GiB"]
    assert [clock(n) for n in (0, 42.4, 3723, 180000, math.nan)] == ["0:00", "0:42", "1:02:03", "2d 02:00:00", "?"]
    assert [seconds(n) for n in (123.4, 18.071, 1.0, 0.3333, 3.21e-3, 1.23e-5)] == [
        "123 s", "18.07 s", "1.00 s", "333 ms", "3.21 ms", "12.30 us",
    ]  # fmt: skip
    assert [plural(1, "rank"), plural(1024, "rank"), plural(2, "micro-batch")] == [
        "1 rank", "1,024 ranks", "2 micro-batches",
    ]  # fmt: skip
    assert ticks(0.3, 9.7, 5) == [2, 4, 6, 8] and ticks(1, 40, 8) == [5, 10, 15, 20, 25, 30, 35, 40]
    assert sparkline([1.0, 2.0, math.nan, 3.0]).plain == "▁▅×█"
    assert sparkline([]).plain == "" and sparkline([2.0]).plain == "▅"


def write_run(folder: Path, c: Config, results: list[StepResult], valid: list[float] = (), **notes: Any) -> Path:  # type: ignore[assignment]
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(to_mapping(c)), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r.line()) + "\n" for r in results), encoding="utf-8")
    lines = [json.dumps({"step": 10 * (i + 1), "loss": loss}) + "\n" for i, loss in enumerate(valid)]
    (folder / "validation.jsonl").write_text("".join(lines), encoding="utf-8")
    if notes:
        (folder / "run.json").write_text(json.dumps(notes), encoding="utf-8")
    return folder


def summarised(folder: Path, stream: io.StringIO | None = None, **more: Any) -> str:
    stream = stream or io.StringIO()
    summary(folder, stream, **more)
    return stream.getvalue()


def test_summary_of_a_run(tmp_path: Path) -> None:
    results = [bad(n) if n == 4 else result(n) for n in range(1, 21)]
    text = summarised(write_run(tmp_path / "run", config(), results, [9.1, 8.2], world=8))
    assert "\x1b" not in text and max(map(len, text.splitlines()[3:])) <= 100
    assert "ffff" not in text and re.search(r"^time +data 1 %  forward 30 %", text, re.MULTILINE)
    assert re.search(r"training +9\.9000 +8\.0000 +8\.0000  at step 20", text)
    assert re.search(r"validation +9\.1000 +8\.2000 +8\.2000  at step 20", text)
    assert "256 tokens/s   32 per rank   1.00 s per step   in the mean of the last 19 steps" in text
    assert "5.12k tokens" in text and "160 samples   20 steps in 0:20" in text
    assert "1 step of 20: 4" in text and text.count("◆") == 3
    for words in ("[0 1] [2 3] [4 5] [6 7]", "[0 2] [1 3] [4 6] [5 7]", "4 pipelines of 2: 0⇄4 1⇄5 2⇄6 3⇄7",
                  "1 group of 8: [0 1 2 3 4 5 6 7]", "gradients of the tied embedding"):  # fmt: skip
        assert words in text
    assert re.search(r"dp +8 +78\.1 KiB +78\.1 KiB +9\.77 KiB +65\.6 %", text)
    coloured = summarised(tmp_path / "run", Terminal())
    assert "\x1b[" in coloured and "78.1 KiB" in coloured


def test_a_summary_is_of_the_newest_layout(tmp_path: Path) -> None:
    config = relaid(tmp_path / "run") / "config.yaml"
    text = summarised(tmp_path / "run")
    assert "5.12k tokens/s   640 per rank   200 ms per step   in the mean of the last 19 steps" in text
    assert "960 samples   60 steps in 0:20" in text
    assert "(a mean step since step 40 of 8 ranks together)" in text and not re.search(r"^tp ", text, re.MULTILINE)
    assert summarised(healthy(tmp_path / "other")).count("since") == 0
    RunFolder(load_config(config, ["zero.stage=1"]), WORLD, 60).close()
    text = summarised(tmp_path / "run")
    assert "no step was finished since the layout changed at step 60" in text and "nothing was sent" not in text


def test_planned_bytes_stand_beside_the_recorded_ones(tmp_path: Path) -> None:
    text = summarised(healthy(tmp_path / "good", steps=100), plan=planned_means)  # ranks are compared in step 100
    rows = re.findall(r"^(dp|tp|pp|embedding|world) .* ([\d.]+ \w+)  +[\d.]+ \w+ .* %  +(.*)$", text, re.MULTILINE)
    assert len(rows) == 5 and all(sent == planned for _, sent, planned in rows)
    metrics = faulty(tmp_path / "bad") / "metrics.jsonl"
    assert "  planned" not in summarised(tmp_path / "bad", plan=planned_means)  # skipped steps may send less
    metrics.write_text(metrics.read_text().replace('"skipped": true', '"skipped": false'))
    text = summarised(tmp_path / "bad", plan=planned_means)
    assert re.findall(r"^(\w+) .*not equal$", text, re.MULTILINE) == ["tp"]


def test_links_carry_what_the_axes_sum_to(tmp_path: Path) -> None:
    for layout in ({"tp": 2, "pp": 2}, {"tp": 1, "pp": 4}, {"pp": 2, "chunks": 2, "tp": 2}):
        c = config(layout=layout)
        run = read_run(write_run(tmp_path / "run", c, [result(1)], world=8))
        comm = {axis: counts for axis, counts in COMM.items() if layout["tp"] > 1 or axis != "tp"}
        sent = links(c, run.layout, comm)  # type: ignore[arg-type]
        assert math.isclose(sum(sent.values()), sum(counts["wire_bytes"] for counts in comm.values()))
        assert all(a != b for a, b in sent)
    pipeline = links(config(layout={"tp": 1, "pp": 4}), Layout(4, pp=4), {"pp": COMM["pp"]})
    assert sorted(pipeline) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]


def test_means_are_of_all_steps() -> None:
    lines = [{"comm": {"dp": {"calls": n, "payload_bytes": 2 * n, "wire_bytes": 3 * n}}} for n in (1, 3)]
    assert traffic_per_step([*lines, {}, {}]) == {"dp": {"calls": 1.0, "payload_bytes": 2.0, "wire_bytes": 3.0}}


def test_summaries_of_odd_runs(tmp_path: Path) -> None:
    one = summarised(write_run(tmp_path / "one", config(), [result(1)]))
    assert re.search(r"training +9\.9000 +9\.9000", one) and "none" in one
    assert "ranks together" not in one  # dp was used, and its size is unknown
    assert "8 ranks together" in summarised(write_run(tmp_path / "one", config(), [result(1)], world=8))
    nobody = write_run(tmp_path / "empty", config(), [], world=8)
    assert "no step was finished" in summarised(nobody)
    (nobody / "metrics.jsonl").unlink()
    (nobody / "validation.jsonl").unlink()
    assert "no step was finished" in summarised(nobody)
    nan = summarised(write_run(tmp_path / "nan", config(), [bad(n) for n in range(1, 30)], [math.nan], world=8))
    assert "no loss was finite" in nan and "29 steps of 29: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, …" in nan
    alone = write_run(tmp_path / "alone", config(layout={"tp": 1, "pp": 1}), [result(1, comm={}), result(2, comm={})])
    assert "1 rank = " in summarised(alone) and "nothing was sent" in summarised(alone)
    flat = [result(n, loss=2.0) for n in range(1, 4)]
    assert re.search(r"lowest\ntraining +2\.0000 +2\.0000", summarised(write_run(tmp_path / "flat", config(), flat)))


def test_a_cut_line_a_repeated_step_and_a_foreign_section(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", config(), [result(1), result(2), result(2, loss=7.0)], world=8)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    raw = to_mapping(config()) | {"mine": {"key": 1}}
    (folder / "config.yaml").write_text(json.dumps(raw), encoding="utf-8")
    run = read_run(folder)
    assert [line["loss"] for line in run.steps] == [9.9, 7.0]


@pytest.mark.parametrize("width", [20, 40, 60, 160])
def test_the_curve_keeps_to_the_width(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    folder = write_run(tmp_path / "run", config(), [result(n) for n in range(1, 300)], [9.0] * 9, world=8)
    lines = summarised(folder, Terminal()).splitlines()
    drawn = [line for line in lines if re.match(r" *[-\d.]* [│┤└]", line)]
    assert len(drawn) == 17 and max(map(len, drawn)) <= max(40, width)


def test_large_worlds_are_abbreviated(tmp_path: Path) -> None:
    c = config(layout={"tp": 2, "pp": 4})
    text = summarised(write_run(tmp_path / "run", c, [result(1)], world=4096))
    assert max(map(len, text.splitlines()[3:])) <= 100
    assert "2,048 groups of 2: [0 1] [2 3]" in text and "… [4094 4095]" in text
    assert "from rank (row)" not in text


def test_emulated_links_are_told(tmp_path: Path) -> None:
    for name, emulate in (("slow", {"link_gb_s": 0.5}), ("own", {})):
        text = summarised(write_run(tmp_path / name, config(comm={"emulate": emulate}), [result(1)], world=8))
        assert ("emulated links: 0.5 GB/s in a node of 8" in text) == (name == "slow")


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        summary(tmp_path, io.StringIO())


def test_neither_imports_torch() -> None:
    code = "import sys, meshwright.watch.live, meshwright.watch.run_page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
