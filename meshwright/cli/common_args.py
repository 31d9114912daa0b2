"""The arguments that planning commands share, and the job that they describe. No torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from meshwright.config.presets import APPROXIMATE_PRESETS
from meshwright.errors import UserError
from meshwright.plan.cluster import Cluster, known_clusters
from meshwright.plan.job import Job
from meshwright.plan.stack import STACKS
from meshwright.plan.target import (
    Target,
    cluster_for,
    devices_for,
    on_cluster,
    stack_for,
    target_of,
    with_supported_precision,
)


def job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CONFIG|PRESET", help="a config file, or the name of a model")
    parser.add_argument("words", nargs="*", metavar="key=value", help="config keys, as for train")


def target_from_args(name: str, words: list[str], **how: Any) -> Target:
    """Returns the target of a planning command, and says on stderr where its preset only approximates a model."""
    target = target_of(name, words, **how)
    if difference := APPROXIMATE_PRESETS.get(target.config.model.preset):
        print(f"meshwright: {target.config.model.preset} is planned by an approximation: {difference}", file=sys.stderr)
    return target


def world_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--world", type=int, metavar="N", help="number of ranks (default: the preset's run's, else tp x cp x pp)"
    )


def world_from_args(args: argparse.Namespace, target: Target) -> int:
    c, zero = target.config.layout, target.config.zero
    if zero.stage and zero.shard_group == "node" and not c.node_size:
        raise UserError("zero.shard_group=node: give layout.node_size, the number of ranks on a node")
    return args.world if args.world is not None else int(target.run.get("devices", 0)) or c.tp * c.cp * c.pp


def cluster_arguments(parser: argparse.ArgumentParser, default: str = "Meshwright's own, as the config runs") -> None:
    parser.add_argument("--cluster", metavar="NAME|FILE", help=f"a YAML file, or one of {', '.join(known_clusters())}")
    parser.add_argument("--stack", metavar="NAME", help=f"the software stack: {', '.join(STACKS)} (default: {default})")


def step_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command about one step of one layout."""
    job_arguments(parser)
    cluster_arguments(parser, "that of the preset's published run, else Meshwright's own")
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices")
    parser.add_argument("--layout", default="", metavar="tp=8,pp=16,...", help="the layout, in short words")


def step_from_args(args: argparse.Namespace) -> tuple[Target, Job, Cluster]:
    target = target_from_args(args.target, args.words, layout=args.layout)
    cluster = cluster_for(target, args.cluster)
    target = with_supported_precision(target, cluster)
    stack = stack_for(target.config, cluster, args.stack or target.run.get("stack"))
    return target, on_cluster(target, devices_for(target, args.devices), cluster, stack), cluster
