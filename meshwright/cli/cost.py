"""`meshwright cost`: predict time, communication, bubble and memory of one training step. Needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.cli.common_args import (
    add_tokens,
    print_result,
    say_next_of,
    step_arguments,
    step_from_args,
    tokens_from,
)
from meshwright.disk import write
from meshwright.errors import UserError
from meshwright.plan.account import as_json, report
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.grids import charts, compare
from meshwright.plan.grids import report as comparison
from meshwright.plan.job import Job
from meshwright.plan.whatif import check_imbalance, with_imbalance
from meshwright.show.chart import check_svg, stack_charts

EXAMPLES = """example:
  meshwright cost gpt3-175b --cluster a100-80g-dgx --devices 1024 --layout tp=8,pp=16,recompute=full \\
      train.global_batch=1536 --tokens 300e9
  meshwright cost bloom-176b                      # the published run: its cluster, devices and layout
  meshwright cost config.yaml --cluster h100-80g-dgx --devices 64 --json
  meshwright cost mixture.yaml --cluster h100-80g-dgx --devices 64 --layout ep=8,etp=1 --imbalance 1.3
  meshwright cost gpt3-175b --cluster h100-80g-dgx --devices 8 --layout tp=8,micro_batch=4 train.global_batch=8 \\
      --compare-tp --svg bytes.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    step_arguments(parser)
    add_tokens(parser)
    full = "also show the communication by axis and the time of each stage"
    parser.add_argument("--full", action="store_true", help=full)
    busiest = "mixture of experts: the busiest rank's rows over the mean (default 1: balanced experts)"
    parser.add_argument("--imbalance", type=float, default=1.0, metavar="X", help=busiest)
    grids = "1D, 2D, 2.5D and 3D tensor parallelism of this many ranks side by side, for one block"
    parser.add_argument("--compare-tp", action="store_true", help=grids)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --compare-tp: chart the bytes for 4 to 64 ranks")


def run(args: argparse.Namespace) -> None:
    check_svg("--svg", args.svg)
    if args.svg and not args.compare_tp:
        raise UserError("--svg draws what --compare-tp compares: give both")
    target, job, cluster = step_from_args(args)
    if not target.own_batch:
        raise UserError("the sequences of a step are not given: add --global-batch N, e.g. --global-batch 1024")
    if args.compare_tp:
        _compare_tp(args, job, cluster)
        return
    check_imbalance(f"--imbalance {args.imbalance:g}", args.imbalance)
    cost = predict_cost(with_imbalance(job, args.imbalance) if args.imbalance > 1 else job, cluster)
    tokens = tokens_from(args)
    print_result(args, as_json(cost, tokens), report(cost, tokens, args.full))
    say_next_of(args, "memory", "plan", devices=job.world, cluster=cluster.name, batch=job.global_batch)


def _compare_tp(args: argparse.Namespace, job: Job, cluster: Cluster) -> None:
    """Print how one block does on each kind of tensor parallelism; those that the job can't use are listed as well."""
    write(args.svg, lambda: stack_charts(charts(job)))
    found, refused = compare(job, cluster)
    ways = {"ways": [one.as_json() for one in found], "refused": refused}
    print_result(args, ways, comparison(job, found, refused))
