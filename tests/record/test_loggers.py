"""Each logger writes through its real package, offline and if that is installed, and the numbers are read back."""

from __future__ import annotations

import csv
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.sections import LOGGER_NAMES
from meshwright.errors import UserError
from meshwright.record.loggers import LOGGERS, LoggerFacts, Loggers
from meshwright.record.run_folder import RunFolder
from tests.support.oracle import small_config

CONFIG = {"train": {"steps": 4, "seed": 1}, "data": {"prefixes": ["a"]}}


def write(folder: Path, name: str, steps: range = range(1, 4), step: int = 0) -> None:
    start = LoggerFacts(folder, CONFIG, step)
    folder.mkdir(exist_ok=True)
    found = Loggers([name], start)
    for n in steps:
        found.log({"train/loss": 10.0 - n, "train/lr": 1e-3, "train/nan": math.nan}, n)
    found.log({"validation/loss": 5.5}, steps[-1])
    found.close()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield


def test_csv_gets_columns_as_they_come_and_forgets_lost_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write(folder, "csv")
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [(row["step"], row["train/loss"]) for row in rows] == [("1", "9.0"), ("2", "8.0"), ("3", "7.0")]
    assert list(csv.DictReader((folder / "validation.csv").open())) == [{"step": "3", "validation/loss": "5.5"}]
    found = Loggers(["csv"], LoggerFacts(folder, CONFIG, 2))  # continues from step 2
    found.log({"train/loss": 1.0, "train/mfu": 0.5}, 3)
    found.close()
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    assert [(row["step"], row["train/loss"], row["train/mfu"]) for row in rows] == [
        ("1", "9.0", ""), ("2", "8.0", ""), ("3", "1.0", "0.5"),
    ]  # fmt: skip
    write(folder, "csv", range(1, 2))  # a new run in the same folder
    assert len(list(csv.DictReader((folder / "metrics.csv").open()))) == 1


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path / "run", "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 9.0), (2, 8.0), (3, 7.0)]
    assert [event.value for event in events.Scalars("validation/loss")] == [5.5]


def records(text: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, which W&B writes after a header of seven bytes.

    The file has blocks of 32 KiB. Each fragment in them has a checksum, a length and a kind (1 whole, 2 first, 3
    middle, 4 last).
    """
    at, fragment = 7, b""
    while at + 7 <= len(text):
        # No header of seven bytes fits into the rest of a block.
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(text[at + 4 : at + 6], "little"), text[at + 6]
        fragment += text[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield fragment
            fragment = b""


@pytest.mark.wide
def test_wandb_writes_offline_without_asking(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    write(tmp_path / "run", "wandb")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    found = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            found.append((items["step"], items.get("train/loss"), items.get("validation/loss")))
    assert found == [(1, 9.0, None), (2, 8.0, None), (3, 7.0, None), (3, None, 5.5)]


@pytest.mark.wide
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    write(tmp_path / "run", "mlflow")
    write(tmp_path / "run", "mlflow", range(4, 5), step=3)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("meshwright").experiment_id])
    assert run.info.run_name == "run" and run.data.params["train.steps"] == "4"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]


@pytest.mark.wide
def test_trackio_gets_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trackio")
    write(tmp_path / "run", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "meshwright.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    found = [(step, json.loads(text).get("train/loss")) for step, text in rows]
    assert found[:3] == [(1, 9.0), (2, 8.0), (3, 7.0)]
    assert capsys.readouterr().out == ""  # standard output may be a JSON document


class Broken:
    def __init__(self, start: LoggerFacts) -> None:
        self.calls = 0

    def log(self, values: Any, step: int) -> None:
        raise RuntimeError("no network")

    def close(self) -> None:
        raise AssertionError("it was left out")


def test_a_logger_that_fails_is_said_once_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(LOGGERS, "trackio", (Broken, "csv"))
    found = Loggers(["trackio", "csv"], LoggerFacts(tmp_path, CONFIG, 0))
    for step in (1, 2):
        found.log({"train/loss": 1.0}, step)
    found.close()
    said = capsys.readouterr().err
    assert said.count("the logger trackio failed (RuntimeError: no network)") == 1
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3


def test_what_is_not_installed_or_unknown_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"run.loggers has 'wand' \(did you mean 'wandb'\?\): use tensorboard, wandb"):
        small_config(run={"loggers": ["wand"]})
    monkeypatch.setitem(LOGGERS, "wandb", (LOGGERS["wandb"][0], "no_such_package"))
    with pytest.raises(UserError, match="wandb, which is not installed: `pip install no_such_package`"):
        RunFolder(small_config(run={"dir": str(tmp_path / "x"), "loggers": ["wandb"]}), 1)
    assert tuple(LOGGERS) == LOGGER_NAMES
