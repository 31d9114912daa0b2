"""Fits the planner's efficiency constants to published runs, and reports how well they predict held-out sources.

    python benchmarks/calibrate.py published_runs.csv            # the errors of the present constants
    python benchmarks/calibrate.py published_runs.csv --fit      # fit, and print the constants
    python benchmarks/calibrate.py published_runs.csv --fit --write     # and write them into the data files
    python benchmarks/calibrate.py published_runs.csv --cross-validate  # fit without each source, and test on it

The loss is the mean absolute error of the step time. The rows of one source share a weight that grows with the square
root of their number, so that no single source decides. Mixtures of experts are left out. The search changes one
constant at a time and keeps improvements.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.plan import mixtures, published
from meshwright.plan.cluster import FOLDER, Cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import Job
from meshwright.plan.stack import STACKS

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish  # noqa: E402

STACK_FILE = FOLDER.parent / "stacks.yaml"


@dataclass(frozen=True)
class Constant:
    """One fitted number, shared by the files in which it appears."""

    kind: str  # cluster or stack
    names: tuple[str, ...]
    field: str
    low: float
    high: float

    @property
    def label(self) -> str:
        return f"{'/'.join(self.names)}.{self.field}"


A100, H100 = ("a100-80g-dgx", "a100-40g-dgx"), ("h100-80g-dgx", "h200-141g-dgx")
CONSTANTS = (
    Constant("cluster", A100, "product", 0.6, 0.95),
    Constant("cluster", A100, "attention", 0.2, 0.8),
    Constant("cluster", H100, "product", 0.5, 0.9),
    Constant("cluster", ("h100-80g-dgx",), "attention", 0.2, 0.8),
    Constant("cluster", ("h200-141g-dgx",), "attention", 0.2, 0.9),
    Constant("cluster", ("h100-96g-500w",), "product", 0.35, 0.8),
    Constant("cluster", ("h100-96g-500w",), "attention", 0.2, 0.8),
    Constant("cluster", ("b200-180g-dgx",), "product", 0.3, 0.9),
    Constant("cluster", ("b200-180g-dgx",), "attention", 0.2, 0.9),
    Constant("cluster", ("v100-32g", "v100-16g"), "product", 0.5, 0.88),
    Constant("cluster", ("h100-80g-dgx", "h200-141g-dgx", "h100-96g-500w", "b200-180g-dgx"), "fp8", 0.4, 0.95),
    Constant("stack", ("unfused",), "accumulate", 0.5, 10.0),
    Constant("stack", ("unfused",), "passes", 0.8, 2.0),
    Constant("stack", ("unfused-deepspeed",), "accumulate", 4.0, 24.0),
    Constant("stack", ("unfused-deepspeed",), "passes", 0.8, 2.5),
    Constant("stack", ("fused",), "attention", 0.4, 1.2),
    Constant("stack", ("fused",), "passes", 1.0, 4.0),
    Constant("stack", ("fused",), "hide_dp", 0.05, 0.95),
    Constant("stack", ("fused-overlap",), "passes", 0.7, 2.0),
    Constant("stack", ("fused-overlap",), "hide_tp", 0.2, 0.95),
    Constant("stack", ("fsdp",), "attention", 0.3, 1.0),
    Constant("stack", ("fsdp",), "passes", 1.0, 4.0),
    Constant("stack", ("fsdp", "fsdp-compiled"), "hide_dp", 0.2, 0.98),
    Constant("stack", ("fsdp",), "kernel_us", 1.0, 12.0),
    Constant("stack", ("fsdp", "fsdp-compiled"), "contention", 0.05, 0.6),
    Constant("stack", ("fsdp-compiled",), "attention", 0.4, 1.2),
    Constant("stack", ("fsdp-compiled",), "passes", 0.5, 2.0),
)

# The two tables on which planners are usually compared weigh more.
IMPORTANT = {"Korthikanti": 8.0, "Narayanan": 2.0}

Values = dict[Constant, float]


def current() -> Values:
    from meshwright.plan.cluster import load_cluster

    found: Values = {}
    for constant in CONSTANTS:
        name = constant.names[0]
        holder = STACKS[name] if constant.kind == "stack" else load_cluster(name).efficiency
        found[constant] = float(getattr(holder, constant.field))
    return found


def start() -> Values:
    """Return the middle of each constant's range. A fit starts there, so that it depends on the table alone."""
    return {constant: math.sqrt(constant.low * constant.high) for constant in CONSTANTS}


def applied(case: published.Case, values: Values) -> tuple[Job, Cluster]:
    """Return the case's job and cluster with these values in place of the shipped ones."""
    cluster, stack = case.cluster, case.job.stack
    for_cluster = {c.field: v for c, v in values.items() if c.kind == "cluster" and cluster.name in c.names}
    for_stack: dict[str, Any] = {c.field: v for c, v in values.items() if c.kind == "stack" and stack.name in c.names}
    if stack.name == "fsdp-compiled" and stack.hide_tp:
        overlap = next((v for c, v in values.items() if c.field == "hide_tp"), stack.hide_tp)
        for_stack["hide_tp"] = overlap
    job = replace(case.job, stack=replace(stack, **for_stack))
    return job, replace(cluster, efficiency=replace(cluster.efficiency, **for_cluster))


def touches(constant: Constant, case: published.Case) -> bool:
    if constant.field == "hide_tp" and case.job.stack.hide_tp:
        return True
    return (case.cluster.name if constant.kind == "cluster" else case.job.stack.name) in constant.names


def error_of(case: published.Case, values: Values) -> float:
    return predict_cost(*applied(case, values), exact=False).step_s / case.measured_s - 1.0


def family(case: published.Case) -> str:
    """Return the source without the name of its table. Cross-validation leaves out all rows of this family together."""
    return re.split(r"[ :/]", case.source)[0] + " " + case.gpu.split("-")[0]


def weights(cases: list[published.Case]) -> list[float]:
    count: dict[str, int] = defaultdict(int)
    for case in cases:
        count[case.source] += 1
    found = [IMPORTANT.get(case.source.split()[0], 1.0) / math.sqrt(count[case.source]) for case in cases]
    return [weight / sum(found) for weight in found]


def fit(cases: list[published.Case], values: Values, rounds: int) -> Values:
    weight = weights(cases)
    errors = [abs(error_of(case, values)) for case in cases]
    step = 0.2
    for _ in range(rounds):
        for constant in CONSTANTS:
            # Only these rows depend on the constant, so only these are predicted again.
            rows = [i for i, case in enumerate(cases) if touches(constant, case)]
            best = sum(weight[i] * errors[i] for i in rows)
            for factor in (1 + step, 1 / (1 + step), 1 + step / 3, 1 / (1 + step / 3)):
                tried = min(constant.high, max(constant.low, values[constant] * factor))
                changed = {**values, constant: tried}
                new = {i: abs(error_of(cases[i], changed)) for i in rows}
                if (loss := sum(weight[i] * new[i] for i in rows)) < best - 1e-6:
                    best, values = loss, changed
                    for i, error in new.items():
                        errors[i] = error
                    break
        step *= 0.85
    return values


def report(cases: list[published.Case], values: Values, title: str) -> float:
    groups: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        groups[f"{case.source[:60]:60} {case.gpu[:14]:14} {case.job.stack.name}"].append(error_of(case, values))
    print(f"\n{title}")
    for name, errors in groups.items():
        mean = sum(map(abs, errors)) / len(errors)
        print(f"  {name:95} {len(errors):3}  {100 * mean:5.1f} %  (bias {100 * sum(errors) / len(errors):+5.1f} %)")
    everything = [abs(error) for errors in groups.values() for error in errors]
    mean = sum(everything) / len(everything)
    print(f"  mean absolute error of {len(everything)} rows: {100 * mean:.2f} %")
    return mean


def write(values: Values) -> None:
    for constant, value in values.items():
        for name in constant.names:
            path = STACK_FILE if constant.kind == "stack" else FOLDER / f"{name}.yaml"
            text = path.read_text(encoding="utf-8")
            start = text.index(f"\n{name}:\n") if constant.kind == "stack" else text.index("\nefficiency:")
            line = re.compile(rf"^(  {constant.field}: )\S+", re.MULTILINE)
            found = line.search(text, start)
            if found is None:
                raise SystemExit(f"{path} has no field {constant.field} under {name}: add it")
            text = text[: found.start()] + f"{found[1]}{value:.3g}" + text[found.end() :]
            path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse(csv=published.TABLE, rounds=1)
    cases = []
    for row in published.read_rows(args.csv):
        if mixtures.is_mixture(row):  # their work beyond the planner's formulas would spoil the constants
            continue
        try:
            case = published.case_of(row)
        except published.CannotTake:
            continue
        if case.measured_s and case.outcome == "ok":
            cases.append(case)
    if not cases:
        print("the table has no run that could be fitted: nothing was measured")
        return
    values = current()
    if args.fit:
        values = fit(cases, start(), args.rounds)
        for constant, value in values.items():
            print(f"{constant.label:70} {value:.3g}")
    found = {"rows": len(cases), "mean_error": report(cases, values, "all rows")}
    if args.write:
        write(values)
    if args.cross_validate:
        tested = []
        for name in sorted({family(case) for case in cases}):
            kept = [case for case in cases if family(case) != name]
            out = [case for case in cases if family(case) == name]
            others = fit(kept, start(), args.rounds)
            mean = report(out, others, f"left out: {name}")
            tested.append((mean, len(out)))
        total = sum(mean * n for mean, n in tested) / sum(n for _, n in tested)
        print(f"\nmean absolute error on rows whose source was left out: {100 * total:.2f} %")
        found["mean_error_left_out"] = total
    finish(args, found)


if __name__ == "__main__":
    main()
