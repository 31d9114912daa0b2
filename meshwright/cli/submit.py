"""`meshwright submit`: write or submit a job for Slurm or Kubernetes that trains until the run is complete. No
torch."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from meshwright.config.blocks import seconds_of
from meshwright.config.load import AUTO_LAYOUT, load_config, to_yaml
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.disk import write
from meshwright.errors import UserError, notice, plural
from meshwright.launch.job_files import JobFile, Pods, kubernetes, slurm
from meshwright.plan.cluster import load_cluster
from meshwright.record.checkpoint_format import checkpoint_folder
from meshwright.spec.model.description import layout_of
from meshwright.watch.run_parts import layout_line

EXAMPLES = """example:
  meshwright submit CONFIG.yaml --slurm --nodes 2 --time 4:00:00 --out job.sh
  meshwright submit CONFIG.yaml --slurm --nodes 2 --time 4:00:00 --setup "source .venv/bin/activate" \\
      --sbatch=--partition=gpu --run
  meshwright submit CONFIG.yaml --kubernetes --nodes 4 --image meshwright:1 --claim shared --out job.yaml

The job saves before its time limit and starts again until `meshwright status RUN --complete` says that the run is
complete."""

# The most ranks of a node, if nothing is known about the nodes.
PER_NODE = 8
# The cores of a rank with an accelerator. Every machine with GPUs has this many per GPU, and fewer would slow the rank.
CORES_OF_GPU = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml|RECIPE", help="the run's config file, or a recipe's name")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change, as for train")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--slurm", action="store_true", help="write a batch script for sbatch")
    where.add_argument("--kubernetes", action="store_true", help="write an indexed Job with a headless service")
    nodes = "machines (default: the fewest that hold the layout once, dp=1)"
    parser.add_argument("--nodes", type=int, metavar="N", help=nodes)
    each = f"ranks and GPUs of a machine (default: layout.node_size, else the cluster's, else {PER_NODE} at most)"
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help=each)
    parser.add_argument("--cluster", metavar="NAME|FILE", help="the cluster, for the GPUs and cores of its machines")
    cores = f"cores of each rank (default: an equal share of the cluster's, else {CORES_OF_GPU}, on a CPU 1)"
    parser.add_argument("--cores-per-rank", type=int, metavar="N", help=cores)
    parser.add_argument("--time", metavar="4:00:00", help="the job's time limit, also as 3h50min (default: none asked)")
    lead = "how long before its time limit a job gets the signal to save (default: 5min); a step and a save must fit in"
    parser.add_argument("--lead", default="5min", metavar="TIME", help=lead)
    parser.add_argument("--name", help="the job's name (default: that of the run's folder)")
    setup = "a shell command to run first, e.g. 'module load cuda' (may be given several times)"
    parser.add_argument("--setup", action="append", default=[], metavar="LINE", help=setup)
    more = "Slurm: a further option, e.g. --sbatch=--partition=gpu (may be given several times)"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=more)
    parser.add_argument("--image", help="Kubernetes: the image of the containers, with meshwright in it")
    parser.add_argument("--claim", help="Kubernetes: the persistent volume claim of the disk that all pods share")
    parser.add_argument("--mount", default="/work", metavar="FOLDER", help="Kubernetes: where it is mounted (/work)")
    failures = "Kubernetes: pods that may fail before the job does (default: 8)"
    parser.add_argument("--failures", type=int, default=8, metavar="N", help=failures)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the file here (default: print it)")
    parser.add_argument("--run", action="store_true", help="submit it, with sbatch or kubectl")


def run(args: argparse.Namespace) -> int:
    if AUTO_LAYOUT in args.overrides:
        raise UserError("layout=auto needs a number of ranks: choose with `meshwright plan --out FILE` and submit FILE")
    config = load_config(args.config, args.overrides)
    job = job_of(args, config)
    text = slurm(job) if args.slurm else kubernetes(job, pods_of(args), to_yaml(config))
    write(args.out, lambda: text)
    submitted = send(text, args.slurm) if args.run else None
    each = f"{plural(job.nodes, 'node')} of {plural(job.per_node, 'rank')}"
    if args.json:
        print(json.dumps({
            "scheduler": "slurm" if args.slurm else "kubernetes", "name": job.name, "nodes": job.nodes,
            "ranks_per_node": job.per_node, "ranks": job.ranks, "file": text, "out": args.out and str(args.out),
            "submitted": submitted,
        }))  # fmt: skip
        return 0
    notice(f"{job.name} asks for {each}: {layout_line(config, layout_of(config, job.ranks))}")
    if not (args.out or args.run):
        print(text, end="")
    if submitted:
        print(submitted)
    return 0


def job_of(args: argparse.Namespace, config: Config) -> JobFile:
    """Return the job to ask for, after checking the config against its ranks."""
    nodes, per_node = sizes_of(args, config)
    check(config, nodes * per_node, TRAINING_RULES)
    time_s = time_of(args.time) if args.time else 0
    lead_s = int(seconds_of("--lead", args.lead))
    if time_s and lead_s * 2 > time_s:
        raise UserError(f"--lead {args.lead} is more than half of --time {args.time}: shorten it or ask for more time")
    if args.sbatch and not args.slurm:
        raise UserError("--sbatch is an option for Slurm: leave it out")
    if config.faults.elastic and args.kubernetes:
        raise UserError("a Kubernetes Job starts its pods again by itself: leave faults.elastic=true out")
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(config.run.dir).name.lower()).strip("-") or "meshwright"
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?" if args.kubernetes else r"[\w.-]+", name):
        raise UserError(f"'{name}' can't name a job: give --name, of lower-case letters, digits and -, a letter first")
    job = JobFile(
        name, nodes, per_node, config.run.device, args.config, tuple(args.overrides), config.run.dir,
        str(checkpoint_folder(config)), config.train.steps, lead_s, time_s, tuple(args.setup), tuple(args.sbatch),
        args.command, config.faults.elastic, *cores_of(args, config, nodes, per_node),
    )  # fmt: skip
    # On Kubernetes the job gets the resolved config as a file, which has the words already.
    return replace(job, words=()) if args.kubernetes else job


def sizes_of(args: argparse.Namespace, config: Config) -> tuple[int, int]:
    """Return the number of machines and of ranks on each."""
    for option, value in (("--nodes", args.nodes), ("--ranks-per-node", args.ranks_per_node),
                          ("--cores-per-rank", args.cores_per_rank)):  # fmt: skip
        if value is not None and value < 1:
            raise UserError(f"{option} {value} must be at least 1")
    least, node = config.layout.least_world, config.layout.node_size
    known = args.ranks_per_node or node or (load_cluster(args.cluster).node.devices if args.cluster else 0)
    per_node = known or min(least, PER_NODE)
    return args.nodes or -(-least // per_node), per_node


def cores_of(args: argparse.Namespace, config: Config, nodes: int, per_node: int) -> tuple[int, bool]:
    """Return the cores of each rank and whether the job takes whole machines. It does if it has GPUs and either several
    machines or all GPUs of one."""
    node = load_cluster(args.cluster).node if args.cluster else None
    default = 1 if config.run.on_cpu else CORES_OF_GPU
    cores = args.cores_per_rank or (node.cores // per_node if node and node.cores else default)
    has_gpus = not config.run.on_cpu
    return max(1, cores), has_gpus and (nodes > 1 or (node is not None and per_node == node.devices))


def time_of(text: str) -> int:
    """Return the seconds of a time, which may be written as for Slurm (4:00:00) or as in a config (4h)."""
    found = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,3}):(\d{2}):(\d{2})", text)
    if not found:
        return int(seconds_of("--time", text))
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    if not (total := 86400 * days + 3600 * hours + 60 * minutes + seconds):
        raise UserError(f"--time {text} is not a time: give e.g. 4:00:00")
    return total


def pods_of(args: argparse.Namespace) -> Pods:
    """Return the settings of the pods of a Kubernetes job."""
    if not args.image or not args.claim:
        raise UserError("a Job needs an image and a disk that all pods share: give --image NAME and --claim NAME")
    if args.failures < 0 or not args.mount.startswith("/"):
        raise UserError("--failures must not be negative, and --mount must be a whole path, e.g. /work")
    return Pods(args.image, args.claim, args.mount, args.failures)


def send(text: str, to_slurm: bool) -> str:
    """Send the job file to the scheduler and return the scheduler's answer."""
    command = ["sbatch"] if to_slurm else ["kubectl", "apply", "-f", "-"]
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} is not installed here: write the file with --out and submit it where it is")
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UserError(f"{command[0]} refused the job: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout.strip()
