"""The status of a run on one screen, from folders made without training: each figure follows from the recorded
lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.record.checkpoint_format import SEAL, Index, folder_name, write_index
from meshwright.watch.report import RunReport
from meshwright.watch.status import faults_by_rank, goodput, ranks_in, status_of
from tests.support.waiting import HANG_S
from tests.watch.made import BEGAN, add_event, faulty, healthy, resumed


def add_checkpoint(run: Path, step: int) -> Path:
    """Write a sealed checkpoint without tensors."""
    folder = run / "checkpoints" / folder_name(step)
    folder.mkdir(parents=True)
    write_index(folder, Index(step=step, consumed=16 * step, world=8, config={"model": {}}))
    return folder


def status(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["status", str(run), "--json", *more]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_screen_tells_how_a_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = resumed(tmp_path / "run")
    (run / "lost.jsonl").write_text(json.dumps({"step": 31, "time": BEGAN + 9.9, "loss": 1.0}) + "\n")
    add_checkpoint(run, 50)
    found = status(run, capsys, "--verify")
    assert (found["step"], found["steps"], found["state"]["kind"], found["complete"]) == (50, 60, "stopped", False)
    assert (found["restarts"], found["resumes"], found["trained_again"], found["skipped"]) == (1, 1, 11, 0)
    assert list(found["faults"]) == ["1"] and "SIGKILL" in found["faults"]["1"][0]["text"]
    # The run kept 50 steps of 0.4 s out of the 30 s from its start to its end, which include the restart.
    assert found["goodput"] == pytest.approx({"share": 2 / 3, "counted_s": 20, "under_way_s": 30, "between_s": 0})
    assert found["checkpoint"]["step"] == 50 and found["checkpoint"]["sealed"]
    assert main(["status", str(run)]) == 0
    page = capsys.readouterr().out
    assert "50 of 60" in page and "66.7 %" in page and "rank 1: 1 fault" in page and len(page.splitlines()) < 20


def test_time_between_jobs_is_told_beside_the_goodput(tmp_path: Path) -> None:
    run = healthy(tmp_path / "run", done=50)  # its last step ends at 20 s
    add_event(run, kind="end", step=50, text="stopped on request at step 50 of 60", time=BEGAN + 22)
    add_event(run, kind="resume", step=50, lost=0, time=BEGAN + 1022)
    add_event(run, kind="end", step=50, text="stopped on request at step 50 of 60", time=BEGAN + 1026)
    report = RunReport(run)
    report.metrics.refresh()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = goodput(report, events, None)
    assert found == pytest.approx({"share": 20 / 26, "counted_s": 20, "under_way_s": 26, "between_s": 1000})
    later = goodput(report, events, BEGAN + 1036)  # the run is alive, and has been silent since
    assert later["under_way_s"] == pytest.approx(36)


def test_what_was_not_saved_when_a_run_ended_counts_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unsaved steps are trained again: they are no goodput, and not done when the remaining time is estimated."""
    run = healthy(tmp_path / "run", done=50)
    add_event(run, kind="end", step=50, text="stopped at once", time=BEGAN + 20)
    found = status(run, capsys)
    assert (found["not_saved"], found["seconds_left"]) == (50, pytest.approx(24.0))  # 60 steps of 0.4 s
    assert found["goodput"]["share"] == 0
    assert main(["status", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "none of which was saved: the run continues from step 0" in shown
    assert "the rest would take about 0:24" in shown and " left" not in shown
    add_checkpoint(run, 20)
    found = status(run, capsys)
    assert (found["not_saved"], found["goodput"]["share"]) == (30, pytest.approx(0.4))
    assert found["seconds_left"] == pytest.approx(16.0)
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "the last 30 of which were not saved: the run continues from step 20" in said
    assert "the rest would take about 0:16" in said, "no process trains"


def test_a_cpu_run_is_compared_with_the_plan_that_init_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status(healthy(tmp_path / "run"), capsys)
    assert found["planned"]["cluster"] == "laptop" and "comm bench --nproc 8" in found["hint"]
    notes = tmp_path / "run" / "run.json"
    notes.write_text(notes.read_text().replace('"device": "cpu"', '"device": "strange"'))
    found = status(tmp_path / "run", capsys)
    assert found["planned"] is None and found["hint"].startswith("no prediction for strange: measure this machine")


def test_faults_are_laid_to_the_ranks_that_caused_them(tmp_path: Path) -> None:
    assert ranks_in("all_reduce did not end within 9 s on ranks [0, 1]; rank 3 did not arrive: it sleeps") == ["3"]
    assert ranks_in("x on rank 0; ranks [2, 5 and 7 more] did not arrive: each sleeps") == ["2", "5"]
    assert ranks_in("the ranks hung") == ["unnamed"]
    found = status_of(RunReport(faulty(tmp_path / "run")))
    assert list(found["faults"]) == ["3"] and found["slow_rank"]["rank"] == 3
    assert (found["skipped"], found["not_finite"], found["checkpoint"]) == (2, 1, None)
    named = faults_by_rank([{"time": 1.0, "kind": "fault", "rank": 12, "text": "a loss"}], {})
    assert list(named) == ["12"]


def test_a_run_is_complete_when_its_last_checkpoint_is_sealed_and_validated(tmp_path: Path) -> None:
    run = healthy(tmp_path / "run")
    asked = ["status", str(run), "--complete"]
    assert main(["status", str(tmp_path / "nothing"), "--complete"]) == 1
    assert main(["status", str(tmp_path / "nothing")]) == 2
    assert main(asked) == 1, "all steps are done, and none is saved"
    last = add_checkpoint(run, 60)
    assert main(asked) == 0
    notes = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(notes | {"validates": True}))
    assert main(asked) == 1, "the last validation is missing"
    with (run / "validation.jsonl").open("a") as file:
        file.write(json.dumps({"step": 60, "loss": 2.0}) + "\n")
    assert main(asked) == 0
    head = (last / "index.json").read_bytes().rpartition(SEAL)[0]
    (last / "index.json").write_bytes(head + SEAL + f"{zlib.crc32(head) ^ 1}}}".encode())
    assert main(asked) == 1, "a damaged checkpoint completes nothing"
    checkpoint = status_of(RunReport(run))["checkpoint"]
    assert not checkpoint["sealed"] and "wrong checksum" in checkpoint["why"]


def test_status_needs_no_torch(tmp_path: Path) -> None:
    run = healthy(tmp_path / "run")
    program = (
        "import sys; from meshwright.cli.main import main; "
        f"code = main(['status', {str(run)!r}]); sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG_S, check=False).returncode == 0
