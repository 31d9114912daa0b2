"""The main training loop, and the hooks that do everything else around its steps: recording, saving, validating, ..."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

from meshwright.checkpoint.memory_copy import Keepers, MemoryCopies
from meshwright.checkpoint.save import Saver
from meshwright.config.sections import CheckpointConfig
from meshwright.engine.hooks import Hook, RolledBack, Watcher
from meshwright.engine.monitor import gather_bytes
from meshwright.engine.step import LaunchedStep, StepResult, Trainer
from meshwright.errors import UserError, notice
from meshwright.launch.processes import LOST
from meshwright.launch.signals import StopRequests
from meshwright.outside import of_kind, parse_json
from meshwright.record.rank_figures import RankFile
from meshwright.record.run_folder import RunFolder, is_validated
from meshwright.record.run_notes import FaultNotes, time_between_failures, write_event
from meshwright.record.speed import Speed
from meshwright.spec.schedule.trace import Recorder, trace_json, unpacked

SAVING_SHARE = 0.01  # With checkpoint.every=auto, saving may take this share of a run's time.
MAX_FLIGHTS = 256  # Up to this many ranks, a traced step writes the last calls of every rank.
# `run.trace` traces this step of a process. The first steps are not typical: they make objects that later steps reuse.
TRACED_STEP = 3


# Takes a result and a function that computes the step once more. Returns the result that counts.
SettleStep = Callable[[StepResult, Callable[[], StepResult]], StepResult]


class LaunchAhead:
    """Launches step N + 1 before the host waits for step N's numbers.

    `pauses(step)` returns True if a hook needs the trainer as that step leaves it (to validate or save): the next step
    then waits. `settle` receives every result and may have a step computed again. While a step is held back, no step
    makes an update until `settle` returns.
    """

    def __init__(self, trainer: Trainer, pauses: Callable[[int], bool], settle: SettleStep | None = None) -> None:
        self.trainer, self.pauses, self.settle = trainer, pauses, settle
        self._waiting: LaunchedStep | None = None
        self._stop = self._save = False

    def next(self, stop_requested: bool, save_requested: bool = False) -> StepResult:
        """Return the next step's result.

        If the following step already runs, a request to stop or save in this result is moved to that step's result. So
        a result that asks to stop or save is always the trainer's newest step.
        """
        current = self._waiting or self.trainer.launch(stop_requested, save_requested)
        self._waiting = None
        if self.trainer.runs_ahead and not (self._stop or self._save or self.pauses(current.result.step)):
            self._waiting = self.trainer.launch(stop_requested, save_requested)
        result = self.trainer.read(current)
        if self.settle is not None:
            if result.held:
                self._drop()
            result = self.settle(result, partial(self._again, stop_requested, save_requested))
        stop = self._stop or result.stop
        save = self._save or result.save
        newest = self._waiting is None
        result.stop, result.save = stop and newest, save and newest
        self._stop, self._save = stop, save and not newest
        return result

    def _again(self, stop_requested: bool, save_requested: bool) -> StepResult:
        return self.trainer.read(self.trainer.launch(stop_requested, save_requested))

    def _drop(self) -> None:
        """Discard a step that was launched after a held one, and so made no update. Keep its requests."""
        if self._waiting is not None:
            dropped = self.trainer.read(self._waiting)
            self._waiting = None
            self.trainer.take_back(dropped)
            self._stop, self._save = self._stop or dropped.stop, self._save or dropped.save


def train(trainer: Trainer, hooks: Sequence[Hook], requests: StopRequests, settle: SettleStep | None = None) -> None:
    """Train from the trainer's present step to the last one, or until a rank is asked to stop."""
    step, steps = trainer.step_number, trainer.ctx.config.train.steps
    ahead = LaunchAhead(trainer, lambda n: any(hook.pauses(n) for hook in hooks), settle)
    StopRequests.has_work = stopped = False
    while step < steps and not stopped:
        for hook in hooks:
            hook.before(step + 1)
        try:
            result = ahead.next(requests.seen, any(hook.wants_save() for hook in hooks))
        except RolledBack:
            step = trainer.step_number
            continue
        step, stopped = result.step, result.stop
        StopRequests.has_work = True
        for hook in hooks:
            hook.after(result, step == steps or stopped)
    StopRequests.has_work = True


class Recording(Hook):
    """Writes each step's line and notifies the watcher, on the rank that writes the run's folder."""

    def __init__(self, folder: RunFolder | None, watcher: Watcher | None, speed: Speed | None, world: int) -> None:
        self.folder, self.watcher, self.speed, self.world = folder, watcher, speed, world
        self.ranks = RankFile(folder.path) if folder else None

    def after(self, result: StepResult, last: bool) -> None:
        if self.speed:
            result.tflops, result.mfu = self.speed.of(result.global_batch, result.step_time_s, self.world)
        if self.folder:
            self.folder.step(result.line())
        if self.ranks and result.ranks:
            self.ranks.add(result.step, result.ranks, last)
        if self.watcher:
            self.watcher.stepped(result)


class GivingUp(Hook):
    """Ends a run that has skipped `max_skips` steps in a row."""

    def __init__(self, max_skips: int) -> None:
        self.skipped, self.max_skips = 0, max_skips

    def after(self, result: StepResult, last: bool) -> None:
        self.skipped = self.skipped + 1 if result.skipped else 0
        if self.skipped == self.max_skips:
            fix = "lower optimizer.lr, lengthen lr.warmup or use another train.precision"
            if not result.counted:
                fix = "check data.mask_eod, data.eod and the data's loss masks"
            raise UserError(f"{result.why_skipped} in {self.skipped} steps in a row, up to step {result.step}: {fix}")


class SaveHook(Hook):
    """Saves checkpoints after a number of steps or a time, and at the end.

    The rank that writes the run measures the time. Its request reaches the other ranks with the step's counts. With
    `checkpoint.every=auto`, saving may take a hundredth of the time. If the run has failed before, the interval is at
    most sqrt(2 x stall of a save x time between failures), which is optimal according to Young and Daly.
    """

    def __init__(self, saver: Saver, config: CheckpointConfig) -> None:
        self.saver, self.steps, self.seconds = saver, config.every_steps, config.every_seconds
        self.share = SAVING_SHARE if config.chooses_times else math.inf
        writes = config.chooses_times and saver.trainer.writes
        self.between_failures = time_between_failures(saver.trainer.ctx.config.run.dir) if writes else math.inf
        self.saved_at = time.monotonic()
        self.noted_step: int | None = None  # The last save that has an event.

    def pauses(self, step: int) -> bool:
        return self.steps > 0 and step % self.steps == 0

    def wants_save(self) -> bool:
        elapsed = time.monotonic() - self.saved_at
        if self.between_failures < math.inf and self.saver.blocked_s:
            best = math.sqrt(2 * self.saver.blocked_s * self.between_failures)
            return elapsed >= min(self.seconds, best) and not self.saver.is_writing
        due = 0 < self.seconds <= elapsed
        return due and self.saver.blocked_s <= self.share * elapsed and not self.saver.is_writing

    def after(self, result: StepResult, last: bool) -> None:
        self._note()
        if last or result.save or self.pauses(result.step):
            self.saved_at = time.monotonic()
            self.saver.save(last)
        if last:
            # Wait for the last checkpoint here, before any later hook can fail.
            self.saver.wait_for_commit()
            self._note()

    def _note(self) -> None:
        """Write an event for a save that has become complete since the last step."""
        saver = self.saver
        if saver.trainer.writes and saver.complete_step not in (None, self.noted_step):
            self.noted_step = saver.complete_step
            words = f"saved in {saver.took_s:.2g} s, for {saver.blocked_s:.2g} s of which training waited"
            folder = saver.trainer.ctx.config.run.dir
            write_event(folder, "checkpoint", words, self.noted_step, took_s=saver.took_s, blocked_s=saver.blocked_s)


class TooManyFaults(Hook):
    """Ends a run if one rank had too many faults, with an error that names it. All trained steps are saved first."""

    def __init__(self, notes: FaultNotes, saver: Saver) -> None:
        self.notes, self.saver = notes, saver

    def pauses(self, step: int) -> bool:
        """Pause if the run is about to end.

        A step launched after this one would be saved with its update but without its line in the metrics.
        """
        return self.notes.over is not None

    def after(self, result: StepResult, last: bool) -> None:
        if self.notes.over is not None:
            if self.saver.saved_step != result.step:
                self.saver.save(last=True)
            self.saver.wait_for_commit()
            raise self.notes.over


class TimeLimit(Hook):
    """Asks to stop early enough that the last step is saved before `run.time_limit`, if steps and saves take no longer
    than they did so far.
    """

    def __init__(self, requests: StopRequests, saver: Saver, limit: float, began: float) -> None:
        self.requests = requests
        self.saver = saver
        self.end = began + limit if limit else math.inf
        self.longest = 0.0  # The longest step so far, except for the first one, which is not typical.
        self.seen = 0

    def before(self, step: int) -> None:
        # Two steps: the next one may already be running ahead.
        due = time.monotonic() + 2 * self.longest + self.saver.took_s >= self.end
        if due and self.saver.trainer.writes and not self.requests.seen:
            notice("the end of run.time_limit is near: saves after this step")
            self.requests.request()

    def after(self, result: StepResult, last: bool) -> None:
        self.seen += 1
        if self.seen > 1:
            self.longest = max(self.longest, result.step_time_s)


class ValidationHook(Hook):
    """Computes the validation loss every `run.eval_every` steps and after the run's last step."""

    def __init__(self, trainer: Trainer, folder: RunFolder | None, watcher: Watcher | None) -> None:
        self.trainer, self.folder, self.watcher = trainer, folder, watcher
        config = trainer.ctx.config
        self.steps, self.every = config.train.steps, config.run.eval_every

    def pauses(self, step: int) -> bool:
        return step == self.steps or (self.every > 0 and step % self.every == 0)

    def after(self, result: StepResult, last: bool) -> None:
        if self.pauses(result.step):
            self.validate()

    def catch_up(self) -> None:
        """Validate before the first step, if `run.eval_first` asks for it, or after a resume, if the run had ended
        between a save and the validation that belongs to it."""
        ctx, step = self.trainer.ctx, self.trainer.step_number
        if self.pauses(step) if step else ctx.config.run.eval_first:
            missing = self.folder is not None and not is_validated(self.folder.path, step)
            # Only one rank knows the folder, and all must take part in a validation.
            if ctx.mesh.world.max_over_ranks(float(missing), ctx.device.torch):
                self.validate()

    def validate(self) -> None:
        line = self.trainer.validate()
        if line and self.folder:
            self.folder.validation(line)
        if line and self.watcher:
            self.watcher.validated(line)


class TracedStep(Hook):
    """Traces one step for `run.trace`, in the format of `meshwright simulate --trace`. `number` is the step; 0: none.

    One rank of each pipeline stage records. The rank that writes the run's folder gathers their spans. Times are those
    of the machines' clocks, so the clocks of several machines must agree.
    """

    def __init__(self, trainer: Trainer) -> None:
        ctx = trainer.ctx
        self.trainer = trainer
        self.path = Path(ctx.config.run.dir) / "trace.json"
        on, steps = ctx.config.run.trace, ctx.config.train.steps
        self.number = min(trainer.step_number + TRACED_STEP, steps) if on else 0
        self.records = on and ctx.mesh.is_first("dp", "cp", "tp")

    def pauses(self, step: int) -> bool:
        """Pause around the traced step, so that no other step runs at the same time."""
        return self.number in (step, step + 1)

    def before(self, step: int) -> None:
        if step == self.number and self.records:
            self.trainer.executor.recorder = Recorder(self.trainer.ctx.pp_rank, self.trainer.ctx.device)

    def after(self, result: StepResult, last: bool) -> None:
        """Write the trace. If the file can't be written, warn and continue: that is no reason to stop a run."""
        ctx, recorder = self.trainer.ctx, self.trainer.executor.recorder
        if result.step == self.number and ctx.layout.world <= MAX_FLIGHTS:
            self._write_flight()
        if result.step != self.number or recorder is None:
            return
        self.trainer.executor.recorder = None
        with ctx.ledger.phase("metrics"):
            everyone = gather_bytes(ctx.mesh.pp, recorder.packed(), ctx)
        if not self.trainer.writes:
            return
        try:
            name = f"{self.path.parent.name}, step {self.number}"
            self.path.write_text(trace_json(unpacked(everyone), name, step=self.number), encoding="utf-8")
        except OSError as error:
            warnings.warn(f"the step's trace can't be written to {self.path}: {error.strerror}", stacklevel=2)

    def _write_flight(self) -> None:
        """Write this rank's last calls, as the watchdog does after a hang."""
        ctx = self.trainer.ctx
        folder = self.path.parent / "flight"
        record = {"rank": ctx.rank, "step": self.number, "last": [call.to_plain() for call in ctx.mesh.flight.last]}
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{ctx.rank}.json").write_text(json.dumps(record), encoding="utf-8")


class MemorySaving(Hook):
    """Copies the state into the memory of keeper processes every `checkpoint.memory_every` steps.

    If the launcher has started no keepers, it says so once and makes no copies.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.every = trainer.ctx.config.checkpoint.memory_every
        keepers = Keepers.from_environment() if self.every else None
        self.copies = MemoryCopies(trainer, keepers) if keepers else None
        if self.every and keepers is None and trainer.writes:
            notice("meshwright: this launcher has no keepers: checkpoint.memory_every makes no copies")

    def pauses(self, step: int) -> bool:
        return self.copies is not None and step % self.every == 0

    def after(self, result: StepResult, last: bool) -> None:
        if self.copies and self.pauses(result.step) and not last:
            self.copies.save()


class Loss(TypedDict):
    """The times of a loss of ranks, from the launcher: when the last step was written, and when the loss was seen."""

    last: float
    seen: float


class RecoveryTimer(Hook):
    """Writes one event after the first step that follows a loss of ranks.

    It gives the seconds from the last finished step until the loss was seen, from there until the ranks had started
    again, from there until they had loaded their state, and of the first step.
    """

    def __init__(self, folder: str, ready: float, loaded: float, source: str, env: Mapping[str, str] = os.environ):
        """Take the times at which this rank began (`ready`) and finished (`loaded`) loading, and the state's source."""
        self.folder, self.ready, self.loaded, self.source = folder, ready, loaded, source
        self.loss = _loss(env)

    def after(self, result: StepResult, last: bool) -> None:
        if self.loss is None:
            return
        now = time.time()
        spans = {
            "detection_s": self.loss["seen"] - self.loss["last"], "restart_s": self.ready - self.loss["seen"],
            "load_s": self.loaded - self.ready, "step_s": now - self.loaded,
        }  # fmt: skip
        spans = {name: round(max(0.0, seconds), 3) for name, seconds in spans.items()}
        words = (
            f"back {now - self.loss['last']:.1f} s after the last step: the loss was seen after "
            f"{spans['detection_s']:.1f} s, the ranks started in {spans['restart_s']:.1f} s, loaded step "
            f"{result.step - 1} from {self.source} in {spans['load_s']:.1f} s and trained in {spans['step_s']:.1f} s"
        )
        notice(words)
        write_event(self.folder, "recovered", words, result.step, source=self.source, **spans)
        self.loss = None


def _loss(env: Mapping[str, str]) -> Loss | None:
    """Read the loss that the launcher noted in the environment; None if these ranks were not restarted after one."""
    try:
        loss: Loss = of_kind(parse_json(env[LOST]), Loss, LOST)
    except (KeyError, ValueError):
        return None
    return loss


class GarbageCollection(Hook):
    """Collects garbage after every `every`-th step on all ranks and, as a context manager, at no other time.

    With `every` 0, Python decides. Python collects after a number of allocations, so each rank would do it at a
    different moment and all others would wait for it. Objects built before training live as long as the run, so they
    are frozen: no collection examines them again.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._was_enabled = self._was_frozen = False

    def __enter__(self) -> GarbageCollection:
        if self.every:
            self._was_enabled = gc.isenabled()
            self._was_frozen = gc.get_freeze_count() > 0
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the collector's settings: the program that called `pretrain` may continue after it."""
        if not self.every:
            return
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after(self, result: StepResult, last: bool) -> None:
        if self.every and result.step % self.every == 0:
            gc.collect()
