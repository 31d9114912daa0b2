"""The folder of a run, written and read: the resolved config, one line per step, validation losses, TensorBoard events.

Torch is imported only for the events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypedDict

from meshwright.config.load import config_from, to_mapping, to_yaml
from meshwright.config.sections import Config
from meshwright.config.yaml_text import parse_yaml
from meshwright.disk import check_writable, refused
from meshwright.errors import UserError, either, notice, plural
from meshwright.outside import of_kind, parse_json, read_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.ending import before_sudden_end
from meshwright.record.loggers import Loggers, Start, check_installed
from meshwright.record.run_notes import changed_keys, layout_since, learning_rate_words, read_events, write_event
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import layout_of
from meshwright.spec.traffic.counts import COUNTS

# What loggers chart of each step.
CHARTED = ("loss", "grad_norm", "lr", "loss_scale", "tokens_per_s", "global_batch", "tflops", "mfu")

FILES = ("metrics.jsonl", "validation.jsonl", "layers.jsonl")  # one line per step, validation, or step with norms

AFTER_ERROR_S = 3.0  # how long a run that fails waits for its loggers; a launcher kills its ranks after 5 s

TAIL_BYTES = 2**20  # more than a line of metrics.jsonl

Lines = list[dict[str, Any]]


class _Line(TypedDict):
    """What every line has."""

    step: int
    loss: float | None


class StepLine(_Line, total=False):
    """What summaries read of a step or of a validation."""

    tokens: float | None
    global_batch: float | None
    lr: float | None
    step_time_s: float | None
    tokens_per_s: float | None
    phases: dict[str, float]
    comm: dict[str, dict[str, float]]


def check_folders(config: Config) -> None:
    """Raises if what a run writes can't be written where the config says."""
    for key, folder in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if folder:
            check_writable(Path(folder), f"{key}={folder}", f"another {key}")


def refuse_finished(config: Config, source: str | None = None) -> None:
    """Raises if `run.dir` holds a run that has nothing left to do, or if a logger is not installed.

    Ranks that are started again, since one died after the last checkpoint, have nothing to do, and that is no mistake.
    """
    folder = Path(config.run.dir)
    check_installed(config.run.loggers)
    if source is not None or fmt.was_restarted():
        return
    step = complete_step(config)
    if step is not None:
        raise UserError(
            f"run.dir={folder} holds a run that is complete at step {step}: raise train.steps to go on, "
            "or choose another folder"
        )


def complete_step(config: Config) -> int | None:
    """The step of the run's last checkpoint if the run is complete: that checkpoint is of its last step, or beyond, is
    as it was written as far as its index tells, and the validation after it is written where the run validates. None
    if it has something left to do. This, and no exit code, tells a run that is complete from one that was stopped."""
    folder, found = Path(config.run.dir), fmt.list_checkpoints(fmt.checkpoint_folder(config))
    if not found or found[-1][0] < config.train.steps:
        return None
    step, last = found[-1]
    try:
        fmt.read_index(last)
    except fmt.DamagedCheckpoint:
        return None  # the run goes on from the one before it
    if step == config.train.steps and _read_note(folder, "validates") and not is_validated(folder, step):
        return None  # it was ended between its last save and the validation after it
    return step


def what_is_lost(config: Config) -> str:
    """What a run that is ended at once loses, in a sentence."""
    folder, lines = Path(config.run.dir), _read_lines(Path(config.run.dir) / "metrics.jsonl")
    saved = max((step for step, _ in fmt.list_checkpoints(fmt.checkpoint_folder(config))), default=0)
    done = max((line["step"] for line in lines), default=0)
    where = f"its newest checkpoint is of step {saved}" if saved else "it has no checkpoint"
    lost = f"steps {saved + 1} to {done} are lost" if done > saved + 1 else f"step {done} is lost"
    lost = lost if done > saved else "no finished step is lost"
    return f"stopped at once at step {done} of {config.train.steps}: {folder}: {where}, {lost}"


class RunFolder:
    """Written by one rank. Each line is flushed, so that a killed run keeps every step it finished."""

    def __init__(
        self, config: Config, world: int, step: int = 0, validates: bool = True, source: str | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`step` is the one that the run goes on from: lines of later steps, which will be trained again, move to
        lost.jsonl, so that the history has each step once. `source` is what gave a new run its weights; `notes` are
        what else run.json says."""
        self.path = Path(config.run.dir)
        source = _read_note(self.path, "from") if step and source is None else source
        changed = changed_keys(self.path / "config.yaml", config) if step else []
        with self._written():
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            facts = {"world": world, "validates": validates, "from": source} | dict(notes or {})
            (self.path / "run.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
            lost = [_set_lost_aside(self.path / name, step) for name in FILES]
            self._open_files()
        again = f"; trains {plural(lost[0], 'later step')} again" if lost[0] else ""
        ranks = plural(world, "rank")
        words = f"continues from step {step} on {ranks}{again}" if step else f"starts on {ranks}"
        write_event(self.path, "resume" if step else "start", words, step, world=world, lost=lost[0],
                    changed=changed)  # fmt: skip
        before = _learning_rate(self.path, step) if changed else None
        if before is not None and (words := learning_rate_words(config, step, before, changed)):
            notice(words)
        self._loggers = Loggers(logger_names(config), Start(self.path, to_mapping(config), step))

    def step(self, line: dict[str, Any]) -> None:
        values = {f"train/{key}": line[key] for key in CHARTED if line.get(key) is not None}
        for group in ("losses", "monitored"):
            values |= {f"{group}/{key}": value for key, value in line.get(group, {}).items()}
        for key, value in line.get("experts", {}).items():
            if key != "rows":
                values[f"experts/{key}"] = max(value) if isinstance(value, list) else value
        values |= {f"comm_wire_bytes/{axis}": counts["wire_bytes"] for axis, counts in line["comm"].items()}
        self._write(self._metrics, line, values)

    def validation(self, line: dict[str, Any]) -> None:
        sources = {f"validation/{name}": loss for name, loss in line.get("sources", {}).items()}
        self._write(self._validation, line, {"validation/loss": line["loss"]} | sources)

    def layers(self, line: dict[str, Any]) -> None:
        self._write(self._layers, line, {})

    def _write(self, file: TextIO, line: dict[str, Any], charted: dict[str, float]) -> None:
        """One line of strict JSON, where a number that is not finite is null, and TensorBoard's events."""
        with self._written():
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
            file.flush()
        self._loggers.log({name: value for name, value in charted.items() if value is not None}, line["step"])

    def last_steps(self, count: int) -> Lines:
        """The last lines of metrics.jsonl."""
        with (self.path / FILES[0]).open(encoding="utf-8") as file:
            return [parse_json(line) for line in deque(file, maxlen=count)]

    def go_back(self, step: int) -> int:
        """Moves the lines of later steps, which will be trained again, to lost.jsonl; returns how many steps."""
        with self._written():
            self._close_files()
            lost = [_set_lost_aside(self.path / name, step) for name in FILES]
            self._open_files()
        return lost[0]

    def _open_files(self) -> None:
        self._metrics, self._validation, self._layers = (
            (self.path / name).open("a", encoding="utf-8") for name in FILES
        )

    def _close_files(self) -> None:
        for file in (self._metrics, self._validation, self._layers):
            file.close()

    def close(self) -> None:
        with self._written():
            self._close_files()
        self._loggers.close()

    @contextlib.contextmanager
    def closed_after_error(self) -> Iterator[None]:
        """Has the loggers take what was logged if the body fails, or if the watchdog ends the process during it: they
        get no other chance, since a rank then ends without the interpreter's own end."""
        with before_sudden_end(self._close_loggers_soon):
            try:
                yield
            except BaseException:
                self._close_loggers_soon()
                raise

    def _close_loggers_soon(self) -> None:
        self._loggers.close(AFTER_ERROR_S)

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """A full disk is no bug."""
        try:
            yield
        except OSError as error:
            what = f"run.dir={self.path} can't be written"
            raise refused(what, error, error.filename or self.path, "another run.dir") from None


def _learning_rate(folder: Path, step: int) -> float | None:
    """The one of this step, which must be the last that is written."""
    lines = _read_lines(folder / "metrics.jsonl")
    return lines[-1].get("lr") if lines and lines[-1]["step"] == step else None


def is_validated(folder: Path, step: int) -> bool:
    """Whether the validation after this step is written."""
    return any(line["step"] == step for line in _read_lines(folder / "validation.jsonl"))


def _set_lost_aside(path: Path, step: int) -> int:
    """Moves the lines after `step`, and a last one that a kill cut off, to lost.jsonl; returns how many. Lost first,
    then the rest: a kill between the two repeats lines there and loses none."""
    if not path.exists():
        return 0
    kept: list[str] = []
    lost: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            (kept if parse_json(line)["step"] <= step else lost).append(line)
        except (ValueError, TypeError, KeyError):
            lost.append(line)
    if lost:
        with (path.parent / "lost.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lost)
        aside = path.with_name(path.name + ".part")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        aside.replace(path)
    return len(lost)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def logger_names(config: Config) -> list[str]:
    """`run.loggers`, which must be installed, and TensorBoard's events where `run.tensorboard` and it are there."""
    names = list(config.run.loggers)
    check_installed(names)
    if config.run.tensorboard and "tensorboard" not in names and importlib.util.find_spec("tensorboard"):
        names.append("tensorboard")
    return names


@dataclass(frozen=True)
class RunRecord:
    """A run's folder as it was read. `layout` is None where nothing tells how many ranks there were; the steps after
    `since` were trained with it."""

    path: Path
    config: Config
    steps: Lines
    validations: Lines
    layout: Layout | None
    since: int = 0

    @property
    def recent(self) -> Lines:
        """The steps of the newest layout, the only ones whose speed and bytes belong together."""
        return [line for line in self.steps if line["step"] > self.since]

    @property
    def world(self) -> int | None:
        return self.layout.world if self.layout else None


def own_config(raw: Mapping[str, Any]) -> Config:
    """The config of a run, without the sections that another program added."""
    known = {field.name for field in dataclasses.fields(Config)} - {"extra"}
    return config_from({name: section for name, section in raw.items() if name in known})


def read_config(path: Path, known: tuple[Config, str] | None = None) -> tuple[Config, str]:
    """Return the config of the run in a folder and its text, or what is `known` if the text is the same."""
    file = path / "config.yaml"
    if not file.is_file():
        raise no_run(path)
    text = file.read_text(encoding="utf-8", errors="replace")
    if known and known[1] == text:
        return known
    raw = parse_yaml(text, str(file))
    if not isinstance(raw, Mapping):
        raise UserError(f"{file} holds no config: name the folder of a run")
    return own_config(raw), text


def no_run(path: Path) -> UserError:
    """Says that a folder holds no run, and which runs lie in it, beside it, or where runs lie unless run.dir says."""
    what = "holds no run" if path.exists() else "is not there"
    for place in (path, path.parent, Path("runs")):
        files = sorted(place.glob("*/config.yaml"), key=lambda file: -file.stat().st_mtime)
        if runs := [str(file.parent) for file in files]:
            return UserError(f"{path} {what}: name one of the runs in {place}, such as {either(runs[:3])}")
    return UserError(f"{path} {what}: name the folder that run.dir named")


def read_run(run_dir: str | Path, world: int | None = None) -> RunRecord:
    """Reads a run's folder. `world` is needed only for a folder without a run.json."""
    path = Path(run_dir)
    config, _ = read_config(path)
    steps = _read_lines(path / "metrics.jsonl")
    world = world or _read_note(path, "world") or _least_world(config, steps)
    layout = layout_of(config, world) if world else None
    since = layout_since(read_events(path))
    return RunRecord(path, config, steps, _read_lines(path / "validation.jsonl"), layout, since)


def _read_note(run_dir: Path, key: str) -> Any:
    """What run.json notes under this key, or None."""
    try:
        return read_json(run_dir / "run.json")[key]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read_lines(path: Path) -> Lines:
    """The records by step. Of a step that was written twice (the run was resumed) the later one counts, and a line that
    was cut off by a kill does not."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            value = of_kind(_finite(parse_json(line)), StepLine, "the line")
        except ValueError:
            continue
        value["loss"] = math.nan if value["loss"] is None else value["loss"]  # null: not finite
        found[value["step"]] = value
    return [found[step] for step in sorted(found)]


def last_step(run_dir: Path) -> tuple[int, float]:
    """The run's last step and when its line was written, from the end of the file; 0 and 0 where there is none."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            ends = file.read().splitlines(keepends=True)
    except OSError:
        return 0, 0.0
    for line in reversed(ends):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            value = parse_json(line)
            return int(value["step"]), float(value.get("time") or 0.0)
    return 0, 0.0


def _least_world(config: Config, steps: Lines) -> int | None:
    """The world of a run in which no gradient was reduced: then there was one data-parallel rank."""
    c = config.layout
    data = any("dp" in axis.split("-") for line in steps for axis in line.get("comm", {}))
    return c.least_world if steps and not data else None


def traffic_per_step(steps: Lines) -> dict[str, dict[str, float]]:
    """By axis, the calls and bytes of a mean step, summed over all ranks."""
    axes: dict[str, dict[str, float]] = {}
    for line in steps:
        for axis, counts in line.get("comm", {}).items():
            into = axes.setdefault(axis, dict.fromkeys(COUNTS, 0.0))
            for key in into:
                into[key] += counts.get(key, 0)
    return {axis: {key: count / len(steps) for key, count in sums.items()} for axis, sums in axes.items()}
