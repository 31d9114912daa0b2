"""`meshwright memory`: count the bytes of one rank by kind, for any world size, without starting a process. No
torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from meshwright.cli.common_args import print_result, say_next_of, world_arguments, world_from_args
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.job import Job, checked_job
from meshwright.plan.memory import DeviceMemory, Memory, device_memory, largest, rank_memory
from meshwright.plan.rank import MEMORY_KINDS, bytes_at_peak, rank_json
from meshwright.plan.target import Target, on_cluster, with_supported_precision
from meshwright.show.terminal import table
from meshwright.show.units import size

EXAMPLES = """example:
  meshwright memory config.yaml --devices 64 zero.stage=1
  meshwright memory gpt3-175b layout.tp=8 layout.pp=16 train.global_batch=1536 --devices 1024 --rank 0 --json

The first figures are the most of each kind at any time in a step. The last column is the moment of the peak, and adds
up to `peak`. `buffers` are gathered or in-flight tensors, `temporary` is the workspace of kernels and the loss, and
`offloaded` are activations in host memory. The first line is the total that a device needs, as in `plan` and `cost`.
--json has bytes, and that total as `device_gib`."""


# If no cluster is named, the context and the communicators of this one's devices are counted.
DEFAULT_CLUSTER = "h100-80g-dgx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    world_arguments(parser)
    cluster = "the cluster whose devices the total is for, as in `plan` (default: the recipe's, else by run.device)"
    parser.add_argument("--cluster", metavar="NAME|FILE", help=cluster)
    parser.add_argument("--rank", type=int, metavar="R", help="this rank (default: the one with the largest peak)")


@dataclass(frozen=True)
class Counted:
    """The memory of one rank of a job, and of its device."""

    target: Target
    job: Job
    cluster: Cluster
    rank: int
    memory: Memory

    @property
    def device(self) -> DeviceMemory:
        return device_memory(self.job, self.cluster, self.memory)


def counted(args: argparse.Namespace) -> Counted:
    """Count the memory of the rank that the arguments name."""
    target, world = world_from_args(args)
    if world < 1:
        raise UserError(f"--devices {world} is not a number of ranks: give at least 1")
    job, cluster = job_on(target, world, args.cluster)
    pp_rank = largest(job).pp_rank if args.rank is None else job.layout.coordinate(args.rank)["pp"]
    rank = job.layout.rank_at(pp=pp_rank) if args.rank is None else args.rank
    return Counted(target, job, cluster, rank, rank_memory(job, pp_rank))


def run(args: argparse.Namespace) -> None:
    one = counted(args)
    job, cluster, rank, memory, device = one.job, one.cluster, one.rank, one.memory, one.device
    pp_rank, world = memory.pp_rank, job.world
    found, at_peak = rank_json(job, pp_rank), bytes_at_peak(memory)
    bytes_by_kind = found["memory"]
    whole = {**found, **bytes_by_kind, "rank": rank, "rank_parameters": found["parameters"], "at_peak": at_peak}
    whole |= {"device_gib": device.total, "device": device.as_json(), "cluster": cluster.name}
    rows = [(f"rank {rank} of {world} (pipeline rank {pp_rank})", "bytes", "", "at the peak")]
    for kind in (*MEMORY_KINDS[:-2], "temporary", *MEMORY_KINDS[-2:]):
        most = (f"{bytes_by_kind[kind]:,}", size(bytes_by_kind[kind])) if kind in bytes_by_kind else ("", "")
        rows.append((kind, *most, size(at_peak[kind]) if kind in at_peak else ""))
    total = f"{device.total:.1f} GiB of a device = {device.words()} ({cluster.name})"
    limit = cluster.device.memory_gib
    total += f": {'fits' if device.total <= limit else 'DOES NOT FIT'} into its {limit:.1f}"
    print_result(args, whole, f"{total}\n\n{table(rows)}\n\n{_device_words(one.target.config, job)}", job)
    say_next_of(args, "cost", "plan", devices=world, cluster=cluster.name, batch=job.global_batch)


def job_on(target: Target, world: int, name: str | None) -> tuple[Job, Cluster]:
    """Return the job and the cluster whose device context and communicators are counted. On a named cluster the job is
    the one that `plan` and `cost` use; without a name it is that of the config alone."""
    if name:
        cluster = load_cluster(name)
        return on_cluster(with_supported_precision(target, cluster), world, cluster), cluster
    job = checked_job(target.config, world)
    usual = "laptop" if job.host else DEFAULT_CLUSTER
    return job, load_cluster(usual if job.host else target.run.get("cluster", usual))


def _device_words(config: Config, job: Job) -> str:
    """Return a line that says for which devices, and for compiled or uncompiled blocks, the figures are."""
    how = "compiled" if job.stack.compiled else "not compiled"
    if job.host:
        return f"on CPUs, blocks {how} (run.device={config.run.device}, train.compile={config.train.compile})"
    return f"on accelerators, blocks {how} (train.compile={config.train.compile}); with run.device=cpu for CPUs"
