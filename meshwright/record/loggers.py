"""Send a run's numbers to TensorBoard, Weights & Biases, MLflow, trackio or CSV files, in addition to its folder.

A logger is an object with `log(values, step)` and `close()`, made from a `LoggerFacts`. LOGGERS has all loggers that
`run.loggers` may name. All of them work in one separate thread, so that no step waits for them. A logger that fails is
reported once and dropped, and the run continues. No torch.
"""

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

CLOSING_S = 60.0  # longest wait for the loggers at the end of a run
PROJECT = "meshwright"

Values = Mapping[str, float]


class Logger(Protocol):
    """The interface of a logger."""

    def log(self, values: Values, step: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggerFacts:
    """The facts that a logger is made from. `step` is the one that the run resumes from, 0 for a new run."""

    folder: Path
    config: Mapping[str, Any]
    step: int

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def id(self) -> str:
        """An identifier that is the same in every process of a run, so that a resumed run continues its old record."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]


class TensorBoard:
    """A logger that writes TensorBoard events to the run's folder."""

    def __init__(self, start: LoggerFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the one that the run resumes from are trained again, and TensorBoard drops their old events.
        self.writer: Any = SummaryWriter(str(start.folder / "tensorboard"), purge_step=start.step + 1)

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A logger for Weights & Biases.

    Without an API key and without WANDB_MODE, the run is written offline, for `wandb sync`. This avoids the library's
    question for a key.
    """

    def __init__(self, start: LoggerFacts) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=start.name, dir=str(start.folder), mode=mode,
            id=start.id, resume="allow", config=dict(start.config), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        # W&B's built-in step can only grow, so it can't be used for steps that are trained again after a resume.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

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
    """A logger for MLflow, with a database in the run's folder unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, start: LoggerFacts) -> None:
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
            for at in range(0, len(params), 100):  # MLflow's limit per request
                self.client.log_batch(self.run, params=params[at : at + 100])
            self.client.log_batch(self.run, tags=[RunTag("run", start.id)])

    def log(self, values: Values, step: int) -> None:
        now = int(1000 * time.time())
        # Not every version of MLflow accepts colons in names.
        usable = {name.replace(":", "-"): value for name, value in values.items()}
        self.client.log_batch(self.run, [self.metric(name, value, now, step) for name, value in usable.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio:
    """A logger for trackio, in the run's folder unless TRACKIO_DIR names another place. `trackio show` displays it."""

    def __init__(self, start: LoggerFacts) -> None:
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
    """Disable `print` in a package that has no option for it, since the run's stdout may be a JSON document."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            vars(module)["print"] = lambda *words, **options: None


class Csv:
    """A logger that writes metrics.csv and validation.csv: one line per step, one column per value.

    A value that appears later gets a column then. A resumed run removes the lines of steps that it trains again.
    """

    def __init__(self, start: LoggerFacts) -> None:
        self.files = {name: _CsvFile(start.folder / f"{name}.csv", start.step) for name in ("metrics", "validation")}

    def log(self, values: Values, step: int) -> None:
        # Steps and validations have separate files, as a validation has the number of a step.
        name = "validation" if any(key.startswith("validation/") for key in values) else "metrics"
        self.files[name].add({"step": step, **values})

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class _CsvFile:
    """One CSV file. Its columns may grow while it is written."""

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
        """Rewrite the file with the columns so far and the `new` ones."""
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


# For each name, the function that makes the logger, and the package that it needs.
LOGGERS: dict[str, tuple[Callable[[LoggerFacts], Logger], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
    "csv": (Csv, "csv"),
}


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested mappings: `{"train": {"steps": 3}}` becomes `{"train.steps": 3}`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{before}{key}.")
        else:
            values[f"{before}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return values


def check_installed(names: Sequence[str]) -> None:
    """Raise a UserError if a package that a logger needs is not installed."""
    for name in names:
        package = LOGGERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise UserError(f"run.loggers has {name}, which is not installed: `pip install {package}`, or leave it out")


class Loggers:
    """The loggers of a run, which work in one background thread."""

    def __init__(self, names: Sequence[str], start: LoggerFacts) -> None:
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
        """Wait until everything is logged, for at most `patience` seconds. A second call only waits."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(patience)
            if self._thread.is_alive():
                _warn(f"the loggers have not taken everything within {patience:.0f} s: their last steps may be missing")

    def _work(self, names: Sequence[str], start: LoggerFacts) -> None:
        """Make the loggers, pass them all values until `close`, and close them. Runs in the thread."""
        open_: dict[str, Logger] = {}
        for name in names:
            with self._drop_on_failure(name, open_):
                open_[name] = LOGGERS[name][0](start)
        while (entry := self._waiting.get()) is not None:
            for name, logger in list(open_.items()):
                with self._drop_on_failure(name, open_):
                    logger.log(*entry)
        for name, logger in list(open_.items()):
            with self._drop_on_failure(name, open_):
                logger.close()

    @contextlib.contextmanager
    def _drop_on_failure(self, name: str, open_: dict[str, Logger]) -> Iterator[None]:
        """Drop a logger that fails in the body, with a warning."""
        try:
            yield
        except Exception as error:  # no error of another program may end the training
            open_.pop(name, None)
            why = one_line(f"{type(error).__name__}: {error}")
            _warn(f"the logger {name} failed ({why}): the run continues without it")


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"meshwright: warning: {text}", file=sys.stderr, flush=True)
