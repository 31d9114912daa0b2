"""`pipeline.schedule: auto` chooses by the predicted times and memory: a zero-bubble schedule where it is faster and
fits, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.config.load import to_mapping
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.launch import this_machine
from meshwright.launch.this_machine import schedule_words
from meshwright.plan.cluster import load_cluster
from meshwright.plan.job import Job, job_of
from meshwright.plan.schedules import Choice, choose_schedule
from meshwright.plan.stack import own_stack
from tests.support.oracle import small_config

A100 = load_cluster("a100-80g-dgx")
SIZES = {"layers": 16, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 2048}


def config_with(pp: int = 4, **sections: dict[str, object]) -> Config:
    made = {
        "model": SIZES, "layout": {"pp": pp}, "pipeline": {"schedule": "auto"},
        "train": {"precision": "bf16", "global_batch": 16, "micro_batch": 1},
    } | sections  # fmt: skip
    return small_config(**made)


def job_with(pp: int = 4, **sections: dict[str, object]) -> Job:
    config = config_with(pp, **sections)
    return Job(config, pp, own_stack(config, False))


def kinds(choice: Choice) -> list[str]:
    return [one.job.config.pipeline.schedule for one in choice.fitting]


def gib_of(choice: Choice, kind: str, chunks: int = 1) -> float:
    found = (one for one in choice.fitting if one.job.config.layout.chunks == chunks)
    return next(one.memory_gib for one in found if one.job.config.pipeline.schedule == kind)


def test_a_zero_bubble_schedule_is_chosen_where_it_is_faster_and_fits() -> None:
    choice = choose_schedule(job_with(), A100, 80)
    times = [one.cost.step_s for one in choice.fitting]
    assert times[0] < 1.01 * min(times) and all(one.cost.simulated for one in choice.fitting)
    assert {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipev"} == set(kinds(choice))
    assert kinds(choice)[0] == "zb-v" and choice.config.layout.chunks == 2
    assert "zb-v with 2 chunks per rank: " in choice.why() and "1f1b takes " in choice.why()
    # The ratio is the one of this model: attention's products have no weight, so W < I.
    rank = max(choice.best.cost.chunk_times, key=lambda row: sum(each.whole for each in row))
    forward, backward, weights = (sum(each[n] for each in rank) for n in range(3))
    said = f"1 : {(backward - weights) / forward:.2f} : {weights / forward:.2f}"
    assert said in choice.why() and weights < backward - weights


ONE_CHUNK = {"split": [4, 4, 4, 4], "schedule": "auto"}
FULL_HEAD = {"model": SIZES | {"vocab": 256000}, "pipeline": ONE_CHUNK}


def test_none_is_chosen_that_does_not_fit() -> None:
    """The last rank has the largest states, and holds one micro-batch under 1f1b, but four under zb-h1."""
    wide = choose_schedule(job_with(**FULL_HEAD), A100, 80)
    assert kinds(wide)[0].startswith("zb-")
    limit = gib_of(wide, "1f1b") * 1.001
    assert limit < gib_of(wide, "zb-h1") < gib_of(wide, "zb-h2")
    choice = choose_schedule(job_with(**FULL_HEAD), A100, limit)
    assert kinds(choice)[0] == "1f1b" and "zb-h1" not in kinds(choice)
    assert "would take" in choice.why() and "but needs" in choice.why()
    assert choice.too_large[0].cost.step_s < choice.best.cost.step_s
    with pytest.raises(UserError, match="no schedule fits into 0.1 GiB"):
        choose_schedule(job_with(), A100, 0.1)


def test_none_is_chosen_without_weight_gradients_to_defer() -> None:
    """Frozen weights have no gradients, and those of adapters are small. Zero-bubble schedules would only hold more
    micro-batches."""
    train = {"precision": "bf16", "global_batch": 64}
    adapters = choose_schedule(job_with(pipeline=ONE_CHUNK, tune={"kind": "lora", "rank": 2}, train=train), A100, 80)
    assert kinds(adapters)[0] == "1f1b" and gib_of(adapters, "1f1b") < gib_of(adapters, "zb-h1")
    assert kinds(choose_schedule(job_with(pipeline=ONE_CHUNK, train=train), A100, 80))[0].startswith("zb-")


def test_a_given_number_of_chunks_stays() -> None:
    choice = choose_schedule(job_with(layout={"pp": 4, "chunks": 2}), A100, 80)
    assert {one.job.config.layout.chunks for one in choice.fitting} == {2}
    one = choose_schedule(job_with(pp=1), A100, 80)
    assert kinds(one) == ["1f1b"] and "no pipeline" in one.why()


def test_training_chooses_for_its_own_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(this_machine, "devices_of", lambda *_, **__: (A100, 75.0))
    config = config_with()
    assert schedule_words(config, 4, 4) == ["pipeline.schedule=zb-v", "layout.chunks=2"]
    assert "pipeline.schedule=auto: zb-v with 2 chunks" in capsys.readouterr().err
    named = config_with(pipeline={"schedule": "zb-h1"})
    assert schedule_words(named, 4, 4) == [] and capsys.readouterr().err == ""


def test_commands_choose_for_a_cluster_or_say_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    named = ["gpt2-124m", "--devices", "4", "train.global_batch=16", "layout.pp=4", "pipeline.schedule=auto"]
    assert main(["cost", *named, "--cluster", "a100-80g-dgx"]) == 0
    printed = capsys.readouterr()
    assert "pipeline.schedule=auto: zb-" in printed.err and "schedule zb-" in printed.out
    assert main(["plan", *named, "--cluster", "a100-80g-dgx", "--top", "1"]) == 0
    assert "\nSchedule zb-" in capsys.readouterr().out
    for command in ("memory", "dryrun"):
        assert main([command, *named]) == 2
        assert "set pipeline.schedule=1f1b" in capsys.readouterr().err


def test_the_job_of_a_config_that_leaves_it_open_has_no_stages() -> None:
    with pytest.raises(UserError, match="chosen by `meshwright train`"):
        job_of(config_with(), 4, host=False).chunks  # noqa: B018
    assert to_mapping(config_with())["pipeline"]["schedule"] == "auto"
