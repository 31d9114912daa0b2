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

# The figures by which a run's speed may be published, and their formats. The first that a recipe has is compared.
FIGURES: dict[str, Callable[[float], str]] = {
    "step_s": lambda value: f"{seconds(value)} a step",
    "tflops": lambda value: f"{value:.3g} TFLOP/s",
    "tokens_s_device": lambda value: f"{value:,.0f} tokens/s",
    "device_hours": lambda value: f"{count(value)} device hours",
}


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
    figure = next((key for key in FIGURES if key in recipe.published), "")
    published = float(recipe.published[figure]) if figure else 0.0
    return Comparison(recipe, cost, needed_gib(job, cluster), figure, published, _predicted_value(cost, recipe, figure))


def _predicted_value(cost: Cost, recipe: Recipe, figure: str) -> float:
    """Return the predicted value of a figure."""
    rate = cost.cluster.device.rate(cost.job.config.train.precision) / 1e12
    # If a source doesn't say how it counts, assume that it counts recomputed FLOPs.
    tflops = rate * (cost.mfu if recipe.published.get("counts") == "model" else cost.hfu)
    tokens = float(recipe.published.get("tokens", 0.0))
    predictions = {
        "step_s": cost.step_s, "tflops": tflops, "tokens_s_device": cost.tokens_per_s_device,
        "device_hours": tokens / cost.tokens_per_s_device / 3600, "": 0.0,
    }  # fmt: skip
    return predictions[figure]


HEADER = ("recipe", "parameters", "hardware", "tokens", "published", "predicted", "error", "days", "predicted")


def row(comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a recipe in the table of all recipes."""
    recipe, cost = comparison.recipe, comparison.cost
    days = recipe.published.get("days")
    whole = " (whole run)" if recipe.published.get("counts") == "whole run" else ""
    tokens = recipe.published.get("tokens")
    return (
        recipe.name, count(parameter_count(cost.job.model)),
        f"{recipe.devices:,} x {cost.cluster.device.name}", count(float(tokens)) if tokens else "-",
        FIGURES[comparison.figure](comparison.published) + whole if comparison.figure else "-",
        FIGURES[comparison.figure](comparison.predicted) if comparison.figure else FIGURES["step_s"](cost.step_s),
        "-" if comparison.error is None else f"{100 * comparison.error:+.0f} %",
        f"{float(days):.3g}" if days else "-", "-" if comparison.days is None else f"{comparison.days:.3g}",
    )  # fmt: skip


# The columns that fit into a terminal of 80 columns: the same figures in short units.
SHORT = ("recipe", "devices", "tokens", "published", "planned", "error", "days")
UNITS = {"step_s": " s/step", "tflops": " TF/s", "tokens_s_device": " tok/s", "device_hours": " h", "": ""}
MARK = "*"
NOTE = f"""TF/s: TFLOP/s of a device; h: device hours; tok/s: tokens of a device.
days: published/planned. {MARK} of the whole run, with all that interrupted it."""


def short_row(comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a recipe in the table for a terminal."""
    recipe, p = comparison.recipe, comparison.recipe.published
    mark = MARK if p.get("counts") == "whole run" and comparison.figure else ""
    published_days = f"{float(p['days']):.3g}" if "days" in p else "-"
    predicted_days = "-" if comparison.days is None else f"{comparison.days:.3g}"
    shown = FIGURES["step_s"](comparison.cost.step_s).removesuffix(" a step")
    return (
        recipe.name, f"{count(recipe.devices)} {comparison.cost.cluster.device.name.split('-')[0]}",
        count(float(p["tokens"])) if "tokens" in p else "-",
        count(comparison.published) + UNITS[comparison.figure] + mark if comparison.figure else "-",
        count(comparison.predicted) if comparison.figure else shown,
        "-" if comparison.error is None else f"{100 * comparison.error:+.0f} %", f"{published_days}/{predicted_days}",
    )  # fmt: skip


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

*Published* is what the sources report of the run's speed; *predicted* is the planner's figure of the same kind for the
same devices, layout and software stack. "Whole run" counts everything that interrupted a run, so it should be slower
than predicted. A twin keeps which of the axes tp, cp, ep, pp and dp are larger than 1, the schedule, ZeRO's stage,
recomputation, and the kinds of parts; it learns bytes of Python's standard library, so it needs no data.

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
        *(f"- Values of {sections}: {source}." for sections, source in recipe.values.items()),
        *(f"- Not published: {sentence}" for sentence in recipe.unpublished),
        *(f"- Differs: {sentence}" for sentence in recipe.differs), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _published_words(p: Mapping[str, float | str]) -> str:
    """Describe the published figures of a run."""
    known = {"hardware": " with recomputation counted", "model": " without recomputation"}
    counts = known.get(str(p.get("counts")), "")
    words = [f"{count(float(p['tokens']))} tokens"] if "tokens" in p else []
    words += [f"{float(p['days']):g} days"] if "days" in p else []
    for key, write in FIGURES.items():
        if key in p:
            words.append(write(float(p[key])) + (counts if key == "tflops" else ""))
    return ", ".join(words)
