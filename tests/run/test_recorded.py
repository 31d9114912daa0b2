"""The records of a run: norms by layer as in a single process, figures of every rank, and the run's origin."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.buffers import ReleasableTensor
from meshwright.plan.measured import cluster_of, speed_of
from meshwright.record.rank_figures import RankFigures
from meshwright.record.speed import Speed
from tests.support.oracle import Made, small_config
from tests.support.ranks import run_ranks

LAYOUTS = {
    "tp and pp": {"layout": {"tp": 2, "pp": 2}},
    "stage 3": {"zero": {"stage": 3}},
}


def slow_step(rank: int) -> Any:
    """Return a forward step that takes longer on rank 1."""

    def step(ctx: Any, module: Any, batch: Any, received: Any) -> Any:
        if rank == 1:
            time.sleep(0.08)
        return forward_step(ctx, module, batch, received)

    return step


def body(rank: int, world: int, folder: str, case: dict[str, Any], slow: bool = False) -> None:
    run = {"dir": folder, "layers_every": 2, "device": "cpu", "tensorboard": False}
    config = small_config(**case, train={"steps": 4, "global_batch": 8, "precision": "fp64"}, run=run)
    data = Made(config.model.vocab, config.model.seq)
    step = slow_step(rank) if slow else forward_step
    speed = Speed(flops_per_sample=1e9, peak=1e12)
    meshwright.pretrain(
        config, model_provider, lambda ctx, samples: (data, None, None), step, speed=lambda *_: speed, command="typed"
    )


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    body(0, 1, str(folder), {})
    return folder


@pytest.mark.parametrize("name", ["tp and pp", pytest.param("stage 3", marks=pytest.mark.wide)])
def test_norms_by_layer_are_those_of_one_process(name: str, alone: Path, tmp_path: Path) -> None:
    world = 4 if "pp" in name else 2
    run_ranks(world, body, str(tmp_path), LAYOUTS[name])
    found, wanted = lines(tmp_path, "layers.jsonl"), lines(alone, "layers.jsonl")
    assert [line["step"] for line in found] == [2, 4]
    steps = {line["step"]: line for line in lines(tmp_path, "metrics.jsonl")}
    for here, there in zip(found, wanted, strict=True):
        assert here["layers"] == there["layers"]
        assert {"embedding", "layers.0", "layers.1"} <= set(here["layers"])
        # Exact, since the model is smaller than the samples taken of it.
        for key in ("grad_norm", "weight_norm", "update_ratio"):
            assert here[key] == pytest.approx(there[key], rel=1e-9), key
        assert math.hypot(*here["grad_norm"]) == pytest.approx(steps[here["step"]]["grad_norm"], rel=1e-12)
    assert all(0 < ratio < 0.1 for ratio in found[0]["update_ratio"])


def test_the_slow_rank_is_named_and_the_others_wait(tmp_path: Path) -> None:
    before = time.time()
    run_ranks(2, body, str(tmp_path), {}, True)
    found = lines(tmp_path, "metrics.jsonl")
    last = found[-1]
    assert before < last["time"] <= time.time()
    assert last["tflops"] == pytest.approx(1e9 * 8 / last["step_time_s"] / 1e12)
    assert last["mfu"] == pytest.approx(last["tflops"] / 2)
    spreads = [(line["ranks"]["busy_s"], line["ranks"]["waited_s"]) for line in found]
    # One such step is enough: other users of the machine make ranks compute longer too.
    assert any(b["rank"] == 1 and b["max"] > b["min"] + 0.1 and w["rank"] == 0 for b, w in spreads), spreads
    waited = spreads[-1][1]
    assert last["ranks"]["peak_bytes"]["min"] > 1 << 20
    assert sum(last["exposed_s"].values()) == pytest.approx((waited["min"] + waited["max"]) / 2, abs=1e-5)
    ranks = json.loads((tmp_path / "ranks.json").read_text())
    assert ranks["step"] == 4 and len(ranks["busy_s"]) == len(ranks["peak_bytes"]) == 2


def test_a_run_says_where_it_came_from_and_what_happened(alone: Path) -> None:
    notes = json.loads((alone / "run.json").read_text())
    assert notes["version"] == meshwright.__version__ and notes["command"] == "typed" and notes["world"] == 1
    assert notes["torch"] and notes["host"] and notes["device"] == "cpu" and "git" in notes
    events = lines(alone, "events.jsonl")
    assert [(event["kind"], event["step"]) for event in events] == [("start", 0), ("checkpoint", 4), ("end", 4)]


def test_the_devices_of_known_clusters_are_recognised() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100-80g-dgx", "NVIDIA A100-SXM4-40GB": "a100-40g-dgx",
        "NVIDIA A100-SXM4-80GB": "a100-80g-dgx", "Tesla V100-SXM2-32GB": "v100-32g",
    }  # fmt: skip
    for device, name in names.items():
        found = cluster_of(device)
        assert found and found.name == name
    assert cluster_of("NVIDIA H200", 139.8).name == "h200-141g-dgx"  # type: ignore[union-attr]
    assert cluster_of("cpu") is None and cluster_of("NVIDIA H100 PCIe") is None
    config = small_config(train={"precision": "bf16"})
    assert speed_of(config, "NVIDIA H100 80GB HBM3").peak == pytest.approx(989.4e12)
    assert speed_of(config, "cpu").peak is None
    assert speed_of(small_config(run={"peak_tflops": 2.0}), "cpu").peak == 2e12


def test_figures_of_ranks_are_read_from_the_sums() -> None:
    found = RankFigures.read([1_000_000, 0, 0, 5, 7, 3_000_000, 500_000, 2_000_000, 9, 7])
    assert found.summary() == {
        "busy_s": {"min": 1.0, "median": 3.0, "max": 3.0, "rank": 1},
        "waited_s": {"min": 0.0, "median": 0.5, "max": 0.5, "rank": 1},
        "data_s": {"min": 0.0, "median": 2.0, "max": 2.0, "rank": 1},
        "peak_bytes": {"min": 5, "median": 9, "max": 9, "rank": 1},
    }
    assert list(RankFigures.read([0, 0, 0, 5, 7, 0, 0, 0, 9, 7]).summary()) == ["peak_bytes"]  # as on an accelerator


def test_norms_by_layer_where_gradients_have_no_memory_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released tensors of an accelerator allow no slice, which is imitated here. The step has one micro-batch."""

    def resized(cls: type[ReleasableTensor], size: int, dtype: torch.dtype, device: torch.device) -> ReleasableTensor:
        return cls(torch.zeros(size, dtype=dtype, device=device))

    monkeypatch.setattr(ReleasableTensor, "of", classmethod(resized))
    train = {"steps": 3, "global_batch": 2, "micro_batch": 2}
    config = small_config(train=train, run={"dir": str(tmp_path / "run"), "device": "cpu", "layers_every": 1})
    data = Made(config.model.vocab, config.model.seq)
    meshwright.pretrain(config, model_provider, lambda ctx, samples: (data, data, None), forward_step)
    lines = [json.loads(line) for line in (tmp_path / "run" / "layers.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(norm > 0 for line in lines for norm in line["grad_norm"])
