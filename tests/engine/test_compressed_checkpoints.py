"""Checkpoints hold the residuals of compression and the factors of PowerSGD. On the same layout a run resumes bit for
bit, and on another layout nothing is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.config.comm import REDUCE_KINDS
from meshwright.engine.step import Trainer
from tests.engine.sums import added, kept_of, trainer_of
from tests.engine.test_compression import EIGHT, FEW, Sections, Whole, compressed
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

LOSSY = [kind for kind in REDUCE_KINDS if kind != "plain"]
SMALL = {"model": FEW["model"] | {"tied_embeddings": True}}


def saved(trainer: Trainer, folder: str) -> Reader:
    saver = Saver(trainer, Path(folder), asynchronous=True, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()
    return Reader(Path(folder) / f"step-{trainer.step_number:08d}")


def twice(rank: int, world: int, cases: list[Sections], folder: str) -> list[tuple[list[float], list[float]]]:
    """Return the grad norms of two more steps after a save, and of the same steps after loading it."""
    found = []
    for number, sections in enumerate(cases):
        first, again = (make_trainer(small_config(**sections), rank, world) for _ in range(2))
        first.step()
        first.step()
        reader = saved(first, f"{folder}/{number}")
        norms = [first.step().grad_norm for _ in range(2)]
        again.step()  # The load must replace this step's state.
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
    """Return by layout the residuals and factors of this rank: saved with the first layout, and loaded with each other
    one.
    """
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
    """Return this rank's parts of the factors, with zeros elsewhere. Of a state with several rows only the first is
    included.
    """
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
    """A matrix that is cut by rows keeps its factor of rows, whose parts another number of ranks can read."""
    cases = [compressed("powersgd", SMALL | layout) for layout in ({"layout": {"tp": 2}}, {}, {"layout": {"tp": 2}})]
    ranks = run_ranks(4, moved, cases, str(tmp_path))
    before, whole, again = ([rank[case][1] for rank in ranks] for case in range(3))
    name = "layers.0.mlp.up.weight"
    both = before[0][name] + before[1][name]
    assert np.array_equal(whole[0][name], both)
    for mine, theirs in zip(before, again, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)


# Every side of these matrices, and half of it, is a multiple of 32, so no layout here cuts a block.
BLOCKY = {"model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 64, "seq": 8, "position": "rope",
                    "tied_embeddings": False}}  # fmt: skip
OTHERS: list[Sections] = [
    {"layout": {"tp": 2}}, {"layout": {"pp": 2}}, {"layout": {"tp": 2, "sequence_parallel": True}},
]  # fmt: skip


def losses(rank: int, world: int, sections: Sections, folder: str, saves: bool) -> list[float]:
    """Return the losses of three steps before a save and three after it, or those of three steps after loading it."""
    trainer = make_trainer(small_config(**sections), rank, world)
    if not saves:
        load_into(trainer, Reader(Path(folder) / "step-00000003"))
    found = [trainer.step().loss for _ in range(3)]
    if saves:
        saved(trainer, folder)
        found += [trainer.step().loss for _ in range(3)]
    return found


def check_same_losses(there: Sections, here: list[tuple[int, Sections]], folder: Path, dp: int = 2) -> None:
    """Check that a run resumed on another layout has the same losses as one that continues where it was."""
    undisturbed = run_ranks(dp, losses, there, str(folder), True)[0]
    assert len(set(undisturbed)) == 6
    for world, sections in here:
        found = run_ranks(world, losses, sections, str(folder), False)[0]
        assert found == pytest.approx(undisturbed[3:], rel=1e-11), sections


def test_top_k_goes_on_with_the_same_losses_on_another_layout(tmp_path: Path) -> None:
    """The run moves from dp 2 to dp 2 x tp 2. It includes the second selection that ZeRO stage 0 makes."""
    check_same_losses(compressed("topk", BLOCKY), [(4, compressed("topk", BLOCKY | OTHERS[0]))], tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["topk", "onebit", "int4"])
def test_losses_are_the_same_on_many_layouts(kind: str, tmp_path: Path) -> None:
    """All layouts have the same number of data-parallel ranks. Stage 0 forms one group. Stages 1 to 3, which send a sum
    only once, form the other. With one micro-batch per rank each of these sends once per step.
    """
    batch = {"train": {"precision": "fp64", "global_batch": 2, "micro_batch": 1, "compile": False}}
    zeros: list[Sections] = [{}, *({"zero": {"stage": stage}} for stage in (1, 2, 3))]
    for number, stages in enumerate([zeros[:1], zeros[1:]]):
        here = [(4, compressed(kind, BLOCKY | batch | stage | other)) for stage in stages for other in OTHERS]
        here += [(2, compressed(kind, BLOCKY | batch | stage)) for stage in stages]
        bucket = here[-1][1] | {"comm": here[-1][1]["comm"] | {"bucket_mib": 0.2}}
        folder = tmp_path / str(number)
        check_same_losses(compressed(kind, BLOCKY | batch | stages[0]), [*here, (2, bucket)], folder)


def test_power_sgd_goes_on_with_the_same_losses_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Its sums are linear in the ranks' gradients and residuals together, so the number of ranks does not matter."""
    there = compressed("powersgd", BLOCKY | {"zero": {"stage": 1}})
    check_same_losses(compressed("powersgd", BLOCKY), [(2, there)], tmp_path, dp=4)
