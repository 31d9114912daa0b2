"""`meshwright check`: test whether a config's layout computes the same as one process. No torch until ranks start."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.config.exact_twin import ExactTwin, exact_twin, full_size
from meshwright.config.load import config_from, load_config, read_sections, set_key
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.config.rules import TRAINING_RULES, batch_divides, check
from meshwright.config.sections import Config
from meshwright.disk import write
from meshwright.errors import UserError, notice, plural
from meshwright.launch.launch import place_in_launcher, start, warm_up
from meshwright.plan.agreement import Verdict, difference, judge
from meshwright.plan.job import checked_job
from meshwright.plan.memory import largest
from meshwright.show.terminal import say_next, table
from meshwright.show.units import seconds, size

EXAMPLES = """example:
  meshwright check config.yaml
  meshwright check config.yaml layout.tp=2 layout.pp=2 zero.stage=1 --nproc 8
  meshwright check llama3-70b --json found.json
  meshwright check config.yaml --model my/hf-folder
  meshwright check config.yaml --model own_model.py      (model_provider, datasets_provider, forward_step)
  meshwright check config.yaml --nproc 8 --full          (the real sizes and precision, on this machine's devices)

A small twin of the config trains a few steps in float64, on one process and on the layout, and every gradient of every
step is compared. Exit code 0 if all agree, 1 if not, with the first and the worst parameter; 2 if the input is wrong;
70 if a process crashed, so that nothing is known.
Features that are inexact by design are replaced by their exact counterparts, and the page says which."""

# The --json of this command names a file, so `main` must not add its own --json.
OWN_JSON = True
# The default tolerance of the float64 twin, relative to a parameter's largest element.
EXACT = 1e-10
# Tolerances of --full by precision: the rounding that a different order of additions explains.
ROUNDING = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 6e-2, "fp16": 2e-2, "fp8": 0.25}
# Host memory of a process with torch and a twin.
RANK_BYTES = 500 * 2**20
# The most ranks without --nproc: enough for three axes of 2, and a limit that gives every larger machine the same twin.
MAX_RANKS = 8
# The exit code of a crash. It is not 1, because 1 means that the layout differs.
CRASHED = os.EX_SOFTWARE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml|RECIPE", help="a config file, or a recipe's name")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change, as for train")
    ranks = "ranks to start (default: as many as the layout has, fewer where this machine can't run them)"
    parser.add_argument("--nproc", type=int, metavar="N", help=ranks)
    model = "check a Hugging Face folder's model, or a Python file with the three providers of `pretrain`"
    parser.add_argument("--model", metavar="DIR|FILE.py", help=model)
    full = "the config's own sizes and precision on this machine's devices, against a tolerance for its rounding"
    parser.add_argument("--full", action="store_true", help=full)
    tolerance = f"the largest difference to accept (default {EXACT:g}; with --full by the precision)"
    parser.add_argument("--tolerance", type=float, metavar="X", help=tolerance)
    parser.add_argument("--json", metavar="FILE", help="write everything that was compared (-: print it)")


def run(args: argparse.Namespace) -> int:
    """Train on one process, then on the layout, compare both and return the exit code."""
    if place_in_launcher(args.nproc):
        raise UserError("check starts its own ranks: leave out torchrun or srun")
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc {args.nproc} must be at least 1")
    if args.tolerance is not None and not 0.0 <= args.tolerance < 1.0:
        raise UserError(f"--tolerance {args.tolerance:g} must be at least 0 and below 1, e.g. 1e-6")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-check-") as scratch:
        args.scratch = Path(scratch)
        args.checked = checked = checked_from(args)
        check(checked.config, checked.world, TRAINING_RULES)
        # A providers file that can't be imported is refused before any process starts.
        providers_of(args)
        if args.full and not has_own_providers(args):
            check_memory(checked.alone)
        if checked.world > 1:
            warm_up()
        _prepare(checked, args.scratch)
        notice(f"one process trains {plural(checked.alone.train.steps, 'step')}")
        if code := train(1, reference, args):
            return code
        ranks = plural(checked.world, "rank")
        notice(f"{ranks} train the same steps, {seconds(time.monotonic() - begin)} after the start")
        if code := train(checked.world, as_rank, args):
            return code
        found = judge_results(args)
    found |= {"seconds": time.monotonic() - begin}
    if args.json and args.json != "-":
        write(Path(args.json), lambda: json.dumps(found, indent=1) + "\n")
    print(json.dumps(found) if args.json == "-" else page(found), flush=True)
    if args.config and found["agree"] and args.json != "-":
        say_next(shlex.join(["meshwright", "train", args.config, *args.overrides]))
    return int(not found["agree"])


def train(ranks: int, body: Callable[..., None], args: argparse.Namespace) -> int:
    """Run `body` on some ranks and return 0 or the exit code of the command, which is CRASHED after a bug."""
    try:
        code = start(ranks, body, args)
    except (UserError, OSError):
        # `main` turns these into one sentence.
        raise
    except Exception:
        traceback.print_exc()
        return CRASHED
    return CRASHED if code == 1 else code


def checked_from(args: argparse.Namespace) -> ExactTwin:
    """Return the config to check: a small twin by default, or the full-size config with --full."""
    config = config_of(args)
    devices = devices_of(args, config)
    check(config, devices, TRAINING_RULES)
    # A small twin is built from our own parts: a module of the user or of transformers can't be made smaller here.
    if args.full or has_own_providers(args) or config.model.kind_facts.is_foreign:
        return full_size(config, args.nproc or devices, exact=not args.full)
    most = args.nproc or ranks_here()
    checked = exact_twin(config, devices, most, given=args.nproc is not None)
    if not config.tune.adapts:
        return checked
    # The config's base has the sizes of the full model, so the twin gets small base weights (see `_prepare`).
    base = str(args.scratch / "base")
    split, single = (replace(c, tune=replace(c.tune, base=base)) for c in (checked.config, checked.alone))
    return replace(checked, config=split, alone=single)


def has_own_providers(args: argparse.Namespace) -> bool:
    """Return whether --model names a Python file with the user's own providers."""
    return bool(args.model) and args.model.endswith(".py")


def config_of(args: argparse.Namespace) -> Config:
    """Return the config. If --model names a folder, that folder's model replaces the config's."""
    if not args.model or (has_own_providers(args) and Path(args.model).is_file()):
        return load_config(args.config, args.overrides)
    if not Path(args.model).is_dir():
        raise UserError(f"--model {args.model} is neither a folder nor a Python file: name one of them")
    given = [word for word in args.overrides if word.startswith("model.") and not word.startswith("model.seq=")]
    if given:
        raise UserError(f"{given[0]} and --model {args.model} both describe the model: leave one of them out")
    raw = read_sections(args.config)
    for word in args.overrides:
        set_key(raw, word)
    # Only `seq` is kept of the config's model: any other key, such as its layers, would win over the folder's.
    model = raw.get("model")
    seq = {"seq": model["seq"]} if isinstance(model, dict) and "seq" in model else {}
    return config_from(raw | {"model": {"hf": args.model, **seq}})


def devices_of(args: argparse.Namespace, config: Config) -> int:
    """Return the devices of the run that the twin is made of: --nproc if the layout fits it, a recipe's, or twice the
    least that the layout takes, so that dp is checked too. If the batch is too small for that, return the least."""
    least = config.layout.least_world
    experts = config.layout.ep * (config.layout.etp or config.layout.tp)

    def is_whole(devices: int) -> bool:
        return devices % least == 0 and devices // config.layout.pp % experts == 0

    if args.nproc is not None and is_whole(args.nproc):
        return int(args.nproc)
    if args.config in recipe_names() and not Path(args.config).is_file():
        devices = read_recipe(args.config).devices
        if devices % least == 0:
            return devices
    one, two = (next(dp for dp in range(first, 2 + 2 * experts) if is_whole(least * dp)) for first in (1, 2))
    breaks_batch = next(batch_divides(config, least * two), None) is not None
    return least * (one if breaks_batch else two)


def ranks_here() -> int:
    """Return the number of ranks that fit into this machine's memory at once, at least 2 and at most MOST_RANKS."""
    from meshwright.device import host_memory_bytes

    return max(2, min(int(host_memory_bytes() // RANK_BYTES), MAX_RANKS))


def check_memory(alone: Config) -> None:
    """Refuse a model at its real sizes that one process of this machine can't hold."""
    from meshwright.device import Device, host_memory_bytes

    device = Device.find(alone.run.device)
    on_host = device.is_cpu
    room = host_memory_bytes() if on_host else device.memory_bytes()
    needed = largest(checked_job(alone, 1)).peak
    if needed > room:
        place = "this machine has free" if on_host else f"{device.name} has"
        raise UserError(
            f"--full trains the whole model on one process, which takes {size(needed)}, and {place} {size(room)}: "
            "leave out --full, which checks a small twin, or make the model smaller"
        )


def _prepare(checked: ExactTwin, scratch: Path) -> None:
    """Write the base weights that the twin's adapters change, if it has adapters."""
    base = checked.config.tune.base
    if checked.config.tune.adapts and base.startswith(str(scratch)):
        from meshwright.interop.first_weights import write_first_weights

        write_first_weights(checked.config.model, Path(base), checked.config.train.seed)


def providers_of(args: argparse.Namespace) -> Any:
    """Return the providers of the Python file that --model names, or else our own."""
    from meshwright.check.checking import Providers

    if not has_own_providers(args):
        return Providers()
    import importlib.util

    spec = importlib.util.spec_from_file_location("checked_model", args.model)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"--model {args.model} can't be imported ({said}): fix the file") from error
    names = ("model_provider", "forward_step", "datasets_provider")
    if missing := [name for name in names if not hasattr(module, name)]:
        raise UserError(f"{args.model} has no {missing[0]}: define it as for `meshwright.pretrain`")
    return Providers(*(getattr(module, name) for name in names))


def reference(args: argparse.Namespace) -> None:
    """Train the reference: the same model on one process."""
    from meshwright.check.checking import run_reference

    run_reference(args.checked.alone, args.scratch, providers_of(args), args.checked.compared)


def as_rank(args: argparse.Namespace) -> None:
    """Train one rank of the layout."""
    from meshwright.check.checking import run_rank

    run_rank(args.checked.config, args.scratch, providers_of(args), args.checked.compared)


def judge_results(args: argparse.Namespace) -> dict[str, Any]:
    """Read the results of all ranks, compare them with the reference and return the figures of the page."""
    from meshwright.check.checking import REFERENCE, Steps

    checked: ExactTwin = args.checked
    one = Steps.read(args.scratch / REFERENCE)
    ranks = [Steps.read(args.scratch / f"rank-{rank}.json") for rank in range(checked.world)]
    rounding = ROUNDING[checked.config.train.precision] if args.full else EXACT
    tolerance = rounding if args.tolerance is None else args.tolerance
    own = has_own_providers(args)
    if args.full:
        # Parameters are not compared: a single update with rounded gradients already moves them apart.
        ranks = [replace(rank, parameters={}) for rank in ranks]
    # The planned bytes include the field `segments`, which a module of transformers does not read.
    foreign = own or (checked.config.model.kind_facts.is_foreign and checked.config.has_segments)
    verdict = judge(checked.config, checked.world, tolerance, one, ranks, plans=not foreign)
    measured = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    memory = None if own else memory_of(checked, measured)
    return as_json(args.config, args.model, checked, verdict) | {"memory": memory}


def memory_of(checked: ExactTwin, measured: list[int]) -> dict[str, Any]:
    """Return the planned peak of the fullest rank and the measured peak. A CPU does not measure it: there a
    dry run of that rank replaces the measurement."""
    job = checked_job(checked.config, checked.world)
    memory = largest(job)
    if measured:
        return {"planned": int(memory.peak), "measured": max(measured), "how": "measured"}
    if checked.config.model.kind_facts.is_foreign:
        # transformers builds its masks from the values of positions, and tensors on `meta` have none.
        return {"planned": int(memory.peak), "measured": None, "how": "not measured (a CPU does not measure it)"}
    from meshwright.device import Device
    from meshwright.dryrun.run_rank import run_rank

    rank = job.layout.rank_at(pp=memory.pp_rank)
    dry = run_rank(checked.config, checked.world, rank, Device("meta"))
    return {"planned": int(memory.peak), "measured": dry.most["peak"], "how": "dry run (a CPU does not measure it)"}


# The number of parameters whose differences the page shows.
MAX_NAMED = 5


def as_json(name: str, model: str | None, checked: ExactTwin, verdict: Verdict) -> dict[str, Any]:
    """Return everything that was compared. `model` is the folder or file that replaces the config's model."""
    c, layout = checked.config, checked.config.layout
    sizes = {"dp": checked.world // layout.least_world, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    return {
        "config": name, "model": model, "agree": not verdict.complaints,
        "complaints": verdict.complaints, "world": checked.world,
        "layout": sizes | {"ep": layout.ep, "zero": c.zero.stage}, "precision": c.train.precision,
        "tolerance": verdict.tolerance, "changes": list(checked.changes), "compared_steps": checked.compared,
        "losses": [list(pair) for pair in verdict.losses], "grad_norms": [list(pair) for pair in verdict.norms],
        "first": next(iter(verdict.differing_parameters), None), "worst": verdict.worst or None,
        "gradients": dict(verdict.gradients), "parameters": dict(verdict.parameters),
        "wire_bytes": {axis: {"planned": a, "recorded": b} for axis, (a, b) in verdict.comm.items()},
        "documents": verdict.documents,
    }  # fmt: skip


def page(found: Mapping[str, Any]) -> str:
    """Return the result of a check as text."""
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
    lines += [table([("gradients, the largest differences", steps), *_worst_parameters(found)]), ""]
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


def _worst_parameters(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows of the parameters whose gradients differ most, after the first one beyond the tolerance."""
    errors: dict[str, float] = found["gradients"]
    worst = sorted(errors, key=lambda name: -errors[name])[:MAX_NAMED]
    first = [found["first"]] if found["first"] in errors and found["first"] not in worst else []
    return [(name, f"{errors[name]:.1e}") for name in (*first, *worst)]


def _bytes(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row for each axis with the bytes that it was planned to send and those that it sent."""
    rows = []
    for axis, pair in found["wire_bytes"].items():
        planned, recorded = pair["planned"], pair["recorded"]
        if planned is None:
            rows.append((axis, "-", f"{recorded:,}", "not planned"))
        else:
            rows.append((axis, f"{planned:,}", f"{recorded:,}", "=" if planned == recorded else "differs"))
    return rows or [("none", "", "", "")]
