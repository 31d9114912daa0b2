"""The speed of a run is the same wherever it is shown: the mean of the last steps of its newest process."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cli.train import figures_of
from meshwright.engine.step import StepResult
from meshwright.record.speed import RECENT, pace_of
from meshwright.watch.live import Display
from meshwright.watch.report import RunReport
from meshwright.watch.run_page import summary
from tests.watch.made import add_event, config_of, healthy


def test_it_is_the_mean_of_the_newest_process_without_its_first_step() -> None:
    seconds = [9.0, 1.0, 1.0, 8.0, 2.0, 4.0]
    ends = [9.0, 10.0, 11.0, 100.0, 103.0, 108.0]
    found = pace_of(range(1, 7), [30] * 6, seconds, ends, [0, 3])  # the run was resumed from step 3
    assert found is not None and (found.first, found.count) == (4, 2)
    assert (found.tokens_per_s, found.step_s, found.wall_s) == (10.0, 3.0, 4.0)
    # No step since then, so the ones before it count.
    before = pace_of(range(1, 4), [30] * 3, seconds[:3], ends[:3], [0, 3])
    assert before is not None and (before.first, before.count, before.wall_s) == (1, 2, 1.0)
    one = pace_of([4], [30], [8.0], [100.0], [3])
    assert one is not None and (one.tokens_per_s, one.wall_s) == (30 / 8, 8.0)
    many = pace_of(range(1, 201), [30] * 200, [1.0] * 100 + [3.0] * 100, range(200))
    assert many is not None and (many.count, many.step_s) == (RECENT, 3.0) and pace_of([], [], [], []) is None


def test_display_summary_status_and_page_show_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow step moves the mean and not the median. An earlier process and a first step move neither."""
    run = healthy(tmp_path / "run", done=50)
    add_event(run, kind="resume", step=20, text="continues from step 20")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["step_time_s"] = 7.0 if line["step"] <= 21 else 0.4
        if line["step"] == 40:
            line["step_time_s"] = 3.3
        line["tflops"] = 0.0042 * 0.4 / line["step_time_s"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    step_s = (28 * 0.4 + 3.3) / 29
    progress = RunReport(run).document()["progress"]
    assert progress["step_time_s"] == pytest.approx(step_s) and progress["recent_steps"] == 29
    assert progress["tokens_per_s"] == pytest.approx(1024 / step_s)
    assert figures_of(str(run))["tokens_per_s"] == pytest.approx(1024 / step_s)
    assert progress["tflops"] == pytest.approx(0.0042 * 0.4 / step_s)
    assert main(["status", str(run)]) == 0
    assert "500 ms a step, 2.05k tokens/s in the mean of the last 29 steps" in capsys.readouterr().out
    stream = io.StringIO()
    summary(run, stream)
    assert "2.05k tokens/s   256 per rank   500 ms per step   in the mean of the last 29 steps" in stream.getvalue()
    shown = io.StringIO()
    with Display(config_of(60, run), 8, shown) as display:
        for line in lines[20:]:
            one = StepResult(line["step"], 2.0, 1.0, 1e-3, None, False, 1024, 16, counted=1024)
            one.step_time_s, one.tflops = line["step_time_s"], 0.0042 * 0.4 / line["step_time_s"]
            display.stepped(one)
    assert "2.05k tok/s  3.36 GFLOP/s" in shown.getvalue().splitlines()[-1]
