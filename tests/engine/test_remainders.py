"""fp32 masters that are stored as bf16 weights plus remainders: every bit pattern survives, and updates equal those of
plain masters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.engine.optim import flat
from meshwright.engine.sharding.remainders import PairedTensor, as_tensor, halve, join
from meshwright.engine.step import Trainer
from meshwright.record import checkpoint_format as fmt
from tests.checkpoint.runs import tensors
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

# On a CPU, offload to its own memory changes only one thing: masters are stored in full.
IN_FULL = {"offload": {"optimizer": "cpu"}}


def patterns() -> Tensor:
    """Return every bf16 value combined with the low halves at which something changes, followed by random bits."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    edges = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    drawn = torch.randint(-(2**31), 2**31, (2**20,), dtype=torch.int64, generator=torch.Generator().manual_seed(5))
    return torch.cat([(high[:, None] + edges).flatten(), drawn.to(torch.int32)])


def test_every_value_is_joined_again_bit_for_bit() -> None:
    bits = patterns()
    values = bits.view(torch.float32)
    weights, remainders = halve(values)
    joined = join(weights, remainders)
    numbers = ~values.isnan()
    assert torch.equal(joined.view(torch.int32)[numbers], bits[numbers])
    assert joined[~numbers].isnan().all() and weights[~numbers].isnan().all(), "a NaN is seen in weight and master"
    ties = (bits & 0xFFFF) == 0x8000
    rounded = values.bfloat16()
    assert torch.equal(weights[numbers & ~ties], rounded[numbers & ~ties]), "the nearest, as torch rounds"
    away = (weights.float() - values).abs() == (rounded.float() - values).abs()
    assert away[numbers & ties & weights.isfinite() & rounded.isfinite()].all(), "a tie is as near, the other way"
    assert (weights.float().abs() >= values.abs())[numbers & ties].all()
    assert weights[values == torch.finfo(torch.float32).max].isinf().all()


def test_it_is_cut_and_set_like_a_tensor() -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    paired = PairedTensor(torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.int16))
    paired[1:3, ::2] = values[1:3, ::2]
    wanted = torch.zeros(4, 6)
    wanted[1:3, ::2] = values[1:3, ::2]
    assert torch.equal(paired.join(), wanted) and torch.equal(paired[:, 2:4].join(), wanted[:, 2:4])
    assert paired.shape == (4, 6) and paired.element_size() == 4 and paired.numel() == 24


def bf16_trainer(rank: int = 0, world: int = 1, **sections: Any) -> Trainer:
    train = {"precision": "bf16", "global_batch": 2} | sections.pop("train", {})
    model = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8}
    return make_trainer(small_config(model=model, train=train, lr={"warmup": 2}, **sections), rank, world)


def stored(trainer: Trainer) -> list[Tensor]:
    """Return the masters, then the moments, of every share."""
    return [as_tensor(share) for state in trainer.states() for share in state.tensors]


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({}, 20), ({"train": {"grad_dtype": "bf16"}}, 4), ({"optimizer": {"state_dtype": "bf16"}}, 4),
        ({"optimizer": {"name": "sgd"}, "train": {"grad_dtype": "bf16"}}, 4),
    ],
    ids=["adamw", "gradients-bf16", "moments-bf16", "sgd-gradients-bf16"],
)  # fmt: skip
def test_updates_are_those_of_masters_in_full(
    sections: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree bit for bit over steps whose gradients are computed with the same weights. The weights must be copied,
    because ties are rounded differently.
    """
    monkeypatch.setattr(flat, "SLICE", 256)
    paired, full = bf16_trainer(**sections), bf16_trainer(zero=IN_FULL, **sections)
    (ours,), (theirs,) = paired.optimizer.states, full.optimizer.states
    assert ours.paired and ours.stores[0].dtype == torch.int16 and not theirs.paired
    for _ in range(steps):
        assert paired.step().loss == full.step().loss
        for a, b in zip(stored(paired), stored(full), strict=True):
            assert torch.equal(a, b)
        weights = theirs.buffer.params
        assert torch.equal(ours.buffer.params, halve(torch.cat([as_tensor(share) for share in theirs.master]))[0])
        assert (ours.buffer.params != weights).sum() <= 3, "but for ties, they are what torch rounds to"
        weights.copy_(ours.buffer.params)
    assert (ours.stores[0].shares[0] != 0).any()


def save(trainer: Trainer, folder: str, asynchronous: bool) -> None:
    saver = Saver(trainer, Path(folder), asynchronous, "wait", 0)
    saver.save()
    saver.wait_for_commit()


def load(trainer: Trainer, folder: str) -> None:
    load_into(trainer, Reader(fmt.find_checkpoint(folder)))
    trainer.data_parallel.weights.wait_for_gathers()
    for state in trainer.optimizer.states:
        for bucket, master in zip(state.buffer.buckets, state.master, strict=True):
            values = as_tensor(master)
            assert torch.equal(bucket.own_params, halve(values)[0] if state.paired else values.bfloat16())


def save_through_layouts(rank: int, world: int, folder: str) -> None:
    """Train with one layout and save a checkpoint. Each further layout loads the previous checkpoint and saves it
    again.
    """
    trainer = bf16_trainer(rank, world, zero={"stage": 2})
    for _ in range(3):
        trainer.step()
    save(trainer, f"{folder}/zero2", asynchronous=True)
    layouts = {"zero3": {"zero": {"stage": 3}}, "tp2": {"layout": {"tp": 2}}, "full": {"zero": {"stage": 1} | IN_FULL}}
    before = "zero2"
    for name, sections in layouts.items():
        trainer = bf16_trainer(rank, world, **sections)
        assert all(state.paired == (name != "full") for state in trainer.optimizer.states)
        load(trainer, f"{folder}/{before}")
        save(trainer, f"{folder}/{name}", asynchronous=name == "tp2")
        before = name


def test_checkpoints_hold_the_masters_whatever_stores_them(tmp_path: Path) -> None:
    """The bits survive ZeRO stages, tensor parallelism, masters stored in full, and the way back."""
    run_ranks(2, save_through_layouts, str(tmp_path))
    alone = bf16_trainer()
    load(alone, str(tmp_path / "full"))
    save(alone, str(tmp_path / "alone"), asynchronous=True)
    first = tensors(fmt.find_checkpoint(str(tmp_path / "zero2")))
    assert all(values.dtype == "float32" for values in first.values())
    lost = sum((values != torch.from_numpy(values).bfloat16().float().numpy()).sum() for values in first.values())
    assert lost > 1000, "the masters are no bf16 values"
    for name in ("zero3", "tp2", "full", "alone"):
        found = tensors(fmt.find_checkpoint(str(tmp_path / name)))
        assert found.keys() == first.keys()
        assert all(found[key].tobytes() == values.tobytes() for key, values in first.items()), name
