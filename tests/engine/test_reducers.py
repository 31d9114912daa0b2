"""A reducer with state at every ZeRO stage: nothing is lost or counted twice, and its bytes are planned.

The reducer rounds gradients to bf16 before it sends them and keeps the rest for the next time (error feedback). On any
layout, the reduced sums plus the remaining residuals equal the sums of a plain reducer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver, Snapshot
from meshwright.comm.group import DONE, Group
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, PendingReduction, PlainReducer
from meshwright.plan.communication import Line, Traffic, by_line, stage_calls
from meshwright.plan.job import job_of
from meshwright.spec.layout.params import ParamRecord
from tests.engine.sums import added, kept_of, lines_of, placed, reduced, trainer_of
from tests.support.oracle import EXACT, Pairs, load_into, small_config
from tests.support.ranks import run_ranks

SENT = torch.bfloat16


class ErrorFeedback(PlainReducer):
    """A reducer that gathers or exchanges the rounded gradients of all ranks and adds them up in full precision."""

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        self.buffers = buffers
        self.kept = {bucket: self._zeros(bucket, bucket.stop - bucket.start) for b in buffers for bucket in b.buckets}
        self.of_shares = {bucket: self._zeros(bucket, bucket.own_grads.numel()) for bucket in self.kept}

    @staticmethod
    def _zeros(bucket: Bucket, size: int) -> Tensor:
        return torch.zeros(size, dtype=bucket.own_grads.dtype)

    def calls(
        self,
        op: str,
        elements: int,
        element_bytes: int,
        ranks: int,
        records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:
        count = elements * (ranks if op == "all_reduce" else 1)
        return [("all_gather" if op == "all_reduce" else "all_to_all", count * SENT.itemsize)]

    def _rounded(self, kept: Tensor, grads: Tensor) -> Tensor:
        kept.add_(grads)
        sent = kept.to(SENT)
        kept.sub_(sent)
        return sent

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        # This is the second sum of sharded gradients, over replicas.
        kept = self.of_shares if bucket.stage else self.kept
        sent = self._rounded(kept[bucket], grads)
        found = sent.new_empty(group.size * sent.numel())
        group.all_gather(found, sent)
        grads.copy_(found.view(group.size, -1).to(grads.dtype).sum(0))
        return DONE

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        sent = self._rounded(self.kept[bucket], grads)
        found = torch.empty_like(sent)
        pending = group.all_to_all(found, sent, wait=False)

        class Sum:
            def wait(self) -> None:
                pending.wait()
                out.copy_(found.view(group.size, -1).to(out.dtype).sum(0))

        return Sum()

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        for buffer in self.buffers:
            yield "residual", buffer, [self.kept[bucket] for bucket in buffer.buckets]
            if buffer.split.stage:
                yield "share", buffer, [self.of_shares[bucket] for bucket in buffer.buckets]


Found = tuple[list[Pairs], Pairs, dict[Line, Traffic]]


def reduce_and_resume(rank: int, world: int, cases: list[dict[str, Any]], folder: str) -> list[Found]:
    """Reduce two steps with the first layout and save a checkpoint. Resume it with each layout, reduce one more step,
    and then take a whole step.
    """
    first = trainer_of(rank, world, cases[0], ErrorFeedback())
    gradients = reduced(first, 2)
    saver = Saver(first, Path(folder), asynchronous=True, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()
    found: list[Found] = [(gradients, kept_of(first), {})]
    for sections in cases:
        trainer = trainer_of(rank, world, sections, ErrorFeedback())
        load_into(trainer, Reader(Path(folder) / "step-00000002"))
        gradients = reduced(trainer, 1)
        kept = kept_of(trainer)
        trainer.step()
        found.append((gradients, kept, lines_of(trainer)))
    return found


SP = {"layout": {"tp": 2, "sequence_parallel": True}}
NODES = {"zero": {"stage": 1, "shard_group": "node"}, "layout": {"node_size": 2}}
CASES: list[dict[str, Any]] = [
    {"zero": {"stage": 1}, **SP}, {}, {"zero": {"stage": 1}}, {"zero": {"stage": 2}}, {"zero": {"stage": 3}},
    NODES, {"layout": {"pp": 2}}, {"zero": {"stage": 2}, **SP},
]  # fmt: skip


@pytest.mark.wide
def test_what_is_left_out_is_kept_saved_and_cut_for_another_layout(tmp_path: Path) -> None:
    plain = trainer_of(0, 1, {}, PLAIN_REDUCER)
    true = [added(pairs) for pairs in reduced(plain, 3)]
    ranks = run_ranks(4, reduce_and_resume, CASES, str(tmp_path))

    def totals(case: int) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        """Return the reduced gradients of each step, and the residuals of all ranks."""
        steps: list[dict[str, np.ndarray]] = [{} for _ in ranks[0][case][0]]
        for rank in ranks:
            for pairs, into in zip(rank[case][0], steps, strict=True):
                placed(pairs, into)
        return steps, added(pair for rank in ranks for pair in rank[case][1])

    (one, two), kept = totals(0)
    for case, sections in enumerate(CASES, start=1):
        (three,), still = totals(case)
        for name in true[0]:
            scale = float(np.abs(true[0][name]).max())
            for expected, found in [
                (true[0][name] + true[1][name], one[name] + two[name] + kept[name]),
                (true[2][name] + kept[name], three[name] + still[name]),
            ]:
                assert np.abs(found - expected).max() <= EXACT * scale, (sections, name)
            assert np.abs(kept[name]).max() > 1e-6 * scale, "bf16 leaves something out"


def test_planned_equals_recorded(tmp_path: Path) -> None:
    cases = [CASES[0], NODES, {"zero": {"stage": 3}}, {}]
    ranks = run_ranks(4, reduce_and_resume, cases, str(tmp_path))
    for case, sections in enumerate(cases, start=1):
        job = replace(job_of(small_config(**sections), 4), reducer=ErrorFeedback())
        for rank in ranks:
            assert rank[case][2] == by_line(stage_calls(job, 0)), sections


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.wide), 2])
def test_a_run_goes_on_to_the_bit(stage: int, tmp_path: Path) -> None:
    """This holds even if the next backward changes the state before the save has copied the rest."""
    for before, after in run_ranks(2, twice, stage, str(tmp_path)):
        assert before == after


def twice(rank: int, world: int, stage: int, folder: str) -> tuple[list[float], list[float]]:
    sections = {"zero": {"stage": stage}}
    first, again = (trainer_of(rank, world, sections, ErrorFeedback()) for _ in range(2))
    first.step()
    saver = Saver(first, Path(folder), asynchronous=True, busy="wait", keep=0)
    copy = Snapshot.copy_to_host
    with mock.patch.object(Snapshot, "copy_to_host", lambda *args, **named: (time.sleep(0.5), copy(*args, **named))):
        saver.save()
        norms = [first.step().grad_norm for _ in range(2)]
    saver.wait_for_commit()
    load_into(again, Reader(Path(folder) / "step-00000001"))
    return norms, [again.step().grad_norm for _ in range(2)]
