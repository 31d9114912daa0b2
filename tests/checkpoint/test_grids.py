"""Checkpoints move bit for bit between one axis of tensor parallelism and grids, and between grids."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.sections import Config
from tests.checkpoint.runs import tensors
from tests.checkpoint.test_other_layouts import BEFORE, ONE, Job, Place, check_pairs, launch
from tests.support.token_files import write_documents


@dataclass(frozen=True)
class GridPlace(Place):
    """A layout with a grid of tensor-parallel ranks."""

    kind: str = "2d"
    grid: tuple[int, ...] = (2, 2)

    @property
    def name(self) -> str:
        return f"{super().name}-{self.kind}-{'x'.join(map(str, self.grid))}"

    def config(self, tied: bool) -> Config:
        config = super().config(tied)
        return replace(config, layout=replace(config.layout, tp_grid=self.grid, tp_kind=self.kind))


TP4, FLAT = Place(4, tp=4), GridPlace(4, tp=4, micro=2)
DEEP = GridPlace(4, tp=4, micro=2, kind="2.5d", grid=(1, 2, 2))
THIN = GridPlace(4, tp=4, micro=4, kind="3d", grid=(1, 2, 2))
CUBE, STACK = (GridPlace(8, tp=8, micro=4, kind=kind, grid=(2, 2, 2)) for kind in ("3d", "2.5d"))
SHARDED = GridPlace(8, tp=4, micro=2, zero=3)


def check_chain(tmp_path: Path, places: list[Place]) -> None:
    """Train in the first layout, then let each layout load and save the checkpoint of the one before it.

    All these checkpoints must be bit-identical.
    """
    jobs = []
    for number, place in enumerate(places):
        source = f"{jobs[-1].target}/step-{BEFORE:08d}" if jobs else ""
        jobs.append(Job(place, True, 0 if jobs else BEFORE, source, str(tmp_path / f"{number}-{place.name}")))
    same: list[Job] = []
    for job in jobs:
        if same and job.place.world != same[-1].place.world:
            launch(same)
            same = []
        same.append(job)
    launch(same)
    first, *others = (tensors(Path(job.target) / f"step-{BEFORE:08d}") for job in jobs)
    for job, loaded in zip(jobs[1:], others, strict=True):
        assert loaded.keys() == first.keys()
        assert all(loaded[name].tobytes() == values.tobytes() for name, values in first.items()), job.place.name


@pytest.mark.wide
def test_grids_of_four_ranks_and_back(tmp_path: Path) -> None:
    check_chain(tmp_path, [TP4, FLAT, THIN, TP4])


@pytest.mark.wide
def test_from_one_axis_to_a_cube_to_one_process_and_back(tmp_path: Path) -> None:
    check_chain(tmp_path, [TP4, FLAT, CUBE, ONE, STACK, SHARDED, DEEP, TP4])


@pytest.mark.wide
def test_runs_go_on_in_other_layouts(tmp_path: Path) -> None:
    """A run continues in another layout as one process would have, samples included."""
    pairs = [(TP4, FLAT, True), (FLAT, CUBE, True), (CUBE, ONE, False), (ONE, STACK, True), (STACK, SHARDED, True),
             (SHARDED, TP4, False)]  # fmt: skip
    check_pairs(tmp_path, pairs, after=2)


@pytest.mark.wide
def test_what_a_grid_trained_is_read_by_eval_and_generate(tmp_path: Path) -> None:
    """`eval` on a grid gives the loss of one process. `generate` runs in one process or along one axis."""
    launch([Job(FLAT, True, BEFORE, "", str(tmp_path / "run"))])
    source, vocab = str(tmp_path / "run" / f"step-{BEFORE:08d}"), FLAT.config(True).model.vocab
    write_documents(tmp_path / "tokens", [np.random.default_rng(0).integers(0, vocab, 400)])

    def json_of(*words: str) -> dict[str, float]:
        # A new process, because the forkserver of this one prints to the stdout that it had when it started, which may
        # be that of an earlier test.
        ran = subprocess.run([sys.executable, "-m", "meshwright", *words, "--json"], capture_output=True, check=True)
        values: dict[str, float] = json.loads(ran.stdout)
        return values

    words = ["eval", source, "--data", str(tmp_path / "tokens"), "--samples", "4"]
    grid = ["--nproc", "4", "layout.tp=4", "layout.tp_grid=[2,2]", "train.micro_batch=2"]
    assert json_of(*words, *grid)["loss"] == pytest.approx(json_of(*words)["loss"], abs=1e-6)
    prompt = ["generate", source, "--prompt-tokens", "5,3", "--max-tokens", "6", "--temperature", "0"]
    assert json_of(*prompt)["tokens"] == json_of(*prompt, "--nproc", "2")["tokens"]
