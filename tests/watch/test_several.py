"""Several runs on one page: a folder of runs, settings that differ, and runs that are about to begin."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli import watch
from meshwright.cli.main import main
from meshwright.device import Device
from meshwright.engine.step import StepResult
from meshwright.record.machine import MACHINE_FILE, MachineLoad
from meshwright.record.run_folder import RunFolder
from meshwright.run.machine_notes import EVERY_S, MachineNotes
from meshwright.watch.server import Runs
from tests.watch.made import healthy


def test_a_folder_of_runs_is_shown_as_a_list_to_which_new_runs_are_added(tmp_path: Path) -> None:
    for name in ("first", "second"):
        healthy(tmp_path / name)
    config = tmp_path / "second" / "config.yaml"
    config.write_text(re.sub(r"seed: \d+", "seed: 7", config.read_text()))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("[]")
    runs = Runs.of([tmp_path])
    found = {run["name"]: run for run in runs.documents()}
    assert set(found) == {"first", "second"} and runs.title == tmp_path.name
    assert found["second"]["settings"]["train.seed"] == "7"
    assert set(found["first"]["settings"]) == set(found["second"]["settings"])
    assert all("seed" in key for key in found["first"]["settings"]), "only settings that differ are compared"
    before = [report.path for report in runs.reports]
    healthy(tmp_path / "third")
    assert len(runs.documents()) == 3
    assert [report.path for report in runs.reports][:2] == before, "the page knows runs by their number"


def test_a_run_that_has_not_begun_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            healthy(tmp_path / "runs" / "new")
        if len(slept) > 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.wait_for(tmp_path / "runs" / "new")
    assert len(slept) == 3 and "waiting for a run to begin in" in capsys.readouterr().err
    watch.wait_for(tmp_path / "runs")  # has begun
    assert main(["watch", str(tmp_path / "other")]) == 130
    assert "other is not there" in capsys.readouterr().err


def test_the_load_of_the_machine_is_read_between_two_calls(tmp_path: Path) -> None:
    def write(user: int, idle: int, sent: int) -> None:
        (tmp_path / "net").mkdir(exist_ok=True)
        (tmp_path / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1\n")
        (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n")
        lines = ["head", "head", f"    lo: 9{' 9' * 15}", f"  eth0: 4{' 0' * 7} {sent}{' 0' * 7}"]
        (tmp_path / "net" / "dev").write_text("\n".join(lines))

    load = MachineLoad(tmp_path)
    write(100, 100, 0)
    assert load.read(10.0) == {"memory": 0.75}
    write(400, 200, 5000)
    assert load.read(12.0) == {"memory": 0.75, "cores": 0.75, "received_per_s": 0.0, "sent_per_s": 2500.0}
    assert MachineLoad(tmp_path / "nowhere").read(1.0) == {}


def test_a_run_notes_its_machine_every_ten_seconds(tmp_path: Path) -> None:
    now = 0.0
    folder = RunFolder.__new__(RunFolder)
    folder.path = tmp_path
    notes = MachineNotes(folder, Device("cpu"), clock=lambda: now)
    result = StepResult.__new__(StepResult)
    for step, seconds in enumerate((1.0, EVERY_S, EVERY_S + 1, 2 * EVERY_S + 1), 1):
        now, result.step = seconds, step
        notes.after(result, last=step == 4)
    lines = [json.loads(line) for line in (tmp_path / MACHINE_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    MachineNotes(None, Device("cpu")).after(result, last=True)  # another rank writes nothing


def test_sensors_that_a_device_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def mem_get_info(index: int) -> tuple[float, float]:
            return 1.0, 4.0

        @staticmethod
        def temperature(index: int) -> int:
            return 55

        @staticmethod
        def utilization(index: int) -> int:
            raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(Device, "module", Module)
    assert Device("cuda").sensors() == {"device_memory": 0.75, "device_celsius": 55.0}
