"""Parts shared by all views of a run: its values, the header, the sparkline and the bar of phases. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from meshwright.config.sections import Config
from meshwright.errors import plural
from meshwright.show.terminal import printable
from meshwright.show.units import count, flops, percent, seconds, size
from meshwright.spec.layout import Layout
from meshwright.spec.layout.rows import balance, causal_pairs
from meshwright.spec.model.description import describe, layout_of, model_of
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.model.part import SINGLE_RANK

if TYPE_CHECKING:
    from meshwright.engine.step import StepResult
    from meshwright.record.speed import RunSpeed

DRAWN_RANKS = 16  # The header draws the layout of at most this many ranks.
BARS = "▁▂▃▄▅▆▇█"
BAD = "×"
DOT = " · "


@dataclass(frozen=True)
class RunView:
    """The values of a run that its live display, summary, `status` and page all show, each in its own form.

    `counted` describes the items that the loss is a mean over; None if it is a mean over all tokens.
    """

    step: int
    steps: int
    loss: float | None = None
    grad_norm: float | None = None
    pace: RunSpeed | None = None
    counted: str | None = None
    skipped: int = 0
    not_finite: int = 0
    events: Sequence[Mapping[str, Any]] = ()

    @property
    def share(self) -> float:
        return self.step / self.steps if self.steps else 0.0

    def seconds_left(self, passed: float = 0.0, again: int = 0) -> float | None:
        """Return the time to the last step, `passed` seconds after the newest one, if `again` steps are lost."""
        return max(0.0, self.pace.wall_s * (self.steps - self.step + again) - passed) if self.pace else None

    def noted(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.get("kind") in kinds]


def head(
    config: Config, world: int | None, width: int, device: str = "", own_model: Mapping[str, Any] | None = None
) -> Table:
    """Return the header of a run: its model, layout, precision, batches and folder. No line is wider than `width`.

    `own_model` is the note on the model of a user's program, whose sizes the config does not have."""
    m, t = config.model, config.train
    name = Text("meshwright", "title")
    room = width - len(name) - 2
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    number = f"{count(own_model['parameters'] if own_model else parameter_count(describe(m)))} parameters  "
    sizes = [plural(m.layers, "layer"), f"hidden {m.hidden}", plural(m.heads, "head")]
    shape = [own_model["name"]] if own_model else [*kind_words(config), *sizes, f"vocab {m.vocab}", f"seq {m.seq}"]
    grid.add_row(name, lined([Text.assemble((number, "bold"), (shape[0], "dim")), *_dim(shape[1:])], room, DOT))
    precision = t.precision + (f" on {device}" if device else "")
    tokens = f"{t.global_batch * m.seq:,} tokens per step"
    if own_model:
        tokens = f"{plural(t.global_batch, 'sample')} per step"
    settings = [precision, tokens, plural(t.steps, "step"), printable(config.run.dir)]
    if world is not None:
        layout = layout_of(config, world)
        drawing = _dim([small_drawing(layout)] if 1 < world <= DRAWN_RANKS else [])
        grid.add_row("", lined([Text(layout_line(config, layout), "bold"), *drawing], room))
        if layout.cp > 1:
            grid.add_row("", lined(_dim(context_words(config)), room, DOT))
        settings.insert(0, schedule_line(config, layout))
    grid.add_row("", lined(_dim(settings), room, DOT))
    return grid


def _dim(words: Sequence[str]) -> list[Text]:
    return [Text(word, "dim") for word in words]


def kind_words(config: Config) -> list[str]:
    """Describe how a model differs from a dense GPT whose weights are all trained: its kind, experts and adapters."""
    experts, tune = config.model.experts, config.tune
    words = []
    if config.model.kind != "gpt":
        words.append(config.model.kind)
    if experts.count:
        words.append(f"{experts.count} experts, {experts.top_k} a token")
    if tune.adapts:
        trained = sum(record.numel for record in model_of(config).records(SINGLE_RANK).values() if record.trained)
        words.append(f"{tune.kind} of rank {tune.rank} trains {count(trained)}")
    return words


def context_words(config: Config) -> list[str]:
    """Describe how ranks share a sequence, and how evenly."""
    pairs = causal_pairs(config.context.order, config.model.seq, config.layout.cp)
    even = f"the busiest of {config.layout.cp} ranks has {balance(pairs):.3f} times the mean pairs of a text"
    return [f"sequences shared by {config.context_kind} in {config.context.order} order", even]


def layout_line(config: Config, layout: Layout) -> str:
    """Format the layout as `8 ranks = dp 2 × tp 2 × pp 2`."""
    axes = [a for a in ("replicas", "dp", "cp", "tp", "pp") if a not in ("replicas", "cp") or layout.axis_size(a) > 1]
    sizes = " × ".join(f"{axis} {layout.axis_size(axis)}" for axis in axes)
    sizes += f" ({config.layout.grid} grid)" if config.layout.grid else ""
    sizes += f", experts over ep {layout.ep}" if layout.ep > 1 else ""
    sequence = " + sequence parallel" if config.layout.sequence_parallel and layout.tp > 1 else ""
    return f"{plural(layout.world, 'rank')} = {sizes}{sequence}"


def small_drawing(layout: Layout) -> str:
    """Draw the layout as `[0 1] [2 3] → [4 5] [6 7]`.

    Each box is the tensor- and context-parallel ranks of one replica; arrows lead from one pipeline stage to the next.
    """
    stages: list[list[str]] = [[] for _ in range(layout.pp)]
    for group in layout.groups("tp-cp"):
        stages[layout.coordinate(group[0])["pp"]].append(f"[{' '.join(map(str, group))}]")
    return " → ".join(" ".join(stage) for stage in stages)


def schedule_line(config: Config, layout: Layout) -> str:
    t, chunks = config.train, config.layout.chunks
    micro_batches = max(1, t.global_batch // (layout.dp * layout.replicas * t.micro_batch))
    batches = f"{plural(micro_batches, 'micro-batch')} of {t.micro_batch}"
    if layout.pp == 1:
        return batches
    return f"{config.pipeline.schedule}{f' x {chunks} chunks' if chunks > 1 else ''}, {batches}"


def rate_words(r: StepResult, pace: RunSpeed) -> list[str]:
    """Return the model's FLOP/s at the run's pace, the MFU if the device's peak is known, and the peak memory of any
    rank so far, as words.
    """
    # The figures are those of one step. Scale them to the run's mean speed, which the display shows beside them.
    share = pace.tokens_per_s * r.step_time_s / r.tokens if r.tokens else 1.0
    words = [] if r.tflops is None else [flops(share * r.tflops)]
    words += [] if r.mfu is None else [f"MFU {percent(share * r.mfu)}"]
    peak = max(r.ranks.peak_bytes, default=0) if r.ranks else 0
    return words + ([f"peak {size(peak)}"] if peak else [])


def rank_words(r: StepResult) -> list[str]:
    """Describe how long ranks computed, which one took longest, and the axes on which they waited most."""
    busy = r.ranks.summary().get("busy_s") if r.ranks else None
    if busy is None:
        return []
    least, median, most = (seconds(busy[name]) for name in ("min", "median", "max"))
    waited = sorted(r.exposed_s.items(), key=lambda item: -item[1])
    words = [f"computed {median} in the median, {least} to {most} (rank {int(busy['rank'])})"]
    return words + [f"waited {' '.join(f'{axis} {seconds(took)}' for axis, took in waited[:3])}"] * bool(waited)


def sparkline(values: Sequence[float]) -> Text:
    """Draw each value as a bar scaled between the lowest and the highest. A cross marks values that are not finite."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    line = Text()
    for value in values:
        if math.isfinite(value):
            share = (value - low) / (high - low) if high > low else 0.5
            line.append(BARS[min(7, int(8 * share))], "curve")
        else:
            line.append(BAD, "bad")
    return line


def lined(parts: Sequence[str | Text], room: int, gap: str = "   ") -> Text:
    """Join the parts with `gap` between them. A part that would exceed `room` columns starts a new line."""
    text, column = Text(), 0
    for part in parts:
        if column and column + len(gap) + len(part) > room:
            text.append("\n")
            column = 0
        elif column:
            text.append(gap, "dim" if gap.strip() else "")
            column += len(gap)
        text.append(part)
        column += len(part)
    return text


def phase_bar(phases: Mapping[str, float], total: float, width: int, colour: bool) -> tuple[Text, list[Text]]:
    """Draw the seconds of a step as one bar with a legend.

    A thin line shows time outside all phases. Without colour each phase is drawn with its initial letter. The style of
    each phase is named after it.
    """
    whole = max(total, sum(phases.values())) or 1.0
    bar, legend, reached = Text(), [], 0.0
    for name, spent in phases.items():
        reached += spent / whole
        # Draw up to the rounded sum of the shares, so that rounding errors do not add up along the bar.
        bar.append(("━" if colour else name[:1]) * (round(reached * width) - len(bar)), name)
        legend.append(Text.assemble((name, name), (f" {percent(spent / whole, 0)}", "dim")))
    return bar.append("─" * (width - len(bar)), "dim"), legend
