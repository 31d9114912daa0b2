"""The step times and memory that the planner predicts, beside the measurements in a table of published runs.

    python benchmarks/predict.py --csv published_runs.csv --out predictions.csv

Empty cp, ep, vpp and kv_heads mean 1, 1, 1 and as many as heads. An empty vocab is 51200, an empty ffn 4 x hidden, and
an empty precision fp16. For rows that can't be used, the column `reason` says why.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from meshwright.disk import write
from meshwright.show.terminal import table
from meshwright.show.units import percent

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish  # noqa: E402
from published import NEEDED, Prediction, predict_file, predictions_csv  # noqa: E402


def summary(predictions: list[Prediction]) -> dict[str, Any]:
    """Return the errors by source and by device, and the outcomes of the rows about memory."""
    taken = [p for p in predictions if not p.reason]
    timed = [p for p in taken if p.error is not None]
    cases = [(p, p.case) for p in taken if p.case is not None]
    measured = [(p, case) for p, case in cases if case.measured_gib and case.outcome == "ok"]
    return {
        "rows": len(predictions),
        "taken": len(taken),
        "step_time": _errors([(p, p.error or 0.0) for p in timed]),
        "memory": _errors([(p, p.mem_gib / case.measured_gib - 1) for p, case in measured])
        | {"by_kind": _grouped([(case.memory_kind, p.mem_gib / case.measured_gib - 1) for p, case in measured])},
        "out_of_memory_predicted_to_fit": [p.id for p, case in cases if case.outcome == "oom" and p.fits],
        "ran_predicted_not_to_fit": [p.id for p, case in cases if case.outcome == "ok" and not p.fits],
    }


def _errors(rows: list[tuple[Prediction, float]]) -> dict[str, Any]:
    return {
        "all": _mean([error for _, error in rows]),
        "by_source": _grouped([(p.source, error) for p, error in rows]),
        "by_gpu": _grouped([(p.gpu, error) for p, error in rows]),
    }


def _grouped(rows: list[tuple[str, float]]) -> dict[str, Any]:
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


def report(found: dict[str, Any]) -> str:
    lines = [f"{found['taken']} of {found['rows']} rows taken"]
    for what, title in (("step_time", "step time"), ("memory", "memory")):
        for key, head in (("by_source", "source"), ("by_gpu", "device"), ("by_kind", "how it was measured")):
            if key not in found[what]:
                continue
            rows = [(f"{title} by {head}", "rows", "mean |error|", "bias", "largest")]
            rows += [(name[:90], *_cells(e)) for name, e in found[what][key].items()]
            rows.append(("all", *_cells(found[what]["all"])))
            lines += ["", table(rows)]
    for key, title in (
        ("out_of_memory_predicted_to_fit", "ran out of memory, predicted to fit"),
        ("ran_predicted_not_to_fit", "ran, predicted not to fit"),
    ):
        lines += ["", f"{title}: {len(found[key])}", *(f"  {name}" for name in found[key])]
    return "\n".join(lines)


def _cells(errors: dict[str, float]) -> tuple[str, str, str, str]:
    bias = f"{100 * errors['bias']:+.1f} %"
    return str(errors["rows"]), percent(errors["mean_abs_error"]), bias, percent(errors["largest"])


def main() -> None:
    parser = BenchParser(__doc__)
    columns = f"a table of runs, one per line; needed columns: {', '.join(NEEDED)}"
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE", help=columns)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the predictions here, as CSV")
    args = parser.parse(csv=Path(__file__).parent / "published_mixtures.csv")
    predictions = predict_file(args.csv)
    write(args.out, lambda: predictions_csv(predictions))
    found = summary(predictions)
    print(report(found))
    finish(args, found)


if __name__ == "__main__":
    main()
