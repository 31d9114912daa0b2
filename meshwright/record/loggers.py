"""Where a run's numbers go besides its own folder: TensorBoard, Weights & Biases, MLflow, trackio, CSV files.

A logger is an object with `log(values, step)` and `close()`, made by a function of a `Start`; LOGGERS names those that
`run.loggers` may name. All of them work in one thread of their own, so that no step waits for one of them; one that
fails is reported once and left out, and the run goes on. No torch."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import math
import netrc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from meshwright.errors import UserError, one_line

CLOSING_S = 60.0  # how long a run that is done waits for its loggers
PROJECT = "meshwright"

Values = Mapping[str, float]


class Logger(Protocol):
    def log(self, values: Values, step: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Start:
    """What a logger is told at first. `step` is the one that the run goes on from, 0 for a new one."""

    folder: Path
    config: Mapping[str, Any]
    step: int

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def id(self) -> str:
        """The same for every process of one run, so that a resumed run goes on where it was."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]


class TensorBoard:
    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(start.folder / "tensorboard"), purge_step=start.step + 1)

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Without a key and without WANDB_MODE the run is written offline, for `wandb sync`: nobody is asked anything."""

    def __init__(self, start: Start) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=start.name, dir=str(start.folder), mode=mode,
            id=start.id, resume="allow", config=dict(start.config), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # its own steps can't be logged again after a resume

    def log(self, values: Values, step: int) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        self.run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MLflow:
    """In a database in the run's folder, unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, start: Start) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self.metric, self.tag = Metric, start.id
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{start.folder.resolve()}/mlflow.db"
        self.client = MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        found = self.client.search_runs([experiment], f"tags.run = '{start.id}'", max_results=1)
        self.run = (found[0] if found else self.client.create_run(experiment, run_name=start.name)).info.run_id
        if not found:
            params = [Param(key, str(value)[:500]) for key, value in flat(start.config).items()]
            for at in range(0, len(params), 100):  # as many as one request may hold
                self.client.log_batch(self.run, params=params[at : at + 100])
            self.client.log_batch(self.run, tags=[RunTag("run", start.id)])

    def log(self, values: Values, step: int) -> None:
        now = int(1000 * time.time())
        usable = {name.replace(":", "-"): value for name, value in values.items()}
        self.client.log_batch(self.run, [self.metric(name, value, now, step) for name, value in usable.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio:
    """In the run's folder, unless TRACKIO_DIR names another place; `trackio show` draws it."""

    def __init__(self, start: Start) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(start.folder.resolve() / "trackio"))
        import trackio

        _silence("trackio")
        options: dict[str, Any] = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
        self.run: Any = trackio.init(
            project=PROJECT, name=start.name, config=flat(start.config), resume="allow", **options
        )

    def log(self, values: Values, step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


def _silence(package: str) -> None:
    """Takes `print` from a package that has no option for it: stdout is the run's own, and may be a JSON document."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            vars(module)["print"] = lambda *words, **options: None


class Csv:
    """metrics.csv and validation.csv: one line per step, one column per value. A value that appears later gets a column
    then, and a resumed run takes out what it trains again."""

    def __init__(self, start: Start) -> None:
        self.files = {name: _CsvFile(start.folder / f"{name}.csv", start.step) for name in ("metrics", "validation")}

    def log(self, values: Values, step: int) -> None:
        name = "validation" if any(key.startswith("validation/") for key in values) else "metrics"
        self.files[name].add({"step": step, **values})

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class _CsvFile:
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.names = path, ["step"]
        self.file: TextIO | None = None
        self.rows: list[dict[str, Any]] = []
        if step and path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = [row for row in csv.DictReader(file) if row.get("step", "").isdigit()]
            self.rows = [row for row in self.rows if int(row["step"]) <= step]
            self.names = list(dict.fromkeys(["step", *(name for row in self.rows for name in row)]))
        elif path.is_file():
            path.unlink()

    def add(self, row: Mapping[str, Any]) -> None:
        new = [name for name in row if name not in self.names]
        if new or self.file is None:
            self._begin(new)
        self.writer.writerow(row)
        self.file.flush()  # type: ignore[union-attr]

    def _begin(self, new: Sequence[str]) -> None:
        """Writes the file anew with all columns."""
        if self.file is not None:
            self.file.close()
            with self.path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
        self.names += new
        self.file = self.path.open("w", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, self.names, restval="")
        self.writer.writeheader()
        self.writer.writerows(self.rows)
        self.rows = []

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


# By name: how it is made, and the package that it needs.
LOGGERS: dict[str, tuple[Callable[[Start], Logger], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
    "csv": (Csv, "csv"),
}


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """`{"train": {"steps": 3}}` as `{"train.steps": 3}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return found


def check_installed(names: Sequence[str]) -> None:
    """Raises if a package that a logger needs is not there."""
    for name in names:
        package = LOGGERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise UserError(f"run.loggers has {name}, which is not installed: `pip install {package}`, or leave it out")


class Loggers:
    """Several loggers in a thread."""

    def __init__(self, names: Sequence[str], start: Start) -> None:
        self._waiting: queue.SimpleQueue[tuple[Values, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if names:
            work = (list(names), start)
            self._thread = threading.Thread(target=self._work, args=work, name="meshwright-loggers", daemon=True)
            self._thread.start()

    def log(self, values: Values, step: int) -> None:
        if self._thread is not None:
            self._waiting.put(({name: value for name, value in values.items() if math.isfinite(value)}, step))

    def close(self, patience: float = CLOSING_S) -> None:
        """Waits until all is logged, for at most `patience` seconds. A second call only waits."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(patience)
            if self._thread.is_alive():
                _warn(f"the loggers have not taken everything within {patience:.0f} s: their last steps may be missing")

    def _work(self, names: Sequence[str], start: Start) -> None:
        open_: dict[str, Logger] = {}
        for name in names:
            with self._kept(name, open_):
                open_[name] = LOGGERS[name][0](start)
        while (found := self._waiting.get()) is not None:
            for name, logger in list(open_.items()):
                with self._kept(name, open_):
                    logger.log(*found)
        for name, logger in list(open_.items()):
            with self._kept(name, open_):
                logger.close()

    @contextlib.contextmanager
    def _kept(self, name: str, open_: dict[str, Logger]) -> Iterator[None]:
        """A logger that fails is left out from then on."""
        try:
            yield
        except Exception as error:  # whatever another program raises, training does not end by it
            open_.pop(name, None)
            why = one_line(f"{type(error).__name__}: {error}")
            _warn(f"the logger {name} failed ({why}): the run goes on without it")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"meshwright: warning: {text}", file=sys.stderr, flush=True)
