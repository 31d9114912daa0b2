"""The main loop: step after step, and what happens beside them. Each of these things is a hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshwright.checkpoint.save import Saver
from meshwright.errors import UserError
from meshwright.train.ahead import Ahead
from meshwright.train.context import Context
from meshwright.train.run_folder import RunFolder
from meshwright.train.signals import StopRequests
from meshwright.train.step import StepResult, Trainer

MAX_SKIPPED_STEPS = 25  # in a row, after which a run gives up


class Hook:
    """Something that happens beside training. Every rank has the same hooks, called in one order, so a hook may
    communicate."""

    def pauses(self, step: int) -> bool:
        """Whether the hook needs the trainer as this step leaves it: then the next one is not begun before."""
        return False

    def before(self, step: int) -> None:
        """Called before a step is begun, or, if the loop runs ahead, before its result is waited for."""

    def after(self, result: StepResult, last: bool) -> None:
        """Called with each step's result; `last` says that no further step will follow."""


class Watcher(Protocol):
    """Somebody who looks at a run on the rank that writes it: a progress display, a test."""

    def started(self, ctx: Context) -> None: ...
    def stepped(self, result: StepResult) -> None: ...
    def validated(self, line: Mapping[str, Any]) -> None: ...
    def finished(self) -> None: ...


def train(trainer: Trainer, hooks: Sequence[Hook], requests: StopRequests) -> None:
    """Trains from where the trainer stands to the last step, or until somebody asks to stop."""
    step, steps = trainer.step_number, trainer.ctx.config.train.steps
    ahead = Ahead(trainer, lambda n: any(hook.pauses(n) for hook in hooks))
    stopped = False
    while step < steps and not stopped:
        for hook in hooks:
            hook.before(step + 1)
        result = ahead.next(requests.seen)
        step, stopped = result.step, result.stop
        for hook in hooks:
            hook.after(result, step == steps or stopped)


class Recording(Hook):
    """Writes each step's line, on the rank that writes, and tells the watcher."""

    def __init__(self, folder: RunFolder | None, watcher: Watcher | None) -> None:
        self.folder, self.watcher = folder, watcher

    def after(self, result: StepResult, last: bool) -> None:
        if self.folder:
            self.folder.step(result.line())
        if self.watcher:
            self.watcher.stepped(result)


class GivingUp(Hook):
    """Ends a run that only skips steps."""

    def __init__(self) -> None:
        self.skipped = 0

    def after(self, result: StepResult, last: bool) -> None:
        self.skipped = self.skipped + 1 if result.skipped else 0
        if self.skipped == MAX_SKIPPED_STEPS:
            fix = "lower optimizer.lr, lengthen lr.warmup or use another train.precision"
            if not result.tokens:
                fix = "check data.mask_eod, data.eod and the data's loss masks"
            raise UserError(f"{result.why_skipped} in {self.skipped} steps in a row, up to step {result.step}: {fix}")


class Saving(Hook):
    """Checkpoints, every so many steps and at the end."""

    def __init__(self, saver: Saver, every: int) -> None:
        self.saver, self.every = saver, every

    def pauses(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def after(self, result: StepResult, last: bool) -> None:
        if last or self.pauses(result.step):
            self.saver.save(last)
        if last:
            self.saver.committed()  # before anything else can fail


class Validating(Hook):
    """The validation loss, every so many steps and after the run's last one."""

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
        """After a resume: validates if the run was ended between saving and validating."""
        ctx, step = self.trainer.ctx, self.trainer.step_number
        if step and self.pauses(step):
            missing = self.folder is not None and not self.folder.validated(step)
            if ctx.mesh.world.agreed(float(missing), ctx.device.torch):
                self.validate()

    def validate(self) -> None:
        line = self.trainer.validate()
        if line and self.folder:
            self.folder.validation(line)
        if line and self.watcher:
            self.watcher.validated(line)
