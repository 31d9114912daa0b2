"""`meshwright memory`: the bytes of one rank by kind, for any world size, without starting a process. No torch."""

from __future__ import annotations

import argparse
import json

from meshwright.cli.common_args import world_arguments, world_from_args
from meshwright.errors import UserError
from meshwright.plan.account import experts_json, experts_words
from meshwright.plan.job import checked_job
from meshwright.plan.memory import largest
from meshwright.plan.rank import MEMORY_KINDS, rank_json
from meshwright.show.terminal import table
from meshwright.show.units import size

EXAMPLES = """example:
  meshwright memory config.yaml --devices 64 zero.stage=1
  meshwright memory gpt3-175b layout.tp=8 layout.pp=16 train.global_batch=1536 --devices 1024 --rank 0 --json

`buffers` holds what is gathered or in flight; `peak` is the most at once in a step, not a sum;
`offloaded` are activations in host memory. --json has bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    world_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="this rank (default: the one with the largest peak)")


def run(args: argparse.Namespace) -> None:
    target, world = world_from_args(args)
    if world < 1:
        raise UserError(f"--devices {world} is no number of ranks: give at least 1")
    job = checked_job(target.config, world)
    pp_rank = largest(job).pp_rank if args.rank is None else job.layout.coordinate(args.rank)["pp"]
    rank = job.layout.rank_at(pp=pp_rank) if args.rank is None else args.rank
    found = rank_json(job, pp_rank)
    bytes_by_kind = found["memory"]
    if args.json:
        whole = {"rank": rank, "rank_parameters": found["parameters"], **experts_json(job)}
        print(json.dumps({**found, **bytes_by_kind, **whole}))
        return
    how = {"compiled": "compiled blocks", "eager": "uncompiled blocks"}.get(job.stack.name, "blocks on a CPU")
    rows = [(f"rank {rank} of {world} (pipeline rank {pp_rank}, {how})", "bytes", "")]
    rows += [(kind, f"{bytes_by_kind[kind]:,}", size(bytes_by_kind[kind])) for kind in MEMORY_KINDS]
    words = experts_words(job)
    print((f"{words}\n\n" if words else "") + table(rows))
