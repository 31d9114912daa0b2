"""Errors of the predictions for published runs: as a summary, as JSON and as tables. No torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.plan.mixtures import is_mixture
from meshwright.plan.published import OUTLIER, Prediction, Row
from meshwright.show.terminal import table
from meshwright.show.units import percent, seconds

# The program or project of a run, by the first match in its source.
SYSTEMS: tuple[tuple[str, str], ...] = (
    (r"bigscience", "BigScience (Megatron-DeepSpeed)"), (r"llm-foundry", "llm-foundry"), (r"torchtitan", "torchtitan"),
    (r"nanotron", "nanotron"), (r"dgxc|NeMo", "NVIDIA DGXC (NeMo)"), (r"Megatron-MoE", "Megatron-MoE"),
    (r"Megatron-Bridge", "Megatron-Bridge"), (r"SC21|Korthikanti|Shoeybi|MT-NLG|Megatron", "Megatron-LM"),
    (r"fms-fsdp", "fms-fsdp"), (r"InternEvo", "InternEvo"), (r"stas00", "ml-engineering"), (r"DeepSpeed", "DeepSpeed"),
    (r"DeepSeek", "DeepSeek"),
)  # fmt: skip
KINDS = ("dense models", "mixtures of experts")


def system_of(row: Row) -> str:
    """Return the program that a run used, or its source if that is not one of the known programs."""
    source = row.get("source", "")
    return next((name for pattern, name in SYSTEMS if re.search(pattern, source)), source)


def kind_of(row: Row) -> str:
    """Return the kind of a run's model, one of KINDS."""
    return KINDS[is_mixture(row)]


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors by system, by device and by kind of model, and the outcomes of the rows about memory."""
    taken = [p for p in predictions if not p.reason]
    timed = [p for p in taken if p.error is not None]
    cases = [(p, p.case) for p in taken if p.case is not None]
    measured = [(p, case) for p, case in cases if case.measured_gib and case.outcome == "ok"]
    return {
        "rows": len(predictions),
        "taken": len(taken),
        "step_time": _errors([(p, p.error or 0.0) for p in timed]),
        "memory": _errors([(p, p.mem_gib / case.measured_gib - 1) for p, case in measured])
        | {"by_measurement": _grouped([(case.memory_kind, p.mem_gib / case.measured_gib - 1) for p, case in measured])},
        "outliers": [p.id for p in timed if p.is_outlier],
        "out_of_memory_predicted_to_fit": [p.id for p, case in cases if case.outcome == "oom" and p.fits],
        "ran_predicted_not_to_fit": [p.id for p, case in cases if case.outcome == "ok" and not p.fits],
    }


def _errors(rows: list[tuple[Prediction, float]]) -> dict[str, Any]:
    return {
        "all": _mean([error for _, error in rows]),
        "by_kind": _grouped([(kind_of(p.row), error) for p, error in rows]),
        "by_system": _grouped([(system_of(p.row), error) for p, error in rows]),
        "by_gpu": _grouped([(p.row.get("gpu", ""), error) for p, error in rows]),
    }


def _grouped(rows: Iterable[tuple[str, float]]) -> dict[str, Any]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, error in rows:
        found[name].append(error)
    return {name: _mean(errors) for name, errors in sorted(found.items())}


def _mean(errors: list[float]) -> dict[str, float]:
    count = max(1, len(errors))
    return {
        "rows": len(errors), "mean_abs_error": sum(map(abs, errors)) / count, "bias": sum(errors) / count,
        "largest": max(map(abs, errors), default=0.0),
    }  # fmt: skip


def as_json(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the summary and every run."""
    return summary(predictions) | {"runs": [_run(p) for p in predictions]}


def _run(p: Prediction) -> dict[str, Any]:
    measured = p.case.measured_s if p.case else 0.0
    return {
        "id": p.id, "system": system_of(p.row), "model": p.row.get("model", ""), "gpu": p.row.get("gpu", ""),
        "devices": int(float(p.row.get("gpus") or 0)), "source": p.row.get("source", ""),
        "url": p.row.get("source_url", ""), "published_s": measured or None, "predicted_s": p.step_s or None,
        "error": p.error, "why": p.row.get("why", "") if p.is_outlier else "", "memory_gib": p.mem_gib or None,
        "not_taken": p.reason,
    }  # fmt: skip


def report(predictions: Sequence[Prediction], full: bool) -> str:
    """Return the results as text: the errors first, then the outliers with their reasons; with `full` also all runs and
    the errors by device and of the memory."""
    found = summary(predictions)
    lines = _headline(found)
    timed = [p for p in predictions if p.error is not None]
    lines += ["", _errors_table("system", found["step_time"]["by_system"])] if timed else []
    outliers = sorted((p for p in timed if p.is_outlier), key=lambda p: -abs(p.error or 0.0))
    if outliers:
        rows = [("run", "published", "predicted", "error", "why"), *(_cells(p) for p in outliers)]
        lines += ["", f"off by more than {percent(OUTLIER, 0)}:", table(rows, left=(0, 4))]
    if not full:
        return "\n".join(lines)
    lines += ["", _errors_table("device", found["step_time"]["by_gpu"])] if timed else []
    if found["memory"]["all"]["rows"]:
        lines += ["", "memory", _errors_table("system", found["memory"]["by_system"])]
        lines += [_errors_table("how it was measured", found["memory"]["by_measurement"])]
    rows = [("run", "published", "predicted", "error", "model and devices"), *(_cells(p, full=True) for p in timed)]
    lines += ["", "all runs with a step time", table(rows, left=(0, 4))]
    skipped = [(p.id, p.reason) for p in predictions if p.reason]
    lines += ["", "not taken", table([("run", "reason"), *skipped], left=(0, 1))] if skipped else []
    return "\n".join(lines)


def _headline(found: dict[str, Any]) -> list[str]:
    lines = [
        f"step time of {kind}: mean error {percent(mean['mean_abs_error'])} over {mean['rows']} published runs "
        f"(bias {100 * mean['bias']:+.1f} %)"
        for kind, mean in found["step_time"]["by_kind"].items()
    ]
    memory = found["memory"]["all"]
    if memory["rows"]:
        lines.append(f"memory: mean error {percent(memory['mean_abs_error'])} over {memory['rows']} runs")
    wrong = [(found["out_of_memory_predicted_to_fit"], "ran out of memory and is predicted to fit"),
             (found["ran_predicted_not_to_fit"], "ran and is predicted not to fit")]  # fmt: skip
    return lines + [f"{what}: {', '.join(names)}" for names, what in wrong if names]


def _errors_table(head: str, groups: dict[str, Any]) -> str:
    rows = [(head, "runs", "mean |error|", "bias", "largest")]
    for name, each in groups.items():
        bias, worst = f"{100 * each['bias']:+.1f} %", percent(each["largest"])
        rows.append((name, str(each["rows"]), percent(each["mean_abs_error"]), bias, worst))
    return table(rows)


def _cells(p: Prediction, full: bool = False) -> tuple[str, ...]:
    assert p.case is not None and p.error is not None
    words = p.row.get("why") or "no reason is known"
    if full:
        words = f"{p.row.get('model', '')}, {p.row['gpus']} x {p.row['gpu']}"
    return p.id, seconds(p.case.measured_s), seconds(p.step_s), f"{100 * p.error:+.0f} %", words
