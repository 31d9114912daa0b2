"""The section `run`: where a run is written, and what of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive, seconds_of
from meshwright.errors import UserError, either, nearest

LOGGER_NAMES = ("tensorboard", "wandb", "mlflow", "trackio", "csv")


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/default"
    log_every: int = 1
    eval_every: int = 0  # 0: only after the last step
    eval_samples: int = 0  # 0: four global batches
    tensorboard: bool = True
    loggers: tuple[str, ...] = ()  # where else numbers go: tensorboard, wandb, mlflow, trackio, csv
    layers_every: int = 50  # steps between the norms by layer in layers.jsonl; 0: none
    peak_tflops: float = 0.0  # dense rate of one device in the run's precision, for MFU; 0: by its name, where known
    time_limit: str = ""  # a time such as 3h50min, by whose end the run is saved and stopped; empty: none
    trace: bool = False  # write one step as it was measured to trace.json, which Perfetto opens
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"

    def __post_init__(self) -> None:
        positive("run", self, "log_every")
        not_negative("run", self, "eval_every", "eval_samples", "layers_every", "peak_tflops")
        for name in self.loggers:
            if name not in LOGGER_NAMES:
                raise UserError(f"run.loggers has '{name}'{nearest(name, LOGGER_NAMES)}: use {either(LOGGER_NAMES)}")
        if len(set(self.loggers)) < len(self.loggers):
            raise UserError(f"run.loggers={list(self.loggers)} names one twice: leave it out")
        if self.time_limit:
            seconds_of("run.time_limit", self.time_limit)
        if not self.dir:
            raise UserError("run.dir is empty: name a folder for the run")
