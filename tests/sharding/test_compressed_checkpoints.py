"""What compression leaves out, and PowerSGD's factors, in checkpoints: on the same layout a run goes on to the bit, and
on another one nothing of it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.config.comm import KINDS
from meshwright.train.step import Trainer
from tests.sharding.sums import added, kept_of, trainer_of
from tests.sharding.test_compression import EIGHT, FEW, Sections, Whole, compressed
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

LOSSY = [kind for kind in KINDS if kind != "plain"]
SMALL = {"model": FEW["model"] | {"tied_embeddings": True}}


def saved(trainer: Trainer, folder: str) -> Reader:
    saver = Saver(trainer, Path(folder), asynchronous=True, busy="wait", keep=0)
    saver.save()
    saver.committed()
    return Reader(Path(folder) / f"step-{trainer.step_number:08d}")


def twice(rank: int, world: int, cases: list[Sections], folder: str) -> list[tuple[list[float], list[float]]]:
    """The grad norms of two more steps after a save, and after a load of it."""
    found = []
    for number, sections in enumerate(cases):
        first, again = (make_trainer(small_config(**sections), rank, world) for _ in range(2))
        first.step()
        first.step()
        reader = saved(first, f"{folder}/{number}")
        norms = [first.step().grad_norm for _ in range(2)]
        again.step()  # what a run had before it loads is gone
        load_into(again, reader)
        found.append((norms, [again.step().grad_norm for _ in range(2)]))
    return found


def check_goes_on(world: int, cases: list[Sections], folder: Path) -> None:
    for rank in run_ranks(world, twice, cases, str(folder)):
        for sections, (before, after) in zip(cases, rank, strict=True):
            assert before == after, sections


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    check_goes_on(2, [compressed("powersgd", SMALL), compressed("topk", SMALL | {"zero": {"stage": 2}})], tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("kind", LOSSY)
def test_runs_go_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    cases = [compressed(kind, sections) for sections in (*EIGHT[:1], *EIGHT[2:5])]
    check_goes_on(8, [*cases, compressed(kind, EIGHT[1], error_feedback=False)], tmp_path)


def moved(rank: int, world: int, cases: list[Sections], folder: str) -> list[tuple[Whole, Whole]]:
    """What all of a layout's ranks kept, and their factors, saved by the first and as the others load it."""
    found: list[tuple[Whole, Whole]] = []
    for number, sections in enumerate(cases):
        trainer = trainer_of(rank, world, sections, None)
        if number == 0:
            trainer.step()
            trainer.step()
            reader = saved(trainer, folder)
        else:
            load_into(trainer, reader)
        found.append((added(kept_of(trainer)), factors_of(trainer)))
    return found


def factors_of(trainer: Trainer) -> Whole:
    """This rank's parts of the factors, zeros elsewhere; of several rows the first alone."""
    whole: Whole = {}
    for state in trainer.data_parallel.reducer_states():
        if not state.additive:
            for slot in state.buffer.slots:
                low, high = state.holds(slot)
                if low < high:
                    record = state.record(slot)
                    values = state.values(slot, low, high).view(record.local_shape)
                    target = whole.setdefault(record.name, np.zeros(record.shape))
                    for box in record.boxes:
                        at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
                        here = tuple(slice(a, a + n) for a, n in zip(box.local_start, box.shape, strict=True))
                        target[at] = values[here].numpy()
    return whole


def check_moves(world: int, cases: list[Sections], folder: Path) -> None:
    ranks = run_ranks(world, moved, cases, str(folder))
    totals: list[dict[str, Any]] = []
    for case in range(len(cases)):
        total: dict[str, Any] = {}
        for rank in ranks:
            for name, part in rank[case][0].items():
                total[name] = total.get(name, 0.0) + part
        totals.append(total)
    assert totals[0]
    assert all(np.abs(total).max() > 0 for total in totals[0].values())
    for case, total in enumerate(totals[1:], start=1):
        for name, expected in totals[0].items():
            assert np.abs(total[name] - expected).max() <= 1e-12 * np.abs(expected).max(), (cases[case], name)


def test_what_is_kept_moves_to_another_layout(tmp_path: Path) -> None:
    there = {"layout": {"tp": 2, "sequence_parallel": True}}
    check_moves(4, [compressed("topk", SMALL | {"zero": {"stage": 1}}), compressed("int4", SMALL | there)], tmp_path)


@pytest.mark.wide
def test_what_is_kept_moves_to_many_layouts(tmp_path: Path) -> None:
    partial = [sections for sections in EIGHT if sections["layout"].get("tp", 1) == 1 or "node_size" in
               sections["layout"]]  # fmt: skip
    layouts = [*partial, {"layout": {"pp": 2}, "zero": {"stage": 3}}, {}]
    check_moves(8, [compressed("powersgd", sections) for sections in layouts], tmp_path)


def test_factors_are_cut_with_the_layout(tmp_path: Path) -> None:
    """A matrix cut by rows keeps its factor of rows, whose parts another number of ranks reads."""
    cases = [compressed("powersgd", SMALL | layout) for layout in ({"layout": {"tp": 2}}, {}, {"layout": {"tp": 2}})]
    ranks = run_ranks(4, moved, cases, str(tmp_path))
    before, whole, again = ([rank[case][1] for rank in ranks] for case in range(3))
    name = "layers.0.mlp.up.weight"
    both = before[0][name] + before[1][name]
    assert np.array_equal(whole[0][name], both)
    for mine, theirs in zip(before, again, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
