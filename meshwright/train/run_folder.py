"""The folder of a run: the resolved config, one line per step, validation losses, TensorBoard events.

Torch is imported only for the events.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from meshwright.checkpoint.format import (
    DamagedCheckpoint,
    checkpoint_folder,
    list_checkpoints,
    read_index,
    was_restarted,
)
from meshwright.config.load import to_yaml
from meshwright.config.sections import Config
from meshwright.errors import UserError


def refuse_finished(config: Config, source: str | None = None) -> None:
    """Raises if `run.dir` can't take this run: it is no folder, or holds a run that has nothing left to do.

    Ranks that are started again, since one died after the last checkpoint, have nothing to do, and that is no mistake.
    """
    folder = Path(config.run.dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.dir={folder} is a file: name a folder")
    found = list_checkpoints(checkpoint_folder(config))
    if source is None and found and found[-1][0] >= config.train.steps and not was_restarted():
        try:
            read_index(found[-1][1])
        except DamagedCheckpoint:
            return  # the run goes on from the one before it
        if found[-1][0] == config.train.steps and _lacks_last_validation(folder, found[-1][0]):
            return
        raise UserError(
            f"run.dir={folder} holds a run that is complete at step {found[-1][0]}: raise train.steps to go on, "
            "or choose another folder"
        )


class RunFolder:
    """Written by one rank. Each line is flushed, so that a killed run keeps every step it finished."""

    def __init__(self, config: Config, world: int, step: int = 0, validates: bool = True) -> None:
        """`step` is the one that the run goes on from: lines of later steps, which will be trained again, move to
        lost.jsonl, so that the history has each step once."""
        self.path = Path(config.run.dir)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            notes = json.dumps({"world": world, "validates": validates})
            (self.path / "run.json").write_text(notes + "\n", encoding="utf-8")
            for name in ("metrics.jsonl", "validation.jsonl"):
                _set_lost_aside(self.path / name, step)
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._validation = (self.path / "validation.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"run.dir={self.path} can't be written: {error.strerror}") from None
        _make_writable(checkpoint_folder(config))
        self._events = _event_writer(self.path) if config.run.tensorboard else None

    def step(self, line: dict[str, Any]) -> None:
        with self._written():
            self._step(line)

    def _step(self, line: dict[str, Any]) -> None:
        _write(self._metrics, line)
        if self._events is not None:
            for key in ("loss", "grad_norm", "lr", "loss_scale", "tokens_per_s", "global_batch"):
                if line[key] is not None:
                    self._events.add_scalar(f"train/{key}", line[key], line["step"])
            for key, value in line.get("monitored", {}).items():
                self._events.add_scalar(f"monitored/{key}", value, line["step"])
            for axis, counts in line["comm"].items():
                self._events.add_scalar(f"comm_wire_bytes/{axis}", counts["wire_bytes"], line["step"])

    def validation(self, line: dict[str, Any]) -> None:
        with self._written():
            _write(self._validation, line)
            if self._events is not None:
                self._events.add_scalar("validation/loss", line["loss"], line["step"])

    def validated(self, step: int) -> bool:
        """Whether the validation after this step is written."""
        return step in _steps(self.path / "validation.jsonl")

    def close(self) -> None:
        with self._written():
            self._metrics.close()
            self._validation.close()
            if self._events is not None:
                self._events.close()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """A full disk is no bug."""
        try:
            yield
        except OSError as error:
            raise UserError(f"run.dir={self.path} can't be written: {error.strerror}") from None


def _make_writable(folder: Path) -> None:
    """Known before the first step, rather than at the first save."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".trial-{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UserError(f"checkpoints can't be written to {folder}: {error.strerror}") from None


def _steps(path: Path) -> set[int]:
    found = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found.add(json.loads(line)["step"])
    return found


def _lacks_last_validation(folder: Path, step: int) -> bool:
    """Whether a run was ended between its last save and the validation after it."""
    try:
        validates = json.loads((folder / "run.json").read_text(encoding="utf-8"))["validates"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return bool(validates) and step not in _steps(folder / "validation.jsonl")


def _set_lost_aside(path: Path, step: int) -> None:
    """Moves the lines after `step`, and a last one that a kill cut off, to lost.jsonl. Lost first, then the rest: a
    kill between the two repeats lines there and loses none."""
    if not path.exists():
        return
    kept: list[str] = []
    lost: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            (kept if json.loads(line)["step"] <= step else lost).append(line)
        except (ValueError, TypeError, KeyError):
            lost.append(line)
    if lost:
        with (path.parent / "lost.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lost)
        aside = path.with_name(path.name + ".part")
        aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        aside.replace(path)


def _write(file: TextIO, line: dict[str, Any]) -> None:
    """One line of strict JSON: a number that is not finite is null."""
    file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
    file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
