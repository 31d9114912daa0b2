"""`meshwright.pretrain` with a model and data of a program: a mapping as config, plain modules, any dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright
from meshwright.data.given import IndexedSamples, IteratedSamples, number_samples
from meshwright.engine.own_models import state_dicts
from meshwright.errors import UserError

SAMPLES = [{"x": np.sin(np.arange(4.0) + n), "y": np.array([n % 3.0])} for n in range(10)]


def forward_step(ctx: Any, module: nn.Module, batch: dict[str, Tensor], received: Any) -> Any:
    return (module(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]), {}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def config(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "train": {"steps": steps, "global_batch": 4}, "lr": {"schedule": "constant"},
        "run": {"dir": str(folder), "tensorboard": False, "device": "cpu"},
    }  # fmt: skip


class Stream:
    """An iterable that begins replaces with each iteration, and notes the samples that it has given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for n, sample in enumerate(SAMPLES):
            self.given.append(n)
            yield sample


class Stateful(Stream):
    """An iterable with a state, as `datasets.IterableDataset` has."""

    at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(SAMPLES):
            self.given.append(self.at)
            self.at += 1
            yield SAMPLES[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Inherited(Stream):
    """An iterable with a length and an index that only raises, as `torch.utils.data.IterableDataset` has."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, n: int) -> Any:
        raise NotImplementedError


def weights(trainer: Any) -> dict[str, Tensor]:
    return state_dicts(trainer)[0]


def test_a_mapping_and_a_plain_module_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = net()
    trainer = meshwright.pretrain(config(tmp_path / "a", 3), module, SAMPLES, forward_step)
    said = capsys.readouterr().err
    assert "19 parameters  Sequential" in said and "4 samples per step" in said and "hidden" not in said
    assert "step 3/3  loss" in said and "finished 3 steps" in said
    assert trainer.modules[0] is module
    with pytest.raises(UserError, match="this Sequential was trained by an earlier call: build a new one"):
        meshwright.pretrain(config(tmp_path / "a", 6), module, SAMPLES, forward_step)

    from meshwright.watch.run_page import summary

    summary(tmp_path / "a")
    assert "19 parameters  Sequential" in capsys.readouterr().out
    meshwright.pretrain(config(tmp_path / "b", 2), net(), SAMPLES, forward_step, quiet=True)
    assert "step" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [list, Stream, Stateful, Inherited])
def test_a_run_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any) -> None:
    """The data end in the third step, so the fourth is in the next epoch."""

    def data() -> Any:
        return SAMPLES if kind is list else kind()

    whole = meshwright.pretrain(config(tmp_path / "whole", 4), net(), data(), forward_step, quiet=True)
    meshwright.pretrain(config(tmp_path / "cut", 2), net(), data(), forward_step, quiet=True)
    capsys.readouterr()
    second = data()
    cut = meshwright.pretrain(config(tmp_path / "cut", 4), net(), second, forward_step, quiet=True)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(cut)[name]), name
    skips = "its first 8 samples are read again and skipped" in capsys.readouterr().err
    assert skips == (kind in (Stream, Inherited))
    if kind is Stateful:
        # Sample 0 shows the shapes of a batch. Training then continues with sample 8.
        assert second.given[:3] == [0, 8, 9]


def test_rows_of_tokens_train_a_model_of_the_config(tmp_path: Path) -> None:
    """Rows have the form of transformers: a token of label -100 is not learned, and short rows are padded."""
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5]}, {"input_ids": [1, 2, 3]}]
    model = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 8, "seq": 6}
    sections = config(tmp_path, 1) | {"model": model}
    trainer = meshwright.pretrain(sections, datasets_provider=(rows, rows), quiet=True)
    sample = trainer.valid_batches.dataset.sample(0)
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 0, 0]
    assert sample["loss_mask"].tolist() == [0, 1, 1, 1, 0, 0] and sample["labels"].tolist() == [0, 3, 4, 5, 0, 0]
    with pytest.raises(UserError, match=r"has input_ids of shape \[9\], and model.seq=6 takes 2 to 7 tokens"):
        meshwright.pretrain(sections, datasets_provider=[{"input_ids": range(9)}], quiet=True)
    with pytest.raises(UserError, match="has words and lacks tokens: give input_ids"):
        meshwright.pretrain(sections, datasets_provider=[{"words": [1]}], quiet=True)


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    data = IndexedSamples([{"n": [n]} for n in range(20)], "it", seed=1, shuffle=True)
    drawn = [int(data.sample(n)["n"][0]) for n in range(40)]
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == list(range(20)) and drawn[:20] != drawn[20:]
    assert int(data.sample(7)["n"][0]) == drawn[7]


def test_an_iterator_goes_back_to_a_state_that_it_remembers() -> None:
    source = Stateful()
    data = IteratedSamples(source, "it", every=2)
    plain = [data.sample(n)["x"].tolist() for n in range(8)]
    source.given.clear()
    assert data.sample(5)["x"].tolist() == plain[5]
    assert source.given == [4, 5], "it begins with the newest state before sample 5"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "has no samples"),
        (iter(SAMPLES[:2]), "is an iterator that can't begin again"),
        ({"x": [1]}, "is a dict: give an object with samples by index or by iteration"),
        ([(1, 2)], "a sample of the data is a tuple: give mappings of names to arrays"),
        ([{"x": "word"}], "'x' of a sample of the data holds no numbers"),
    ],
)
def test_data_that_can_not_be_used_are_refused(data: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        made = number_samples(data, "the data")
        for n in range(3):
            made.sample(n)
