"""The Python API: own sections, a world and process groups from elsewhere, monitored values, arguments of providers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright.config.load import config_from
from meshwright.errors import UserError
from meshwright.launch.signals import StopRequests
from meshwright.run import pretrain
from meshwright.run.loop import Hook
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Bag:
    scale: float = 1.0


class Counter(nn.Module):
    """A model that predicts the next token from the current one alone."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocab, vocab)
        self.receives: dict[str, Any] = {}


class Cycle:
    def sample(self, n: int) -> dict[str, Any]:
        import numpy as np

        ids = (n + np.arange(9)) % 7
        return {"tokens": ids[:-1], "labels": ids[1:]}


def forward_step(ctx: Any, module: Counter, batch: dict[str, torch.Tensor], received: Any) -> Any:
    logits = module.table(batch["tokens"]) * ctx.config.extra["bag"].scale
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return loss, batch["labels"].numel(), {"rank": float(ctx.rank)}


class SeesWork(Hook):
    """Notes at the beginning of each step whether a request to stop would wait for its end."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def before(self, step: int) -> None:
        self.found.append(StopRequests.has_work)


def train(folder: str, world: int, asked: list[Any], **more: Any) -> Any:
    config = config_from(
        {
            "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab": 7, "seq": 8},
            "data": {"prefixes": ["none"]},
            "train": {"steps": 30, "global_batch": 4},
            "optimizer": {"lr": 0.1},
            "run": {"dir": folder, "tensorboard": False, "device": "cpu"},
            "bag": {"scale": 2.0},
        },
        {"bag": Bag},
    )

    def datasets(ctx: Any, samples: tuple[int, int, int]) -> Any:
        asked.append(samples)
        return Cycle(), Cycle(), None

    return meshwright.pretrain(config, lambda ctx, stage: Counter(7), datasets, forward_step, **more)


def body(rank: int, world: int, folder: str) -> Any:
    import torch.distributed as dist

    own = dist.new_group([0, 1])
    asked: list[Any] = []
    trainer = train(folder, world, asked, process_groups={"dp": own})
    assert dist.is_initialized(), "a world made elsewhere is left as it was"
    assert trainer.ctx.mesh.samples.process_group is own
    return asked, trainer.consumed, [p.detach().clone() for p in trainer.modules[0].parameters()]


def test_a_world_and_groups_made_elsewhere(tmp_path: Path) -> None:
    (asked, consumed, first), (_, _, second) = run_ranks(2, body, str(tmp_path / "two"))
    assert asked == [(120, 16, 16)] and consumed == 120
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    seen = SeesWork()
    alone = train(str(tmp_path / "one"), 1, [], hooks=[seen])
    assert seen.found == [False, *[True] * 29], "a stop waits for the end of any step but the first"
    assert torch.allclose(first[0], alone.modules[0].table.weight, atol=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["monitored"] == {"rank": 0.5}, "the mean over data-parallel ranks"


def own_run(folder: Path, step: Any, steps: int = 100, micro: int = 4, precision: str = "fp32") -> Any:
    config = config_from(
        {
            "model": {"layers": 1, "hidden": 8, "heads": 1, "vocab": 7, "seq": 8},
            "data": {"prefixes": ["none"]},
            "train": {"steps": steps, "global_batch": 4, "micro_batch": micro, "precision": precision},
            "loss_scale": {"initial": 8.0, "window": 4},
            "run": {"dir": str(folder), "tensorboard": False, "device": "cpu"},
        }
    )
    return meshwright.pretrain(config, lambda ctx, stage: Counter(7), lambda ctx, n: (Cycle(), None, None), step)


def lines_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_gives_up_on_a_loss_that_is_never_finite(tmp_path: Path) -> None:
    def broken(ctx: Any, module: Counter, batch: dict[str, torch.Tensor], received: Any) -> Any:
        return module.table(batch["tokens"]).sum() * float("nan"), 8, {}

    with pytest.raises(UserError, match="not finite in 25 steps in a row"):
        own_run(tmp_path / "run", broken)
    lines = lines_of(tmp_path / "run")
    assert len(lines) == 25 and all(line["skipped"] and line["loss"] is None for line in lines)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_without_a_token_changes_nothing(tmp_path: Path, precision: str) -> None:
    """The loss is not zero, and the step does not count as a good one that raises the loss scale."""
    seen: list[torch.Tensor] = []
    calls = iter(range(1000))

    def blind(ctx: Any, module: Counter, batch: dict[str, torch.Tensor], received: Any) -> Any:
        seen.append(module.table.weight.detach().clone())
        counts = next(calls) < 2
        return module.table(batch["tokens"]).sum() * float(counts), 8 * counts, {}

    with pytest.raises(UserError, match="no token counted in the loss in 25 steps in a row, up to step 27"):
        own_run(tmp_path / "run", blind, precision=precision)
    assert not torch.equal(seen[0], seen[1]) and all(torch.equal(seen[2], later) for later in seen[3:])
    lines = lines_of(tmp_path / "run")
    assert [line["learned"] for line in lines] == [8, 8] + 25 * [0]
    assert all(line["loss"] is None and line["skipped"] for line in lines[2:])
    assert {line["loss_scale"] for line in lines} == ({8.0} if precision == "fp16" else {None})


def test_values_that_only_some_micro_batches_have(tmp_path: Path) -> None:
    calls = iter(range(1000))

    def sometimes(ctx: Any, module: Counter, batch: dict[str, torch.Tensor], received: Any) -> Any:
        found = {"x": 10.0} if next(calls) % 2 == 0 else {}
        return module.table(batch["tokens"]).sum(), 8, found

    own_run(tmp_path / "run", sometimes, steps=3, micro=1)
    assert [line["monitored"] for line in lines_of(tmp_path / "run")] == 3 * [{"x": 10.0}]


class Wide(nn.Module):
    """A model of two layers, for the dtype of its products and the shapes of its weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7)).to(dtype)
        self.register_buffer("count", torch.tensor(3), persistent=True)
        self.receives: dict[str, Any] = {}


def wide_run(folder: str, seen: list[Any], dtype: torch.dtype = torch.float32, **sections: dict[str, Any]) -> Any:
    train_keys = {"steps": 2, "global_batch": 4} | sections.pop("train", {})
    config = config_from(
        {
            "model": {"layers": 1, "hidden": 8, "heads": 2, "vocab": 7, "seq": 8},
            "data": {"prefixes": ["none"]},
            "train": train_keys,
            "run": {"dir": folder, "tensorboard": False, "device": "cpu"},
            **sections,
        }
    )

    def step(ctx: Any, module: Wide, batch: dict[str, torch.Tensor], received: Any) -> Any:
        logits = module.inner(batch["tokens"])
        seen.append(logits.dtype)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return loss, batch["labels"].numel(), {}

    return meshwright.pretrain(config, lambda ctx, stage: Wide(dtype), lambda ctx, n: (Cycle(), None, None), step)


def test_the_precision_is_that_of_an_own_model_too(tmp_path: Path) -> None:
    for number, (precision, dtype, expected) in enumerate(
        [("fp32", torch.float32, torch.float32), ("bf16", torch.float32, torch.bfloat16),
         ("bf16", torch.bfloat16, torch.bfloat16), ("fp64", torch.float64, torch.float64)]
    ):  # fmt: skip
        seen: list[Any] = []
        wide_run(str(tmp_path / str(number)), seen, dtype, train={"precision": precision})
        assert set(seen) == {expected}, (precision, dtype)
    with pytest.raises(UserError, match="train.precision=fp64 can't be applied to Wide, whose parameters have another"):
        wide_run(str(tmp_path / "fp64"), [], train={"precision": "fp64"})


def state_dicts_of(rank: int, world: int, folder: str, stage: int) -> Any:
    trainer = wide_run(folder, [], torch.float64, train={"precision": "fp64"}, zero={"stage": stage})
    held = sum(parameter.untyped_storage().nbytes() for parameter in trainer.modules[0].parameters())
    return held, meshwright.state_dicts(trainer)[0], list(trainer.modules[0].state_dict())


def test_the_weights_of_an_own_model_are_gathered_whole(tmp_path: Path) -> None:
    """The module itself holds none of its weights with zero.stage=3."""
    (_, first, names), (_, same, _) = run_ranks(2, state_dicts_of, str(tmp_path / "0"), 0)
    (held, third, _), (_, other, _) = run_ranks(2, state_dicts_of, str(tmp_path / "3"), 3)
    assert held == 0 and list(third) == names == list(first)
    for name, values in first.items():
        assert torch.equal(values, same[name]) and torch.equal(third[name], other[name])
        # Not to the bit: a shard ends elsewhere, and the last elements of a vector loop may round differently.
        torch.testing.assert_close(third[name], values, rtol=1e-12, atol=0.0)
        assert values.numel() > 0


def cut_run(rank: int, world: int, folder: str, axis: str) -> str:
    with pytest.raises(UserError) as caught:
        wide_run(folder, [], layout={axis: 2})
    return str(caught.value)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_ranks_that_would_all_compute_the_same_are_refused(axis: str, tmp_path: Path) -> None:
    said = run_ranks(2, cut_run, str(tmp_path / "run"), axis)
    assert all(f"layout.{axis}=2 would have every rank compute all of Wide" in text for text in said)


@pytest.mark.parametrize("writes", [True, False])
def test_the_rank_that_writes_says_whether_a_run_is_new(writes: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """This rank sees a checkpoint and no other rank does. In the second case, one of the others is the writer."""
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    world = SimpleNamespace(max_over_ranks=lambda value, device: value)
    config = SimpleNamespace(
        run=SimpleNamespace(dir=str(tmp_path)), checkpoint=SimpleNamespace(dir=""), model=SimpleNamespace(hf="folder"),
        tune=SimpleNamespace(adapts=False),
    )  # fmt: skip
    ctx = SimpleNamespace(config=config, mesh=SimpleNamespace(world=world), device=SimpleNamespace(torch=None), rank=0)
    fresh_flags = []

    def begin(trainer: Any, modules: Any, fresh: bool) -> None:
        fresh_flags.append(fresh)
        raise UserError("far enough")

    monkeypatch.setattr(pretrain, "begin_with_folder", begin)
    monkeypatch.setattr(pretrain, "refuse_finished", lambda *args: None)
    monkeypatch.setattr(pretrain, "check_shared", lambda *args: None)
    with pytest.raises(UserError, match="far enough"):
        pretrain.run_in_owned_folder(SimpleNamespace(ctx=ctx, writes=writes, modules=[]), None, None, 0.0)  # type: ignore[arg-type]
    assert fresh_flags == [not writes]
