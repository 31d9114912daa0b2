"""What planning commands have in common: the job they are asked about. No torch."""

from __future__ import annotations

import argparse

from meshwright.errors import UserError
from meshwright.plan import job as jobs
from meshwright.plan.cluster import Cluster, known_clusters
from meshwright.plan.stack import NAMED, OWN, Stack
from meshwright.plan.workload import Workload


def job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CONFIG|PRESET", help="a config file, or the name of a model")
    parser.add_argument("words", nargs="*", metavar="key=value", help="config keys, as for train")


def world_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--world", type=int, metavar="N", help="number of ranks (default: the preset's run's, else tp x cp x pp)"
    )


def world_asked(args: argparse.Namespace, job: jobs.Planned) -> int:
    c, zero = job.config.layout, job.config.zero
    if zero.stage and zero.shard_group == "node" and not c.node_size:
        raise UserError("zero.shard_group=node: give layout.node_size, the number of ranks on a node")
    return args.world if args.world is not None else int(job.run.get("devices", 0)) or c.tp * c.cp * c.pp


def cluster_arguments(parser: argparse.ArgumentParser, default: str = OWN) -> None:
    parser.add_argument("--cluster", metavar="NAME|FILE", help=f"a YAML file, or one of {', '.join(known_clusters())}")
    parser.add_argument("--stack", metavar="NAME", help=f"the software stack: {', '.join(NAMED)} (default: {default})")


def step_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a command about one step of one layout."""
    job_arguments(parser)
    cluster_arguments(parser, f"that of the preset's published run, else {OWN}")
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices")
    parser.add_argument("--layout", default="", metavar="tp=8,pp=16,...", help="the layout, in short words")


def step_asked(args: argparse.Namespace) -> tuple[jobs.Planned, Workload, Cluster, Stack]:
    job = jobs.planned(args.target, args.words, args.layout)
    cluster = jobs.cluster_for(job, args.cluster)
    job = jobs.suited(job, cluster)
    stack = jobs.stack_asked(job.config, cluster, args.stack or job.run.get("stack"))
    return job, jobs.checked_step(job, jobs.devices_for(job, args.devices), cluster), cluster, stack
