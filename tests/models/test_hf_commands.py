"""Every command with its defaults, over families of transformers that have no description here."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.errors import UserError
from meshwright.plan.cluster import load_cluster
from meshwright.plan.job import Job
from meshwright.plan.search import SearchSpace, search
from meshwright.plan.stack import own_stack
from tests.models.planned_families import config_of, tiny, write_tiny
from tests.tune.test_chat import make_model

# Two families with a tensor-parallel plan, and two without one.
FAMILIES = ("granite", "olmo2", "phi", "stablelm")
ON = ["--cluster", "h100-80g-dgx", "--devices"]


@pytest.mark.parametrize("family", ["granite", "stablelm"])
def test_a_search_leaves_out_what_a_family_refuses(tmp_path: Path, family: str) -> None:
    """Granite's two key-value heads are not copied to four ranks, and StableLM's stages have not been compared."""
    config = config_of(write_tiny(family, tmp_path), {"train": {"precision": "bf16", "global_batch": 8}})
    cluster, job = load_cluster("h100-80g-dgx"), Job(config, 8, own_stack(config, False), 8)
    found = {(each.job.layout.tp, each.job.layout.pp) for each in search(job, cluster).candidates}
    assert found == ({(1, 1), (2, 1), (1, 2), (2, 2)} if family == "granite" else {(1, 1)})
    only_stages = search(job, cluster, space=SearchSpace(pp=(2,)))
    assert bool(only_stages.candidates) == (family == "granite")
    assert only_stages.refused.startswith("layout.pp=2 can't be used with the family stablelm") == (family != "granite")


def test_adapters_are_refused_before_the_data_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    folder = str(tmp_path / "base")
    transformers.AutoModelForCausalLM.from_config(tiny("granite")).save_pretrained(folder)
    make_model(Path(folder))
    config = config_of(folder, {"tune": {"kind": "lora"}})
    with pytest.raises(UserError, match="adapters need linear layers"):
        assert Job(config, 1, own_stack(config, True), 1).model
    (tmp_path / "talks.jsonl").write_text(json.dumps({"prompt": "Say 1.", "completion": "1."}) + "\n")
    assert main(["tune", folder, str(tmp_path / "talks.jsonl"), "--lora", "--out", str(tmp_path / "out")]) == 2
    assert "tune.kind=lora can't be combined with a model that transformers builds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_every_command_takes_the_family(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    monkeypatch.chdir(tmp_path)
    config = tiny(family)
    config.vocab_size, config.max_position_embeddings = 300, 4096
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(family)
    make_model(Path(family))
    talks = [json.dumps({"prompt": f"Say {n}.", "completion": f"It is {n}."}) for n in range(48)]
    Path("talks.jsonl").write_text("\n".join(talks))

    def runs(*words: str) -> str:
        assert main([*words]) == 0, (words, capsys.readouterr().err)
        said = capsys.readouterr()
        return said.out + said.err

    small = ["train.steps=2", "train.global_batch=4", "train.micro_batch=2", "run.device=cpu", "run.tensorboard=false"]
    runs("tune", family, "talks.jsonl", "--out", "run", *small)
    assert load_config("run/tune.yaml").model.kind == "hf"
    runs("train", "run/tune.yaml", *small[1:], "run.dir=stages", "train.steps=1")
    for source in ("run", family):
        runs("generate", source, "--prompt", "Say", "--max-tokens", "2")
        monkeypatch.setattr(sys, "stdin", io.StringIO("Say 5.\n"))
        runs("chat", source, "--max-tokens", "2")
    runs("eval", "run")
    assert "both agree" in runs("export", "run", "--to", "out", "--compare")
    assert json.loads(Path("out/config.json").read_text())["max_position_embeddings"] == 4096
    assert "every checksum is right" in runs("inspect", "run")
    assert "bit for bit" in runs("replay", "run", "--step", "2")
    runs("status", "run")
    runs("watch", "run", "--html", "run.html")
    assert "The run equals the plan." in runs("dryrun", "run/tune.yaml", "--devices", "2")
    runs("check", "run/tune.yaml", "--nproc", "2")
    for words in (["plan", family, *ON, "8", "--out", "best.yaml", "--global-batch", "8"],
                  ["memory", "run/tune.yaml", "--devices", "2"],
                  ["cost", "run/tune.yaml", *ON, "2"], ["simulate", "run/tune.yaml", *ON, "2"],
                  ["scaling", "run/tune.yaml", *ON, "1:2"], ["layout", "run/tune.yaml", "--devices", "2"],
                  ["config", "check", "run/tune.yaml"], ["config", "show", "run/tune.yaml"]):  # fmt: skip
        runs(*words)
