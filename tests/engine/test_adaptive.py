"""A run that chooses how it compresses gradients.

Tested are the criterion of the choice and that all ranks choose alike. The choice must be sent as planned, be saved in
checkpoints, and last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.load import Reader
from meshwright.config.comm import ReduceConfig
from meshwright.config.rules import check
from meshwright.engine.sharding.compression.adaptive import AdaptiveReducer, Trial, best
from meshwright.engine.sharding.compression.sizes import candidates, planned_choice
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.plan.communication import predict_step
from meshwright.run.adapting import BEFORE, MEASURED, ReducerChoice
from tests.engine.test_compressed_checkpoints import saved
from tests.engine.test_compression import FEW
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

PLAIN, BF16, INT8, INT4, *SPARSE = candidates(ReduceConfig(adaptive=True, ratio=0.05))
FASTER = [Trial(PLAIN, 8.0, 0.0), Trial(BF16, 4.5, 0.5), Trial(INT8, 2.5, 0.5), Trial(SPARSE[0], 1.2, 1.0)]


def test_candidates_become_harsher_down_to_the_least_ratio() -> None:
    assert [each.kind for each in (PLAIN, BF16, INT8, INT4)] == ["plain", "bf16", "int8", "int4"]
    assert [(each.kind, each.ratio) for each in SPARSE] == [("topk", 0.1), ("topk", 0.05)]
    assert all(each.feeds_back for each in (BF16, INT8, INT4, *SPARSE))


@pytest.mark.parametrize(("room", "expected"), [
    (9.0, PLAIN),  # All traffic is hidden.
    (4.0, BF16),  # The remaining traffic is hidden, and harsher kinds take as long to encode.
    (1.0, SPARSE[0]),  # int8 would leave one second exposed.
    (1.9, INT8),
])  # fmt: skip
def test_the_mildest_is_chosen_that_nothing_beats_by_much(room: float, expected: ReduceConfig) -> None:
    assert best(FASTER, room, step_s=6.0).config is expected
    slower = [trial._replace(making=20.0, seconds=28.0) for trial in FASTER[1:]]
    assert best([FASTER[0], *slower], room, step_s=6.0).config is PLAIN, "making messages is never hidden"


# On this link the gradients of a step take much longer than its backward.
SLOW: dict[str, Any] = FEW | {"comm": {
    "bucket_mib": 0.02, "emulate": {"link_gb_s": 0.002}, "reduce": {"adaptive": True, "ratio": 0.1, "block": 32},
}}  # fmt: skip
SLOW["train"] = {"precision": "fp64", "global_batch": 4, "micro_batch": 1, "compile": False, "steps": 50}


def chosen(rank: int, world: int, folder: str, sections: dict[str, Any]) -> tuple[Any, ...]:
    """Train until the run has chosen and save it. Return the choice, the traffic of each step, whether the choice is
    final, the choice after a load, and the norms of two more steps without and with the load.
    """
    config = small_config(**sections)
    trainer, again = (make_trainer(config, rank, world) for _ in range(2))
    hook = ReducerChoice(trainer, Path(folder))
    sent = []
    for number in range(BEFORE + MEASURED + 1):
        hook.before(number + 1)
        result = trainer.step()
        hook.after(result, last=False)
        sent.append(result.comm["dp"])
    found = ReducerChoice(trainer, None).reducer
    reader = saved(trainer, folder)
    norms = [trainer.step().grad_norm for _ in range(2)]
    load_into(again, reader)
    return choice_of(trainer), sent, found is None, choice_of(again), norms, [again.step().grad_norm for _ in range(2)]


def choice_of(trainer: Trainer) -> ReduceConfig | None:
    reducer = trainer.data_parallel.reducer
    assert isinstance(reducer, AdaptiveReducer)
    return reducer.choice


def moved(rank: int, world: int, folder: str, sections: dict[str, Any]) -> tuple[bool, bool, float, float]:
    """Load a checkpoint on another number of ranks and take a step. Return whether the choice is gone, whether the run
    will choose again, and the size of the residuals before and after the step, whose plain sums send them.
    """
    trainer = make_trainer(small_config(**sections), rank, world)
    load_into(trainer, Reader(Path(folder) / f"step-{BEFORE + MEASURED + 1:08d}"))

    def kept() -> float:
        return sum(float(x.abs().sum()) for _, _, tensors in trainer.data_parallel.reducer.states() for x in tensors)

    before = kept()
    trainer.step()
    return choice_of(trainer) is None, ReducerChoice(trainer, None).reducer is not None, before, kept()


def check_chooses(sections: dict[str, Any], folder: Path) -> None:
    ranks = run_ranks(2, chosen, str(folder), sections)
    choice, sent, decided, loaded, norms, after = ranks[0]
    config = small_config(**sections)
    assert choice in candidates(config.comm.reduce)[1:], "such a link is not left as it is"
    assert all(rank[0] == choice for rank in ranks) and decided
    plain, later = (
        predict_step(config, 2, reducer=plan)["dp"]._asdict()
        for plan in (None, planned_choice(config.comm.reduce, choice))
    )
    assert sent[:-1] == [plain] * (BEFORE + MEASURED) and sent[-1] == later != plain
    assert loaded == choice and norms == after, "a resumed run has its choice, and continues bit for bit"
    event = json.loads((folder / "events.jsonl").read_text())
    assert event["kind"] == "reduce" and event["choice"] == choice.kind and event["step"] == BEFORE + MEASURED
    assert f"sent as {choice.kind}" in event["text"]


def test_a_run_on_a_slow_link_chooses_and_keeps_its_choice(tmp_path: Path) -> None:
    check_chooses(SLOW, tmp_path)


@pytest.mark.wide
def test_another_number_of_ranks_chooses_anew(tmp_path: Path) -> None:
    check_chooses(SLOW, tmp_path)
    for undecided, chooses, before, after in run_ranks(4, moved, str(tmp_path), SLOW):
        assert undecided and chooses
        assert before > 0 == after


@pytest.mark.wide
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_runs_of_every_stage_choose(stage: int, tmp_path: Path) -> None:
    check_chooses(SLOW | {"zero": {"stage": stage}}, tmp_path)


def test_a_rank_that_has_nothing_to_compress_agrees_as_often_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would wait for each other forever, for instance if a stage holds only vectors. All ranks use the
    numbers of the rank that sends most.
    """
    trainer = make_trainer(small_config(**SLOW), 0, 1)
    hook = ReducerChoice(trainer, None)
    assert hook.reducer is not None and not hook.reducer.buffers, "one rank sends nothing"
    given: list[float] = []
    monkeypatch.setattr(hook, "_max_over_ranks", lambda value: given.append(value) or 7.0)

    def agreed() -> list[bool]:
        """Return for each agreement whether it is about seconds, rather than about the moment to start."""
        given.clear()
        trials = [hook._trial(each) for each in (PLAIN, INT8)]
        assert [(trial.seconds, trial.making) for trial in trials] == [(7.0, 0.0), (7.0, 7.0)]
        return [value > 0 for value in given]

    without = agreed()
    hook.reducer.buffers = list(trainer.data_parallel.trained)
    buckets = [bucket for buffer in hook.reducer.buffers for bucket in buffer.buckets]
    hook.reducer.residuals = {bucket: bucket.own_grads.new_zeros(bucket.stop - bucket.start) for bucket in buckets}
    with_buckets = agreed()
    assert len(without) == len(with_buckets) and any(with_buckets) and not any(without)


def test_keys_that_do_not_go_together() -> None:
    with pytest.raises(UserError, match=r"adaptive=true chooses .* leave comm.reduce.kind"):
        ReduceConfig(kind="int8", adaptive=True)
    with pytest.raises(UserError, match=r"comm.reduce.rank has no effect"):
        ReduceConfig(rank=8, adaptive=True)
    with pytest.raises(UserError, match=r"reduce.adaptive=true compresses gradients, which comm.algorithm.dp=ring"):
        check(small_config(comm={"algorithm": "ring", "reduce": {"adaptive": True}}), 2)
