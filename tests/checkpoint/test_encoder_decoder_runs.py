"""An encoder-decoder run resumes from checkpoints.

A killed run continues bit-identically. A run that changes the split of its pipeline continues as one process would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.runs import Attempt, assert_same, complete, newest, saved, steps, tensors, tiny
from tests.support.oracle import EXACT

MODEL = {"kind": "t5", "layers": 5, "heads": 2, "seq": 16, "t5": {"encoder_layers": 2, "decoder_seq": 8}}
PLACES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pp2": (2, {"pp": 2}, {}),  # The first rank also holds the start of the decoder.
    "pp4": (4, {"pp": 4}, {"encoder_stages": 1}),
    "chunks": (2, {"pp": 2, "chunks": 2}, {"schedule": "interleaved", "encoder_stages": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}, {"encoder_stages": 1}),
}


def sections_of(folder: Path, place: str, **more: dict[str, Any]) -> tuple[int, dict[str, dict[str, Any]]]:
    world, layout, pipeline = PLACES[place]
    changes = {"model": MODEL, "layout": layout, "pipeline": pipeline, "lr": {"schedule": "constant"}} | more
    return world, tiny(folder, **changes)


@pytest.mark.wide
@pytest.mark.parametrize("place", ["pp2", "pp4", "chunks"])
def test_a_killed_run_goes_on_to_the_bit(place: str, tmp_path: Path) -> None:
    world, straight = sections_of(tmp_path / "straight", place, checkpoint={"every": 4, "keep": 0})
    reference = complete(world, straight)
    _, sections = sections_of(tmp_path / "killed", place, checkpoint={"every": 4, "keep": 0})
    attempt = Attempt(world, sections)
    assert attempt.until(lambda: saved(attempt.run) == [4] and len(steps(attempt.run)) > 4)
    attempt.kill(world - 1)
    assert attempt.finish() is None, "a rank was killed before the end"
    assert_same(complete(world, sections), reference)


@pytest.mark.wide
def test_a_run_moves_to_other_splits_of_the_pipeline(tmp_path: Path) -> None:
    """A run that moves through several splits ends with the tensors of a run in one process."""
    exact = {"train": {"precision": "fp64"}, "model": {**MODEL, "dropout": 0.0}}
    done, run = 0, tmp_path / "moving"
    for place in PLACES:
        done += 2
        world, sections = sections_of(run, place, **exact)
        sections["train"]["steps"] = done
        complete(world, sections)
        assert steps(run) == list(range(1, done + 1))
    alone = tiny(tmp_path / "alone", lr={"schedule": "constant"}, **exact)
    alone["train"]["steps"] = done
    mine, other = tensors(newest(run)), tensors(newest(complete(1, alone)))
    assert mine.keys() == other.keys() and "param/decoder.bias.weight" in mine
    for name, values in other.items():
        assert np.abs(mine[name] - values).max() <= EXACT * max(np.abs(values).max(), 1e-6), name
