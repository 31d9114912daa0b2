"""`meshwright.wrap`: a user's module in a user's loop, on ZeRO and on tp, against one process."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright
import meshwright.run.wrap
from meshwright.engine.marks import BACKWARD, FORWARD, Marks
from meshwright.engine.own_models import check_own
from meshwright.errors import UserError
from tests.support.ranks import RankFailed, run_ranks

PLAN = {"blocks.*.gate": "colwise", "blocks.*.mark": "replicated_with_grad_allreduce", "blocks.*.down": "rowwise"}
STEPS = 3
BASE: dict[str, Any] = {
    "train": {"global_batch": 8, "micro_batch": 2, "precision": "fp64"}, "optimizer": {"lr": 1e-2},
    "run": {"device": "cpu"}, "comm": {"bucket_mib": 0.001},
}  # fmt: skip


class Block(nn.Module):
    """A block whose parts have common names. No attribute that is set on a unit may hide them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mark, self.down = nn.Linear(8, 12), nn.LayerNorm(3), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mark(self.gate(x).unflatten(-1, (-1, 3))).flatten(-2)  # a norm of each "head", as models have
        return x + self.down(torch.tanh(y))


class Net(nn.Module):
    """A network with blocks in a list, a module before and after them, and a parameter outside all modules.

    With `skips` the data decide whether the first or the second block is left out. Otherwise the block `left_out` is.
    """

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips, self.left_out = skips, -1
        torch.manual_seed(3)
        self.begin, self.blocks, self.end = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        left_out = int(x[0, 0] > 0) if self.skips else self.left_out
        x = self.begin(x) * self.scale
        for number, block in enumerate(self.blocks):
            x = x if number == left_out else block(x)
        return self.end(x)


def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (module(batch["x"]) - batch["y"]).square().sum(), batch["y"].numel()


def batch_of(step: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    return {"x": torch.randn(8, 4).double(), "y": torch.randn(8, 2).double()}


def wrapped(
    plan: dict[str, str] | None = None, skips: bool = False, **sections: dict[str, Any]
) -> meshwright.run.wrap.Wrapped:
    return meshwright.wrap(Net(skips).double(), {**BASE, **sections}, plan=plan, loss=loss)


def losses(model: Any, rank: int, ranks: int, first: int = 0) -> list[float]:
    """Return losses and norms of some steps, in each of which a data-parallel rank has every `ranks`-th micro-batch."""
    found = []
    for step in range(first, first + STEPS):
        own = {name: x.view(-1, ranks, 2, x.shape[-1])[:, rank].flatten(0, 1) for name, x in batch_of(step).items()}
        result = model.step(own)
        found += [result.loss, result.grad_norm]
    return found


def on_ranks(rank: int, world: int, folder: str) -> list[list[float]]:
    sharded = wrapped(zero={"stage": 3})
    first = losses(sharded, rank, 2)
    sharded.save(folder)
    cut = wrapped(PLAN, layout={"tp": 2})
    again = wrapped(PLAN, layout={"tp": 2}, zero={"stage": 1})
    again.load(folder)  # weights that ZeRO sharded continue where tp cuts them
    skipping = losses(wrapped(skips=True, zero={"stage": 2}), rank, 2)
    apart = wrapped(zero={"stage": 3})
    apart.module.left_out = rank
    with pytest.raises(UserError, match="ranks 0 and 1 went through different blocks in step 1.*zero.stage=2"):
        losses(apart, rank, 2)
    other = Net().double()
    other.scale.data[-1] += rank  # as with a different seed on each rank
    with pytest.raises(UserError, match="rank 1 built another Net than rank 0: seed every rank alike"):
        meshwright.wrap(other, BASE, loss=loss)
    with pytest.raises(UserError, match="built it with other parameters"):  # the message about a model provider
        check_own(sharded.trainer.ctx, nn.Linear(2, 2 + rank).double())
    assert sharded.trainer.ctx.mesh.world.broadcast_text(f"said by {rank}", torch.device("cpu")) == "said by 0"
    return [first, losses(cut, 0, 1), losses(again, 0, 1, first=STEPS), skipping]


def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    one = wrapped()
    reference, later = losses(one, 0, 1), losses(one, 0, 1, first=STEPS)
    skipping = losses(wrapped(skips=True), 0, 1)
    wanted = [reference, reference, later, skipping]
    for found in run_ranks(2, on_ranks, str(tmp_path / "saved")):
        for name, own, alone in zip(("ZeRO 3", "tp", "tp after ZeRO 3", "skipping"), found, wanted, strict=True):
            assert own == pytest.approx(alone, rel=1e-9), name


def skipping_by_the_data(rank: int, world: int) -> None:
    losses(wrapped(skips=True, zero={"stage": 3}), rank, world)


def test_a_module_that_changes_its_blocks_is_stopped_in_stage_3() -> None:
    """In one process no other rank has to gather the same blocks."""
    with pytest.raises(RankFailed, match="another order than in the pass before"):
        run_ranks(2, skipping_by_the_data)
    skipping_by_the_data(0, 1)


def test_every_block_leaves_marks() -> None:
    model = wrapped()
    marks = model.trainer.marks = Marks(model.trainer.ctx, model.trainer.modules)
    losses(model, 0, 1)
    for direction in (FORWARD, BACKWARD):
        found = {mark.order for mark in marks.steps[STEPS] if mark.direction == direction}
        assert len(found) == 5, "begin, three blocks and end"


@pytest.mark.parametrize("closes", [True, False])
def test_only_a_program_that_ends_without_close_reports_its_last_error(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interactive session keeps the error of an earlier line, although the user continued after it."""
    error = ValueError("of an earlier line")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    seen: list[BaseException | None] = []
    watch = ExitStack()
    watch.push(lambda kind, caught, trace: seen.append(caught))
    weights = SimpleNamespace(wait_for_gathers=lambda: None)
    trainer: Any = SimpleNamespace(data_parallel=SimpleNamespace(weights=weights))
    model = meshwright.run.wrap.Wrapped(trainer, False, watch)
    if closes:
        model.close()
    model._end_watch()
    assert seen == [None if closes else error]


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="a step takes 8 samples of each rank"):
        wrapped().step({"x": torch.zeros(4, 4), "y": torch.zeros(4, 2)})
    with pytest.raises(UserError, match="the plan's style 'sideways' of begin.weight is not known"):
        wrapped({"begin": "sideways"})


def test_an_optimizer_of_matrices_needs_a_model_that_names_them() -> None:
    with pytest.raises(UserError, match="optimizer.name=muon updates the matrices .* names none: use adamw"):
        wrapped(optimizer={"name": "muon"})
    with pytest.raises(UserError, match="optimizer.groups names parameters of Meshwright's models"):
        wrapped(optimizer={"groups": [{"match": "*", "lr": 1e-4}]})
