"""Two ranks that share weights hold the same values, even with rarer kinds of updates, loads or data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.save import Saver
from meshwright.comm.mesh import Mesh
from meshwright.config.memory import ZeroConfig
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.record import checkpoint_format as fmt
from meshwright.spec.layout import Layout
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks


def weights(trainer: Any) -> Tensor:
    trainer.data_parallel.weights.wait_for_gathers()
    return torch.cat([buffer.params.double() for buffer in trainer.data_parallel.buffers])


def train_bf16(rank: int, world: int, stage: int) -> list[float]:
    config = small_config(
        train={"precision": "bf16", "global_batch": 4}, zero={"stage": stage},
        optimizer={"master_dtype": "bf16", "state_dtype": "bf16", "lr": 0.1},
    )  # fmt: skip
    trainer = make_trainer(config, rank, world)
    for _ in range(3):
        trainer.step()
    return weights(trainer).tolist()


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_without_masters(stage: int) -> None:
    """They are updated in place, slice by slice. No rank may gather them before the last slice is written back."""
    first, second = run_ranks(2, train_bf16, stage)
    assert first == second


def train_or_resume(rank: int, world: int, folder: str, stage: int) -> tuple[int, list[float], float]:
    config = small_config(
        zero={"stage": stage}, checkpoint={"dir": folder}, run={"dir": folder}, train={"global_batch": 4}
    )
    trainer = make_trainer(config, rank, world)
    if not fmt.list_checkpoints(Path(folder)):
        saver = Saver(trainer, Path(folder), asynchronous=False, busy="wait", keep=0)
        for _ in range(2):
            trainer.step()
            saver.save()
            saver.wait_for_commit()
        return 0, [], 0.0
    resume(trainer, None)
    return trainer.step_number, weights(trainer).tolist(), trainer.step().loss


@pytest.mark.parametrize("stage", [0, 1])
def test_a_checkpoint_that_one_rank_finds_damaged(stage: int, tmp_path: Path) -> None:
    """All ranks return to the previous checkpoint and hold its weights."""
    run_ranks(2, train_or_resume, str(tmp_path), stage)
    newest = fmt.list_checkpoints(tmp_path)[-1][1] / "rank-00001.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 16
    newest.write_bytes(bytes(data))
    (step, first, loss), (other, second, same) = run_ranks(2, train_or_resume, str(tmp_path), stage)
    assert step == other == 1 and first == second and loss == same


class Sometimes(nn.Module):
    """A plain torch module with a layer that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.rare, self.last = (nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.rare(x) if x.sum() > 0 else x).square().sum()


def data_dependent(rank: int, world: int, stage: int) -> list[list[float]]:
    parallel = DataParallel([net := Sometimes()], Mesh(Layout(world), rank), 1e-4, zero=ZeroConfig(stage))
    parallel.begin(2)
    for number in range(2):
        torch.manual_seed(10 * rank + number)
        x = torch.randn(4, 6, dtype=torch.float64)
        if stage == 3:
            parallel.gather(0, "forward")
        loss = net(x)
        loss.backward()
        if stage == 3:
            parallel.free(0)
        if stage >= 2:
            parallel.finish_reductions(0)
    parallel.finish()
    found = []
    for buffer in parallel.buffers:
        for bucket in buffer.buckets:
            whole = bucket.own_grads.new_empty(bucket.stop - bucket.start)
            parallel.groups(buffer).shards.all_gather(whole, bucket.own_grads.contiguous())
            found += [whole[s.start - bucket.start : s.stop - bucket.start].tolist() for s in bucket.slots]
    return found


def test_what_a_module_uses_may_depend_on_the_data() -> None:
    """Ranks launch the same collectives anyway, and every ZeRO stage computes the same gradients."""
    plain = run_ranks(2, data_dependent, 0)[0]
    for stage in (1, 2, 3):
        for rank in run_ranks(2, data_dependent, stage):
            for a, b in zip(sum(rank, []), sum(plain, []), strict=True):
                assert a == pytest.approx(b, rel=1e-12, abs=1e-12)
