"""The display of a running job: a block that is redrawn in place, or a plain line every few steps without a terminal.

Nothing here imports torch, and nothing here may stop a run: if the terminal goes away, only the display ends.
"""

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
from meshwright.launch.launch import regroups
from meshwright.record.speed import RECENT, RunSpeed, pace_of
from meshwright.show.terminal import console_for, has_colour, is_terminal, printable, show
from meshwright.show.units import clock, count, decimals, percent, seconds
from meshwright.watch.run_parts import BAD, RunView, head, lined, phase_bar, rank_words, rate_words, sparkline

if TYPE_CHECKING:
    from meshwright.engine.context import Context
    from meshwright.engine.step import StepResult

REDRAWS_PER_SECOND = 4
SPARKS = 40  # The number of recent losses in the sparkline.
LABEL_WIDTH = 9  # Columns before the values of the live block.
LEAST_BAR = 8  # Columns that a progress bar or sparkline needs to share a line with text.
HEAD_WIDTH = 200  # Width of a run's header, in columns, when the output is not a terminal.
# Without a terminal, the first line about a first step still in progress appears after this time. The interval doubles
# after each such line.
QUIET_S = 10.0


class Display:
    """A `Watcher` that shows a run on `stream`.

    Use it as a context manager, so that the terminal is restored after an exception. Otherwise it is restored when the
    process ends.
    """

    def __init__(self, config: Config, world: int, stream: TextIO | None = None) -> None:
        self.config, self.world = config, world
        self.stream = sys.stderr if stream is None else stream
        self.terminal, self.colour = is_terminal(self.stream), has_colour(self.stream)
        self.console = console_for(self.stream, None if self.terminal else HEAD_WIDTH)
        self.steps = config.train.steps
        self.samples = consumed_after(config, self.steps)
        self.last: StepResult | None = None
        self.losses: deque[float] = deque(maxlen=SPARKS)
        # For each recent step of this process: its number within the process, tokens, seconds, and end time.
        self.steps_seen: deque[tuple[float, float, float, float]] = deque(maxlen=RECENT + 1)
        self.own_model: Mapping[str, Any] = {}  # The note on the model of a user's program.
        self.done = 0  # Steps that this process has trained.
        self.consumed = self.skipped = 0
        self.valid: Mapping[str, Any] | None = None
        self.validating = False
        self.begin = time.monotonic()
        self.live: Live | None = None
        # Set when the first step ends or the display closes: there is nothing left to wait for.
        self._waiting_over = threading.Event()
        # Guards the figures that the redrawing thread reads. Do not print while holding it: rich's thread holds rich's
        # lock while it waits for this one, so printing would deadlock.
        self._lock = threading.Lock()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def started(self, ctx: Context | None = None) -> None:
        self.begin = time.monotonic()
        device = getattr(getattr(ctx, "device", None), "kind", "")
        show(self.console, head(self.config, self.world, self.console.width, device, self.own_model))
        if self.terminal:
            # With redirection, rich prints the program's other output above the block instead of through it.
            redirects = self.stream is sys.stderr
            self.live = Live(
                console=self.console, get_renderable=self.block, refresh_per_second=REDRAWS_PER_SECOND,
                vertical_overflow="crop", redirect_stderr=redirects,
                redirect_stdout=redirects and is_terminal(sys.stdout),
            )  # fmt: skip
            atexit.register(self.close)
            self.live.start(refresh=True)
        else:
            threading.Thread(target=self._report_waiting, daemon=True).start()

    def _report_waiting(self) -> None:
        """Print now and then that the first step is still being computed; used if there is no live block to show it."""
        quiet = QUIET_S
        while not self._waiting_over.wait(quiet):
            quiet *= 2
            self._print(f"{self._first_step()} for {clock(time.monotonic() - self.begin)}")

    def _first_step(self) -> str:
        return f"computing the first step, of up to {plural(self.config.train.global_batch, 'sample')},"

    def stepped(self, result: StepResult) -> None:
        self._waiting_over.set()
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
        # Print outside the lock (see its comment).
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
        sources = line.get("sources", {}).items()
        by_source = "  ".join(f"{printable(name)} {decimals(loss, 4)}" for name, loss in sources)
        mean = (f"loss {decimals(line['loss'], 4)}", "valid")
        self._print((f"validation at step {line['step']}  ", "dim"), mean, f"  {by_source}" if by_source else "")

    def finished(self) -> None:
        self.close()
        reached = self.last.step if self.last else 0
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        took = clock(time.monotonic() - self.begin)
        where = printable(self.config.run.dir)
        # A resumed run: an earlier process trained the other steps.
        earlier = reached > self.done
        if reached < self.steps:
            now = f", {plural(self.done, 'step')} in {took}" if earlier else f" after {took}"
            then = "continues on more ranks" if regroups() else "run the same command to continue"
            again = f"saved in {where}; {then}"
            self._print(("stopped ", "good"), f"at step {reached} of {self.steps}{skipped}{now}, {again}")
        else:
            total = f" ({reached:,} in all)" if earlier else ""
            self._print(("finished ", "good"), f"{plural(self.done, 'step')}{skipped} in {took}{total}: {where}")

    def close(self) -> None:
        """Stop redrawing and restore the cursor. A second call does nothing."""
        self._waiting_over.set()
        live, self.live = self.live, None
        if live is not None:
            with self._lock:
                self.validating = False
            live.stop()
            atexit.unregister(self.close)

    def view(self, r: StepResult) -> tuple[RunView, RunSpeed, str]:
        """Return the run's values so far, its pace, and the remaining time as text."""
        pace = pace_of(*zip(*self.steps_seen, strict=True))
        assert pace is not None
        view = RunView(r.step, self.steps, r.loss, r.grad_norm, pace, skipped=self.skipped)
        return view, pace, clock(view.seconds_left(time.monotonic() - self.steps_seen[-1][3]) or 0.0)

    def _print(self, *parts: str | tuple[str, str]) -> None:
        """Print one line, above the live block if there is one."""
        show(self.console, Text.assemble(*parts))

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
        """Return the live block. Lines wrap so that none is wider than the terminal."""
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
            grid.add_row("step", self._step_bar(view, f"{clock(elapsed)} in, {left} left", room))
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
        parts = [Text(decimals(r.loss, 4), "loss" if math.isfinite(r.loss) else "bad")]
        if self.validating and self.live:
            parts.append(Text("validating …", "valid"))
        elif self.valid is not None:
            value = (decimals(self.valid["loss"], 4), "valid")
            parts.append(Text.assemble("validation ", value, (f" at step {self.valid['step']}", "dim")))

        # If the rest of this line is too short for a sparkline, it gets the whole next line.
        left = room - sum(len(part) + 2 for part in parts)
        columns = left if left >= LEAST_BAR else max(1, room)
        parts.append(sparkline(list(self.losses)[-columns:]))
        return lined(parts, room, "  ")

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
