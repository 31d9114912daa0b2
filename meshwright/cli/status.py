"""`meshwright status`: show the state of a run on one screen. No torch."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import Any

from meshwright.config.numbers import count_argument
from meshwright.errors import plural
from meshwright.show.terminal import UNLIMITED, is_terminal, printable, terminal_width
from meshwright.show.units import clock, count, decimals, percent, seconds, size
from meshwright.watch.report import RunReport
from meshwright.watch.status import UNNAMED, is_complete, status_of

EXAMPLES = """example:
  meshwright status runs/mine
  meshwright status runs/mine --verify                      (reads every byte of the newest checkpoint)
  meshwright status runs/mine --cluster here.yaml --json    (speed against that cluster's plan)
  meshwright status runs/mine --complete || sbatch job.sh   (exit code 0 if nothing is left to do, else 1)"""

# Columns before the text of a line: the label and the blanks around it.
INDENT = 14
# The most ranks with faults that the screen lists.
MAX_FAULTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run (its run.dir)")
    parser.add_argument("--verify", action="store_true", help="read the newest checkpoint and check all its checksums")
    complete = "print nothing, and exit with 0 if the run is complete or with 1 if it has something left to do"
    parser.add_argument("--complete", action="store_true", help=complete)
    steps = "with --complete: the steps that make the run complete (default: train.steps of the run's config)"
    parser.add_argument("--steps", type=count_argument, metavar="N", help=steps)
    cluster = "plan with this cluster (default: by the device's name, where it is known)"
    parser.add_argument("--cluster", metavar="NAME|FILE", help=cluster)


def run(args: argparse.Namespace) -> int:
    if args.complete:
        complete = is_complete(args.run, args.steps)
        if args.json:
            print(json.dumps({"complete": complete}))
        return int(not complete)
    found = status_of(RunReport(args.run, args.cluster), args.verify)
    print(json.dumps(found, allow_nan=False) if args.json else "\n".join(page(found)))
    return 0


def page(found: dict[str, Any]) -> list[str]:
    """Return the document of `status_of` as lines of text."""
    state, checkpoint, good = found["state"], found["checkpoint"], found["goodput"]
    kind = "complete" if found["complete"] else state["kind"]
    rows = [("state", f"{kind} ({state['text']})" if state["text"] else kind)]
    done = found["step"] / found["steps"] if found["steps"] else 0.0
    left = ""
    if found["seconds_left"]:
        time = clock(found["seconds_left"])
        # No process works on a run that has ended, so its remaining steps take time only if it continues.
        alive = found["state"]["kind"] in ("running", "silent")
        left = f", about {time} left" if alive else f", the rest would take about {time}"
    rows.append(("step", f"{found['step']:,} of {found['steps']:,} ({percent(done)}){left}"))
    if lost := found["not_saved"]:
        these = "none of which was" if lost == found["step"] else f"the last {lost:,} of which were not"
        rows.append(("", f"{these} saved: the run continues from step {found['step'] - lost:,}"))
    if found["loss"] is not None:
        norm = f", gradient norm {decimals(found['grad_norm'], 4)}" if found["grad_norm"] is not None else ""
        rows.append(("loss", decimals(found["loss"], 4) + norm))
    rows += _speed_rows(found)
    if good["share"] is not None:
        between = f", and {clock(good['between_s'])} between jobs" if good["between_s"] >= 1 else ""
        times = f"{clock(good['counted_s'])} of {clock(good['under_way_s'])}"
        rows.append(("goodput", f"{percent(good['share'])}: {times} went into steps that the run kept{between}"))
    again = f"; {plural(found['trained_again'], 'step')} trained again" if found["trained_again"] else ""
    resumed = f"continued from a checkpoint {plural(found['resumes'], 'time')}" if found["resumes"] else "never resumed"
    rows.append(("restarts", f"{found['restarts'] or 'none'} by the launcher, {resumed}{again}"))
    infinite = f"; the loss was not finite in {found['not_finite']}" if found["not_finite"] else ""
    skipped = f"the update of {plural(found['skipped'], 'step')}" if found["skipped"] else "none"
    rows.append(("skipped", f"{skipped}{infinite}"))
    if bad := found["bad_steps"]:
        last = f"the last at step {bad[-1]['step']}: {bad[-1]['text']}"
        rows.append(("bad steps", f"{len(bad)}, due to the data or the model and not to a device; {last}"))
    rows += _faults(found)
    rows.append(("checkpoint", _checkpoint(checkpoint)))
    return [printable(found["folder"]), *(_row(name, printable(text)) for name, text in rows)]


def _row(name: str, text: str) -> str:
    """Return a line with its label. On a terminal, words that don't fit continue on further lines below the text."""
    # A file or a pipe gets each line whole.
    width = terminal_width(80) if is_terminal(sys.stdout) else UNLIMITED
    left = " " * INDENT
    return textwrap.fill(
        text, max(width, INDENT + 20), initial_indent=f"  {name:<11} ", subsequent_indent=left,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _speed_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about the run's speed, compared with the plan if there is one."""
    if found["tokens_per_s"] is None:
        return []
    planned = found["planned"]
    steps = f" in the mean of the last {found['recent_steps']} steps" if found["recent_steps"] > 1 else ""
    learned = f" ({found['counted']})" if found["counted"] else ""
    text = f"{seconds(found['step_time_s'])} a step, {count(found['tokens_per_s'])} tokens/s{learned}{steps}"
    if planned:
        share = f"{percent(planned['share'])} of the plan's {count(planned['tokens_per_s'])} on {planned['cluster']}"
        text = f"{text}, {share}"
    return [("speed", text), *([("", found["hint"])] if found["hint"] else [])]


def _faults(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about faults and slow ranks."""
    rows = []
    for rank, said in list(found["faults"].items())[:MAX_FAULTS]:
        at = "" if said[-1]["step"] is None else f" at step {said[-1]['step']}"
        times = f"{plural(len(said), 'fault')}, the last{at}: {said[-1]['text']}"
        rows.append(("faults", f"{'of no known rank' if rank == UNNAMED else f'rank {rank}'}: {times}"))
    if len(found["faults"]) > MAX_FAULTS:
        rows.append(("faults", f"and {plural(len(found['faults']) - MAX_FAULTS, 'more rank')} (see --json)"))
    rows += [("slow", text) for text in found["slow"][:MAX_FAULTS]]
    if (slow := found["slow_rank"]) and not found["slow"]:
        rows.append(("slow", f"rank {slow['rank']} {slow['text']}"))
    return rows or [("faults", "none")]


def _checkpoint(found: dict[str, Any] | None) -> str:
    """Return the text about the newest checkpoint."""
    if found is None:
        return "none yet"
    step = f"step {found['step']:,}"
    if found["why"]:
        return f"{step}: {found['why']}"
    if found["verified_bytes"] is not None:
        return f"{step}, every checksum is right ({size(found['verified_bytes'])})"
    return f"{step}, complete by its index and the sizes of its files (--verify reads every byte)"
