"""The hook that lets a run choose how it sends gradients, after its first steps (`comm.reduce.adaptive`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from meshwright.config.comm import ReduceConfig
from meshwright.engine.hooks import Hook
from meshwright.engine.result import StepResult
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.compression.adaptive import AdaptiveReducer, Trial, best
from meshwright.engine.sharding.compression.exchange import ExchangeReducer
from meshwright.engine.sharding.compression.making import summed
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, Reducer
from meshwright.engine.step import Trainer
from meshwright.errors import notice
from meshwright.record.run_notes import write_event
from meshwright.spec.schedule.table import MEANING, Op
from meshwright.spec.schedule.trace import Recorder

BEFORE, MEASURED = 3, 3  # steps of a process that are not measured, which make what later ones reuse; and that are
ROUNDS = 3  # of each sum
FORWARD = MEANING[Op.FORWARD].letter


class Adapting(Hook):
    """Measures, and chooses once: all ranks find the same numbers, so they choose alike."""

    def __init__(self, trainer: Trainer, folder: Path | None) -> None:
        reducer = trainer.data_parallel.reducer
        self.trainer, self.folder = trainer, folder
        self.reducer = reducer if isinstance(reducer, AdaptiveReducer) and reducer.choice is None else None
        self.steps: list[float] = []
        self.rooms: list[float] = []
        self._taken = 0
        self._recorder: Recorder | None = None

    def pauses(self, step: int) -> bool:
        return self.reducer is not None

    def before(self, step: int) -> None:
        if self.reducer is not None and self._taken >= BEFORE and self.trainer.executor.recorder is None:
            self._recorder = Recorder(self.trainer.ctx.pp_rank, self.trainer.ctx.device)
            self.trainer.executor.recorder = self._recorder

    def after(self, result: StepResult, last: bool) -> None:
        if self.reducer is None:
            return
        self._taken += 1
        recorder, self._recorder = self._recorder, None
        if recorder is None:  # somebody else may trace this step
            return
        self.trainer.executor.recorder = None
        spans = (s for s in recorder.spans() if s.track == "compute" and not s.name.startswith(FORWARD))
        waited = sum(self.trainer.ctx.ledger.waited.values()) if self.trainer.data_parallel.stage >= 2 else 0.0
        self.rooms.append(max(0.0, sum(span.end - span.start for span in spans) - waited))
        self.steps.append(result.step_time_s)
        if len(self.steps) == MEASURED and not last:
            self._choose(result.step)

    def _choose(self, step: int) -> None:
        assert self.reducer is not None
        ctx = self.trainer.ctx
        room = statistics.median(self.rooms) if ctx.config.comm.overlap.gradients else 0.0
        room, step_s = -self._agreed(-room), self._agreed(statistics.median(self.steps))
        with ctx.ledger.phase("startup"):
            trials = [self._trial(each) for each in self.reducer.candidates]
        trial = best(trials, room, step_s)
        self.reducer.choose(trial.config)
        self.reducer = None
        if self.trainer.writes and self.folder is not None:
            text = words(trial, trials[0], room)
            seconds = {name_of(each.config): [each.seconds, each.making] for each in trials}
            write_event(self.folder, "reduce", text, step, choice=trial.config.kind, ratio=trial.config.ratio,
                        room_s=room, seconds=seconds)  # fmt: skip
            notice(text)

    def _trial(self, config: ReduceConfig) -> Trial:
        """Returns the seconds of one candidate's sums in a step, by those of this rank's largest bucket."""
        assert self.reducer is not None
        buckets = [bucket for buffer in self.reducer.buffers for bucket in buffer.buckets]
        bucket = max(buckets, key=lambda each: each.stop - each.start, default=None)
        times = 0.0
        if bucket is not None:
            times = sum(each.stop - each.start for each in buckets) / (bucket.stop - bucket.start)
            times *= self.trainer.micro_batches if bucket.stage >= 2 else 1
        reducer: Reducer = PLAIN_REDUCER
        if config.kind != "plain":
            reducer = trying = ExchangeReducer(replace(config, error_feedback="true"), 0)
            if bucket is not None:
                trying.residuals = {bucket: torch.zeros_like(self.reducer.residuals[bucket])}
        seconds = self._timed(reducer, bucket, times, links=True)
        making = self._timed(reducer, bucket, times, links=False) if config.kind != "plain" else 0.0
        return Trial(config, seconds, min(making, seconds))

    def _timed(self, reducer: Reducer, bucket: Bucket | None, times: float, links: bool) -> float:
        """Returns the seconds of so many sums of a bucket on the rank where they take longest. A rank that has nothing
        to compress (None) takes part in the agreements all the same."""
        took = []
        for _ in range(ROUNDS):
            add_up = self._sum_of(reducer, bucket, links)
            self.trainer.ctx.device.synchronize()
            self._agreed(0.0)  # all begin together
            begin = time.perf_counter()
            add_up()
            took.append(time.perf_counter() - begin)
        return self._agreed(min(took) * times)

    def _sum_of(self, reducer: Reducer, bucket: Bucket | None, links: bool) -> Callable[[], None]:
        """Returns what sums random gradients of a bucket; where there is none, what does nothing."""
        if bucket is None:
            return lambda: None
        device, groups = self.trainer.ctx.device, self.trainer.data_parallel.groups(bucket.buffer)
        grads = torch.zeros(bucket.stop - bucket.start, dtype=bucket.own_grads.dtype, device=device.torch).normal_()

        def run() -> None:
            summed(reducer, bucket, grads, *groups, links=links).wait()
            device.synchronize()

        return run

    def _agreed(self, value: float) -> float:
        return self.trainer.ctx.mesh.world.agreed(value, self.trainer.ctx.device.torch)


def name_of(config: ReduceConfig) -> str:
    return f"{config.kind} {config.ratio:g}" if config.kind == "topk" else config.kind


def words(trial: Trial, plain: Trial, room: float) -> str:
    """Returns e.g. `gradients are sent as topk 0.05: plain sums would take 1.2 s of a step, of which 0.3 s are hidden,
    these take 0.1 s and 0.02 s to be made`."""
    would = f"plain sums take {plain.seconds:.3g} s of a step, of which {min(room, plain.seconds):.3g} s can be hidden"
    if trial.config.kind == "plain":
        return f"gradients are sent as they are: {would}"
    these = f"these take {trial.seconds - trial.making:.3g} s, and {trial.making:.3g} s to be made and read"
    return f"gradients are sent as {name_of(trial.config)}: {would}; {these}"
