"""Write and read the folder of a run: the resolved config, one line per step, validation losses, TensorBoard events.

Torch is imported only for TensorBoard events.
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
from meshwright.disk import check_writable, refusal
from meshwright.errors import UserError, either, notice, plural
from meshwright.outside import of_kind, parse_json, read_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.ending import before_sudden_end
from meshwright.record.loggers import LoggerFacts, Loggers, check_installed
from meshwright.record.run_notes import changed_keys, layout_since, learning_rate_words, read_events, write_event
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import layout_of
from meshwright.spec.traffic.counts import COUNTS

# The values of a step that are passed to loggers, in addition to losses, monitored values, experts and traffic.
CHARTED_METRICS = ("loss", "grad_norm", "lr", "loss_scale", "tokens_per_s", "global_batch", "tflops", "mfu")

# Files with one line per step, per validation, and per step with norms of the layers.
FILES = ("metrics.jsonl", "validation.jsonl", "layers.jsonl")

# Longest wait of a failing run for its loggers. A launcher kills its ranks after 5 s.
AFTER_ERROR_S = 3.0

# Bytes from the end of metrics.jsonl that are searched for the last line, more than any line has.
TAIL_BYTES = 2**20

Lines = list[dict[str, Any]]


class _Line(TypedDict):
    """The fields that every line has."""

    step: int
    loss: float | None


class StepLine(_Line, total=False):
    """The fields of a step or a validation that summaries read."""

    tokens: float | None
    global_batch: float | None
    lr: float | None
    step_time_s: float | None
    tokens_per_s: float | None
    phases: dict[str, float]
    comm: dict[str, dict[str, float]]


def check_folders(config: Config) -> None:
    """Raise a UserError if the run's files can't be written to the folders that the config names."""
    for key, folder in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if folder:
            check_writable(Path(folder), f"{key}={folder}", f"another {key}")


def refuse_finished(config: Config, source: str | None = None) -> None:
    """Raise a UserError if `run.dir` holds a complete run, or if a logger is not installed.

    Ranks that a launcher restarted may find the run complete, if one died after the last checkpoint. That is no error.
    """
    folder = Path(config.run.dir)
    check_installed(config.run.loggers)
    if source is not None or fmt.was_restarted():
        return
    step = complete_step(config)
    if step is not None:
        raise UserError(
            f"run.dir={folder} holds a run that is complete at step {step}: raise train.steps to continue, "
            "or choose another folder"
        )


def complete_step(config: Config) -> int | None:
    """Return the step of the run's last checkpoint if the run is complete, or None if there is work left.

    A run is complete if its last checkpoint is of its last step or a later one and its index is valid. If the run
    validates, the validation after that step must be recorded as well. A run most of whose updates were skipped has
    hardly learned, so it is not complete. The exit code can't tell a complete run from one that was stopped.
    """
    folder = Path(config.run.dir)
    checkpoints = fmt.list_checkpoints(fmt.checkpoint_folder(config))
    if not checkpoints or checkpoints[-1][0] < config.train.steps:
        return None
    step, last = checkpoints[-1]
    if skipped_updates_notice(folder):
        return None
    try:
        fmt.read_index(last)
    except fmt.DamagedCheckpoint:
        return None  # the run resumes from the checkpoint before it
    # Without its last validation, the run was ended between its last save and that validation.
    if step == config.train.steps and _read_note(folder, "validates") and not is_validated(folder, step):
        return None
    return step


def skipped_updates_notice(folder: Path) -> str:
    """Return a sentence with the fix if more than half of a run's updates were skipped, else ""."""
    lines = _read_lines(folder / "metrics.jsonl")
    skipped = sum(bool(line.get("skipped")) for line in lines)
    if 2 * skipped <= len(lines):
        return ""
    return (
        f"{skipped:,} of {len(lines):,} updates were skipped, so {folder} is not complete: lower optimizer.lr "
        "or, if no token counted in the loss, raise model.seq or check the data, and begin again in another run.dir"
    )


def describe_loss(config: Config) -> str:
    """Return a sentence that says which steps a run loses if it is stopped at once."""
    folder = Path(config.run.dir)
    lines = _read_lines(Path(config.run.dir) / "metrics.jsonl")
    saved = max((step for step, _ in fmt.list_checkpoints(fmt.checkpoint_folder(config))), default=0)
    done = max((line["step"] for line in lines), default=0)
    where = f"its newest checkpoint is of step {saved}" if saved else "it has no checkpoint"
    if done <= saved:
        lost = "no finished step is lost"
    else:
        lost = f"steps {saved + 1} to {done} are lost" if done > saved + 1 else f"step {done} is lost"
    return f"stopped at once at step {done} of {config.train.steps}: {folder}: {where}, {lost}"


class RunFolder:
    """A writer of a run's folder, on one rank. Each line is flushed, so that a killed run keeps every finished step."""

    def __init__(
        self, config: Config, world: int, step: int = 0, validates: bool = True, source: str | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Begin a run or, with `step` above 0, resume it from that step.

        The lines of later steps, which will be trained again, move to lost.jsonl, so that the history has each step
        once. `source` names the origin of a new run's weights; `notes` are additional facts for run.json.
        """
        self.path = Path(config.run.dir)
        # The old config and run.json are read here, before they are overwritten.
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
        text = f"continues from step {step} on {ranks}{again}" if step else f"starts on {ranks}"
        write_event(self.path, "resume" if step else "start", text, step, world=world, lost=lost[0],
                    changed=changed)  # fmt: skip
        before = _learning_rate(self.path, step) if changed else None
        if before is not None and (text := learning_rate_words(config, step, before, changed)):
            notice(text)
        self._loggers = Loggers(logger_names(config), LoggerFacts(self.path, to_mapping(config), step))

    def step(self, line: dict[str, Any]) -> None:
        """Record a step."""
        values = {f"train/{key}": line[key] for key in CHARTED_METRICS if line.get(key) is not None}
        for group in ("losses", "monitored"):
            values |= {f"{group}/{key}": value for key, value in line.get(group, {}).items()}
        for key, value in line.get("experts", {}).items():
            if key != "rows":
                values[f"experts/{key}"] = max(value) if isinstance(value, list) else value
        values |= {f"comm_wire_bytes/{axis}": counts["wire_bytes"] for axis, counts in line["comm"].items()}
        self._write(self._metrics, line, values)

    def validation(self, line: dict[str, Any]) -> None:
        """Record a validation."""
        sources = {f"validation/{name}": loss for name, loss in line.get("sources", {}).items()}
        self._write(self._validation, line, {"validation/loss": line["loss"]} | sources)

    def layers(self, line: dict[str, Any]) -> None:
        """Record the norms of the layers in a step."""
        self._write(self._layers, line, {})

    def _write(self, file: TextIO, line: dict[str, Any], charted: dict[str, float]) -> None:
        """Write a line of strict JSON, in which a number that is not finite is null, and pass values to the loggers."""
        with self._written():
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
            file.flush()
        self._loggers.log({name: value for name, value in charted.items() if value is not None}, line["step"])

    def last_steps(self, count: int) -> Lines:
        """Return the last `count` lines of metrics.jsonl."""
        with (self.path / FILES[0]).open(encoding="utf-8") as file:
            return [parse_json(line) for line in deque(file, maxlen=count)]

    def go_back(self, step: int) -> int:
        """Move the lines of steps after `step`, which will be trained again, to lost.jsonl. Return how many steps."""
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
        """Close the loggers if the body fails, or if the watchdog ends the process during it.

        A rank then ends without the interpreter's shutdown, so the loggers have no other chance to write.
        """
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
        """Turn an OSError in the body, for example from a full disk, into an error message for the user."""
        try:
            yield
        except OSError as error:
            problem = f"run.dir={self.path} can't be written"
            raise refusal(problem, error, error.filename or self.path, "another run.dir") from None


def _learning_rate(folder: Path, step: int) -> float | None:
    """Return the learning rate of this step if it is the last one in metrics.jsonl, else None."""
    lines = _read_lines(folder / "metrics.jsonl")
    return lines[-1].get("lr") if lines and lines[-1]["step"] == step else None


def is_validated(folder: Path, step: int) -> bool:
    """Return True if the validation after this step is recorded."""
    return any(line["step"] == step for line in _read_lines(folder / "validation.jsonl"))


def _set_lost_aside(path: Path, step: int) -> int:
    """Move the lines after `step`, and lines that are not complete, to lost.jsonl. Return how many were moved."""
    if not path.exists():
        return 0
    kept: list[str] = []
    lost: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            (kept if parse_json(line)["step"] <= step else lost).append(line)
        except (ValueError, TypeError, KeyError):
            lost.append(line)
    # lost.jsonl is written before the lines are removed: a kill between the two repeats lines there and loses none.
    if lost:
        with (path.parent / "lost.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lost)
        aside = path.with_name(path.name + ".part")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        aside.replace(path)
    return len(lost)


def _finite(value: Any) -> Any:
    """Return a JSON value in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def logger_names(config: Config) -> list[str]:
    """Return the loggers of a run: `run.loggers`, and TensorBoard if `run.tensorboard` is set and it is installed.

    Raise a UserError if one of `run.loggers` is not installed.
    """
    names = list(config.run.loggers)
    check_installed(names)
    if config.run.tensorboard and "tensorboard" not in names and importlib.util.find_spec("tensorboard"):
        names.append("tensorboard")
    return names


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder.

    `layout` is None if the number of ranks is not known. The steps after `since` were trained with this layout.
    """

    path: Path
    config: Config
    steps: Lines
    validations: Lines
    layout: Layout | None
    since: int = 0
    own_model: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a user's model: `own_facts`

    @property
    def recent(self) -> Lines:
        """The steps of the newest layout. Speed and traffic can only be compared among these."""
        return [line for line in self.steps if line["step"] > self.since]

    @property
    def world(self) -> int | None:
        return self.layout.world if self.layout else None


def own_config(raw: Mapping[str, Any]) -> Config:
    """Return the config of a run without sections that another program added."""
    known = {field.name for field in dataclasses.fields(Config)} - {"extra"}
    return config_from({name: section for name, section in raw.items() if name in known})


def read_config(path: Path, known: tuple[Config, str] | None = None) -> tuple[Config, str]:
    """Return the config of the run in a folder and its text, or `known` if the text has not changed since."""
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


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (path / "config.yaml").is_file()


def runs_in(place: Path) -> list[Path]:
    """Return the runs in a folder, the newest first."""
    files = sorted(place.glob("*/config.yaml"), key=lambda file: -file.stat().st_mtime)
    return [file.parent for file in files]


def no_run(path: Path) -> UserError:
    """Return the error for a folder that holds no run. It suggests runs in the folder, beside it, or in `runs`."""
    problem = "holds no run" if path.exists() else "is not there"
    for place in (path, path.parent, Path("runs")):
        if runs := [str(run) for run in runs_in(place)]:
            return UserError(f"{path} {problem}: name one of the runs in {place}, such as {either(runs[:3])}")
    return UserError(f"{path} {problem}: name the folder that run.dir named")


def read_run(run_dir: str | Path, world: int | None = None) -> RunRecord:
    """Read a run's folder. `world` is needed only for a folder without a run.json."""
    path = Path(run_dir)
    config, _ = read_config(path)
    steps = _read_lines(path / "metrics.jsonl")
    world = world or _read_note(path, "world") or _least_world(config, steps)
    layout = layout_of(config, world) if world else None
    since = layout_since(read_events(path))
    own = own_model_in({"own_model": _read_note(path, "own_model")})
    return RunRecord(path, config, steps, _read_lines(path / "validation.jsonl"), layout, since, own)


class OwnModel(TypedDict):
    """The note in run.json on the model of a user's program, whose sizes the config does not have."""

    name: str
    parameters: int


def own_model_in(notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the note on the model of a user's program, or nothing if there is none."""
    try:
        return dict(of_kind(notes.get("own_model"), OwnModel, "own_model"))
    except ValueError:
        return {}


def _read_note(run_dir: Path, key: str) -> Any:
    """Return the value of this key in run.json, or None."""
    try:
        return read_json(run_dir / "run.json")[key]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read_lines(path: Path) -> Lines:
    """Return the lines of a file in the order of their steps.

    If a step was written twice, because the run was resumed, the later line counts. Incomplete lines, which a killed
    process may leave, are skipped.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            value = of_kind(_finite(parse_json(line)), StepLine, "the line")
        except ValueError:
            continue
        value["loss"] = math.nan if value["loss"] is None else value["loss"]  # null: not finite
        by_step[value["step"]] = value
    return [by_step[step] for step in sorted(by_step)]


def last_step(run_dir: Path) -> tuple[int, float]:
    """Return the run's last step and the time when its line was written; (0, 0.0) if there is none.

    Only the end of the file is read.
    """
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            last_lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0, 0.0
    # The last line may be incomplete, and the first one may have been cut by the seek.
    for line in reversed(last_lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            value = parse_json(line)
            return int(value["step"]), float(value.get("time") or 0.0)
    return 0, 0.0


def _least_world(config: Config, steps: Lines) -> int | None:
    """Return the world size of a run with one data-parallel rank, or None for any other run.

    With one such rank no gradient is reduced, so the run's steps have no traffic of the axis dp.
    """
    reduces_gradients = any("dp" in axis.split("-") for line in steps for axis in line.get("comm", {}))
    return config.layout.least_world if steps and not reduces_gradients else None


def traffic_per_step(steps: Lines) -> dict[str, dict[str, float]]:
    """Return the mean calls and bytes per step of each axis, summed over all ranks."""
    axes: dict[str, dict[str, float]] = {}
    for line in steps:
        for axis, counts in line.get("comm", {}).items():
            into = axes.setdefault(axis, dict.fromkeys(COUNTS, 0.0))
            for key in into:
                into[key] += counts.get(key, 0)
    return {axis: {key: count / len(steps) for key, count in sums.items()} for axis, sums in axes.items()}
