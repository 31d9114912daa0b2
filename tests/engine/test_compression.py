"""Compressed sums on real ranks, in float64: nothing is lost, copies stay equal, and the bytes are the planned ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from meshwright.config.comm import REDUCE_KINDS
from meshwright.engine.sharding.compression.exchange import gaps_of
from meshwright.engine.sharding.compression.sizes import WarmUpPlan
from meshwright.engine.sharding.reducers import PLAIN_REDUCER
from meshwright.engine.step import Trainer
from meshwright.lab.algorithms import ALGORITHMS
from meshwright.plan.communication import Line, Traffic, by_line, predict_step, stage_calls
from meshwright.plan.job import Job, job_of
from tests.engine.sums import added, kept_of, lines_of, placed, reduced, trainer_of
from tests.support.oracle import make_trainer, parameters, small_config
from tests.support.ranks import run_ranks

EXACT = 1e-12
STEPS = 2
Sections = dict[str, Any]
Whole = dict[str, np.ndarray]

KEYS: dict[str, Sections] = {
    "topk": {"ratio": 0.1, "block": 32}, "threshold": {"ratio": 0.1}, "powersgd": {"rank": 2},
    **{kind: {"block": 32} for kind in ("fp8", "int8", "int4", "onebit")},
}  # fmt: skip


def compressed(kind: str, sections: Sections | None = None, **keys: Any) -> Sections:
    reduce = {"kind": kind, "error_feedback": True} | KEYS.get(kind, {}) | keys
    return {"comm": {"bucket_mib": 0.02, "reduce": reduce}} | (sections or {})


class RankResult(NamedTuple):
    """The results of one rank: the sums of each step, its residuals, whether all elements outside parameters are zero
    and blocks are whole, its calls in one step, and its parameters after that step.
    """

    sums: list[Whole]
    kept: Whole
    clean: bool
    calls: dict[Line, Traffic]
    parameters: Whole


def sums_of(rank: int, world: int, cases: list[Sections]) -> list[RankResult]:
    found = []
    for sections in cases:
        trainer = trainer_of(rank, world, sections, None)
        sums = [boxes_of(pairs) for pairs in reduced(trainer, STEPS)]
        kept, clean = added(kept_of(trainer)), is_clean(trainer) and cuts_no_block(trainer)
        trainer.step()
        found.append(RankResult(sums, kept, clean, lines_of(trainer), boxes_of(parameters(trainer))))
    return found


def is_clean(trainer: Trainer) -> bool:
    """Return True if the gaps between parameters, including their rows of padding, are zero. The grad norm counts
    them.
    """
    total = torch.zeros(())
    for bucket in trainer.data_parallel.buckets:
        for low, high in gaps_of(bucket):
            start = bucket.share[0]
            total += bucket.own_grads[max(0, low - start) : max(0, high - start)].abs().sum()
    return not bool(total)


def cuts_no_block(trainer: Trainer) -> bool:
    """Return True if compressed parameters, and the ranks' slices of them, begin at block boundaries."""
    buffers = [buffer for buffer in trainer.data_parallel.trained if buffer.key.compressed]
    starts = [slot.start for buffer in buffers for slot in buffer.slots]
    starts += [buffer.split.written(b.start, b.stop)[0] for buffer in buffers for b in buffer.buckets]
    return not any(start % trainer.ctx.config.comm.reduce.block for start in starts)


def boxes_of(pairs: Any) -> Whole:
    into: Whole = {}
    placed(pairs, into)
    return into


def together(wholes: Iterable[Whole], equal: bool = True) -> Whole:
    """Assemble global tensors from the ranks' parts. Elements that several ranks hold must be equal bit for bit."""
    into: Whole = {}
    for whole in wholes:
        for name, part in whole.items():
            target = into.setdefault(name, np.full(part.shape, np.nan))
            both = ~np.isnan(target) & ~np.isnan(part)
            assert not equal or np.array_equal(target[both], part[both]), f"copies of {name} differ"
            np.copyto(target, part, where=~np.isnan(part))
    return into


def true_sums(model: Sections) -> list[Whole]:
    return [added(pairs) for pairs in reduced(trainer_of(0, 1, model, PLAIN_REDUCER), STEPS)]


def far(found: np.ndarray, expected: np.ndarray) -> float:
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    return error if error == error else np.inf


def check_nothing_is_lost(world: int, cases: list[Sections], model: Sections | None = None) -> None:
    """Check for every case that sums and residuals add up to the true sums, that copies of parameters are equal, and
    that the calls match the plan.
    """
    cases = [case | (model or {}) for case in cases]
    true, ranks = true_sums(model or {}), run_ranks(world, sums_of, cases)
    for case, sections in enumerate(cases):
        found = [rank[case] for rank in ranks]
        assert all(rank.clean for rank in found), sections
        sums = [together(rank.sums[step] for rank in found) for step in range(STEPS)]
        kept: Whole = {}
        for rank in found:
            for name, part in rank.kept.items():
                kept[name] = kept.get(name, 0.0) + part
        together(rank.parameters for rank in found)
        for name in true[0]:
            expected, arrived = (sum(step[name] for step in steps) for steps in (true, sums))
            assert far(arrived + kept.get(name, 0.0), expected) <= EXACT, (sections, name)
        assert kept
        assert max(far(sums[0][name], true[0][name]) for name in kept) > 1e-4, "something is left out"
        job = job_of(small_config(**sections), world)
        for number, rank in enumerate(found):
            check_calls(job, number, rank.calls)


# There are only eight tokens, so no gradient of a product has a rank above eight.
FEW = {"model": {"layers": 2, "hidden": 24, "heads": 4, "vocab": 53, "seq": 4, "tied_embeddings": False}}


def check_calls(job: Job, number: int, calls: dict[Line, Traffic]) -> None:
    """Check that a rank's calls that reduce gradients match the plan. (The traffic of experts depends on the data.)"""
    planned = by_line(stage_calls(job, job.layout.coordinate(number)["pp"]))
    found, expected = ({line: each for line, each in of.items() if line.phase == "reduce"} for of in (calls, planned))
    assert found == expected, (job.config.comm, job.config.layout, job.config.zero, number)


NODES = {"zero": {"stage": 1, "shard_group": "node"}, "layout": {"node_size": 2}}


def test_nothing_is_lost() -> None:
    """In one case two of four ranks hold copies of norms and positions. In another one shards have copies."""
    cases = [
        compressed("topk", {"layout": {"tp": 2}}), compressed("onebit", NODES),
        compressed("int8", {"zero": {"stage": 3}}), compressed("powersgd", {"zero": {"stage": 2}}),
    ]  # fmt: skip
    check_nothing_is_lost(4, cases, {"model": FEW["model"] | {"tied_embeddings": True}})


EIGHT: list[Sections] = [
    *({"zero": {"stage": stage}, "layout": {"tp": 2, "pp": 2}} for stage in range(4)),
    {"zero": {"stage": 1, "shard_group": "node"}, "layout": {"tp": 2, "sequence_parallel": True, "node_size": 4}},
    {"zero": {"stage": 2}, "layout": {"cp": 2, "pp": 2}},
]
EXPERTS = {"model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16, "experts": {"count": 4, "ffn": 32}}}


@pytest.mark.wide
@pytest.mark.parametrize("kind", [kind for kind in REDUCE_KINDS if kind != "plain"])
def test_nothing_is_lost_on_many_layouts(kind: str) -> None:
    check_nothing_is_lost(8, [compressed(kind, sections) for sections in EIGHT])


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["int4", "topk", "powersgd"])
def test_nothing_is_lost_of_experts(kind: str) -> None:
    layouts: list[Sections] = [{"layout": {"ep": 2}, "zero": {"stage": 1}}, {"layout": {"ep": 2, "tp": 2}}]
    check_nothing_is_lost(4, [compressed(kind, sections) for sections in layouts], EXPERTS)


FEW_AT_ONCE = FEW | {"train": {"precision": "fp64", "global_batch": 2, "micro_batch": 1, "compile": False}}


def check_exact(world: int, layouts: list[Sections]) -> None:
    """Check that sending all elements, or a product of full rank, gives the exact sum."""
    whole = [("topk", {"ratio": 1.0}), ("threshold", {"ratio": 1.0}), ("powersgd", {"rank": 8})]
    cases = [compressed(kind, layout | FEW_AT_ONCE, **keys) for kind, keys in whole for layout in layouts]
    true, ranks = true_sums(FEW_AT_ONCE), run_ranks(world, sums_of, cases)
    for case, sections in enumerate(cases):
        sums = together(rank[case].sums[0] for rank in ranks)
        for name, expected in true[0].items():
            assert far(sums[name], expected) <= EXACT, (sections, name)


def test_all_elements_and_full_rank_are_exact() -> None:
    check_exact(2, [{"zero": {"stage": 1}}])


@pytest.mark.wide
def test_all_elements_and_full_rank_are_exact_on_many_layouts() -> None:
    layout = {"tp": 2, "pp": 2}
    check_exact(8, [{"layout": layout, "zero": {"stage": stage}} for stage in range(4)])


def check_algorithms(world: int, kinds: list[str], layouts: list[Sections], **more: Any) -> None:
    """Check that Meshwright's own algorithms compute torch's sums and send the planned bytes."""
    links = {"link_gb_s": 1.0, "network_gb_s": 0.1, "latency_us": 5.0}
    cases = [
        {"comm": {"bucket_mib": 0.02, "algorithm": kind, "links": links} | more} | layout
        for kind in kinds
        for layout in layouts
    ]
    deadline = 60.0 + 20.0 * len(cases)
    true, ranks = true_sums(FEW), run_ranks(world, sums_of, [case | FEW for case in cases], deadline=deadline)
    for case, sections in enumerate(cases):
        found = [rank[case] for rank in ranks]
        together(rank.parameters for rank in found)
        for step in range(STEPS):
            sums = together(rank.sums[step] for rank in found)
            for name, expected in true[step].items():
                assert far(sums[name], expected) <= EXACT, (sections, name)
        job = job_of(small_config(**sections, **FEW), world)
        for number, rank in enumerate(found):
            check_calls(job, number, rank.calls)


def test_own_algorithms() -> None:
    check_algorithms(4, ["tree", "hierarchical", "auto"], [{"layout": {"node_size": 2}}], switches=[1, 0])


@pytest.mark.wide
def test_own_algorithms_on_many_layouts() -> None:
    layouts: list[Sections] = [{"zero": {"stage": stage}, "layout": {"node_size": 4}} for stage in range(4)]
    layouts += [{"layout": {"tp": 2, "pp": 2, "node_size": 4}, "zero": {"stage": stage}} for stage in range(4)]
    layouts += [{"layout": {"cp": 2, "node_size": 2, "order": "tp-ep-dp-cp-pp"}}]
    check_algorithms(8, [*ALGORITHMS, "auto"], layouts)
    check_algorithms(8, [*ALGORITHMS], [{"layout": {"node_size": 2}, "zero": {"stage": 1}}], switches=[0, 1, 0, 1])


def steps_of(rank: int, world: int, kinds: list[Sections]) -> list[list[tuple[float, float, dict[str, int]]]]:
    """Return for each step the grad norm, the norm of the reduced gradients after clipping, and the traffic over dp."""
    found = []
    for sections in kinds:
        trainer = make_trainer(small_config(**sections), rank, world)
        found.append([(step.grad_norm, arrived(trainer), step.comm["dp"]) for step in steps(trainer)])
    return found


def steps(trainer: Trainer) -> Iterable[Any]:
    for _ in range(3):
        yield trainer.step()


def arrived(trainer: Trainer) -> float:
    total = sum(float(bucket.own_grads.square().sum()) for bucket in trainer.data_parallel.buckets)
    return total**0.5


def test_first_steps_are_plain_and_the_norm_is_that_of_what_arrived() -> None:
    plain, warm = run_ranks(2, steps_of, [{}, compressed("onebit", warmup_steps=2)])[0]
    assert [step[0] for step in warm[:2]] == pytest.approx([step[0] for step in plain[:2]], rel=1e-12)
    assert warm[2][0] != pytest.approx(plain[2][0], rel=1e-3)
    assert all(norm > 1 for norm, _, _ in warm)
    assert [after for _, after, _ in warm] == pytest.approx([1.0] * 3, rel=1e-12), "clipped to train.clip=1"
    config = small_config(**compressed("onebit", warmup_steps=2))
    assert warm[0][2] == predict_step(config, 2, reducer=WarmUpPlan(config.comm.reduce))["dp"]._asdict()
    assert warm[2][2] == predict_step(config, 2)["dp"]._asdict()


def scaled(rank: int, world: int, sections: Sections) -> tuple[list[Whole], Whole]:
    trainer, sums = trainer_of(rank, world, sections, None), []
    for scale in (4.0, 0.5):
        trainer.loss_scale.value = scale
        sums.append({name: part / scale for name, part in boxes_of(reduced(trainer, 1)[0]).items()})
    return sums, added(kept_of(trainer))


@pytest.mark.parametrize("kind", ["onebit", "powersgd"])
def test_what_is_kept_does_not_depend_on_the_loss_scale(kind: str) -> None:
    true, ranks = true_sums(FEW), run_ranks(2, scaled, compressed(kind, FEW))
    for name in ranks[0][1]:
        arrived, kept = sum(step[name] for step in ranks[0][0]), sum(rank[1][name] for rank in ranks)
        assert far(arrived + kept, true[0][name] + true[1][name]) <= EXACT, name


@pytest.mark.parametrize("kind", ["int4", "onebit", "powersgd"])
def test_a_gradient_that_is_not_finite_is_skipped_and_forgotten(kind: str) -> None:
    for skipped, finite, loss in run_ranks(2, overflow, compressed(kind)):
        assert skipped == [True, False, False]
        assert finite
        assert loss < 10


def overflow(rank: int, world: int, sections: Sections) -> tuple[list[bool], bool, float]:
    trainer = make_trainer(small_config(**sections), rank, world)
    launch, first = trainer.data_parallel._once._launch, trainer.data_parallel.buckets[0]

    def spoilt(bucket: Any, out: torch.Tensor) -> Any:
        if bucket is first and trainer.step_number == 0 and rank == 1:
            bucket.grads.tensor[3] = np.inf
        return launch(bucket, out)

    trainer.data_parallel._once._launch = spoilt
    found = list(steps(trainer))
    kept = [x for _, _, tensors in trainer.data_parallel.reducer.states() for x in tensors]
    return [step.skipped for step in found], all(bool(x.isfinite().all()) for x in kept), found[-1].loss
