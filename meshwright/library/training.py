"""`meshwright.train` and `meshwright.evaluate`: the commands of these names, called by a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cli import eval as eval_command
from meshwright.cli import train as train_command
from meshwright.cli.main import arguments
from meshwright.config.load import GivenConfig, load_config
from meshwright.config.twin import tiny_config
from meshwright.launch.processes import find_place
from meshwright.library.results import Result
from meshwright.record.run_folder import read_run
from meshwright.record.run_notes import read_events
from meshwright.record.speed import pace_of_lines
from meshwright.show.chart import Chart, svg
from meshwright.show.units import decimals, seconds
from meshwright.spec.traffic.counts import LEARNED
from meshwright.watch.loss_curve import finite, smoothed

STOPPED = 130  # the exit code of a run that Ctrl-C has stopped


@dataclass(frozen=True, repr=False)
class Training(Result):
    """A run that `meshwright.train` has trained.

    Attributes:
        run: the run's folder, for `meshwright.load` and all commands.
        steps: the number of steps that the run has trained.
        loss: the loss of the last step.
        validation: the loss of the last validation, or None without one.
        step_s, tokens_per_s: the mean of the last steps.
        metrics: for each figure of metrics.jsonl its values by step, such as `metrics["loss"]`.
        validations: the same of validation.jsonl.
    """

    run: Path
    steps: int
    loss: float
    validation: float | None
    step_s: float
    tokens_per_s: float
    metrics: Mapping[str, Sequence[Any]] = field(repr=False)
    validations: Mapping[str, Sequence[Any]] = field(repr=False)

    def title(self) -> str:
        return f"{self.run}: {self.steps:,} steps"

    def table(self) -> Sequence[Sequence[str]]:
        losses = {"loss of the first step": self.metrics["loss"][0], "loss of the last step": self.loss}
        rows = [("figure", "value"), *((name, decimals(loss, 4)) for name, loss in losses.items())]
        if self.validation is not None:
            rows.append(("last validation", decimals(self.validation, 4)))
        return [*rows, ("step", seconds(self.step_s)), ("tokens per second", f"{self.tokens_per_s:,.0f}")]

    def drawing(self) -> str:
        """Return the loss curve."""
        lines = {"training": smoothed(_points(self.metrics))}
        if valid := _points(self.validations):
            lines["validation"] = valid
        return svg(Chart("loss", "step", "", lines, label="{:,.0f}".format, linear=True, even=True))


def train(
    config: GivenConfig,
    *overrides: str,
    ranks: int | None = None,
    tiny: bool = False,
    source: str | Path | None = None,
    restarts: int = 0,
    quiet: bool = False,
) -> Training:
    """Train a config, and return the run with its figures.

    >>> result = meshwright.train("examples/demo.yaml", "train.steps=50", ranks=8)
    >>> result = meshwright.train("gpt2-124m", tiny=True)           # a recipe's small twin, with its own data
    >>> result = meshwright.train({"model": {...}, "data": {"prefixes": ["data/text"]}})
    >>> result.loss, result.metrics["loss"][:3]
    >>> model = meshwright.load(result.run)

    - `config` is the path of a YAML file, a recipe's name, a mapping of sections, or a `Config`. `overrides` are
      `key=value` words, as on the command line.
    - One rank trains in this process. More `ranks` are started on this machine.
    - A folder that holds a run is continued, as by `meshwright train`. `source` names other weights to begin from, and
      `restarts` how often lost ranks are started again.
    - `quiet` shows no progress.
    """
    launched = find_place().launched
    _, args = arguments("train", ["CONFIG", *overrides, "--restarts", str(restarts)])
    args.config, args.tiny, args.source = config, tiny, None if source is None else str(source)
    # The ranks of another launcher are there already, and a twin says how many it needs.
    args.nproc = ranks if launched or ranks or tiny else 1
    args.quiet, args.summary, args.command = quiet, False, "meshwright.train(...)"
    code = train_command.run(args)
    if code == STOPPED:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"training ended with exit code {code}: its messages stand above")
    resolved = tiny_config(str(config), overrides)[0] if tiny else load_config(config, overrides)
    return training_of(resolved.run.dir)


def training_of(folder: str | Path) -> Training:
    """Return the figures of the run in a folder."""
    run = read_run(folder)
    pace = pace_of_lines(run.steps, read_events(run.path))
    metrics, validations = _columns(run.steps), _columns(run.validations)
    return Training(
        run.path, int(run.steps[-1]["step"]), float(run.steps[-1]["loss"]),
        float(run.validations[-1]["loss"]) if run.validations else None, pace.step_s if pace else 0.0,
        pace.tokens_per_s if pace else 0.0, metrics, validations,
    )  # fmt: skip


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the lines of a file of figures as one list for each name. A line without a name has None there."""
    return {name: [line.get(name) for line in lines] for name in dict.fromkeys(name for line in lines for name in line)}


def _points(columns: Mapping[str, Sequence[Any]]) -> list[tuple[float, float]]:
    return finite([(float(step), float(loss)) for step, loss in zip(columns["step"], columns["loss"], strict=True)]
                  if columns else [])  # fmt: skip


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """The loss of a model on data that it has not learned.

    Attributes:
        source: the folder of the weights.
        loss: the mean loss over `tokens`.
        perplexity: exp(loss), or None if the loss is not that of tokens, as in preference tuning.
        tokens: the number of tokens (or answers) that count.
        samples: the number of samples that were read.
        losses: the terms of the loss by name, if there are several.
    """

    source: Path
    loss: float
    perplexity: float | None
    tokens: int
    samples: int
    losses: Mapping[str, float]

    def title(self) -> str:
        return f"{self.source} on {self.samples:,} samples"

    def table(self) -> Sequence[Sequence[str]]:
        likely = [("perplexity", f"{self.perplexity:.2f}")] if self.perplexity is not None else []
        terms = [(name, decimals(loss, 4)) for name, loss in self.losses.items()]
        return [("figure", "value"), ("loss", decimals(self.loss, 4)), *likely, *terms, ("tokens", f"{self.tokens:,}")]


def evaluate(
    source: str | Path,
    *overrides: str,
    data: str | Path | Sequence[str | Path] | None = None,
    split: str | None = None,
    samples: int = eval_command.DEFAULT_SAMPLES,
) -> Evaluation:
    """Return the loss of a run, a checkpoint or a Hugging Face folder, in this process.

    >>> meshwright.evaluate("runs/mine").perplexity
    >>> meshwright.evaluate("runs/mine@100", split="test", samples=256)
    >>> meshwright.evaluate("models/llama-8b", data="data/text")

    By default the data are the validation data of the run. `split` names another part of them, and `data` the prefixes
    of token files that are read instead. Data that hold fewer than `samples` samples are read once.
    """
    named = [data] if isinstance(data, (str, Path)) else list(data or ())
    _, args = arguments("eval", [str(source), *overrides])
    args.data, args.split, args.samples = [str(prefix) for prefix in named] or None, split, samples
    eval_command.prepare(args)
    found, unit = eval_command.evaluated(args)
    likely = float(found["perplexity"]) if unit == LEARNED else None
    losses = found.get("losses", {})
    return Evaluation(Path(args.source), found["loss"], likely, found["tokens"], found["samples"], losses)
