"""A hook that measures the first steps of a run, then chooses how it sends gradients (`comm.reduce.adaptive`)."""

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
from meshwright.engine.sharding.compression.making import begin_sum
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, Reducer
from meshwright.engine.step import Trainer
from meshwright.errors import notice
from meshwright.record.run_notes import write_event
from meshwright.spec.schedule.table import MEANING, Op
from meshwright.spec.schedule.trace import Recorder

# Steps before the measured ones, and measured steps. The first steps of a process are slower: they make objects that
# later steps reuse.
BEFORE, MEASURED = 3, 3
ROUNDS = 3  # Times that each sum is measured; the fastest counts.
FORWARD = MEANING[Op.FORWARD].letter


class ReducerChoice(Hook):
    """Measures the candidates and chooses one, once per run. All ranks agree on the figures, so they choose alike."""

    def __init__(self, trainer: Trainer, folder: Path | None) -> None:
        reducer = trainer.data_parallel.reducer
        self.trainer, self.folder = trainer, folder
        self.reducer = reducer if isinstance(reducer, AdaptiveReducer) and reducer.choice is None else None
        self.steps: list[float] = []  # Seconds of each measured step.
        self.rooms: list[float] = []  # Seconds of each measured step behind which communication can be hidden.
        self._taken = 0  # Steps that this process has trained.
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
        # The step was not recorded: it came too early, or another hook traced it.
        if recorder is None:
            return
        self.trainer.executor.recorder = None
        # Sums of gradients hide behind backward. From ZeRO stage 2 on, part of that time is waiting: it hides nothing.
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
        # `_max_over_ranks` takes the maximum over all ranks, so this is the minimum.
        room = -self._max_over_ranks(-room)
        step_s = self._max_over_ranks(statistics.median(self.steps))
        with ctx.ledger.phase("startup"):
            trials = [self._trial(candidate) for candidate in self.reducer.candidates]
        trial = best(trials, room, step_s)
        self.reducer.choose(trial.config)
        self.reducer = None
        if self.trainer.writes and self.folder is not None:
            text = words(trial, trials[0], room)
            seconds = {name_of(tried.config): [tried.seconds, tried.making] for tried in trials}
            write_event(self.folder, "reduce", text, step, choice=trial.config.kind, ratio=trial.config.ratio,
                        room_s=room, seconds=seconds)  # fmt: skip
            notice(text)

    def _trial(self, config: ReduceConfig) -> Trial:
        """Return the seconds that a step's sums take with one candidate.

        Only this rank's largest bucket is measured. Its time is scaled to the elements of all buckets.
        """
        assert self.reducer is not None
        buckets = [bucket for buffer in self.reducer.buffers for bucket in buffer.buckets]
        largest = max(buckets, key=lambda bucket: bucket.stop - bucket.start, default=None)
        times = 0.0
        if largest is not None:
            times = sum(bucket.stop - bucket.start for bucket in buckets) / (largest.stop - largest.start)
            # From ZeRO stage 2 on, gradients are reduced after every micro-batch.
            times *= self.trainer.micro_batches if largest.stage >= 2 else 1

        reducer: Reducer = PLAIN_REDUCER
        if config.compresses:
            # A separate reducer with empty residuals, so that the measurement does not change those of the run.
            reducer = tried = ExchangeReducer(replace(config, error_feedback="true"), 0)
            if largest is not None:
                tried.residuals = {largest: torch.zeros_like(self.reducer.residuals[largest])}
        seconds = self._measure_sum(reducer, largest, times, links=True)
        making = self._measure_sum(reducer, largest, times, links=False) if config.compresses else 0.0
        return Trial(config, seconds, min(making, seconds))

    def _measure_sum(self, reducer: Reducer, bucket: Bucket | None, times: float, links: bool) -> float:
        """Return the seconds of one sum of a bucket times `times`, on the rank where that takes longest.

        With `links` False, messages are made and read but not sent. A rank without a bucket (None) must call this
        too, since it takes part in the collectives that synchronise the ranks.
        """
        took = []
        for _ in range(ROUNDS):
            add_up = self._sum_of(reducer, bucket, links)
            self.trainer.ctx.device.synchronize()
            # This collective is a barrier: all ranks begin together.
            self._max_over_ranks(0.0)
            begin = time.perf_counter()
            add_up()
            took.append(time.perf_counter() - begin)
        return self._max_over_ranks(min(took) * times)

    def _sum_of(self, reducer: Reducer, bucket: Bucket | None, links: bool) -> Callable[[], None]:
        """Return a function that sums random gradients of a bucket; without a bucket, it does nothing."""
        if bucket is None:
            return lambda: None
        device = self.trainer.ctx.device
        groups = self.trainer.data_parallel.groups(bucket.buffer)
        grads = torch.zeros(bucket.stop - bucket.start, dtype=bucket.own_grads.dtype, device=device.torch).normal_()

        def run() -> None:
            begin_sum(reducer, bucket, grads, *groups, links=links).wait()
            device.synchronize()

        return run

    def _max_over_ranks(self, value: float) -> float:
        return self.trainer.ctx.mesh.world.max_over_ranks(value, self.trainer.ctx.device.torch)


def name_of(config: ReduceConfig) -> str:
    return f"{config.kind} {config.ratio:g}" if "ratio" in config.facts.keys else config.kind


def words(trial: Trial, plain: Trial, room: float) -> str:
    """Return the sentence that explains the choice.

    For example `gradients are sent as topk 0.05: plain sums take 1.2 s of a step, of which 0.3 s can be hidden; these
    take 0.1 s, and 0.02 s to be made and read`.
    """
    before = f"plain sums take {plain.seconds:.3g} s of a step, of which {min(room, plain.seconds):.3g} s can be hidden"
    if not trial.config.compresses:
        return f"gradients are sent as they are: {before}"
    these = f"these take {trial.seconds - trial.making:.3g} s, and {trial.making:.3g} s to be made and read"
    return f"gradients are sent as {name_of(trial.config)}: {before}; {these}"
