"""The moving average of the weights: its formula, its places, checkpoints, and the commands that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.cli.main import main
from meshwright.config.rules import check
from meshwright.engine.sharding.buffers import EMA
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.record.checkpoint_format import list_checkpoints
from tests.support.oracle import load_into, make_trainer, small_config

DECAY = 0.7


def trainer_of(ema: float = DECAY, **sections: Any) -> Trainer:
    sections["optimizer"] = {"lr": 0.01, **sections.get("optimizer", {})} | ({"ema": ema} if ema else {})
    return make_trainer(small_config(**sections))


def states_of(trainer: Trainer, kind: str) -> dict[str, Tensor]:
    return {
        slot.record.name: as_tensor(state.values(slot, *state.holds(slot))).clone()
        for state in trainer.states() if state.name == kind
        for slot in state.buffer.slots
    }  # fmt: skip


def saved(trainer: Trainer, folder: Path) -> Path:
    Saver(trainer, folder, asynchronous=False, busy="wait", keep=0).save()
    return list_checkpoints(folder)[-1][1]


@pytest.mark.parametrize("sections", [
    {}, {"optimizer": {"name": "muon"}}, {"train": {"precision": "bf16"}},
    {"train": {"precision": "bf16"}, "optimizer": {"state_dtype": "bf16", "master_dtype": "bf16"}},
    {"zero": {"stage": 1, "offload": {"optimizer": "disk", "buffer_mib": 0.02}}},
], ids=["fp64", "muon", "split-masters", "no-masters", "disk"])  # fmt: skip
def test_it_is_the_mean_and_then_the_moving_average(sections: dict[str, Any], tmp_path: Path) -> None:
    """The weights are those of a run without it. Without masters, the weights are averaged before they are rounded."""
    if "zero" in sections:
        sections = {"zero": {**sections["zero"], "offload": {**sections["zero"]["offload"], "path": str(tmp_path)}}}
    trainer, without = trainer_of(**sections), trainer_of(0.0, **sections)
    wanted: dict[str, Tensor] = {}
    for step in range(1, 7):
        trainer.step()
        without.step()
        weights = states_of(trainer, "param")
        for name, weight in states_of(without, "param").items():
            assert torch.equal(weight, weights[name])
            old = wanted.get(name, torch.zeros_like(weight, dtype=torch.float64))
            wanted[name] = old + max(1 - DECAY, 1 / step) * (weight.double() - old)
    exact, rounded = "train" not in sections, "master_dtype" in sections.get("optimizer", {})
    for name, average in states_of(trainer, EMA).items():
        assert average.dtype == (torch.float64 if exact else torch.float32)
        close = {"rtol": 2**-8, "atol": 2e-4} if rounded else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(average.double(), wanted.pop(name), **close)
    assert not wanted


def test_it_continues_and_begins_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A checkpoint continues it. A run that adds it keeps its moments, and begins with the first new weights."""
    straight, first = trainer_of(), trainer_of()
    for _ in range(4):
        straight.step()
    for _ in range(2):
        first.step()
    resumed = trainer_of()
    load_into(resumed, Reader(saved(first, tmp_path / "with")))
    for _ in range(2):
        resumed.step()
    for name, average in states_of(straight, EMA).items():
        assert torch.equal(average, states_of(resumed, EMA)[name]), name
    plainly = trainer_of(0.0)
    plainly.step()
    added = trainer_of()
    load_into(added, Reader(saved(plainly, tmp_path / "without")))
    assert (added.optimizer.updates, added.optimizer.averaged) == (1, 0)
    for name, average in states_of(added, EMA).items():
        assert torch.equal(average, states_of(added, "param")[name])
    added.step()
    for name, average in states_of(added, EMA).items():
        torch.testing.assert_close(average, states_of(added, "param")[name], rtol=1e-14, atol=1e-14)


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(model={"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False})
    for _ in range(3):
        trainer.step()
    folder = saved(trainer, tmp_path)
    assert main(["export", str(folder), "--to", str(tmp_path / "hf"), "--ema", "--dtype", "fp64"]) == 0
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"]
    average, weight = (
        next(value for name, value in states_of(trainer, kind).items() if "norm" in name and "layers" not in name)
        for kind in (EMA, "param")
    )
    assert torch.equal(exported, average) and not torch.equal(average, weight)
    capsys.readouterr()
    answers = []
    for words in ([], ["--ema"]):
        assert main(["generate", str(folder), "--prompt-tokens", "5,1", "--max-tokens", "2", "--json", *words]) == 0
        answers.append(capsys.readouterr().out)
    assert all(answers)
    without = trainer_of(0.0)
    without.step()
    other = saved(without, tmp_path / "without")
    assert main(["export", str(other), "--to", str(tmp_path / "no"), "--ema"]) == 2
    assert "has no average of its weights: train with optimizer.ema=0.9999" in capsys.readouterr().err


BAD: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"ema": 1.0}}, r"optimizer.ema=1.0 must be in \[0, 1\)"),
    ({"optimizer": {"ema": 0.9}, "layout": {"replicas": 2}}, "layout.replicas=2 has outer weights"),
]


@pytest.mark.parametrize("sections, said", BAD)
def test_mistakes_are_one_sentence(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(small_config(**sections), 2)
