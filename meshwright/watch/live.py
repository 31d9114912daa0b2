"""A run in the terminal: a live block that is redrawn in place, or one plain line every few steps if there is no
terminal. Nothing here imports torch, and nothing here may stop a run: if the terminal goes away, only the display
ends."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.config.sections import Config
from meshwright.config.step_schedules import consumed_after
from meshwright.errors import plural
from meshwright.record.speed import RECENT, Pace, pace_of
from meshwright.show.terminal import console_for, has_colour, is_terminal, printable, show
from meshwright.show.units import clock, count, decimals, percent, seconds
from meshwright.watch.run_parts import BAD, RunView, head, lined, phase_bar, rank_words, rate_words, sparkline

if TYPE_CHECKING:
    from meshwright.engine.context import Context
    from meshwright.engine.step import StepResult

REDRAWS_PER_SECOND = 4
SPARKS = 40
LABEL_WIDTH = 9  # columns before the values of the live block
LEAST_BAR = 8  # columns that a bar or the curve of losses needs beside the words of its line
HEAD_WIDTH = 200  # columns of a run's header in a file
QUIET_S = 10.0  # after which a first step that is still computed gets a line; the next comes after twice the time


class Display:
    """A `Watcher` that shows a run on `stream`. Use it as a context manager, so that an exception leaves the terminal
    as it was; otherwise the terminal is restored when the process ends."""

    def __init__(self, config: Config, world: int, stream: TextIO | None = None) -> None:
        self.config, self.world = config, world
        self.stream = sys.stderr if stream is None else stream
        self.terminal, self.colour = is_terminal(self.stream), has_colour(self.stream)
        self.console = console_for(self.stream, None if self.terminal else HEAD_WIDTH)
        self.steps = config.train.steps
        self.samples = consumed_after(config, self.steps)
        self.last: StepResult | None = None
        self.losses: deque[float] = deque(maxlen=SPARKS)
        # Of the last steps of this process: number among them, tokens, seconds, and when it ended.
        self.steps_seen: deque[tuple[float, float, float, float]] = deque(maxlen=RECENT + 1)
        self.done = 0  # steps of this process
        self.consumed = self.skipped = 0
        self.valid: Mapping[str, Any] | None = None
        self.validating = False
        self.begin = time.monotonic()
        self.live: Live | None = None
        self._heard = threading.Event()  # set once the first step has ended, or the display
        # Guards the figures, which the redrawing thread reads. It must not be held while printing: rich holds a lock of
        # its own while its thread waits for this one, so that would deadlock.
        self._lock = threading.Lock()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def started(self, ctx: Context | None = None) -> None:
        self.begin = time.monotonic()
        device = getattr(getattr(ctx, "device", None), "kind", "")
        show(self.console, head(self.config, self.world, self.console.width, device))
        if self.terminal:
            ours = self.stream is sys.stderr  # rich then prints other output above the block
            self.live = Live(
                console=self.console, get_renderable=self.block, refresh_per_second=REDRAWS_PER_SECOND,
                vertical_overflow="crop", redirect_stderr=ours, redirect_stdout=ours and is_terminal(sys.stdout),
            )  # fmt: skip
            atexit.register(self.close)
            self.live.start(refresh=True)
        else:
            threading.Thread(target=self._tell_of_waiting, daemon=True).start()

    def _tell_of_waiting(self) -> None:
        """Says, without a terminal that would show it, that the first step is being computed."""
        quiet = QUIET_S
        while not self._heard.wait(quiet):
            quiet *= 2
            self._print(f"{self._first_step()} for {clock(time.monotonic() - self.begin)}")

    def _first_step(self) -> str:
        return f"computing the first step, of up to {plural(self.config.train.global_batch, 'sample')},"

    def stepped(self, result: StepResult) -> None:
        self._heard.set()
        with self._lock:
            if self.last is None and result.step > 1:
                self.consumed = consumed_after(self.config, result.step - 1)
            self.last = result
            self.losses.append(math.nan if result.skipped else result.loss)
            self.done += 1
            self.steps_seen.append((self.done, result.tokens, result.step_time_s, time.monotonic()))
            self.consumed += result.global_batch
            self.skipped += result.skipped
            every = self.config.run.eval_every
            self.validating = result.step == self.steps or bool(every and result.step % every == 0)
        bad = result.skipped or not math.isfinite(result.loss)
        if self.terminal:
            if bad:
                why = f"{result.why_skipped}, the update was skipped" if result.skipped else "the loss is not finite"
                scale = f" (loss scale {count(result.loss_scale)})" if result.loss_scale is not None else ""
                complaint = f"loss {decimals(result.loss, 4)}  {why}{scale}"
                self._print((f"{BAD} step {result.step}  ", "bad"), complaint)
        elif bad or result.step % self.config.run.log_every == 0 or result.step == self.steps:
            self._print(self._plain_line(result))

    def validated(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self.valid, self.validating = line, False
        each = "  ".join(f"{printable(name)} {decimals(loss, 4)}" for name, loss in line.get("sources", {}).items())
        what = (f"loss {decimals(line['loss'], 4)}", "valid")
        self._print((f"validation at step {line['step']}  ", "dim"), what, f"  {each}" if each else "")

    def finished(self) -> None:
        self.close()
        reached = self.last.step if self.last else 0
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        took = clock(time.monotonic() - self.begin)
        where = printable(self.config.run.dir)
        earlier = reached > self.done  # an earlier process trained the others
        if reached < self.steps:
            now = f", {plural(self.done, 'step')} in {took}" if earlier else f" after {took}"
            again = f"saved in {where}; run the same command to continue"
            self._print(("stopped ", "good"), f"at step {reached} of {self.steps}{skipped}{now}, {again}")
        else:
            total = f" ({reached:,} in all)" if earlier else ""
            self._print(("finished ", "good"), f"{plural(self.done, 'step')}{skipped} in {took}{total}: {where}")

    def close(self) -> None:
        """Stops redrawing and restores the cursor; a second call does nothing."""
        self._heard.set()
        live, self.live = self.live, None
        if live is not None:
            with self._lock:
                self.validating = False
            live.stop()
            atexit.unregister(self.close)

    def view(self, r: StepResult) -> tuple[RunView, Pace, str]:
        """Return the values so far, the pace among them, and the time that is left in words."""
        pace = pace_of(*zip(*self.steps_seen, strict=True))
        assert pace is not None
        view = RunView(r.step, self.steps, r.loss, r.grad_norm, pace, skipped=self.skipped)
        return view, pace, clock(view.seconds_left(time.monotonic() - self.steps_seen[-1][3]) or 0.0)

    def _print(self, *pieces: str | tuple[str, str]) -> None:
        """Prints one line, above the live block if there is one."""
        show(self.console, Text.assemble(*pieces))

    def _plain_line(self, r: StepResult) -> str:
        _, pace, left = self.view(r)
        parts = [
            f"step {r.step:>{len(str(self.steps))}}/{self.steps}", f"loss {decimals(r.loss, 4)}",
            f"norm {decimals(r.grad_norm, 2)}", f"lr {r.lr:.1e}", f"{count(pace.tokens_per_s)} tok/s",
            *r.counted_words, *rate_words(r, pace), f"eta {left}",
        ]  # fmt: skip
        if r.loss_scale is not None:
            parts.append(f"scale {count(r.loss_scale)}")
        parts += [printable(words) for words in r.shown]
        if r.skipped:
            parts.append(f"SKIPPED: {r.why_skipped}")
        elif not math.isfinite(r.loss):
            parts.append("LOSS NOT FINITE")
        return "  ".join(parts)

    def block(self) -> Table:
        """Returns the live block. No line is wider than the terminal: what does not fit stands in the next one."""
        grid = Table.grid(expand=True)
        grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        room = max(1, self.console.width - LABEL_WIDTH)
        with self._lock:
            r, elapsed = self.last, time.monotonic() - self.begin
            if r is None:
                words = f"0/{self.steps}  {self._first_step()} for {clock(elapsed)}".split(" ")
                grid.add_row("step", lined(words, room, " "))
                return grid
            view, pace, left = self.view(r)
            speed = (
                f"{count(pace.tokens_per_s)} tok/s", f"{seconds(pace.step_s)} per step", *r.counted_words,
                *rate_words(r, pace), f"{self.consumed:,} of {self.samples:,} samples", f"batch {r.global_batch}",
            )  # fmt: skip
            grid.add_row("step", self._step_bar(view, f"{clock(elapsed)} gone, {left} left", room))
            grid.add_row("loss", self._loss_line(r, room))
            grid.add_row("speed", lined(speed, room))
            grid.add_row("update", lined(self._update(r), room))
            bar, legend = phase_bar(r.phases, r.step_time_s, room, self.colour)
            grid.add_row("time", bar)
            grid.add_row("", lined(legend, room, "  "))
            if self.world > 1 and (words := rank_words(r)):
                grid.add_row("ranks", lined(words, room))
        return grid

    def _step_bar(self, view: RunView, clocks: str, room: int) -> Table | Text:
        bar = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, overflow="ellipsis")
        times = f"{percent(view.share, 0)}  {clocks}"
        number = Text(f"{view.step:>{len(str(view.steps))}}/{view.steps}", "bold")
        if room < len(number) + len(times) + LEAST_BAR:
            return lined([number, *times.split("  ")], room, "  ")
        bar.add_row(number, ProgressBar(view.steps, view.step, complete_style="bar", finished_style="bar"), times)
        return bar

    def _loss_line(self, r: StepResult, room: int) -> Text:
        pieces = [Text(decimals(r.loss, 4), "loss" if math.isfinite(r.loss) else "bad")]
        if self.validating and self.live:
            pieces.append(Text("validating …", "valid"))
        elif self.valid is not None:
            value = (decimals(self.valid["loss"], 4), "valid")
            pieces.append(Text.assemble("validation ", value, (f" at step {self.valid['step']}", "dim")))
        left = room - sum(len(piece) + 2 for piece in pieces)
        pieces.append(sparkline(list(self.losses)[-(left if left >= LEAST_BAR else max(1, room)) :]))
        return lined(pieces, room, "  ")

    def _update(self, r: StepResult) -> list[Text]:
        parts = [
            Text(f"norm {decimals(r.grad_norm, 2)}", "" if math.isfinite(r.grad_norm) else "bad"),
            Text(f"lr {r.lr:.1e}"),
        ]
        if r.loss_scale is not None:
            parts.append(Text(f"scale {count(r.loss_scale)}"))
        if self.skipped:
            parts.append(Text(f"{BAD} {self.skipped} skipped", "bad"))
        parts += [Text(printable(words)) for words in r.shown]
        return parts
