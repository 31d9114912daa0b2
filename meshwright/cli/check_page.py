"""The page and the JSON of `meshwright check`: one process beside the layout. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config.exact_twin import Checked
from meshwright.errors import plural
from meshwright.plan.agreement import Verdict, difference
from meshwright.show.terminal import table
from meshwright.show.units import seconds, size

MOST_NAMED = 5  # parameters whose differences are shown


def as_json(name: str, model: str | None, checked: Checked, verdict: Verdict) -> dict[str, Any]:
    """Return everything that was compared. `model` is the folder or file that replaces the config's model."""
    c, layout = checked.config, checked.config.layout
    sizes = {"dp": checked.world // layout.least_world, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    return {
        "config": name, "model": model, "agree": not verdict.complaints,
        "complaints": verdict.complaints, "world": checked.world,
        "layout": sizes | {"ep": layout.ep, "zero": c.zero.stage}, "precision": c.train.precision,
        "tolerance": verdict.tolerance, "changes": list(checked.changes), "compared_steps": checked.compared,
        "losses": [list(pair) for pair in verdict.losses], "grad_norms": [list(pair) for pair in verdict.norms],
        "first": next(iter(verdict.differing), None), "worst": verdict.worst or None,
        "gradients": dict(verdict.gradients), "parameters": dict(verdict.parameters),
        "wire_bytes": {axis: {"planned": a, "recorded": b} for axis, (a, b) in verdict.comm.items()},
        "documents": verdict.documents,
    }  # fmt: skip


def page(found: Mapping[str, Any]) -> str:
    """Returns the page of one check."""
    axes = ", ".join(f"{axis} {number}" for axis, number in found["layout"].items() if number > 1 or axis == "dp")
    name = f"{found['config']} with the model of {found['model']}" if found["model"] else found["config"]
    head = f"{name} on {plural(found['world'], 'rank')} ({axes}) beside one process, in {found['precision']}"
    lines = [head, *(f"  changed: {sentence}" for sentence in found["changes"]), ""]
    rows = [("", "one process", "the layout", "difference")]
    for what, key in (("loss", "losses"), ("gradient norm", "grad_norms")):
        for step, (one, other) in enumerate(found[key], 1):
            rows.append((f"{what}, step {step}", f"{one:.9f}", f"{other:.9f}", f"{difference(one, other):.1e}"))
    lines += [table(rows), ""]
    steps = f"of {plural(found['compared_steps'], 'step')}"
    lines += [table([("gradients, the largest differences", steps), *_named(found)]), ""]
    lines += [table([("bytes of a step, all ranks", "planned", "recorded", ""), *_bytes(found)]), ""]
    if memory := found.get("memory"):
        measured = "" if memory["measured"] is None else f": {size(memory['measured'])}"
        lines.append(f"  peak memory of a rank: planned {size(memory['planned'])}, {memory['how']}{measured}")
    if found["documents"] is not None:
        moved = f"{found['documents']:.1e} of it"
        lines.append(f"  packed documents: another first one changes the loss of the others by {moved}")
    took = f"in {seconds(found['seconds'])}"
    if found["agree"]:
        many = f"all {len(found['gradients'])} gradients {steps}"
        return "\n".join([*lines, "", f"agree: {many} are within {found['tolerance']:g} of one process's, {took}"])
    return "\n".join([*lines, "", *(f"DIFFERS: {sentence}" for sentence in found["complaints"])])


def _named(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    errors: dict[str, float] = found["gradients"]
    worst = sorted(errors, key=lambda name: -errors[name])[:MOST_NAMED]
    first = [found["first"]] if found["first"] in errors and found["first"] not in worst else []
    return [(name, f"{errors[name]:.1e}") for name in (*first, *worst)]


def _bytes(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for axis, pair in found["wire_bytes"].items():
        planned, recorded = pair["planned"], pair["recorded"]
        if planned is None:
            rows.append((axis, "-", f"{recorded:,}", "not planned"))
        else:
            rows.append((axis, f"{planned:,}", f"{recorded:,}", "=" if planned == recorded else "differs"))
    return rows or [("none", "", "", "")]
