"""States that live in files are brought and written back in chunks, and a disk that fails stops the run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from meshwright.config.memory import Place
from meshwright.config.rules import check
from meshwright.engine.sharding.offload import Prefetcher, StateFile, StateStore, cut_pieces
from meshwright.errors import UserError
from meshwright.spec.traffic.placement import PAGE, piece_size
from tests.support.oracle import make_trainer, small_config

SIZES = [3 * PAGE + 16, 48, 2 * PAGE]


@pytest.mark.parametrize("most", [PAGE, 2 * PAGE, 100 * PAGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_element_is_brought_once_and_taken_back(dtype: torch.dtype, most: int, tmp_path: Path) -> None:
    """This holds over three passes for states in a file, in memory of another precision, and in memory of the compute
    precision.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    cpu = torch.device("cpu")
    kinds = [StateStore(SIZES, dtype, cpu, Place.DISK, tmp_path), StateStore(SIZES, torch.bfloat16, cpu, Place.DEVICE),
             StateStore(SIZES, compute, cpu, Place.DEVICE)]  # fmt: skip
    size = piece_size(most, SIZES)
    order = cut_pieces(SIZES, [2, 1, 0], size)
    brought = Prefetcher(kinds, cpu, compute, size)
    for number in range(3):
        seen = 0
        for piece, tensors in brought.run(order):
            for kind, values in enumerate(tensors):
                assert values.shape == (piece.high - piece.low,) and values.dtype == compute
                assert (values == number * (kind + 1)).all(), "what the pass before left"
                values += kind + 1
            seen += piece.high - piece.low
        assert seen == sum(SIZES)
    for number, store in enumerate(kinds):
        assert all((share == 3 * (number + 1)).all() for share in store.shares)
    assert list(tmp_path.iterdir()) == [], "files have no name, so nothing is left behind"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(UserError, match=r"can't be offloaded to .*zero.offload.path"):
        StateFile(blocked / "below", [100], torch.float32)


def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"No space left .* GiB are needed"):
        StateFile(tmp_path, [100], torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_off_stops_the_run(tmp_path: Path) -> None:
    offload = {"optimizer": "disk", "path": str(tmp_path)}
    trainer = make_trainer(small_config(zero={"offload": offload}))
    trainer.step()
    file = trainer.optimizer.states[0].stores[1].file
    assert file is not None
    os.ftruncate(file._handle, PAGE)
    with pytest.raises(UserError, match="cut off while training: start again from the last checkpoint"):
        trainer.step()


def test_a_disk_that_fails_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(small_config(zero={"offload": {"optimizer": "disk", "path": str(tmp_path)}}))
    trainer.step()

    def fails(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fails)
    with pytest.raises(UserError, match="the disk failed under"):
        trainer.step()


@pytest.mark.parametrize(
    ("sections", "world", "said"),
    [
        ({"zero": {"stage": 4}}, 2, "zero.stage=4 is not one of"),
        ({"zero": {"offload": {"optimizer": "disk"}}}, 2, "zero.offload.path is empty"),
        ({"zero": {"stage": 1, "offload": {"params": "cpu"}}}, 2, "needs zero.stage=3"),
        ({"zero": {"stage": 3, "shard_group": "node"}, "layout": {"node_size": 8}}, 2, "larger than the world of 2"),
        ({"zero": {"stage": 3, "shard_group": "node"}, "layout": {"tp": 2, "node_size": 2}}, 4, "divides nothing"),
        ({
            "zero": {"stage": 3, "shard_group": "node"}, "layout": {"pp": 4, "node_size": 8},
            "train": {"global_batch": 6},
        }, 24, "divides nothing"),
        ({"recompute": {"mode": "every:0"}}, 1, "not one of none, selective, full, every:N"),
        ({"train": {"grad_dtype": "bf16", "precision": "fp32"}}, 1, "neither fp32 nor the precision fp32"),
        ({"optimizer": {"master_dtype": "bf16"}, "train": {"precision": "fp16"}}, 1, "needs train.precision=bf16"),
    ],
)  # fmt: skip
def test_bad_keys(sections: dict[str, dict[str, object]], world: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(small_config(**sections), world)
