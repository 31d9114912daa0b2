"""What a person wants to look at after a run, from the files of its folder alone: the loss curve, the speed, where the
time went, and who sent how many bytes to whom. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from meshwright.config.load import config_from, parse_yaml
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.layout.draw import elide
from meshwright.pipeline.table import looped
from meshwright.train import display as d
from meshwright.train.display import BAD, PHASES, Line, many, number, quantity, size

ROWS = 16
GUTTER = 9  # columns of the curve's labels and axis
MATRIX_RANKS = 16  # up to this many ranks every link is shown
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell, by row and column

# What goes over an axis.
CARGO = {
    "tp": "activations and their gradients, in every layer",
    "tp.kv": "gradients of the key-value heads that several ranks hold",
    "cp": "keys and values, in every layer",
    "dp": "gradients",
    "dp-cp": "gradients",
    "pp": "activations to the next stage, their gradients back",
    "ep": "tokens to their experts and back",
    "embedding": "gradients of the tied embedding, between first and last stage",
    "position_embedding": "gradients of the position embedding",
    "world": "loss, gradient norm and the counts of this table",
}

Lines = list[dict[str, Any]]
Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """A run folder as it was read. `world` and `layout` are None where nothing tells how many ranks there were."""

    path: Path
    config: Config
    steps: Lines
    validations: Lines
    layout: Layout | None
    own_model: bool = False

    @property
    def world(self) -> int | None:
        return self.layout.world if self.layout else None


def summary(
    run_dir: str | Path, stream: TextIO | None = None, *, world: int | None = None, width: int | None = None
) -> None:
    """Writes the page. `world` is needed only for folders without a run.json; a narrow terminal wraps the table."""
    stream = sys.stdout if stream is None else stream
    run = read_run(run_dir, world)
    colour = d.coloured(stream)
    if width is None:
        width = min(d.terminal_size(stream)[0], 120) if d.terminal(stream) else 100
    lines = page(run, max(40, width), colour)
    stream.write(d.printable("".join(line.render(colour) + "\n" for line in lines), stream))
    stream.flush()


def page(run: Run, width: int, colour: bool) -> list[Line]:
    config = dataclasses.replace(run.config, run=dataclasses.replace(run.config.run, dir=str(run.path)))
    lines = [*d.head(config, run.world, own_model=run.own_model, width=width), Line()]
    if not run.steps:
        return [*lines, Line("no step was finished", "bad")]
    train = [(float(s["step"]), float(s["loss"])) for s in run.steps]
    valid = [(float(v["step"]), float(v["loss"])) for v in run.validations]
    lines += [*curve(train, valid, width, colour), Line(), *_losses(train, valid), Line()]
    lines += [*_speed(run), *_phases(run, width, colour), *_skipped(run), Line()]
    return lines + traffic(run, width)


def read_run(run_dir: str | Path, world: int | None = None) -> Run:
    path = Path(run_dir)
    file = path / "config.yaml"
    if not file.is_file():
        raise UserError(f"{path} holds no run: name the folder that run.dir named")
    raw = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(raw, Mapping):
        raise UserError(f"{file} holds no config: name the folder of a run")
    known = {f.name for f in dataclasses.fields(Config)} - {"extra"}
    config = config_from({name: section for name, section in raw.items() if name in known})
    notes = _json_file(path / "run.json")
    steps = _json_lines(path / "metrics.jsonl")
    world = world or notes.get("world") or _least_world(config, steps)
    layout = d.layout_of(config, int(world), int(notes.get("node_size") or 0)) if world else None
    return Run(path, config, steps, _json_lines(path / "validation.jsonl"), layout, bool(notes.get("own_model")))


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _json_lines(path: Path) -> Lines:
    """By step; of a step written twice (a run that was resumed) the later line, and none for one cut off by a kill."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "step" in value and "loss" in value:
            value["loss"] = math.nan if value["loss"] is None else value["loss"]  # null: not finite
            found[value["step"]] = value
    return [found[step] for step in sorted(found)]


def _least_world(config: Config, steps: Lines) -> int | None:
    """Known without a word where no gradient was reduced: then there is one replica."""
    c = config.layout
    data = any("dp" in axis.split("-") for line in steps for axis in line.get("comm", {}))
    return c.tp * c.cp * c.pp if steps and not data else None


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A centred mean over a fortieth of the points."""
    reach = len(points) // 80
    sums = list(accumulate((loss for _, loss in points), initial=0.0))
    out = []
    for i, (step, _) in enumerate(points):
        low, high = max(0, i - reach), min(len(points), i + reach + 1)
        out.append((step, (sums[high] - sums[low]) / (high - low)))
    return out


def _finite(points: Iterable[Point]) -> list[Point]:
    return [p for p in points if math.isfinite(p[1])]


class Canvas:
    """Dots in braille, two by four to a cell, over a range of steps and one of losses."""

    def __init__(self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.columns, self.rows, self.x, self.y = columns, rows, x, y
        self.dots: dict[tuple[int, int], int] = defaultdict(int)

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """In dots, from the left and from the top."""
        (left, right), (low, high) = self.x, self.y
        across = (step - left) / (right - left) if right > left else 0.5
        return across * (2 * self.columns - 1), (high - loss) / (high - low) * (4 * self.rows - 1)

    def dot(self, x: float, y: float) -> None:
        column, row = round(x), round(y)
        if 0 <= column < 2 * self.columns and 0 <= row < 4 * self.rows:
            self.dots[row // 4, column // 2] |= DOTS[row % 4][column % 2]

    def line(self, points: Sequence[Point]) -> None:
        places = [self.place(*p) for p in points]
        for (x0, y0), (x1, y1) in zip(places, places[1:], strict=False):
            pieces = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
            for i in range(pieces + 1):
                self.dot(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces)
        for x, y in places[:1]:
            self.dot(x, y)


def curve(train: Sequence[Point], valid: Sequence[Point], width: int, colour: bool) -> list[Line]:
    """The loss over steps: the smoothed line, in colour also every step's own dot, and validation as diamonds."""
    good = _finite(train)
    marks = _finite(valid)
    if not good and not marks:
        return [Line("no loss was finite", "bad")]
    line = smoothed(good)
    losses = [loss for _, loss in (*line, *marks)]
    spread = max(losses) - min(losses) or abs(losses[0]) * 0.1 or 1.0
    reach = (min(losses) - 0.03 * spread, max(losses) + 0.03 * spread)
    ends = [step for step, _ in (*train, *valid)]
    columns, steps = width - GUTTER - 1, (min(ends), max(ends))
    drawn, each = Canvas(columns, ROWS, steps, reach), Canvas(columns, ROWS, steps, reach)
    drawn.line(line)
    for point in good if colour else ():
        each.dot(*each.place(*point))
    spots = {}
    for point in marks:
        x, y = drawn.place(*point)
        spots[round(y) // 4, round(x) // 2] = "◆"
    ticks = {round(drawn.place(0, t)[1]) // 4: t for t in _ticks(*reach, 5)}
    digits = _digits(list(ticks.values()))
    title = Line(" " * GUTTER).add("loss  ", "bold").add("━ training" if len(good) > 1 else "• training", "curve")
    if marks:
        title.add("  ◆ validation", "valid")
    lines = [title.add("  by step", "dim")]
    for row in range(ROWS):
        label = f"{ticks[row]:.{digits}f}" if row in ticks else ""
        text = Line(f"{label:>{GUTTER - 2}} {'┤' if row in ticks else '│'}", "dim")
        for column in range(columns):
            at = (row, column)
            if at in spots:
                text.add(spots[at], "valid")
            elif at in drawn.dots:
                text.add(chr(0x2800 + drawn.dots[at]), "curve")
            else:
                text.add(chr(0x2800 + each.dots[at]) if at in each.dots else " ", "dim")
        lines.append(text)
    bad = {round(drawn.place(s, 0.0)[0]) // 2 for s, loss in train if not math.isfinite(loss)}
    return lines + _step_axis(drawn, bad)


def _step_axis(canvas: Canvas, bad: set[int]) -> list[Line]:
    """The rule with ticks, a cross where a loss was not finite, and the steps below."""
    left, right = canvas.x
    ticks = [left] if left == right else [t for t in _ticks(left, right, max(2, canvas.columns // 10)) if t == int(t)]
    at = {round(canvas.place(t, 0.0)[0]) // 2: f"{int(t):,}" for t in ticks}
    rule = Line(" " * (GUTTER - 1) + "└", "dim")
    labels = " " * GUTTER
    for column in range(canvas.columns):
        rule.add(BAD if column in bad else "┬" if column in at else "─", "bad" if column in bad else "dim")
        start = GUTTER + min(column, canvas.columns - len(at.get(column, "")))
        if column in at and len(labels) <= start:
            labels = labels.ljust(start) + at[column] + " "
    return [rule, Line(labels, "dim")]


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between low and high, at most so many."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _digits(ticks: Sequence[float]) -> int:
    """Decimals that tell neighbouring ticks apart."""
    gap = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else 0.01
    return min(6, max(0, -math.floor(math.log10(gap) + 1e-9)))


def _losses(train: Sequence[Point], valid: Sequence[Point]) -> list[Line]:
    rows = [("training", train, "loss")] + ([("validation", valid, "valid")] if valid else [])
    lines = [Line(f"{'loss':<12}{'first':>10}{'last':>12}{'lowest':>12}", "dim")]
    for name, points, style in rows:
        low = min(_finite(points), key=lambda p: p[1], default=(math.nan, math.nan))
        line = Line(f"{name:<12}").add(f"{number(points[0][1], 4):>10}").add(f"{number(points[-1][1], 4):>12}", style)
        line.add(f"{number(low[1], 4):>12}")
        lines.append(line.add(f"  at step {int(low[0]):,}", "dim") if math.isfinite(low[0]) else line)
    return lines if valid else [*lines, Line(f"{'validation':<12}").add("      none", "dim")]


def _speed(run: Run) -> list[Line]:
    times = [float(s.get("step_time_s") or 0.0) for s in run.steps]
    speeds = [float(s["tokens_per_s"]) for s in run.steps if s.get("tokens_per_s")]
    tokens, samples = (sum(int(s.get(key) or 0) for s in run.steps) for key in ("tokens", "global_batch"))
    middle = statistics.median(speeds) if speeds else math.nan
    first = Line(f"{'speed':<12}", "dim").add(f"{quantity(middle)} tokens/s", "bold").add(" (median)")
    if run.world and run.world > 1:
        first.add(f"   {quantity(middle / run.world)} a rank")
    first.add(f"   {d.duration(statistics.median(times))} a step")
    seen = f"{quantity(tokens)} tokens"
    if not run.own_model:
        seen += f" ({_three(tokens / d.parameters(run.config))} a parameter)"
    whole = Line(f"{'seen':<12}", "dim").add(seen, "bold")
    whole.add(f"   {samples:,} samples   {many(len(run.steps), 'step')} in {d.clock(sum(times))} without validation")
    return [first, whole]


def _three(value: float) -> str:
    return f"{value:.3g}"


def _phases(run: Run, width: int, colour: bool) -> list[Line]:
    names = [p for p in PHASES if any(p in s.get("phases", {}) for s in run.steps)]
    seconds = {p: sum(float(s.get("phases", {}).get(p, 0.0)) for s in run.steps) for p in names}
    if not seconds:
        return []
    total = sum(float(s.get("step_time_s") or 0.0) for s in run.steps)
    bar = d.phase_bar(seconds, total, min(width, 100) - 12, colour)
    first = Line(f"{'time':<12}", "dim")
    first.pieces += bar.pieces
    return [first, Line(" " * 12).join(d.phase_legend(seconds, total), "   ", width)]


def _skipped(run: Run) -> list[Line]:
    lines = []
    skipped = [str(s["step"]) for s in run.steps if s.get("skipped")]
    wrong = [str(s["step"]) for s in run.steps if not s.get("skipped") and not math.isfinite(s["loss"])]
    for name, steps in (("skipped", skipped), ("not finite", wrong)):
        if steps:
            listed = ", ".join(steps[:12]) + (", …" if len(steps) > 12 else "")
            share = f" of {len(run.steps):,}" if len(run.steps) > 1 else ""
            lines.append(Line(f"{name:<12}", "dim").add(f"{many(len(steps), 'step')}{share}", "bad").add(f": {listed}"))
    return lines or [Line(f"{'skipped':<12}", "dim").add("none")]


def traffic(run: Run, width: int) -> list[Line]:
    """Who sent how many bytes to whom: the mean of a step, by axis of the layout, and by link in a small world."""
    axes = per_step(run.steps)
    total = sum(counts["wire_bytes"] for counts in axes.values())
    if not axes:
        return [Line("nothing was sent: ", "bold").add("one rank needs nobody")]
    ranks = f", {many(run.world, 'rank')} together" if run.world else ""
    lines = [
        Line("who sent how many bytes to whom ", "bold").add(f"(mean of a step{ranks})", "dim"),
        Line(f"{'axis':<12}{'calls':>8}{'payload':>13}{'on the wire':>14}{'a rank':>13}{'share':>8}", "dim"),
    ]
    for axis, counts in sorted(axes.items(), key=lambda item: -item[1]["wire_bytes"]):
        lines += _axis_lines(run, axis, counts, total, width)
    calls, payload = (sum(counts[key] for counts in axes.values()) for key in ("calls", "payload_bytes"))
    lines.append(Line(f"{'all':<12}{quantity(calls):>8}{size(payload):>13}{size(total):>14}", "bold"))
    note = "payload: the whole tensor, on every rank that takes part; wire: what they send, by rings"
    lines.append(Line(note, "dim"))
    if run.layout and 1 < run.layout.world <= MATRIX_RANKS:
        lines += [Line(), *_matrix(run.config, run.layout, axes, width)]
    return lines


def per_step(steps: Lines) -> dict[str, dict[str, float]]:
    """By axis, the calls and bytes of a mean step, summed over all ranks."""
    axes: dict[str, dict[str, float]] = {}
    for line in steps:
        for axis, counts in line.get("comm", {}).items():
            into = axes.setdefault(axis, {"calls": 0.0, "payload_bytes": 0.0, "wire_bytes": 0.0})
            for key in into:
                into[key] += counts.get(key, 0)
    return {axis: {key: count / len(steps) for key, count in sums.items()} for axis, sums in axes.items()}


def _groups(layout: Layout | None, axis: str) -> tuple[tuple[int, ...], ...]:
    """Of several ranks; none for an axis that the layout does not know."""
    try:
        return tuple(group for group in layout.groups(axis) if len(group) > 1) if layout else ()
    except UserError:
        return ()


def _axis_lines(run: Run, axis: str, counts: Mapping[str, float], total: float, width: int) -> list[Line]:
    groups = _groups(run.layout, axis)
    takers = sum(map(len, groups))
    each = size(counts["wire_bytes"] / takers) if takers else ""
    share = counts["wire_bytes"] / total if total else 0.0
    percent = "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
    row = Line(f"{axis:<12}", "name").add(f"{quantity(counts['calls']):>8}{size(counts['payload_bytes']):>13}")
    row.add(f"{size(counts['wire_bytes']):>14}", "bold").add(f"{each:>13}{percent:>8}  ")
    row.add("█" * round(share * max(0, min(width, 100) - len(row))), "bar")
    lines = [row]
    if axis in CARGO:
        lines.append(Line("  ").add(CARGO[axis], "dim"))
    if groups:
        chain = axis == "pp"
        words = f"{many(len(groups), 'pipeline' if chain else 'group')} of {len(groups[0])}:"
        lines.append(Line("  ").add(_written(words, groups, "⇄" if chain else " ", width - 2), "dim"))
        if chain and run.config.layout.chunks > 1:
            text = f"{run.config.layout.chunks} chunks a rank: the last stage also sends to the first, and back"
            lines.append(Line("  ").add(text, "dim"))
    return lines


def _written(words: str, groups: Sequence[Sequence[int]], between: str, width: int) -> str:
    """The groups with their ranks, as many as fit, the last one always shown."""

    def one(group: Sequence[int], limit: int) -> str:
        ranks = between.join("…" if i is None else str(group[i]) for i in elide(len(group), limit))
        return f"[{ranks}]" if between == " " else ranks

    text = ""
    for most, limit in ((len(groups), max(map(len, groups))), *((n, 8) for n in (12, 8, 6, 4, 3)), (3, 4)):
        shown = elide(len(groups), most)
        text = " ".join([words, *("…" if i is None else one(groups[i], max(3, limit)) for i in shown)])
        if len(text) <= width:
            break
    return text


def links(config: Config, layout: Layout, axes: Mapping[str, Mapping[str, float]]) -> dict[tuple[int, int], float]:
    """Wire bytes from rank to rank in a step: a collective goes round its group as a ring, a pipeline from stage to
    stage and back. An axis' bytes are spread evenly over its links, for the run folder knows their sum."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    for axis, counts in axes.items():
        ways: list[tuple[int, int]] = []
        for group in _groups(layout, axis):
            if axis == "pp":
                places = [group[rank] for rank, _ in looped(layout.pp, config.layout.chunks)]
                pairs = list(zip(places, places[1:], strict=False))
                ways += [*pairs, *((b, a) for a, b in pairs)]
            else:
                ways += zip(group, (*group[1:], group[0]), strict=True)
        for way in ways:
            sent[way] += counts["wire_bytes"] / len(ways)
    return dict(sent)


def _matrix(config: Config, layout: Layout, axes: Mapping[str, Mapping[str, float]], width: int) -> list[Line]:
    sent = links(config, layout, axes)
    cell = 10 if 4 + 10 * layout.world <= width else 6
    if not sent or 4 + cell * layout.world > width:
        return []
    lines = [
        Line("from rank (row) to rank (column) ", "bold").add("rings, an axis spread evenly over its links", "dim"),
        Line(" " * 4 + "".join(f"{rank:>{cell}}" for rank in range(layout.world)), "dim"),
    ]
    most = max(sent.values())
    for rank in range(layout.world):
        row = Line(f"{rank:>3} ", "dim")
        for to in range(layout.world):
            count = sent.get((rank, to), 0.0)
            text = size(count) if cell == 10 else size(count, "").replace("iB", "")
            style = "backward" if count > 0.5 * most else "forward" if count > 0.01 * most else "dim"
            row.add(f"{text if count else '·':>{cell}}", style if count else "dim")
        lines.append(row)
    return lines
