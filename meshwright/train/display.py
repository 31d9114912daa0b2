"""A run in the terminal: a live block redrawn in place, or one plain line every few steps where there is no terminal.

Also holds the small vocabulary that the summary of a run speaks too: styled lines, human units, the head of a run.
Nothing here imports torch, and nothing here may stop a run: a terminal that goes away only ends the display.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from meshwright.config.sections import Config
from meshwright.layout import Layout
from meshwright.models.description import describe, layout_of
from meshwright.optim.schedules import consumed_after
from meshwright.parts.part import parameter_count

if TYPE_CHECKING:
    from meshwright.train.context import Context
    from meshwright.train.step import StepResult

REDRAW_SECONDS = 0.1
TICK_SECONDS = 0.5  # how often the clock goes on while a step takes its time
SPARKS = 40
WINDOW = 20  # steps over which speed is smoothed
DRAWN_RANKS = 16  # up to this many ranks the head draws the layout
HIDE, SHOW, CLEAR_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[J"
BARS = "▁▂▃▄▅▆▇█"
BAD = "×"

STYLES = {
    "dim": "2", "bold": "1", "name": "1;38;5;75", "loss": "1;38;5;80", "curve": "38;5;80", "valid": "1;38;5;220",
    "bar": "38;5;75", "bad": "1;38;5;203", "good": "38;5;114",
    "data": "38;5;246", "forward": "38;5;75", "backward": "38;5;214", "reduce": "38;5;141", "optimizer": "38;5;114",
}  # fmt: skip
PHASES = ("data", "forward", "backward", "reduce", "optimizer")

# For terminals that can't show the rest, one character each; a braille cell with any dot becomes a star.
ASCII: dict[int, str] = {0x2800 + dots: "*" for dots in range(1, 256)} | {0x2800: " "}
ASCII |= {ord(bar): plain for bar, plain in zip(BARS, "_.-~=+*#", strict=True)}
ASCII |= str.maketrans({
    "━": "#", "╸": "#", "─": "-", "·": "-", "×": "x", "→": ">", "⇄": "=", "…": "~", "│": "|", "┤": "+",
    "└": "+", "┬": "+", "◆": "o", "•": ".",
})  # fmt: skip


class Line:
    """Styled pieces of text, whose length is what the eye sees."""

    def __init__(self, text: str = "", style: str = "") -> None:
        self.pieces: list[tuple[str, str]] = []
        self.add(text, style)

    def add(self, text: str, style: str = "") -> Line:
        """Appends `text`; what would move the cursor or change the terminal becomes a question mark."""
        if text:
            clean = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
            if self.pieces and self.pieces[-1][1] == style:
                clean = self.pieces.pop()[0] + clean
            self.pieces.append((clean, style))
        return self

    def join(self, lines: Iterable[Line], gap: str, width: int) -> Line:
        """Appends as many of `lines` as fit into `width` columns, `gap` between them."""
        for index, line in enumerate(lines):
            space = gap if index else ""
            if len(self) + len(space) + len(line) > width:
                break
            self.add(space)
            self.pieces += line.pieces
        return self

    def __len__(self) -> int:
        return sum(len(text) for text, _ in self.pieces)

    def cut(self, width: int) -> Line:
        out, left = Line(), max(0, width)
        for text, style in self.pieces:
            out.add(text[:left], style)
            left -= min(left, len(text))
        return out

    def render(self, colour: bool) -> str:
        if not colour:
            return "".join(text for text, _ in self.pieces).rstrip()
        return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for text, style in self.pieces)


def printable(text: str, stream: TextIO) -> str:
    """`text` in characters that the stream can encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "replace").decode(encoding)


def terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can redraw."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(stream: TextIO) -> bool:
    return terminal(stream) and not os.environ.get("NO_COLOR")


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns, rows = shutil.get_terminal_size((100, 24))
    return columns or 80, rows or 24


def show_cursor(stream: TextIO) -> None:
    """For whoever ends the process of a display from outside: gives the terminal its cursor back."""
    if terminal(stream):
        stream.write(SHOW)
        stream.flush()


def quantity(value: float) -> str:
    """`950`, `12.3k`, `1.24M`."""
    if not math.isfinite(value):
        return str(value)
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return _three(value / size) + unit
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def size(count: float, gap: str = " ") -> str:
    """Bytes: `512 B`, `1.50 MiB`."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 0.9995 * 2**power:
            return _three(count / 2**power) + gap + unit
    return f"{count:.0f}{gap}B"


def _three(value: float) -> str:
    """Three digits where there are no more before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 03:04:05`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def duration(seconds: float) -> str:
    """Of one step: `3.21 ms`, `333 ms`, `12.4 s`."""
    return f"{_three(seconds)} s" if seconds >= 0.9995 else f"{_three(1e3 * seconds)} ms"


def number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)


def many(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def parameters(config: Config) -> int:
    """Of our own GPT in the sizes of the config."""
    return parameter_count(describe(config.model))


def head(
    config: Config, world: int | None, *, own_model: bool = False, device: str = "", width: int = 200
) -> list[Line]:
    """What runs, where and how, in three lines. `own_model`: the config's sizes are all that is known of it."""
    m, t = config.model, config.train
    what = Line("meshwright  ", "name")
    if not own_model:
        what.add(f"{quantity(parameters(config))} parameters", "bold").add("  ")
    sizes = f"{many(m.layers, 'layer')} · hidden {m.hidden} · {many(m.heads, 'head')} · vocab {m.vocab} · seq {m.seq}"
    what.add(sizes, "dim")
    where = Line(" " * 12)
    if world is not None:
        layout = layout_of(config, world)
        where.add(layout_words(config, layout), "bold")
        if 1 < world <= DRAWN_RANKS:
            where.join([Line("   ").add(small_drawing(layout), "dim")], "", width)
    precision = t.precision + (f" on {device}" if device else "")
    how = [precision, f"{t.global_batch * m.seq:,} tokens a step", many(t.steps, "step"), config.run.dir]
    if world is not None:
        how.insert(0, schedule_words(config, layout))
    return [what, *([where] if world is not None else []), Line(" " * 12).add(" · ".join(how), "dim")]


def layout_words(config: Config, layout: Layout) -> str:
    """`8 ranks = dp 2 × tp 2 × pp 2`."""
    axes = [a for a in ("dp", "cp", "tp", "pp") if a != "cp" or layout.cp > 1]
    sizes = " × ".join(f"{axis} {layout.axis_size(axis)}" for axis in axes)
    sequence = " + sequence parallel" if config.layout.sequence_parallel and layout.tp > 1 else ""
    return f"{many(layout.world, 'rank')} = {sizes}{sequence}"


def small_drawing(layout: Layout) -> str:
    """`[0 1] [2 3] → [4 5] [6 7]`: a box of tensor-parallel ranks a replica, an arrow from stage to stage."""
    stages: list[list[str]] = [[] for _ in range(layout.pp)]
    for group in layout.groups("tp-cp"):
        stages[layout.coordinate(group[0])["pp"]].append(f"[{' '.join(map(str, group))}]")
    return " → ".join(" ".join(stage) for stage in stages)


def schedule_words(config: Config, layout: Layout) -> str:
    t, chunks = config.train, config.layout.chunks
    count = max(1, t.global_batch // (layout.dp * layout.cp * t.micro_batch))
    batches = f"{many(count, 'micro-batch')} of {t.micro_batch}"
    if layout.pp == 1:
        return batches
    return f"{config.pipeline.schedule}{f' x {chunks} chunks' if chunks > 1 else ''}, {batches}"


def sparkline(values: Sequence[float]) -> Line:
    """Bars from the lowest to the highest value; what is not finite is crossed out."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    line = Line()
    for value in values:
        if math.isfinite(value):
            share = (value - low) / (high - low) if high > low else 0.5
            line.add(BARS[min(7, int(8 * share))], "curve")
        else:
            line.add(BAD, "bad")
    return line


def progress_bar(share: float, width: int) -> Line:
    halves = round(2 * width * min(1.0, max(0.0, share)))
    line = Line("━" * (halves // 2) + "╸" * (halves % 2), "bar")
    return line.add("─" * (width - len(line)), "dim")


def phase_bar(phases: Mapping[str, float], total: float, width: int, colour: bool) -> Line:
    """The seconds of a step as one bar; without colour a phase is drawn by its initial. The rest is no phase's."""
    whole = max(total, sum(phases.values()))
    line, reached = Line(), 0.0
    for name in (*PHASES, *(p for p in phases if p not in PHASES)):
        reached += phases.get(name, 0.0) / whole if whole > 0 else 0.0
        columns = round(reached * width) - len(line)
        line.add(("━" if colour else name[:1]) * columns, name if name in STYLES else "")
    return line.add("─" * (width - len(line)), "dim")


def phase_legend(phases: Mapping[str, float], total: float) -> list[Line]:
    whole = max(total, sum(phases.values())) or 1.0
    names = [*(p for p in PHASES if p in phases), *(p for p in phases if p not in PHASES)]
    entries = [(name, phases[name] / whole) for name in names]
    return [Line(name, name if name in STYLES else "").add(f" {share:.0%}", "dim") for name, share in entries]


class Display:
    """A `Watcher` that shows a run on `stream`. Use it as a context manager, so that an exception finds the terminal
    as it was; without, the terminal is put right when the process ends."""

    def __init__(self, config: Config, world: int, stream: TextIO | None = None, *, own_model: bool = False) -> None:
        self.config, self.world, self.own_model = config, world, own_model
        self.stream = sys.stderr if stream is None else stream
        self.live, self.colour = terminal(self.stream), coloured(self.stream)
        self.steps = config.train.steps
        ramp = config.train.ramp
        self.samples = consumed_after(config, self.steps) if ramp else self.steps * config.train.global_batch
        self.last: StepResult | None = None
        self.losses: deque[float] = deque(maxlen=SPARKS)
        self.speeds: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self.ends: deque[float] = deque(maxlen=2 * WINDOW)  # when steps ended
        self.consumed = self.skipped = 0
        self.valid: Mapping[str, Any] | None = None
        self.validating = False
        self.begin = time.monotonic()
        self._drawn: list[int] = []  # lengths of the lines on the screen
        self._drawn_at = -math.inf
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._open = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def started(self, ctx: Context | None = None) -> None:
        self.begin = time.monotonic()
        device = getattr(getattr(ctx, "device", None), "kind", "")
        width = terminal_size(self.stream)[0] if self.live else 200
        for line in head(self.config, self.world, own_model=self.own_model, device=device, width=width):
            self._print(line)
        self._open = True
        if self.live:
            self._print(Line())
            self._write(HIDE)
            atexit.register(self.close)
            threading.Thread(target=self._tick, name="display", daemon=True).start()
            self._draw()

    def stepped(self, result: StepResult) -> None:
        with self._lock:
            if self.last is None and result.step > 1:
                self.consumed = consumed_after(self.config, result.step - 1)
            elif len(self.speeds) == 1 and len(self.ends) == 1:
                self.speeds.clear()  # the first step also warms up, which says nothing about the next ones
            self.last = result
            self.losses.append(math.nan if result.skipped else result.loss)
            self.speeds.append((result.tokens, result.step_time_s))
            self.ends.append(time.monotonic())
            self.consumed += result.global_batch
            self.skipped += result.skipped
            every = self.config.run.eval_every
            self.validating = result.step == self.steps or bool(every and result.step % every == 0)
            bad = result.skipped or not math.isfinite(result.loss)
            if not self.live:
                if bad or result.step % self.config.run.log_every == 0 or result.step == self.steps:
                    self._print(self._plain_line(result))
            elif bad:
                self._above(self._complaint(result))
            elif time.monotonic() - self._drawn_at >= REDRAW_SECONDS:
                self._draw()

    def validated(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self.valid, self.validating = line, False
            text = Line(f"validation at step {line['step']}  ", "dim").add(f"loss {number(line['loss'], 4)}", "valid")
            if self.live:
                self._above(text)
            else:
                self._print(text)

    def finished(self) -> None:
        with self._lock:
            self.validating = False
            done = self.last.step if self.last else 0
            self.close()
            took = clock(time.monotonic() - self.begin)
            skipped = f", {self.skipped} skipped" if self.skipped else ""
            words = f"{many(done, 'step')}{skipped} in {took}: {self.config.run.dir}"
            self._print(Line("finished ", "good").add(words))

    def close(self) -> None:
        """Stops redrawing and gives the cursor back; does nothing the second time."""
        with self._lock:
            self._stop.set()
            if self._open and self.live:
                self._draw()
                self._write(SHOW)
                atexit.unregister(self.close)
            self._open = False

    @property
    def tokens_per_s(self) -> float:
        tokens, seconds = (sum(column) for column in zip(*self.speeds, strict=True)) if self.speeds else (0, 0.0)
        return tokens / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """From the time between the ends of the latest steps, so that validation counts too."""
        if self.last is None:
            return math.nan
        each = self.last.step_time_s
        if len(self.ends) > 1:
            each = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return max(0.0, each * (self.steps - self.last.step) - (time.monotonic() - self.ends[-1]))

    def _complaint(self, result: StepResult) -> Line:
        why = f"{result.why_skipped}, the update was skipped" if result.skipped else "the loss is not finite"
        scale = f" (loss scale {quantity(result.loss_scale)})" if result.loss_scale is not None else ""
        return Line(f"{BAD} step {result.step}  ", "bad").add(f"loss {number(result.loss, 4)}  {why}{scale}")

    def _plain_line(self, r: StepResult) -> Line:
        parts = [
            f"step {r.step:>{len(str(self.steps))}}/{self.steps}", f"loss {number(r.loss, 4)}",
            f"norm {number(r.grad_norm, 2)}", f"lr {r.lr:.1e}", f"{quantity(self.tokens_per_s)} tok/s",
            f"eta {clock(self.seconds_left)}",
        ]  # fmt: skip
        if r.loss_scale is not None:
            parts.append(f"scale {quantity(r.loss_scale)}")
        parts += [f"{name} {value:.4g}" for name, value in r.monitored.items()]
        if r.skipped:
            parts.append(f"SKIPPED: {r.why_skipped}")
        elif not math.isfinite(r.loss):
            parts.append("LOSS NOT FINITE")
        return Line("  ".join(parts))

    def block(self, width: int) -> list[Line]:
        """The live block, none of its lines wider than `width`."""
        r, elapsed = self.last, time.monotonic() - self.begin
        if r is None:
            waiting = Line("step     ", "dim").add(f"0/{self.steps}  waiting for the first step  {clock(elapsed)}")
            return [waiting.cut(width)]
        times = f"  {r.step / self.steps:4.0%}  {clock(elapsed)} gone, {clock(self.seconds_left)} left"
        times = "" if len(times) + 24 > width else times
        step = Line("step     ", "dim").add(f"{r.step:>{len(str(self.steps))}}/{self.steps}  ", "bold")
        step.pieces += progress_bar(r.step / self.steps, max(0, width - len(step) - len(times))).pieces
        speed = [
            Line(quantity(self.tokens_per_s), "bold").add(" tok/s"),
            Line(duration(r.step_time_s), "bold").add(" a step"),
            Line(f"{self.consumed:,}", "bold").add(f" of {self.samples:,} samples"),
            Line("batch ").add(str(r.global_batch), "bold"),
        ]
        lines = [
            step.add(times),
            self._loss_line(r, width),
            Line("speed    ", "dim").join(speed, "   ", width),
            Line("update   ", "dim").join(self._update(r), "   ", width),
            Line("time     ", "dim").join([phase_bar(r.phases, r.step_time_s, width - 9, self.colour)], "", width),
            Line("         ").join(phase_legend(r.phases, r.step_time_s), "  ", width),
        ]
        return [line.cut(width) for line in lines]

    def _loss_line(self, r: StepResult, width: int) -> Line:
        line = Line("loss     ", "dim").add(number(r.loss, 4), "loss" if math.isfinite(r.loss) else "bad").add("  ")
        valid = self._validation()
        room = width - len(line) - sum(len(part) + 2 for part in valid)
        if room < 8:
            valid, room = [], width - len(line)
        return line.join([sparkline(list(self.losses)[-max(1, room) :]), *valid], "  ", width)

    def _validation(self) -> list[Line]:
        if self.validating and self._open:
            return [Line("validating …", "valid")]
        if self.valid is None:
            return []
        loss = Line("validation ").add(number(self.valid["loss"], 4), "valid")
        return [loss.add(f" at step {self.valid['step']}", "dim")]

    def _update(self, r: StepResult) -> list[Line]:
        style = "bold" if math.isfinite(r.grad_norm) else "bad"
        parts = [Line("norm ").add(number(r.grad_norm, 2), style), Line("lr ").add(f"{r.lr:.1e}", "bold")]
        if r.loss_scale is not None:
            parts.append(Line("scale ").add(quantity(r.loss_scale), "bold"))
        if self.skipped:
            parts.append(Line(f"{BAD} {self.skipped} skipped", "bad"))
        return parts + [Line(f"{name} ").add(f"{value:.4g}", "bold") for name, value in r.monitored.items()]

    def _tick(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            with self._lock:
                if self._open and time.monotonic() - self._drawn_at >= TICK_SECONDS:
                    self._draw()

    def _erase(self, columns: int) -> str:
        """Moves to the first line of the block; in a window made narrower its lines have been wrapped."""
        rows = sum(max(1, -(-length // columns)) for length in self._drawn)
        return (f"\x1b[{rows}F" if rows else "\r") + CLEAR_BELOW

    def _draw(self, above: Line | None = None) -> None:
        """Redraws the block, in one write; `above` scrolls away over it."""
        columns, rows = terminal_size(self.stream)
        text = self._erase(columns)
        if above is not None:
            text += above.cut(columns - 1).render(self.colour) + "\n"
        lines = self.block(max(8, columns - 1))[: max(1, rows - 1)]
        self._write(text + "".join(line.render(self.colour) + "\n" for line in lines))
        self._drawn, self._drawn_at = [len(line) for line in lines], time.monotonic()

    def _above(self, line: Line) -> None:
        if self._open:
            self._draw(above=line)

    def _print(self, line: Line) -> None:
        self._write(line.render(self.colour) + "\n")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(printable(text, self.stream))
            self.stream.flush()
        except (OSError, ValueError):  # the terminal is gone or the stream is closed: the run goes on
            self._stop.set()
            self._open = False
