"""Command-line arguments that the planning commands share, and the jobs that they describe. No torch."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.config.numbers import count_argument, length_argument, number_from
from meshwright.config.presets import APPROXIMATE_PRESETS
from meshwright.config.rules import batch_unit
from meshwright.errors import UserError, notice
from meshwright.plan.account import experts_json, experts_words
from meshwright.plan.cluster import Cluster, adjusted
from meshwright.plan.job import Job
from meshwright.plan.stack import STACKS, Stack
from meshwright.plan.target import (
    Target,
    cluster_for,
    devices_for,
    on_cluster,
    stack_for,
    target_of,
    with_supported_precision,
)
from meshwright.show.terminal import say_next

# The sections of a config that divide a job over devices without changing its results.
LAYOUT_SECTIONS = ("layout", "pipeline", "zero", "recompute", "context")


def _target_arguments(parser: argparse.ArgumentParser) -> None:
    named = "a config file, transformers' config.json, a recipe or a preset"
    parser.add_argument("target", metavar="CONFIG|NAME", help=named)
    parser.add_argument("words", nargs="*", metavar="key=value", help="config keys, as for train")


def _target_of(
    args: argparse.Namespace,
    words: Sequence[str],
    layout: str,
    as_run: bool = True,
    place_options: Sequence[str] = ("cluster", "devices", "world"),
) -> Target:
    """Return the target of a planning command, and say on stderr if its preset only approximates a model.

    If one of `place_options` or a key of the layout is given, the command plans another run than the one that a recipe
    describes."""
    places = (getattr(args, name, None) for name in place_options)
    own = any(word.partition(".")[0] in LAYOUT_SECTIONS for word in words)
    target = target_of(args.target, words, layout, as_run, placed=own or bool(layout) or any(places))
    preset = target.config.model.preset or target.name
    if difference := APPROXIMATE_PRESETS.get(preset):
        print(f"meshwright: {preset} is planned by an approximation: {difference}", file=sys.stderr)
    return target


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options for the layout and the batch, which every command about a single layout takes."""
    parser.add_argument("--layout", default="", metavar="tp=8,pp=16,...", help="the layout, in short words")
    add_batch(parser)


def add_batch(parser: argparse.ArgumentParser) -> None:
    batch = "sequences of a step (train.global_batch)"
    parser.add_argument("--global-batch", type=count_argument, metavar="B", help=batch)
    parser.add_argument("--seq", type=length_argument, metavar="S", help="tokens of a sequence (default: the model's)")


def add_tokens(parser: argparse.ArgumentParser) -> None:
    whole = "tokens of the whole run, to predict its days, energy and price too"
    parser.add_argument("--tokens", metavar="N", help=whole)


def tokens_from(args: argparse.Namespace) -> float | None:
    """Return the tokens of the whole run, or None if they are not given."""
    if args.tokens is None:
        return None
    value = number_from(args.tokens)
    if value is None or not 0 < value < float("inf"):
        raise UserError(f"--tokens {args.tokens} must be a number above zero, e.g. 300B or 300e9")
    return value


def command_words(args: argparse.Namespace) -> list[str]:
    """Return the key=value words of a command, including the keys that --global-batch and --seq set."""
    words = list(args.words)
    words += [f"train.global_batch={args.global_batch}"] if args.global_batch is not None else []
    return words + ([f"model.seq={args.seq}"] if args.seq is not None else [])


def world_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command about a number of ranks, whatever cluster they are on."""
    _target_arguments(parser)
    ranks = "number of devices, one rank each (default: the recipe's, else tp x cp x pp x replicas)"
    parser.add_argument("--devices", "--world", dest="world", type=int, metavar="N", help=ranks)
    add_layout(parser)


def world_from_args(args: argparse.Namespace) -> tuple[Target, int]:
    """Return the target to plan and the number of its ranks."""
    # The --cluster of `memory` only names the device that the total is for, so it does not make the run another one
    # than the recipe's.
    target = _target_of(args, command_words(args), args.layout, place_options=("world",))
    c, zero = target.config.layout, target.config.zero
    if zero.stage and zero.stays_in_node and not c.node_size:
        raise UserError("zero.shard_group=node: give layout.node_size, the number of ranks on a node")
    default = int(target.run.get("devices", 0)) or c.least_world
    world = default if args.world is None else args.world
    return target if target.own_batch or world < 1 else _with_least_batch(target, world), world


def _with_least_batch(target: Target, world: int) -> Target:
    """Return the target with a batch that fills its pipeline and that the ranks can share. A preset has no batch, and a
    larger one would take no more memory."""
    c = target.config
    unit, _ = batch_unit(c, world)
    return replace(target, config=replace(c, train=replace(c.train, global_batch=unit * c.layout.pp)))


def cluster_arguments(
    parser: argparse.ArgumentParser, default: str = "Meshwright's own, as the config runs", several: bool = False
) -> None:
    """Add the arguments for a target, a cluster (or with `several` more than one) and a software stack."""
    _target_arguments(parser)
    named = "a YAML file, or a name from `meshwright clusters`" + (" (give several to compare them)" if several else "")
    parser.add_argument("--cluster", action="append" if several else "store", metavar="NAME|FILE", help=named)
    parser.add_argument("--network", metavar="25gbe|8x400gb/s|4xhdr", help="another network: the adapters of a node")
    nodes = "another size of nodes, with adapters, memory and CPUs in proportion"
    parser.add_argument("--node-devices", type=int, metavar="N", help=nodes)
    parser.add_argument("--stack", metavar="NAME", help=f"the software stack: {', '.join(STACKS)} (default: {default})")


def planned_from_args(
    args: argparse.Namespace, words: Sequence[str], layout: str = "", as_run: bool = True
) -> tuple[Target, Cluster, Stack]:
    """Return the target to plan, its cluster and its software stack. With `as_run`, a preset gets the layout and the
    stack of its published run."""
    target = _target_of(args, words, layout, as_run)
    cluster = adjusted(cluster_for(target, args.cluster), args.network, args.node_devices)
    asked = target.config.train.precision
    target = with_supported_precision(target, cluster)
    if (precision := target.config.train.precision) != asked:
        notice(f"planned in {precision}, which {cluster.name} is used with: set train.precision for another")
    stack = args.stack or (target.run.get("stack") if as_run else None)
    return target, cluster, stack_for(target.config, cluster, stack)


def print_result(args: argparse.Namespace, found: Mapping[str, Any], text: str, job: Job | None = None) -> None:
    """Print the result of a planning command: `text`, or with --json the mapping. If `job` has experts, both also say
    how the rows of the experts are divided."""
    if args.json:
        print(json.dumps({**found, **(experts_json(job) if job else {})}))
        return
    words = experts_words(job) if job else ""
    print(f"{words}\n\n{text}" if words else text)


def say_next_of(args: argparse.Namespace, *commands: str, devices: int, cluster: str, batch: int = 0) -> None:
    """Print how to ask other planning commands about the same job. With --json, print nothing.

    `plan` gets the keys that it does not choose itself, and the number of sequences of a step.
    """
    if args.json:
        return
    where = ["--cluster", args.cluster or cluster, "--devices", str(devices)]
    words, layout = command_words(args), ["--layout", args.layout] if args.layout else []
    options = (("--network", getattr(args, "network", None)), ("--node-devices", getattr(args, "node_devices", None)))
    network = [word for name, value in options if value for word in (name, str(value))]
    free = [word for word in words if word.partition(".")[0] not in LAYOUT_SECTIONS]
    free = [word for word in free if not word.startswith(("train.global_batch", "train.micro_batch"))]
    usual = [*words, *layout, *where]
    # The memory of a rank does not depend on the network.
    rest = {"plan": [*free, *where, *network, "--global-batch", str(batch)], "memory": usual}
    usual = [*usual, *network]
    say_next(*(shlex.join(["meshwright", name, args.target, *rest.get(name, usual)]) for name in commands))


def add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", "--world", type=int, metavar="N", help="number of devices")


def step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command about one step of one layout."""
    cluster_arguments(parser, "that of the preset's published run, else Meshwright's own")
    add_devices(parser)
    add_layout(parser)


def step_from_args(args: argparse.Namespace) -> tuple[Target, Job, Cluster]:
    """Return the target, the job and the cluster that the arguments of `step_arguments` describe."""
    target, cluster, stack = planned_from_args(args, command_words(args), args.layout)
    return target, on_cluster(target, devices_for(target, args.devices), cluster, stack), cluster
