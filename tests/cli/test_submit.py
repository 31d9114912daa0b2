"""Tests of job files for Slurm and Kubernetes.

They cover the resources that a job requests, and what its script does when a run is stopped, fails, is cancelled or is
complete. bash runs the scripts with stand-ins for srun, scontrol and meshwright.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.main import main
from meshwright.plan.cluster import FOLDER
from tests.cli.test_bad_input import sentence
from tests.support.waiting import HANG_S, until

CONFIG = """
model: {layers: 4, hidden: 32, heads: 4, vocab: 64, seq: 16}
layout: {tp: 2, pp: 2, node_size: 4}
data: {prefixes: [data/text]}
train: {steps: 100, global_batch: 16, micro_batch: 1}
run: {dir: runs/Big_One, device: cuda}
"""


TEXTS = {"*": str}
META = {"name!": str, "labels": TEXTS, "namespace": str, "annotations": TEXTS}
SELECTOR = {"matchLabels": TEXTS}
CONTAINER = {
    "name!": str, "image": str, "command": [str], "args": [str], "workingDir": str,
    "env": [{"name!": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath!": str, "apiVersion": str}}}],
    "resources": {"limits": {"*": (int, str)}, "requests": {"*": (int, str)}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "subPath": str, "readOnly": bool}],
}  # fmt: skip
VOLUME = {
    "name!": str, "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    "configMap": {"name": str}, "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": str},
}  # fmt: skip
SPREAD = {
    "maxSkew!": int, "topologyKey!": str, "whenUnsatisfiable!": {"DoNotSchedule", "ScheduleAnyway"},
    "labelSelector": SELECTOR,
}  # fmt: skip
POD = {
    "containers!": [CONTAINER], "restartPolicy": {"Never", "OnFailure"}, "subdomain": str, "volumes": [VOLUME],
    "terminationGracePeriodSeconds": int, "topologySpreadConstraints": [SPREAD],
}  # fmt: skip
ON_CODES = {"containerName": str, "operator!": {"In", "NotIn"}, "values!": [int]}
RULE = {
    "action!": {"Ignore", "FailJob", "Count", "FailIndex"}, "onExitCodes": ON_CODES,
    "onPodConditions": [{"type!": str, "status": {"True", "False", "Unknown"}}],
}  # fmt: skip
JOB = {
    "completionMode": {"Indexed", "NonIndexed"}, "completions": int, "parallelism": int, "backoffLimit": int,
    "activeDeadlineSeconds": int, "podFailurePolicy": {"rules!": [RULE]},
    "template!": {"metadata": {"labels": TEXTS}, "spec!": POD},
}  # fmt: skip
PORT = {"name": str, "port!": int, "targetPort": (int, str), "protocol": {"TCP", "UDP"}}
SERVICE = {"clusterIP": str, "selector": TEXTS, "publishNotReadyAddresses": bool, "ports": [PORT]}
# The fields of the Kubernetes API (v1, batch/v1) for the kinds that we write. `!` marks a required field, and `*` any
# name. A set holds the allowed values.
SCHEMA: dict[str, Any] = {
    "ConfigMap": {"apiVersion!": {"v1"}, "kind!": {"ConfigMap"}, "metadata!": META, "data": TEXTS},
    "Service": {"apiVersion!": {"v1"}, "kind!": {"Service"}, "metadata!": META, "spec!": SERVICE},
    "Job": {"apiVersion!": {"batch/v1"}, "kind!": {"Job"}, "metadata!": META, "spec!": JOB},
}


def fits(value: Any, schema: Any, at: str) -> None:
    """Assert that a value has the form of a schema. `at` is its path for messages."""
    if isinstance(schema, dict):
        known = {name.rstrip("!"): each for name, each in schema.items()}
        assert isinstance(value, dict), f"{at} must be keys and values"
        for name in (name.rstrip("!") for name in schema if name.endswith("!")):
            assert name in value, f"{at}.{name} is missing"
        for name, each in value.items():
            assert name in known or "*" in known, f"{at}.{name} is unknown"
            fits(each, known.get(name, known.get("*")), f"{at}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), f"{at} must be a list"
        for number, each in enumerate(value):
            fits(each, schema[0], f"{at}.{number}")
    elif isinstance(schema, set):
        assert value in schema, f"{at} is {value!r}"
    else:
        assert isinstance(value, schema) and (schema is bool or not isinstance(value, bool)), f"{at} is {value!r}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def directives(script: str) -> dict[str, str]:
    """Return the options of a script's #SBATCH lines."""
    words = [line.removeprefix("#SBATCH --").partition("=") for line in script.splitlines() if "#SBATCH" in line]
    return {name: value for name, _, value in words}


def slurm_script(*more: str) -> str:
    """Write a job file for Slurm, check its syntax and return it."""
    assert main(["submit", "c.yaml", "--slurm", "--out", "job.sh", *more]) == 0
    subprocess.run(["bash", "-n", "job.sh"], check=True)
    return Path("job.sh").read_text()


def test_slurm_is_asked_for_what_the_layout_needs() -> None:
    asked = directives(slurm_script("--nodes", "2", "--time", "1-4:00:00", "--sbatch=--partition=gpu"))
    wanted = {"nodes": "2", "ntasks-per-node": "4", "gpus-per-node": "4", "time": "1-04:00:00", "signal": "USR1@300",
              "requeue": "", "job-name": "big-one", "partition": "gpu"}  # fmt: skip
    assert {name: asked.get(name) for name in wanted} == wanted
    asked = directives(slurm_script("run.device=cpu", "layout.pp=4", "--time", "50min", "--lead", "90s"))
    assert asked["nodes"] == "2" and "gpus-per-node" not in asked and asked["signal"] == "USR1@90"
    script = slurm_script("--ranks-per-node", "8", "train.seed=3", "run.dir=runs/a b")
    assert " --kill-on-bad-exit=1 meshwright train c.yaml train.seed=3 'run.dir=runs/a b'\n" in script
    assert "checkpoints='runs/a b/checkpoints'\n" in script and "time" not in directives(script)


def test_an_elastic_run_has_one_launcher_on_each_node() -> None:
    """The loss of a node ends neither the job nor its job step. The launchers start the ranks."""
    script = slurm_script("faults.elastic=true", "--nodes", "4")
    asked = directives(script)
    wanted = {"ntasks-per-node": "1", "cpus-per-task": "16", "gpus-per-node": "4", "no-kill": ""}
    assert {name: asked.get(name) for name in wanted} == wanted
    train = "meshwright train c.yaml faults.elastic=true --nodes 1:4 --nproc 4\n"
    assert f" --no-kill --kill-on-bad-exit=0 {train}" in script


def test_every_rank_is_given_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job requests cores from both sbatch and srun, because srun does not inherit the option.

    If the cluster's number of cores is known, the ranks of a node share all of them.
    """
    script = slurm_script("--nodes", "2")
    asked = directives(script)
    assert asked["cpus-per-task"] == "4" and asked["exclusive"] == ""
    assert 'srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-4}" ' in script
    asked = directives(slurm_script("run.device=cpu", "--nodes", "2"))
    assert asked["cpus-per-task"] == "1" and "exclusive" not in asked
    assert directives(slurm_script("--nodes", "2", "--cores-per-rank", "12"))["cpus-per-task"] == "12"
    known = yaml.safe_load((FOLDER / "h100-80g-dgx.yaml").read_text())
    known["node"] |= {"cores": 112}
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(known))
    script = slurm_script("--ranks-per-node", "8", "--nodes", "1", "--cluster", str(tmp_path / "here.yaml"))
    assert directives(script)["cpus-per-task"] == "14" and "exclusive" in directives(script)
    words = ["submit", "c.yaml", "--slurm", "--cores-per-rank", "0"]
    assert "--cores-per-rank 0 must be at least 1" in sentence(capsys, words)


def run_slurm(here: Path, train: str, **env: str) -> tuple[int, str, bool]:
    """Run the job file with a stand-in for srun that does `train`.

    Return the exit code, the output, and whether the job was requeued.
    """
    slurm_script()
    bin_, checkpoints = here / "bin", here / "runs" / "Big_One" / "checkpoints"
    bin_.mkdir(exist_ok=True)
    programs = {"srun": train, "scontrol": 'echo "$@" > requeued', "meshwright": "test -e complete"}
    for name, body in programs.items():
        (bin_ / name).write_text(f"#!/bin/bash\nsave() {{ mkdir -p {checkpoints}/step-$1; }}\n{body}\n")
        (bin_ / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **env}
    done = subprocess.run(["bash", "job.sh"], env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    requeued = here / "requeued"
    again = requeued.exists() and requeued.read_text() == "requeue 7\n"
    requeued.unlink(missing_ok=True)
    return done.returncode, done.stdout + done.stderr, again


def test_the_job_is_requeued_until_the_run_is_complete(here: Path) -> None:
    assert run_slurm(here, "save 00000010") == (0, "continues from step-00000010: the job is requeued\n", True)
    code, output, requeued = run_slurm(here, "exit 0")
    assert (code, requeued) == (1, False) and "no newer checkpoint" in output, "it would be requeued for ever"
    assert run_slurm(here, "save 00000020; exit 75")[2], "a hang ended it, and it had made progress"
    code, output, requeued = run_slurm(here, "save 00000030; exit 2")
    assert (code, requeued) == (2, False) and "mistake" in output
    code, output, requeued = run_slurm(here, "save 00000040; kill -TERM $PPID")
    assert (code, requeued) == (143, False) and "cancelled" in output
    code, output, requeued = run_slurm(here, "save 00000100; touch complete")
    assert (code, requeued) == (0, False) and "complete" in output
    code, output, requeued = run_slurm(here, "echo srun was called; exit 1")
    assert (code, output, requeued) == (0, "the run is complete\n", False), "nothing is left to do"


def documents(*more: str) -> dict[str, dict[str, Any]]:
    """Write a job file for Kubernetes and return its documents by kind."""
    words = ["--kubernetes", "--nodes", "2", "--image", "mw:1", "--claim", "disk", "--out", "job.yaml"]
    assert main(["submit", "c.yaml", *words, *more]) == 0
    return {document["kind"]: document for document in yaml.safe_load_all(Path("job.yaml").read_text())}


def test_a_kubernetes_job_has_what_it_needs() -> None:
    by_kind = documents("train.seed=3", "--time", "4:00:00")
    versions = {kind: document["apiVersion"] for kind, document in by_kind.items()}
    assert versions == {"ConfigMap": "v1", "Service": "v1", "Job": "batch/v1"}
    service, spec = by_kind["Service"]["spec"], by_kind["Job"]["spec"]
    assert service["clusterIP"] == "None" and service["selector"] == {"job-name": "big-one"}
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["activeDeadlineSeconds"] == 4 * 3600
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["subdomain"] == by_kind["Service"]["metadata"]["name"] == "big-one"
    assert pod["terminationGracePeriodSeconds"] == 300
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    shell, flag, script = container["command"]
    assert (shell, flag) == ("bash", "-c")
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "WORLD_SIZE=8" in script and "MASTER_ADDR=big-one-0.big-one" in script
    rules = spec["podFailurePolicy"]["rules"]
    rules = {str(rule.get("onExitCodes", {}).get("values")): rule["action"] for rule in rules}
    assert rules == {"None": "Ignore", "[85]": "Ignore", "[2]": "FailJob"}
    config = yaml.safe_load(by_kind["ConfigMap"]["data"]["config.yaml"])
    assert config["train"]["seed"] == 3 and config["layout"]["tp"] == 2


def test_a_kubernetes_job_fits_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes knows every field of the job at its place and with its type. An unknown field fails the check."""
    words = ["submit", "c.yaml", "--kubernetes", "--image", "i", "--claim", "c", "--time", "2h", "--out", "job.yaml"]
    assert main(words) == 0
    documents = list(yaml.safe_load_all(Path("job.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "Job"]
    for document in documents:
        fits(document, SCHEMA[document["kind"]], document["kind"])
    documents[2]["spec"]["template"]["spec"]["containers"][0]["imagePullPolicies"] = "Always"
    with pytest.raises(AssertionError, match="Job.spec.template.spec.containers.0.imagePullPolicies is unknown"):
        fits(documents[2], SCHEMA["Job"], "Job")
    if shutil.which("kubeconform"):
        subprocess.run(["kubeconform", "-strict", "job.yaml"], check=True)


@pytest.mark.parametrize(("body", "wanted"), [
    ("exit 0", 85), ("touch complete", 0), ('[ "$RANK" = 6 ] && exit 2; exit 1', 2), ("exit 75", 75),
])  # fmt: skip
def test_a_pod_starts_its_ranks_and_tells_how_they_ended(here: Path, body: str, wanted: int) -> None:
    script = documents()["Job"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    program = here / "meshwright"
    program.write_text(
        '#!/bin/bash\nif [ "$1" = status ]; then exec test -e complete; fi\n'
        f'echo "$RANK $LOCAL_RANK" >> started\n{body}\n'
    )
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    assert subprocess.run(["bash", "-c", script], env=env, timeout=HANG_S, check=False).returncode == wanted
    assert sorted(Path("started").read_text().splitlines()) == ["4 0", "5 1", "6 2", "7 3"]


def test_a_pod_that_is_ended_passes_the_request_on_and_waits(here: Path) -> None:
    script = documents()["Job"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    program = here / "meshwright"
    asked = "trap 'sleep 0.3; touch saved-$RANK; exit 0' TERM; touch up-$RANK; while :; do sleep 0.05; done"
    program.write_text(f'#!/bin/bash\nif [ "$1" = status ]; then exit 1; fi\n{asked}\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"}
    with subprocess.Popen(["bash", "-c", script], env=env) as pod:
        until(lambda: len(list(here.glob("up-*"))) == 4)
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(HANG_S) == 85
    assert len(list(here.glob("saved-*"))) == 4


def test_submit_hands_the_file_to_the_scheduler(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = here / "sbatch"
    sbatch.write_text("#!/bin/bash\ncat > got.sh\necho Submitted batch job 12\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    assert main(["submit", "c.yaml", "--slurm", "--run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["submitted"] == "Submitted batch job 12" and Path("got.sh").read_text() == result["file"]
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    message = sentence(capsys, ["submit", "c.yaml", "--slurm", "--run"])
    assert "refused the job: sbatch: error: invalid partition" in message


@pytest.mark.parametrize(("words", "wanted"), [
    ("--slurm --nodes 0", "--nodes 0 must be at least 1"),
    ("--slurm --ranks-per-node 3", "a world of 6 ranks is not divisible"),
    ("--slurm --time soon", "--time=soon is not a time"),
    ("--slurm --time 5min --lead 5min", "more than half"),
    ("--slurm layout=auto", "meshwright plan"),
    ("--kubernetes", "--image NAME and --claim NAME"),
    ("--kubernetes --image a --claim b --name Big_One", "can't name a job"),
])  # fmt: skip
def test_mistakes(words: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert wanted in sentence(capsys, ["submit", "c.yaml", *shlex.split(words)])
