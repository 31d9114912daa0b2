"""The folder of a run: the resolved config, one line a step, validation losses, TensorBoard events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from meshwright.config.load import to_yaml
from meshwright.config.sections import Config
from meshwright.errors import UserError


def refuse_used(config: Config) -> None:
    """Raises if `run.dir` can't take a new run."""
    folder = Path(config.run.dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.dir={folder} is a file: name a folder")
    for name in ("config.yaml", "metrics.jsonl"):
        if (folder / name).exists():
            raise UserError(f"run.dir={folder} already holds a run: choose another folder or remove it")


class RunFolder:
    """Written by one rank. Each line is flushed, so that a killed run keeps every step it finished."""

    def __init__(self, config: Config, world: int) -> None:
        refuse_used(config)
        self.path = Path(config.run.dir)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            (self.path / "run.json").write_text(json.dumps({"world": world}) + "\n", encoding="utf-8")
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._validation = (self.path / "validation.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"run.dir={self.path} can't be written: {error.strerror}") from None
        self._events = _event_writer(self.path) if config.run.tensorboard else None

    def step(self, line: dict[str, Any]) -> None:
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
        _write(self._validation, line)
        if self._events is not None:
            self._events.add_scalar("validation/loss", line["loss"], line["step"])

    def close(self) -> None:
        self._metrics.close()
        self._validation.close()
        if self._events is not None:
            self._events.close()


def _write(file: TextIO, line: dict[str, Any]) -> None:
    """One line of strict JSON: a number that is not finite is null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    file.write(json.dumps(finite) + "\n")
    file.flush()


def _event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
