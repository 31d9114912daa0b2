"""What the views of a run share: its values, the header, the sparkline and the bar of phases. No torch."""

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
from meshwright.spec.model.part import ALONE

if TYPE_CHECKING:
    from meshwright.engine.step import StepResult
    from meshwright.record.speed import Pace

DRAWN_RANKS = 16  # up to this many ranks the head draws the layout
BARS = "▁▂▃▄▅▆▇█"
BAD = "×"
DOT = " · "


@dataclass(frozen=True)
class RunView:
    """The values that the live display, the summary, `status` and the page of a run show, each in its own way.
    `counted` says what the loss is a mean over, where that is not all tokens."""

    step: int
    steps: int
    loss: float | None = None
    grad_norm: float | None = None
    pace: Pace | None = None
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


def head(config: Config, world: int | None, width: int, device: str = "") -> Table:
    """Returns the header: what runs, where and how. No line is wider than `width`."""
    m, t, name = config.model, config.train, Text("meshwright", "title")
    room = width - len(name) - 2
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    number = f"{count(parameter_count(describe(m)))} parameters  "
    sizes = [plural(m.layers, "layer"), f"hidden {m.hidden}", plural(m.heads, "head")]
    shape = [*kind_words(config), *sizes, f"vocab {m.vocab}", f"seq {m.seq}"]
    grid.add_row(name, lined([Text.assemble((number, "bold"), (shape[0], "dim")), *_dim(shape[1:])], room, DOT))
    precision = t.precision + (f" on {device}" if device else "")
    how = [precision, f"{t.global_batch * m.seq:,} tokens per step", plural(t.steps, "step"), printable(config.run.dir)]
    if world is not None:
        layout = layout_of(config, world)
        drawing = _dim([small_drawing(layout)] if 1 < world <= DRAWN_RANKS else [])
        grid.add_row("", lined([Text(layout_line(config, layout), "bold"), *drawing], room))
        if layout.cp > 1:
            grid.add_row("", lined(_dim(context_words(config)), room, DOT))
        how.insert(0, schedule_line(config, layout))
    grid.add_row("", lined(_dim(how), room, DOT))
    return grid


def _dim(words: Sequence[str]) -> list[Text]:
    return [Text(word, "dim") for word in words]


def kind_words(config: Config) -> list[str]:
    """What a model is beside a decoder whose weights are all trained: its kind, its experts, its adapters."""
    experts, tune, found = config.model.experts, config.tune, []
    if config.model.kind != "gpt":
        found.append(config.model.kind)
    if experts.count:
        found.append(f"{experts.count} experts, {experts.top_k} a token")
    if tune.adapts:
        trained = sum(record.numel for record in model_of(config).records(ALONE).values() if record.trained)
        found.append(f"{tune.kind} of rank {tune.rank} trains {count(trained)}")
    return found


def context_words(config: Config) -> list[str]:
    """Says how ranks share a sequence, and how evenly."""
    pairs = causal_pairs(config.context.order, config.model.seq, config.layout.cp)
    even = f"the busiest of {config.layout.cp} ranks has {balance(pairs):.3f} times the mean pairs of a text"
    return [f"sequences shared by {config.context_kind} in {config.context.order} order", even]


def layout_line(config: Config, layout: Layout) -> str:
    """Formats the layout as `8 ranks = dp 2 × tp 2 × pp 2`."""
    axes = [a for a in ("replicas", "dp", "cp", "tp", "pp") if a not in ("replicas", "cp") or layout.axis_size(a) > 1]
    sizes = " × ".join(f"{axis} {layout.axis_size(axis)}" for axis in axes)
    sizes += f" ({config.layout.grid} grid)" if config.layout.grid else ""
    sizes += f", experts over ep {layout.ep}" if layout.ep > 1 else ""
    sequence = " + sequence parallel" if config.layout.sequence_parallel and layout.tp > 1 else ""
    return f"{plural(layout.world, 'rank')} = {sizes}{sequence}"


def small_drawing(layout: Layout) -> str:
    """Draws `[0 1] [2 3] → [4 5] [6 7]`: a replica is a box of tensor-parallel ranks, arrows go from stage to stage."""
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


def rate_words(r: StepResult, pace: Pace) -> list[str]:
    """The model's FLOP/s and, where the device's peak is known, MFU, at the run's pace; and the most memory that a rank
    held so far."""
    share = pace.tokens_per_s * r.step_time_s / r.tokens if r.tokens else 1.0
    words = [] if r.tflops is None else [flops(share * r.tflops)]
    words += [] if r.mfu is None else [f"MFU {percent(share * r.mfu)}"]
    peak = max(r.ranks.peak_bytes, default=0) if r.ranks else 0
    return words + ([f"peak {size(peak)}"] if peak else [])


def rank_words(r: StepResult) -> list[str]:
    """How long ranks computed, who longest, and for which axes they waited."""
    busy = r.ranks.summary().get("busy_s") if r.ranks else None
    if busy is None:
        return []
    spread = " / ".join(seconds(busy[name]) for name in ("min", "median", "max"))
    waited = sorted(r.exposed_s.items(), key=lambda item: -item[1])
    words = [f"computed {spread} (rank {int(busy['rank'])})"]
    return words + [f"waited {' '.join(f'{axis} {seconds(took)}' for axis, took in waited[:3])}"] * bool(waited)


def sparkline(values: Sequence[float]) -> Text:
    """Draws bars from the lowest to the highest value; values that are not finite are crossed out."""
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


def lined(pieces: Sequence[str | Text], room: int, gap: str = "   ") -> Text:
    """Returns the pieces beside each other, and from where one does not fit into `room` columns on in the next line."""
    found, column = Text(), 0
    for piece in pieces:
        if column and column + len(gap) + len(piece) > room:
            found.append("\n")
            column = 0
        elif column:
            found.append(gap, "dim" if gap.strip() else "")
            column += len(gap)
        found.append(piece)
        column += len(piece)
    return found


def phase_bar(phases: Mapping[str, float], total: float, width: int, colour: bool) -> tuple[Text, list[Text]]:
    """Draws the seconds of a step as one bar, with a thin line for time outside all phases, and a legend. Without
    colour each phase is drawn by its initial. Every phase has a style of its name."""
    whole = max(total, sum(phases.values())) or 1.0
    bar, legend, reached = Text(), [], 0.0
    for name, spent in phases.items():
        reached += spent / whole
        bar.append(("━" if colour else name[:1]) * (round(reached * width) - len(bar)), name)
        legend.append(Text.assemble((name, name), (f" {percent(spent / whole, 0)}", "dim")))
    return bar.append("─" * (width - len(bar)), "dim"), legend
