"""`meshwright memory`: bytes of one rank by kind, for any world size, without starting a process. Needs no torch."""

from __future__ import annotations

import argparse
import json

from meshwright.cli.asked import job_arguments, world_argument, world_asked
from meshwright.errors import UserError
from meshwright.plan import job as jobs
from meshwright.plan.show import size, table
from meshwright.plan.states import exact, rank_memory

MIXED = True
KINDS = ("parameters", "gradients", "master", "optimizer", "activations", "buffers", "peak")
EXAMPLES = """example:
  meshwright memory config.yaml --world 64 zero.stage=1
  meshwright memory gpt3-175b layout.tp=8 layout.pp=16 train.global_batch=1536 --world 1024 --rank 0 --json

`buffers` holds what is gathered or in flight; `peak` is the most at once in a step, not a sum."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_arguments(parser)
    world_argument(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="this rank (default: the one with the largest peak)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, integers in bytes")


def run(args: argparse.Namespace) -> int:
    job = jobs.planned(args.target, args.words)
    world = world_asked(args, job)
    if world < 1:
        raise UserError(f"--world {world} is no number of ranks: give at least 1")
    rank = args.rank
    workload, memory = rank_memory(job.config, world, rank or 0)
    if rank is None:
        found = [exact(job.config, workload, pp_rank) for pp_rank in range(workload.parallel.pp)]
        memory = max(found, key=lambda m: m.peak)
        rank = workload.layout.rank_at(pp=memory.pp_rank)
    fields = {"rank": rank, **{kind: int(getattr(memory, kind)) for kind in KINDS}}
    if args.json:
        print(json.dumps(fields))
        return 0
    rows = [(f"rank {rank} of {world} (pipeline rank {memory.pp_rank})", "bytes", "")]
    rows += [(kind, f"{fields[kind]:,}", size(fields[kind])) for kind in KINDS]
    print(table(rows))
    return 0
