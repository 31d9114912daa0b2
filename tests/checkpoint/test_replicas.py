"""Checkpoints of runs whose replicas synchronise rarely.

On the same layout a run continues bit-identically, also with outer all-reduces in flight. Any other layout, with any
number of replicas, loads the same model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.check.oracle import whole_locals
from meshwright.checkpoint.load import Reader
from meshwright.engine.sharding.buffers import REPLICA_STATE
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.engine.step import Trainer
from tests.engine.replica_runs import Sections, Whole, replicas
from tests.engine.sums import placed
from tests.engine.test_compressed_checkpoints import saved
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

ADAM = {"name": "adamw", "lr": 1e-2}
STREAMED = {"steps": 4, "fragments": 2, "delay": 2}
TOPK = {"compress": {"kind": "topk", "ratio": 0.1}}


def run_of(number: int, local: Sections, **more: Any) -> Sections:
    return replicas(number, local, **more) | {"optimizer": ADAM}


def twice(rank: int, world: int, cases: list[Sections], folder: str, steps: int) -> list[tuple[list[float], Any, Any]]:
    """Save a run after some steps, and load the checkpoint into a second run that has trained differently.

    Return, for each case, pairs of the losses of further steps of both runs, and the final state of both.
    """
    results = []
    for number, sections in enumerate(cases):
        first, again = (make_trainer(small_config(**sections), rank, world) for _ in range(2))
        for _ in range(steps):
            first.step()
        reader = saved(first, f"{folder}/{number}")
        again.step()
        load_into(again, reader)
        pairs = [(first.step().loss, again.step().loss) for _ in range(4)]
        results.append((pairs, bytes_of(first), bytes_of(again)))
    return results


def bytes_of(trainer: Trainer) -> list[tuple[str, list[bytes]]]:
    return [(state.name, [as_tensor(x).numpy().tobytes() for x in state.tensors]) for state in trainer.states()]


def check_goes_on(world: int, cases: list[Sections], folder: Path, steps: int) -> None:
    for rank in run_ranks(world, twice, cases, str(folder), steps):
        for sections, (pairs, first, again) in zip(cases, rank, strict=True):
            assert [a for a, _ in pairs] == [b for _, b in pairs], sections
            assert first == again, sections


def test_a_run_goes_on_to_the_bit_while_fragments_are_under_way(tmp_path: Path) -> None:
    check_goes_on(2, [run_of(2, STREAMED | TOPK)], tmp_path, steps=5)


@pytest.mark.wide
@pytest.mark.parametrize("steps", [3, 4])
def test_runs_go_on_to_the_bit(steps: int, tmp_path: Path) -> None:
    layouts: list[Sections] = [
        {"layout": {"tp": 2}, "zero": {"stage": 1}}, {"layout": {"pp": 2}, "zero": {"stage": 3}},
        {"zero": {"stage": 2}},
    ]  # fmt: skip
    wide = {"train": {"precision": "bf16"}}
    cases = [run_of(2, STREAMED | TOPK, **layout) for layout in layouts]
    check_goes_on(8, [*cases, run_of(4, STREAMED, **wide), run_of(2, STREAMED | {"delay": 3})], tmp_path, steps)


def model_of(trainer: Trainer, name: str) -> Whole:
    """Return this rank's shard of one kind of state as full tensors, with NaN in place of other ranks' elements."""
    into: Whole = {}
    for state in (state for state in trainer.states() if state.name == name):
        placed([(slot.record, value) for slot, value in whole_locals(trainer, state.buffer, list(state.tensors))], into)
    return into


def moved(rank: int, world: int, cases: list[Sections], folder: str) -> list[dict[str, Whole]]:
    """Train and save in the first case, and load the checkpoint in the others. Return the state of each by kind."""
    states = []
    for number, sections in enumerate(cases):
        trainer = make_trainer(small_config(**sections), rank, world)
        if number == 0:
            for _ in range(5):
                trainer.step()
            reader = saved(trainer, folder)
        else:
            load_into(trainer, reader)
        states.append({name: model_of(trainer, name) for name in {state.name for state in trainer.states()}})
        assert np.isfinite(trainer.step().loss)
    return states


def row(reader: Reader, name: str) -> np.ndarray:
    """Return a whole tensor of a checkpoint, assembled from its blocks."""
    out = np.full(reader.index.tensors[name]["shape"], np.nan)
    for block in reader.index.blocks:
        if block.tensor == name:
            out[tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))] = reader.block(block)
    return out


def check_moves(world: int, cases: list[Sections], folder: Path) -> None:
    """Check that every case loads the checkpoint of the first.

    Replicas start with the mean of the saved ones, as does a run without replicas.
    """
    states_by_rank = run_ranks(world, moved, cases, str(folder))
    reader = Reader(folder / "step-00000005")
    for rank in states_by_rank:
        for sections, held in zip(cases[1:], rank[1:], strict=True):
            number = sections.get("layout", {}).get("replicas", 1)
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                for name, value in held[kind if number == 1 else REPLICA_STATE + kind].items():
                    rows = row(reader, f"{REPLICA_STATE}{kind}/{name}")
                    # Elements of other ranks (NaN) are not compared.
                    own = np.where(np.isnan(value), rows.mean(0), value)
                    assert np.allclose(own, rows.mean(0), rtol=1e-12, atol=1e-15), (sections, kind, name)
            for kind in ("param", "outer.momentum") if number > 1 else ():
                for name, value in held[kind].items():
                    saved_value = row(reader, f"{kind}/{name}")
                    assert np.array_equal(np.where(np.isnan(value), saved_value, value), saved_value), (kind, name)


@pytest.mark.wide
def test_another_number_of_replicas_begins_with_their_mean(tmp_path: Path) -> None:
    local = {"steps": 3}
    check_moves(4, [run_of(2, local), run_of(4, local), {"optimizer": ADAM, "layout": {"tp": 2}}], tmp_path)


@pytest.mark.wide
def test_any_layout_loads_them(tmp_path: Path) -> None:
    local = {"steps": 3}
    cases = [
        run_of(2, local, layout={"tp": 2}, zero={"stage": 1}), run_of(4, local, zero={"stage": 3}),
        run_of(4, STREAMED, layout={"pp": 2}), {"optimizer": ADAM, "zero": {"stage": 3}},
        {"optimizer": ADAM, "layout": {"tp": 2, "pp": 2}},
    ]  # fmt: skip
    check_moves(8, cases, tmp_path)


def begun(rank: int, world: int, folder: str) -> bool:
    """Assert that replicas that start from a run without replicas have its weights and moments."""
    trainer = make_trainer(small_config(optimizer=ADAM), rank, world)
    for _ in range(2):
        trainer.step()
    reader = saved(trainer, folder)
    for model_only in (False, True):
        others = make_trainer(small_config(**run_of(2, {"steps": 3})), rank, world)
        load_into(others, reader, model_only)
        assert (others.optimizer.updates, others.step_number) == ((0, 0) if model_only else (2, 2))
        kinds = ("param",) if model_only else ("param", "exp_avg", "exp_avg_sq")
        for kind in kinds:
            before, own = model_of(trainer, kind), model_of(others, REPLICA_STATE + kind)
            assert all(np.array_equal(own[name], before[name], equal_nan=True) for name in before)
        assert all(np.array_equal(x, model_of(trainer, "param")[name]) for name, x in model_of(others, "param").items())
    return True


def test_replicas_begin_from_a_run_without_any(tmp_path: Path) -> None:
    assert all(run_ranks(2, begun, str(tmp_path)))
