"""Compares the planner's predictions for recipes with the published figures of their runs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from meshwright.config.recipes import Recipe, read_recipe, recipe_names
from meshwright.plan.account import layout_of_cost, layout_words, whole_run
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.memory import needed_gib
from meshwright.plan.target import cluster_for, on_cluster, stack_for, target_of
from meshwright.show.units import count, percent, seconds
from meshwright.spec.model.graph import parameter_count

# The figures by which the speed of a run's steps may be published, and their formats. The first that a recipe has is
# compared. Figures of a whole run, with all that interrupted it, are not: they are shown beside the predicted hours.
FIGURES: dict[str, Callable[[float], str]] = {
    "step_s": lambda value: f"{seconds(value)} a step",
    "tflops": lambda value: f"{value:.3g} TFLOP/s",
    "tokens_s_device": lambda value: f"{value:,.0f} tokens/s",
}


WHOLE_RUN = "whole run"  # the value of `counts` for figures that include what interrupted a run


@dataclass(frozen=True)
class Comparison:
    """A recipe's published and predicted speed, in a figure that both have."""

    recipe: Recipe
    cost: Cost
    memory_gib: float
    figure: str  # A key of FIGURES, or empty if nothing was published.
    published: float
    predicted: float

    @property
    def error(self) -> float | None:
        """The relative error of the prediction, positive if it is too large; None if nothing was published."""
        return self.predicted / self.published - 1 if self.figure else None

    @property
    def published_hours(self) -> float | None:
        """The published device hours of the whole run, or None."""
        p = self.recipe.published
        if "device_hours" in p:
            return float(p["device_hours"])
        return float(p["days"]) * 24 * self.recipe.devices if "days" in p else None

    @property
    def predicted_hours(self) -> float | None:
        """The device hours of the run's steps alone, or None if the number of tokens was not published."""
        return None if self.days is None else self.days * 24 * self.recipe.devices

    @property
    def days(self) -> float | None:
        """The predicted days for the published number of tokens, or None if that was not published."""
        tokens = self.recipe.published.get("tokens")
        return whole_run(self.cost, float(tokens))["days"] if tokens else None


@lru_cache(maxsize=64)
def predict_recipe(name: str) -> Comparison:
    """Predict the recipe of that name on its own cluster, devices and software stack."""
    recipe = read_recipe(name)
    target = target_of(name, placed=False)
    cluster = cluster_for(target, None)
    job = on_cluster(target, recipe.devices, cluster, stack_for(target.config, cluster, recipe.stack))
    cost = predict_cost(job, cluster)
    is_whole = recipe.published.get("counts") == WHOLE_RUN
    figure = "" if is_whole else next((key for key in FIGURES if key in recipe.published), "")
    published = float(recipe.published[figure]) if figure else 0.0
    return Comparison(recipe, cost, needed_gib(job, cluster), figure, published, _predicted_value(cost, recipe, figure))


def _predicted_value(cost: Cost, recipe: Recipe, figure: str) -> float:
    """Return the predicted value of a figure."""
    rate = cost.cluster.device.rate(cost.job.config.train.precision) / 1e12
    # If a source doesn't say how it counts, assume that it counts recomputed FLOPs.
    tflops = rate * (cost.mfu if recipe.published.get("counts") == "model" else cost.hfu)
    predictions = {"step_s": cost.step_s, "tflops": tflops, "tokens_s_device": cost.tokens_per_s_device, "": 0.0}
    return predictions[figure]


# The first five columns are about a step, the last two about the device hours of a whole run.
HEADER = ("recipe", "parameters", "hardware", "tokens", "step, published", "predicted", "error", "run, published",
          "its steps alone, predicted")  # fmt: skip


def row(comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a recipe in the table of all recipes."""
    recipe, cost, figure = comparison.recipe, comparison.cost, comparison.figure
    tokens = recipe.published.get("tokens")
    hours = (comparison.published_hours, comparison.predicted_hours)
    return (
        recipe.name, count(parameter_count(cost.job.model)), f"{recipe.devices:,} x {cost.cluster.device.name}",
        count(float(tokens)) if tokens else "-", FIGURES[figure](comparison.published) if figure else "-",
        FIGURES[figure or "step_s"](comparison.predicted if figure else cost.step_s), _error(comparison),
        *("-" if each is None else f"{count(each)} hours" for each in hours),
    )  # fmt: skip


def _error(comparison: Comparison) -> str:
    return "-" if comparison.error is None else f"{100 * comparison.error:+.0f} %"


# The columns that fit into a terminal of 80 columns: the same figures in short units.
SHORT = ("recipe", "devices", "step", "planned", "error", "run, h", "steps, h")
UNITS = {"step_s": " s", "tflops": " TF/s", "tokens_s_device": " t/s"}
NOTE = """step: published, and planned. TF/s: TFLOP/s of a device; t/s: its tokens/s.
run, h: published device hours of the whole run, with all that interrupted it;
steps, h: planned hours of its steps alone."""


def _short(value: float) -> str:
    return count(value) if value >= 1000 else f"{value:.3g}"


def short_row(comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a recipe in the table for a terminal."""
    recipe, figure = comparison.recipe, comparison.figure
    unit, planned = UNITS[figure or "step_s"], comparison.predicted if figure else comparison.cost.step_s
    return (
        recipe.name, f"{count(recipe.devices)} {comparison.cost.cluster.device.name.split('-')[0]}",
        f"{_short(comparison.published)}{unit}" if figure else "-", f"{_short(planned)}{unit}", _error(comparison),
        *("-" if each is None else count(each) for each in (comparison.published_hours, comparison.predicted_hours)),
    )  # fmt: skip


LAYOUTS = ("recipe", "devices", "dp", "tp", "pp", "ZeRO", "precision", "layout of")


def layout_row(name: str) -> tuple[str, ...]:
    """Return the cells of a recipe in the table of layouts, with the number of devices and how the run divides them."""
    recipe = read_recipe(name)
    config = target_of(name, placed=False).config
    layout = config.layout
    dp = recipe.devices // layout.least_world
    numbers = (recipe.devices, dp, layout.tp, layout.pp, config.zero.stage)
    origin = "its source" if recipe.layout == "published" else "Meshwright"
    return (name, *map(str, numbers), config.train.precision, origin)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison of a recipe as JSON."""
    recipe, cost = comparison.recipe, comparison.cost
    return {
        "name": recipe.name, "title": recipe.title, "source": recipe.source, "hardware": recipe.hardware,
        "cluster": recipe.cluster, "devices": recipe.devices, "stack": cost.job.stack.name,
        "layout": layout_of_cost(cost), "layout_by": recipe.layout, "published": dict(recipe.published),
        "values": dict(recipe.values), "unpublished": list(recipe.unpublished), "differs": list(recipe.differs),
        "parameters": parameter_count(cost.job.model),
        "predicted": {
            "step_s": cost.step_s, "tokens_s_device": cost.tokens_per_s_device, "mfu": cost.mfu,
            "hfu": cost.hfu, "memory_gib": comparison.memory_gib, "days": comparison.days,
        },
        "compared": comparison.figure or None, "error": comparison.error,
        "whole_run_hours": {"published": comparison.published_hours, "predicted": comparison.predicted_hours},
    }  # fmt: skip


INTRODUCTION = """# Recipes

The configs of known training runs, made by `meshwright recipes --markdown`. A recipe is a config file of the package,
found by its name wherever a command takes a config:

```
meshwright recipes                         # this table
meshwright config show bloom-176b          # the whole config
meshwright config check bloom-176b
meshwright cost bloom-176b                 # the predicted step; also plan, memory, simulate and dryrun
meshwright train bloom-176b --tiny         # its twin: a small model on the same axes, 8 ranks of this machine
meshwright train bloom-176b data.prefixes=[my/tokens]
```

*Step* is the speed that the sources report of a step, beside the planner's figure of the same kind for the same
devices, layout and software stack. *Run* is the device hours of the whole run, with everything that interrupted it. It
has no error: beside it stand the predicted hours of its steps alone. A twin keeps which of the axes tp, cp, ep, pp and
dp are larger than 1, the schedule, ZeRO's stage, recomputation, and the kinds of parts; it learns bytes of Python's
standard library, so it needs no data.

Those that end in `sft1`, `lora2`, `nf4` and so on tune a model on conversations ([finetuning.md](finetuning.md)), on
that many GPUs; their twins learn the first lines of docstrings, those with adapters over an untrained base.
"""


def markdown(names: Sequence[str] = ()) -> str:
    """Return the text of docs/recipes.md."""
    comparisons = [predict_recipe(name) for name in names or recipe_names()]
    rows = [HEADER, tuple("---" for _ in HEADER), *map(row, comparisons)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([INTRODUCTION, table, "", *map(_recipe_section, comparisons)])


def _recipe_section(comparison: Comparison) -> str:
    """Return the section of docs/recipes.md about one recipe."""
    recipe, p = comparison.recipe, comparison.recipe.published
    by = "the run's" if recipe.layout == "published" else "ours, or of whoever measured"
    peak = f"{comparison.memory_gib:.0f} of {comparison.cost.cluster.device.memory_gib:.0f} GiB"
    mine = f"{seconds(comparison.cost.step_s)} a step, {comparison.cost.tokens_per_s_device:,.0f} tokens/s per device, "
    mine += f"MFU {percent(comparison.cost.mfu)}, HFU {percent(comparison.cost.hfu)}, {peak}"
    published = _published_words(p)
    lines = [
        f"## {recipe.title} (`{recipe.name}`)", "", f"- Source: {recipe.source}.", f"- Hardware: {recipe.hardware}.",
        f"- Published: {published}." if published else "- Published: nothing about its speed.",
        f"- Layout ({by}): {layout_words(layout_of_cost(comparison.cost))}.",
        f"- Predicted on {recipe.devices:,} x {comparison.cost.cluster.device.name} ({recipe.cluster}, stack "
        f"{comparison.cost.job.stack.name}): {mine}.",
        *([f"- Why the prediction is far off: {recipe.why}."] if recipe.why else []),
        *(f"- Values of {sections}: {source}." for sections, source in recipe.values.items()),
        *(f"- Not published: {sentence}" for sentence in recipe.unpublished),
        *(f"- Differs: {sentence}" for sentence in recipe.differs), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _published_words(p: Mapping[str, float | str]) -> str:
    """Describe the published figures of a run."""
    known = {"hardware": " with recomputation counted", "model": " without recomputation"}
    counts = (known | {WHOLE_RUN: " over the whole run"}).get(str(p.get("counts")), "")
    words = [f"{count(float(p['tokens']))} tokens"] if "tokens" in p else []
    words += [f"{float(p['days']):g} days"] if "days" in p else []
    for key, write in FIGURES.items():
        if key in p:
            words.append(write(float(p[key])) + (counts if key == "tflops" else ""))
    words += [f"{count(float(p['device_hours']))} device hours"] if "device_hours" in p else []
    return ", ".join(words)
