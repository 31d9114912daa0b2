"""`meshwright doctor`: examine the machine and the world of ranks before a long run, and name every problem."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.bench.diagnosis import Check, Facts, Requirements, judge
from meshwright.bench.request import MeasurementRequest
from meshwright.config.load import load_config
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.device_kinds import device_names
from meshwright.errors import UserError, notice, plural
from meshwright.launch.launch import local_devices, place_in_launcher, run_as_rank, start, warm_up
from meshwright.plan.cluster import load_cluster
from meshwright.plan.job import job_of
from meshwright.plan.memory import copied_bytes, largest
from meshwright.show.terminal import printable
from meshwright.show.units import seconds
from meshwright.spec.layout.layout import Layout

EXAMPLES = """example:
  meshwright doctor                                      (this machine's devices, for a minute)
  meshwright doctor CONFIG.yaml --nproc 8 --cluster here.yaml
  srun -N 2 --ntasks-per-node 8 meshwright doctor CONFIG.yaml --seconds 120

Versions, devices, memory, disk, the shared folder, clocks, ports, links and a burn-in are examined on all ranks
together. The exit code is 0 if nothing is off, else 1. `meshwright comm bench --out here.yaml` writes a profile."""

# The longest burn-in that --seconds may ask for.
LONGEST_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the run's config file, or a recipe's name: its needs are examined too"
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml|RECIPE", help=text)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change, as for train")
    parser.add_argument("--nproc", type=int, help="local ranks to start (default: the number of GPUs, or 1)")
    folder = "a folder that all ranks must see (default: the config's run.dir, else the working directory)"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--cluster", metavar="NAME|FILE", help="compare the links with this cluster or profile")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="length of the burn-in (default: 60)")
    parser.add_argument("--device", choices=device_names(), help="(default: the config's, else auto)")


def run(args: argparse.Namespace) -> int:
    if not 0 < args.seconds <= LONGEST_S:
        raise UserError(f"--seconds {args.seconds:g} must be above 0 and at most {LONGEST_S:g}")
    if place := place_in_launcher(args.nproc):
        return run_as_rank(place, lambda at: prepare(args, at.world, at.local_world), as_rank, args, stops=False)
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc {args.nproc} must be at least 1")
    config = config_of(args)
    ranks = args.nproc or local_devices(args.device or (config.run.device if config else "auto"), least=1)
    prepare(args, ranks, ranks)
    if ranks > 1:
        warm_up()
    notice(f"examines {plural(ranks, 'rank')} of this machine, for about {seconds(args.seconds)}")
    with tempfile.TemporaryDirectory(prefix="meshwright-doctor-") as scratch:
        args.scratch = scratch
        if code := start(ranks, as_local_rank, args):
            return code
        # The ranks may be other processes, so rank 0 leaves the facts of all in a file.
        facts = [Facts(**one) for one in json.loads((Path(scratch) / "facts.json").read_text(encoding="utf-8"))]
    return tell(args, facts)


def config_of(args: argparse.Namespace) -> Config | None:
    """Return the run's config, or None if no config was named."""
    if args.config is None and args.overrides:
        raise UserError(f"{args.overrides[0]} changes a config: name the config before it")
    return load_config(args.config, args.overrides) if args.config else None


def prepare(args: argparse.Namespace, world: int, local_world: int) -> None:
    """Store the ranks and links to examine in `args.request`, and the values to compare them with in `args.wanted`."""
    config = config_of(args)
    args.folder = args.folder or Path(config.run.dir if config else ".")
    device, backend = (config.run.device, config.comm.backend) if config else ("auto", "auto")
    layout = Layout(world, node_size=local_world)
    args.request = MeasurementRequest(
        layout, ("dp",), ("send",), (2**20,), 1.0, device=args.device or device, backend=backend
    )
    wanted: dict[str, Any] = {"folder": str(args.folder)}
    if config:
        check(config, world, TRAINING_RULES)
        job = job_of(config, world)
        wanted |= {"checkpoint_bytes": float(copied_bytes(job)), "states_bytes": largest(job).states}
    if args.cluster:
        cluster = load_cluster(args.cluster)
        # A cluster file has the network rate of a whole node, which its devices share.
        network = cluster.network.node_gb_s * cluster.efficiency.network / max(1, cluster.node.devices)
        wanted |= {"link_gb_s": cluster.node.link_gb_s * cluster.efficiency.link, "network_gb_s": network}
    args.wanted = Requirements(**wanted)


def as_local_rank(args: argparse.Namespace) -> None:
    """Examine one rank that this command started. Rank 0 writes the facts of all ranks to a file."""
    from meshwright.bench.doctor import examine

    if facts := examine(args.request, args.folder, args.seconds):
        text = json.dumps([asdict(one) for one in facts])
        (Path(args.scratch) / "facts.json").write_text(text, encoding="utf-8")


def as_rank(args: argparse.Namespace) -> None:
    """Examine one rank of torchrun or srun. Rank 0 prints the result and exits with 1 if something is off."""
    from meshwright.bench.doctor import examine

    facts = examine(args.request, args.folder, args.seconds)
    if facts and tell(args, facts):
        raise SystemExit(1)


def tell(args: argparse.Namespace, facts: list[Facts]) -> int:
    """Print the checks and return the exit code: 1 if something is off, else 0."""
    checks = judge(facts, args.wanted)
    off = [one for one in checks if not one.ok]
    if args.json:
        ranks = [asdict(one) for one in facts]
        print(json.dumps({"ok": not off, "checks": [one._asdict() for one in checks], "ranks": ranks}))
    else:
        print("\n".join(page(checks)), flush=True)
    return int(bool(off))


def page(checks: list[Check]) -> list[str]:
    """Return the checks as lines of text."""
    rows = [f"  {one.name:<9} {'ok ' if one.ok else 'OFF'}  {printable(one.text)}" for one in checks]
    off = [one.name for one in checks if not one.ok]
    return [*rows, f"off: {', '.join(off)}" if off else "nothing is off"]
