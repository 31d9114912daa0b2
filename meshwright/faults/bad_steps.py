"""Handles bad steps: steps whose loss or gradient is not finite, or far above those of the last steps.

A bad step makes no update (`losses.UpdateGate`). The weights are still those before it, so it can be computed again
from the same inputs: a step is a function of the weights, the seed and the samples consumed. If the second result is
good, the hardware of a rank failed the first time, and comparing the marks of both computations shows the rank and the
layer. If the second result is as bad, the cause is the data or the model, and the config says what happens."""

from __future__ import annotations

import json
import math
import socket
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from meshwright.checkpoint.resume import has_checkpoint, resume
from meshwright.checkpoint.save import Saver
from meshwright.config.faults import MIN_WINDOW, FaultsConfig
from meshwright.engine.batches import sample_ids
from meshwright.engine.compiling import blocks_one_by_one
from meshwright.engine.hooks import RolledBack
from meshwright.engine.marks import BACKWARD, FORWARD, TOLERANCE, Mark, MarkPlace, Marks, unit_places
from meshwright.engine.monitor import gather_bytes
from meshwright.engine.step import StepResult, Trainer
from meshwright.errors import UserError
from meshwright.record.run_folder import RunFolder
from meshwright.record.run_notes import BAD_STEP, FAULT, ROLLBACK, FaultNotes

# The deviation used for the bounds is at least this share of the median: losses vary little, and norms vary much.
LOSS_FLOOR, NORM_FLOOR = 0.02, 1.0
NORMAL = 1.4826  # The ratio of standard deviation to median absolute deviation in a normal distribution.

RepeatStep = Callable[[], StepResult]  # Computes a step once more.


class Window:
    """The losses and norms of the last steps, and the bounds that follow from them."""

    def __init__(self, config: FaultsConfig) -> None:
        self.factor = config.spike_factor
        self.losses: deque[float] = deque(maxlen=config.window)
        self.norms: deque[float] = deque(maxlen=config.window)

    def add(self, loss: float | None, norm: float | None) -> None:
        if loss is not None and norm is not None and math.isfinite(loss) and math.isfinite(norm):
            self.losses.append(loss)
            self.norms.append(norm)

    def bounds(self) -> tuple[float, float]:
        """Return the bounds of the loss and of the gradient norm; infinite until there are enough steps to compare."""
        if len(self.losses) < MIN_WINDOW:
            return math.inf, math.inf
        return _bound(self.losses, self.factor, LOSS_FLOOR), _bound(self.norms, self.factor, NORM_FLOOR)


def _bound(values: Sequence[float], factor: float, floor: float) -> float:
    """Return the median plus `factor` deviations, estimated from the median deviation, which ignores earlier spikes."""
    median = statistics.median(values)
    deviation = NORMAL * statistics.median(abs(value - median) for value in values)
    return median + factor * max(deviation, floor * abs(median))


def is_finite(result: StepResult) -> bool:
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)


def _is_close(a: StepResult, b: StepResult) -> bool:
    """Return True if two computations of a step gave the same result, up to an accelerator's order of additions."""
    return all(math.isclose(x, y, rel_tol=TOLERANCE) for x, y in ((a.loss, b.loss), (a.grad_norm, b.grad_norm)))


def why_bad(result: StepResult, bounds: tuple[float, float]) -> str:
    """Return a description of the step's bad number; empty if all its numbers are good."""
    if not math.isfinite(result.loss):
        return "the loss is not finite"
    if not math.isfinite(result.grad_norm):
        return "the gradient is not finite"
    if result.loss > bounds[0]:
        return f"the loss, {result.loss:.4g}, stands out from the last steps' (above {bounds[0]:.4g})"
    if result.grad_norm > bounds[1]:
        return f"the gradient's norm, {result.grad_norm:.4g}, stands out from the last steps' (above {bounds[1]:.4g})"
    return ""


class FaultPlace(NamedTuple):
    """The place of a fault: the ranks that it is attributed to, the machine of the first, and the first bad tensor."""

    ranks: tuple[int, ...] = ()
    host: str = ""
    found: MarkPlace | None = None

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if len(self.ranks) == 1 else None

    @property
    def words(self) -> str:
        if self.found is None:
            return "no rank and no layer can be named"
        return f"first in {self.found.words} on {self.who}"

    @property
    def who(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank} ({self.host})"
        shown = ", ".join(map(str, self.ranks[:8]))
        return f"one of ranks {shown}" + (f" and {len(self.ranks) - 8} more" if len(self.ranks) > 8 else "")


class BadSteps:
    """The state machine of bad steps. All ranks go through it together, since all have the same numbers."""

    def __init__(self, trainer: Trainer, folder: RunFolder | None, saver: Saver, notes: FaultNotes) -> None:
        self.trainer, self.folder, self.saver, self.notes = trainer, folder, saver, notes
        self.config = config = trainer.ctx.config.faults
        self.window = Window(config)
        # The last step that caused a rollback, and the number of rollbacks since the run last got beyond it.
        self.reached = self.went_back = 0
        gate, parallel = trainer.gate, trainer.data_parallel
        # With replicas there is no gate: they synchronise as they step, so a held update would block the others.
        gate.active = trainer.outer is None and (config.nonfinite or config.detects_spikes)
        gate.nonfinite = config.nonfinite and not trainer.loss_scale.active
        # A second computation gives another sum if the reducer keeps residuals, or if sums are applied late.
        has_state = any(True for _ in parallel.reducer_states()) or trainer.ctx.config.train.server.staleness > 0
        self.replays = config.replays and not has_state
        self.holds_spikes = config.detects_spikes and (self.replays or not config.trusts_replays)
        if config.locate and gate.active:
            trainer.marks = Marks(trainer.ctx, trainer.modules)
            parallel.reduces.append(trainer.marks.reduces)
        if gate.active and trainer.step_number:
            self._recall()

    def _recall(self) -> None:
        """Fill the window of a resumed run from its recorded steps, as if the run had not been interrupted."""
        lines = self.folder.last_steps(self.config.window) if self.folder else []
        local = json.dumps([(line["loss"], line["grad_norm"]) for line in lines if not line["skipped"]]).encode()
        # Only one rank knows the folder: take the one list that is not empty.
        by_rank = gather_bytes(self.trainer.ctx.mesh.world, local, self.trainer.ctx)
        for loss, norm in next((steps for text in by_rank if (steps := json.loads(text))), []):
            self.window.add(loss, norm)
        self._set_bounds(*self.window.bounds())

    def settle(self, result: StepResult, again: RepeatStep) -> StepResult:
        """Return the final result of a step. `again` computes the step once more. Raise `RolledBack` after a
        rollback."""
        # Use the bounds that decided whether it was held. If steps run ahead, the window has newer steps by now.
        bounds = result.bounds if self.holds_spikes or not self.config.detects_spikes else self.window.bounds()
        if result.held:
            self.trainer.gate.release()
            result = self._examine(result, again, bounds)
        elif (why := why_bad(result, bounds)) and is_finite(result) and self.trainer.gate.active:
            self.notes.add(BAD_STEP, f"{why}: trained, and not computed again", result.step)
        if not result.skipped:
            self.window.add(result.loss, result.grad_norm)
        self.went_back = 0 if result.step > self.reached else self.went_back
        self._set_bounds(*self.window.bounds())
        return result

    def _set_bounds(self, loss: float, norm: float) -> None:
        gate = self.trainer.gate
        gate.loss_bound, gate.norm_bound = (loss, norm) if self.holds_spikes else (math.inf, math.inf)

    def _examine(self, result: StepResult, again: RepeatStep, bounds: tuple[float, float]) -> StepResult:
        """Compute a held step again to find its cause. Return the result that counts."""
        why = why_bad(result, bounds)
        spike = is_finite(result)
        first = self._marks(result.step)
        if not self.replays:
            return self._data_or_model(result, f"{why}, and is not computed again", self._not_finite(first))

        # With `spike: tell`, a step that has about the same numbers again makes its update, so raise the bounds.
        if self.config.trusts_replays:
            self._set_bounds(*(x + abs(x) if spike else math.inf for x in (result.loss, result.grad_norm)))
        self.trainer.take_back(result)
        replayed = again()
        self.trainer.gate.release()
        same = spike and _is_close(result, replayed)
        passes = is_finite(replayed) and not replayed.held
        if passes and not same:
            return self._hardware(replayed, why, self._first_difference(first, self._marks(result.step)), bounds)
        if passes:
            verdict = "the same when it is computed again, so it is due to the data or the model"
            text = f"{why}; {verdict}; the update was made all the same{self._samples(replayed)}"
            self.notes.add(BAD_STEP, text, result.step)
            return replayed

        place = FaultPlace() if spike else self._diagnose(replayed)
        if self._is_of_rank(replayed, place):
            text = f"{why}, and again; with other ranks' samples too, {place.words}: its hardware is broken"
            self.notes.add(FAULT, text, result.step, rank=place.rank)
            self._stop(replayed, f"{text}: take its machine out of the run")
        return self._data_or_model(replayed, f"{why}, also when it is computed again: the data or the model", place)

    def _hardware(self, replayed: StepResult, why: str, place: FaultPlace, bounds: tuple[float, float]) -> StepResult:
        """Note a passing hardware fault: the step gave another result the second time, which makes its update."""
        is_now = "stands out too, but differently" if why_bad(replayed, bounds) else "is good"
        numbers = f"loss {replayed.loss:.6g}, norm {replayed.grad_norm:.4g}"
        text = f"{why}; computed again from the same inputs it {is_now} ({numbers}): a passing fault of the hardware"
        self.notes.fault(f"{text}, {place.words}", replayed.step, place.rank, layer=_layer(place))
        return replayed

    def _data_or_model(self, result: StepResult, text: str, place: FaultPlace) -> StepResult:
        """Handle a bad step that the data or the model caused as `faults.action` says: skip, roll back or stop."""
        where = f", {place.words}" if place.found else ""
        text = f"{text}{where}{self._samples(result, place)}"
        goes_back, stops = self.config.goes_back, self.config.stops
        if goes_back and self.went_back == self.config.max_skips:
            text, stops = f"{text}; the run has gone back {self.went_back} times since", True
        if stops:
            self.notes.add(BAD_STEP, f"{text}; the run stops", result.step, layer=_layer(place))
            self._stop(result, f"{text}: look at the samples and the learning rate, or set faults.action=skip")
        if goes_back and self._has_checkpoint():
            self._roll_back(result, text, place)
            raise RolledBack
        nowhere = " (there is no checkpoint to go back to)" if goes_back else ""
        self.notes.add(BAD_STEP, f"{text}; skipped{nowhere}", result.step, layer=_layer(place))
        return result

    def _stop(self, result: StepResult, text: str) -> None:
        """Save the state before the step, and end the run with an error."""
        self.trainer.take_back(result)
        if self.trainer.step_number and self.saver.saved_step != self.trainer.step_number:
            self.saver.save(last=True)
        self.saver.wait_for_commit()
        raise UserError(f"step {result.step}: {text}")

    def _has_checkpoint(self) -> bool:
        self.saver.wait_for_commit()
        return has_checkpoint(self.trainer)

    def _roll_back(self, result: StepResult, text: str, place: FaultPlace) -> None:
        """Load the newest checkpoint, and continue with the samples after the bad batch."""
        trainer = self.trainer
        trainer.data_parallel.weights.wait_for_gathers()
        resume(trainer, None)
        trainer.consumed = result.consumed + result.global_batch
        lost = self.folder.go_back(trainer.step_number) if self.folder else 0
        self.reached = max(self.reached, result.step)
        self.went_back = self.went_back + 1
        words = f"{text}; went back to step {trainer.step_number}, to continue with the samples after the batch"
        self.notes.add(ROLLBACK, words, result.step, layer=_layer(place), lost=lost)

    # Find the place of the fault.

    def _marks(self, step: int) -> Sequence[Mark]:
        return [] if self.trainer.marks is None else self.trainer.marks.steps.get(step, [])

    def _not_finite(self, marks: Sequence[Mark]) -> FaultPlace:
        return self._place(self.trainer.marks.not_finite(marks) if self.trainer.marks else None)

    def _first_difference(self, marks: Sequence[Mark], again: Sequence[Mark]) -> FaultPlace:
        return self._place(self.trainer.marks.first_difference(marks, again) if self.trainer.marks else None)

    def _place(self, found: MarkPlace | None) -> FaultPlace:
        """Gather the first bad mark of each rank. Return the earliest one in the step, with the ranks that have it."""
        ctx = self.trainer.ctx
        local = json.dumps([found, socket.gethostname()]).encode()
        with ctx.ledger.phase("metrics"):
            gathered = [json.loads(text) for text in gather_bytes(ctx.mesh.world, local, ctx)]
        by_rank = {rank: MarkPlace(*fields) for rank, (fields, _) in enumerate(gathered) if fields}
        if not by_rank:
            return FaultPlace()
        first = min(by_rank.values(), key=lambda mark: mark.sooner)
        ranks = tuple(rank for rank, mark in by_rank.items() if mark.sooner == first.sooner)
        return FaultPlace(ranks, gathered[ranks[0]][1], first)

    def _diagnose(self, result: StepResult) -> FaultPlace:
        """Compute the step once more to find the first bad tensor. The trainer's counters are restored afterwards."""
        trainer = self.trainer
        after = (self.trainer.step_number, self.trainer.consumed)
        trainer.take_back(result)
        found = first_bad(trainer)
        trainer.balance.forget()
        trainer.step_number, trainer.consumed = after
        return self._place(found)

    def _is_of_rank(self, result: StepResult, place: FaultPlace) -> bool:
        """Return True if the fault belongs to a rank rather than to its samples.

        Ranks exchange their samples for one more computation. The rank is at fault if its result is as bad with other
        samples, or if no rank's result is bad then.
        """
        batches = self.trainer.train_batches
        if not self.config.exchanges_samples or place.rank is None or self.trainer.ctx.mesh.samples.size == 1:
            return False
        batches.exchange(1)  # Each rank takes the samples of its neighbour.
        moved = self._diagnose(result)
        batches.exchange(0)
        return moved.found is None or moved.ranks == place.ranks

    def _samples(self, result: StepResult, place: FaultPlace | None = None) -> str:
        """Name the samples of the whole batch or, if `place` names one rank and micro-batch, of that micro-batch."""
        ctx = self.trainer.ctx
        samples: Sequence[int] = range(result.consumed, result.consumed + result.global_batch)
        if place is not None and place.found is not None and place.rank is not None and place.found.micro_batch >= 0:
            index = ctx.layout.coordinate(place.rank)["dp"]
            size = ctx.config.train.micro_batch
            samples = sample_ids(result.consumed, place.found.micro_batch, size, index, ctx.mesh.samples.size)
        many = f"samples {samples[0]} to {samples[-1]}" if len(samples) > 1 else f"sample {samples[0]}"
        return f", in {many}"


def _layer(place: FaultPlace) -> str | None:
    return None if place.found is None else place.found.words


def first_bad(trainer: Trainer) -> MarkPlace | None:
    """Return the first tensor of a step that is not finite on this rank, named by its module.

    The step is computed once more without an update, and the results and input gradients of every module are examined.
    This is slow, so it is done only after a step was bad twice. All ranks must call it together.
    """
    finder = _Finder(trainer)
    handle = register_module_forward_hook(finder.examine_module)
    try:
        # Hooks of modules inside a graph are not called.
        with torch.compiler.set_stance("force_eager"), blocks_one_by_one(trainer.modules):
            trainer.gradients()
    finally:
        handle.remove()
    # Weight gradients belong to no module's result, but marks cover them.
    if finder.found is None and trainer.marks is not None:
        return trainer.marks.not_finite(trainer.marks.steps[trainer.step_number + 1])
    return finder.found


class _Finder:
    """Finds the first tensor that is not finite among the results and input gradients of modules."""

    def __init__(self, trainer: Trainer) -> None:
        self.streams = trainer.ctx.parallel.streams
        self.found: MarkPlace | None = None
        self.places: dict[int, tuple[int, str]] = {}
        for unit, order, name, _ in unit_places(trainer.ctx, trainer.modules):
            for inner, part in unit.named_modules():
                self.places[id(part)] = order, f"{name}.{inner}" if inner else name

    def examine_module(self, module: nn.Module, given: Any, result: Any) -> None:
        """Examine the result of a module, and later its input gradients.

        Hooks of inner modules run before those of the modules around them, so the first one found is the innermost.
        """
        if id(module) not in self.places:
            return
        self._look(FORWARD, module, self.streams.where[1], *_tensors(result))
        for x in _tensors(given):
            if x.requires_grad:
                x.register_hook(partial(self._look, BACKWARD, module, self.streams.where[1]))

    def _look(self, direction: str, module: nn.Module, micro_batch: int, *xs: Tensor) -> None:
        if self.found is None and any(not bool(x.isfinite().all()) for x in xs):
            order, name = self.places[id(module)]
            self.found = MarkPlace(direction, order, name, micro_batch)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value.detach() if not value.requires_grad else value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
