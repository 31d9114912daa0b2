"""Writes the job file of a run: a batch script for Slurm, or an indexed Job for Kubernetes. No torch.

Both follow one rule. A run is complete when `meshwright status RUN --complete` says so. An exit code can't show it:
`train` also ends with 0 after it was asked to stop and has saved. Slurm restarts a job that ended early if it left a
newer checkpoint. Kubernetes restarts it unless it ended with exit code 2, a mistake that no restart can fix.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from meshwright.config.yaml_text import dump_yaml
from meshwright.device_kinds import DEVICE_KINDS, resource_of

STOPPED = 85  # The exit code of a container whose run was stopped before it was complete.
PORT = 29500
MISTAKE = 2
ELASTIC_STEP = "--no-kill --kill-on-bad-exit=0"  # The loss of a node ends neither the job nor its step.
# Since Slurm 22.05, srun no longer inherits this option from sbatch. The user may have changed it with --sbatch.
CORES = '--cpus-per-task="${{SLURM_CPUS_PER_TASK:-{cores}}}"'
SHM = "/dev/shm"  # noqa: S108
CONFIG_AT = "/etc/meshwright"


@dataclass(frozen=True)
class JobFile:
    """The resources and settings of a scheduled run.

    The scheduler signals the job `lead_s` seconds before it ends the job, so that the run can save.
    """

    name: str
    nodes: int
    per_node: int  # Ranks per node.
    device: str  # run.device
    config: str  # The path or recipe that `train` reads.
    words: tuple[str, ...]  # Overrides of the config, key=value.
    run_dir: str
    checkpoints: str
    steps: int
    lead_s: int
    time_s: int = 0  # 0: no limit.
    setup: tuple[str, ...] = ()  # Lines of shell that run first.
    options: tuple[str, ...] = ()  # Further options of sbatch.
    command: str = ""  # The command that made this file.
    elastic: bool = False  # Each node has one launcher, which continues when other nodes are lost.
    # Cores per rank. Python, autograd, the data's reader, NCCL's threads and the watchdogs share them.
    cores: int = 1
    whole_nodes: bool = False  # No other job may use these nodes.

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def has_accelerators(self) -> bool:
        return self.device not in DEVICE_KINDS or DEVICE_KINDS[self.device].is_accelerator

    def train(self, config: str | None = None) -> str:
        """Return the command of a rank or, in an elastic run, of a node's launcher."""
        launcher = ["--nodes", f"1:{self.nodes}", "--nproc", str(self.per_node)] if self.elastic else []
        return shlex.join(["meshwright", "train", config or self.config, *self.words, *launcher])

    @property
    def is_complete(self) -> str:
        return shlex.join(["meshwright", "status", self.run_dir, "--complete", "--steps", str(self.steps)])


def slurm_time(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02d}:{minute:02d}:{second:02d}"


SLURM = """\
#!/bin/bash
# Written by: {command}
{directives}

# Before the time limit Slurm sends SIGUSR1 to the ranks, which save and end. This script then puts the job into the
# queue again, and it continues from the newest checkpoint, until the run is complete or a job leaves no newer one.
set -u
{setup}
checkpoints={checkpoints}
newest() {{ ls "$checkpoints" 2>/dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }}
is_complete() {{ {is_complete}; }}

cancelled=
trap 'cancelled=1' TERM  # scancel, or the time limit itself
if is_complete; then echo "the run is complete"; exit 0; fi
before=$(newest)
srun {step} {train}
code=$?
if is_complete; then echo "the run is complete"; exit 0; fi
if [ -n "$cancelled" ]; then echo "the job was cancelled: it is not requeued"; exit 143; fi
if [ "$code" -eq {mistake} ]; then echo "a mistake, reported above, ended the run: it is not requeued"; exit "$code"; fi
if [ "$(newest)" = "$before" ]; then
    echo "the job left no newer checkpoint (exit code $code): it is not requeued"
    if [ "$code" -eq 0 ]; then exit 1; else exit "$code"; fi
fi
echo "continues from $(newest): the job is requeued"
scontrol requeue "$SLURM_JOB_ID"
"""


def slurm(job: JobFile) -> str:
    """Return the batch script for Slurm."""
    # A task is a rank or, in an elastic run, a node's launcher, whose ranks share its cores.
    tasks, cores = (1, job.per_node * job.cores) if job.elastic else (job.per_node, job.cores)
    ours = [f"job-name={job.name}", f"nodes={job.nodes}", f"ntasks-per-node={tasks}", f"cpus-per-task={cores}"]
    ours += ["no-kill"] if job.elastic else []
    ours += ["exclusive"] if job.whole_nodes else []
    ours += [f"gpus-per-node={job.per_node}"] if job.has_accelerators else []
    ours += [f"time={slurm_time(job.time_s)}"] if job.time_s else []
    ours += [f"signal=USR1@{job.lead_s}", "requeue", "open-mode=append", f"output={job.name}-%j.log"]
    options = [f"--{option}" for option in ours] + list(job.options)
    return SLURM.format(
        command=job.command, directives="\n".join(f"#SBATCH {option}" for option in options),
        setup="\n".join(job.setup), checkpoints=shlex.quote(job.checkpoints), is_complete=job.is_complete,
        step=f"{CORES.format(cores=cores)} {ELASTIC_STEP if job.elastic else '--kill-on-bad-exit=1'}",
        train=job.train(), mistake=MISTAKE,
    )  # fmt: skip


# Each pod starts its own ranks. The shell receives a request to stop and forwards it to them. The ranks of all pods
# agree on the step at which they stop.
POD = """\
{setup}
is_complete() {{ {is_complete}; }}
is_complete && exit 0
export WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={per_node} MASTER_ADDR={master} MASTER_PORT={port}
export MESHWRIGHT_ATTEMPT=$(date +%s)
ranks=()
trap 'kill -TERM "${{ranks[@]}}" 2>/dev/null' TERM
for ((n = 0; n < {per_node}; n++)); do
    RANK=$((JOB_COMPLETION_INDEX * {per_node} + n)) LOCAL_RANK=$n {train} &
    ranks+=($!)
done
code=0
for rank in "${{ranks[@]}}"; do
    wait "$rank"; ended=$?
    while [ "$ended" -gt 128 ] && kill -0 "$rank" 2>/dev/null; do wait "$rank"; ended=$?; done
    [ "$ended" -eq 0 ] || [ "$code" -eq {mistake} ] || code=$ended
done
is_complete && exit 0
[ "$code" -eq 0 ] && exit {stopped}
exit "$code"
"""


@dataclass(frozen=True)
class Pods:
    """The settings of the containers.

    All containers mount the disk of the persistent volume `claim` at `folder`. The config's relative paths start there.
    """

    image: str
    claim: str
    folder: str
    failures: int  # This many pods may fail before the job fails. Stopped and evicted pods do not count.


def kubernetes(job: JobFile, pods: Pods, config: str) -> str:
    """Return the manifest: a ConfigMap with the run's config, a headless Service that names the pods, and the Job."""
    labels = {"app.kubernetes.io/name": "meshwright", "app.kubernetes.io/instance": job.name}
    meta: dict[str, Any] = {"name": job.name, "labels": labels}
    documents: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"config.yaml": config}},
        {
            "apiVersion": "v1", "kind": "Service", "metadata": meta,
            "spec": {
                "clusterIP": "None", "selector": {"job-name": job.name}, "publishNotReadyAddresses": True,
                "ports": [{"name": "store", "port": PORT}],
            },
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _job_spec(job, pods, labels)},
    ]  # fmt: skip
    text = dump_yaml(*documents, width=120)
    return f"# Written by: {job.command}\n{text}"


def _job_spec(job: JobFile, pods: Pods, labels: dict[str, str]) -> dict[str, Any]:
    again = {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [STOPPED]}}
    mistake = {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [MISTAKE]}}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    spec: dict[str, Any] = {
        "completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes, "backoffLimit": pods.failures,
        "podFailurePolicy": {"rules": [evicted, again, mistake]},
    }  # fmt: skip
    spec |= {"activeDeadlineSeconds": job.time_s} if job.time_s else {}
    return spec | {"template": {"metadata": {"labels": labels}, "spec": _pod_spec(job, pods)}}


def _pod_spec(job: JobFile, pods: Pods) -> dict[str, Any]:
    script = POD.format(
        setup="\n".join(job.setup) or "set -u", is_complete=job.is_complete, ranks=job.ranks, per_node=job.per_node,
        master=f"{job.name}-0.{job.name}", port=PORT, train=job.train(f"{CONFIG_AT}/config.yaml"), mistake=MISTAKE,
        stopped=STOPPED,
    )  # fmt: skip
    container: dict[str, Any] = {
        "name": "train", "image": pods.image, "workingDir": pods.folder, "command": ["bash", "-c", script],
        "env": [{"name": "MESHWRIGHT_JOB", "valueFrom": {"fieldRef": {"fieldPath": _JOB_ID}}}],
        "volumeMounts": [
            {"name": "disk", "mountPath": pods.folder}, {"name": "config", "mountPath": CONFIG_AT},
            {"name": "shm", "mountPath": SHM},
        ],
    }  # fmt: skip
    if job.has_accelerators:
        container["resources"] = {"limits": {resource_of(job.device): job.per_node}}
    apart = {"matchLabels": {"job-name": job.name}}
    return {
        "restartPolicy": "Never", "subdomain": job.name, "terminationGracePeriodSeconds": job.lead_s,
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
             "labelSelector": apart},
        ],
        "containers": [container],
        "volumes": [
            {"name": "disk", "persistentVolumeClaim": {"claimName": pods.claim}},
            {"name": "config", "configMap": {"name": job.name}}, {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip


# This label is the same in all pods of a job, and in no other job.
_JOB_ID = "metadata.labels['batch.kubernetes.io/controller-uid']"
