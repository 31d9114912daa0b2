"""The validation loss by source covers the same samples, file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.engine.batches import by_source
from meshwright.engine.datasets import datasets_of
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks
from tests.support.token_files import write_documents


def lines(rank: int, world: int, prefixes: list[str], pp: int) -> tuple[Any, Any]:
    config = small_config(
        data={"prefixes": prefixes, "weights": [1, 3], "split": [0.5, 0.5, 0]},
        train={"micro_batch": 2}, run={"eval_samples": 8 * world}, layout={"pp": pp},
    )  # fmt: skip
    trainer = make_trainer(config, rank, world, datasets_of(config)[1])
    found = trainer.validate()
    trainer.valid_sources = {}
    return found, trainer.validate()


def test_validation_by_source_is_of_the_same_samples(tmp_path: Path) -> None:
    """The losses agree on one rank, on two that read other samples (those of one source then fill no whole round), and
    on a pipeline.
    """
    prefixes = [str(tmp_path / name) for name in ("even", "odd")]
    draw = np.random.default_rng(0)
    for parity, prefix in enumerate(prefixes):
        write_documents(Path(prefix), [2 * draw.integers(0, 26, 60) + parity for _ in range(40)])
    many = [each for pp in (1, 2) for each in run_ranks(2, lines, prefixes, pp)]
    for found, plain in [lines(0, 1, prefixes, 1), *many]:
        assert set(found["sources"]) == set(prefixes) and "sources" not in plain
        assert found["tokens"] == plain["tokens"] and found["samples"] == plain["samples"]
        assert found["loss"] == pytest.approx(plain["loss"], rel=1e-12)
        low, high = sorted(found["sources"].values())
        assert low < found["loss"] < high
        shares = (0.25 * found["sources"][prefixes[0]], 0.75 * found["sources"][prefixes[1]])
        assert found["loss"] == pytest.approx(sum(shares), rel=1e-12), "a quarter and three quarters of the samples"


def test_data_that_name_no_source_have_one() -> None:
    assert by_source(object(), 3) == {"": [0, 1, 2]}  # type: ignore[arg-type]
