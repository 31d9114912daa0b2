"""Replicas that take local steps. Synchronising after every plain step is data parallelism, and the streaming form
without fragments and delay is DiLoCo. Every byte is planned.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from meshwright.cli.dryrun import compare
from meshwright.config.comm import REDUCE_KINDS
from meshwright.config.replicas import LocalConfig
from meshwright.config.rules import check
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.errors import UserError
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from meshwright.spec.traffic.fragments import fragment_bounds, moment_of
from tests.engine.replica_runs import (
    BUGS,
    EVERY_STEP,
    Sections,
    alone,
    by_hand,
    furthest,
    replicas,
    trained,
    weights_of,
)  # fmt: skip
from tests.support.oracle import small_config
from tests.support.ranks import run_ranks

EXACT = 1e-12
STEPS = 3
# Each replica is itself a layout of several ranks.
FOUR = [replicas(2, layout={"tp": 2}), replicas(2, EVERY_STEP | {"shares": [3, 1]}, zero={"stage": 3})]
UNTIED = {"model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16, "tied_embeddings": False}}
EIGHT: list[Sections] = [
    *(replicas(2, layout={"tp": 2, "pp": 2}, zero={"stage": stage}) for stage in (0, 1)),
    *(replicas(2, layout={"tp": 2}, zero={"stage": stage}) for stage in range(4)),
    replicas(2, layout={"pp": 2, "chunks": 2}, zero={"stage": 3}, pipeline={"schedule": "interleaved"}),
    replicas(4, EVERY_STEP | {"shares": [1, 2, 4, 1]}, {"pp": 2}),
    replicas(4, layout={"pp": 2}, **UNTIED),
    replicas(2, layout={"cp": 2, "tp": 2, "sequence_parallel": True}, zero={"stage": 1}),
    replicas(2, layout={"tp": 4}, zero={"stage": 2}, model=UNTIED["model"] | {"kv_heads": 2}),
]  # fmt: skip


def check_equals_data_parallelism(world: int, cases: list[Sections], steps: int = STEPS) -> None:
    references = trained(0, 1, [alone(case) for case in cases], steps)
    for rank, found in enumerate(run_ranks(world, trained, cases, steps)):
        for case, one, reference in zip(cases, found, references, strict=True):
            assert one.losses == pytest.approx(reference.losses, rel=EXACT), (rank, case)
            assert furthest(one.parameters, reference.parameters) < EXACT, (rank, case)
            assert one.calls == one.planned, (rank, case)


def test_synchronising_after_every_plain_step_is_data_parallelism() -> None:
    check_equals_data_parallelism(4, FOUR, steps=2)


@pytest.mark.wide
def test_so_it_is_in_every_layout() -> None:
    check_equals_data_parallelism(8, EIGHT)


# AdamW inside, clipping, and unequal shares of each batch. A run synchronises everything at its last step, which these
# runs do not reach.
INSIDE = {"optimizer": {"name": "adamw", "lr": 1e-2}, "train": {"clip": 1.0}}
DILOCO = {"steps": 3, "shares": [3, 1]}
STREAMED = DILOCO | {"steps": 4, "fragments": 2, "delay": 1}


def off_by(found: list[list[np.ndarray]], reference: list[list[np.ndarray]]) -> float:
    pairs = [(a, b) for mine, theirs in zip(found, reference, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs) / max(float(np.abs(b).max()) for _, b in pairs)


def run_of(local: Sections) -> Sections:
    sections = replicas(2, local)
    return sections | {"optimizer": INSIDE["optimizer"], "train": sections["train"] | INSIDE["train"]}


def test_replicas_do_what_a_few_lines_of_numpy_do() -> None:
    sections, steps = run_of(STREAMED), 10
    assert off_by(run_ranks(2, weights_of, sections, steps), by_hand(sections, steps)) < EXACT


@pytest.mark.wide
@pytest.mark.parametrize("outer", ["nesterov", "sgd", "average"])
@pytest.mark.parametrize("more", [{}, {"fragments": 3, "delay": 2}, {"steps": 5, "fragments": 5, "delay": 4}])
def test_every_outer_step_is_the_one_by_hand(outer: str, more: Sections) -> None:
    sections, steps = run_of(DILOCO | {"outer": outer} | more), 12
    assert off_by(run_ranks(2, weights_of, sections, steps), by_hand(sections, steps)) < EXACT


@pytest.mark.wide
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str) -> None:
    sections, steps = run_of(DILOCO), 7
    assert off_by(run_ranks(2, weights_of, sections, steps, bug), by_hand(sections, steps)) > 1e-6


def test_one_fragment_without_a_delay_is_the_plain_form() -> None:
    plain, streamed = LocalConfig(steps=5), LocalConfig(steps=5, fragments=1, delay=0)
    moments = [moment_of(plain, step, last=False) for step in range(1, 16)]
    assert moments == [moment_of(streamed, step, last=False) for step in range(1, 16)]
    assert [bool(moment.begin) for moment in moments] == [step % 5 == 0 for step in range(1, 16)]


@pytest.mark.parametrize(("steps", "fragments", "delay"), [(1, 1, 0), (4, 2, 1), (5, 3, 4), (7, 7, 6), (20, 3, 2)])
def test_every_fragment_leaves_once_a_round_and_arrives_in_time(steps: int, fragments: int, delay: int) -> None:
    local = LocalConfig(steps=steps, fragments=fragments, delay=delay)
    left: dict[int, list[int]] = {f: [] for f in range(fragments)}
    arrived: dict[int, list[int]] = {f: [] for f in range(fragments)}
    for step in range(1, 3 * steps + 1):
        moment = moment_of(local, step, last=step == 3 * steps)
        if step == 3 * steps:
            assert (moment.begin, moment.at_once) == (tuple(range(fragments)), True)
        for f in moment.arrive:
            arrived[f].append(step)
        for f in () if step == 3 * steps else moment.begin:
            left[f].append(step)
    for f in range(fragments):
        assert all(b - a == steps for a, b in pairwise(left[f]))
        assert arrived[f] == ([min(step + delay, 3 * steps) for step in left[f]] if delay else [])


@pytest.mark.parametrize(("share", "fragments", "n"), [(16, 1, 2), (16, 4, 3), (1000 * 16, 7, 4)])
def test_fragments_cover_a_share_once(share: int, fragments: int, n: int) -> None:
    bounds = fragment_bounds(share, fragments, n)
    assert bounds[0][0] == 0 and share <= bounds[-1][1] < share + 16 * n
    assert all(a[1] == b[0] for a, b in pairwise(bounds)) and all(not (b - a) % (16 * n) for a, b in bounds)


def bytes_of_kinds(rank: int, world: int, cases: list[Sections], steps: int) -> list[Any]:
    """Return by case whether the calls match the plan, the parameters, and the layout."""
    found = []
    for sections, one in zip(cases, trained(rank, world, cases, steps), strict=True):
        found.append((one.calls == one.planned, one.parameters, sections["layout"]))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("kind", [kind for kind in REDUCE_KINDS if kind != "powersgd"])
def test_what_replicas_send_is_planned_and_all_have_the_same_weights(kind: str) -> None:
    """They agree at the end of a round with every kind of compression, also in fragments, and after plain warm-up
    steps.
    """
    compress = {"compress": {"kind": kind} | ({"warmup_steps": 2} if kind == "topk" else {})}
    layouts: list[Sections] = [
        {"layout": {"tp": 2}}, {"layout": {"pp": 2}, "zero": {"stage": 1}}, {"zero": {"stage": 2}},
    ]  # fmt: skip
    cases = [replicas(2, {"steps": 2} | compress, **more) for more in layouts]
    cases += [replicas(4, {"steps": 2, "fragments": 2} | compress)]
    ranks = run_ranks(8, bytes_of_kinds, cases, 4)
    for number in range(len(cases)):
        assert all(rank[number][0] for rank in ranks), cases[number]
    # Fragments end their rounds at different steps, so the last case is left out.
    for number in range(3):
        for rank in range(4):
            one, other = ranks[rank][number][1], ranks[rank + 4][number][1]
            assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one), cases[number]


def test_replicas_know_what_they_cannot_do() -> None:
    wrong: list[tuple[Sections, str]] = [
        (replicas(3), "world of 8 ranks is not divisible by tp x cp x pp x replicas = 1 x 1 x 1 x 3 = 3"),
        (replicas(2, train={"global_batch": 12}), "of dp x micro_batch x replicas = 4 x 1 x 2 = 8: try 8 or 16"),
        (replicas(2, {"shares": [1, 2, 3]}), r"train.local.shares=\[1, 2, 3\] must have one number for each"),
        (replicas(2, {"steps": 4, "fragments": 5}), "fragments=5 can't be synchronised in turn within"),
        (replicas(2, {"steps": 4, "delay": 4}), "delay=4 must be below train.local.steps=4"),
        (replicas(2, {"outer": "average", "outer_lr": 0.5}), "outer_lr has no effect with train.local.outer=average"),
        (replicas(2, {"outer": "sgd", "momentum": 0.5}), "momentum has no effect with train.local.outer=sgd"),
        (replicas(2, {"compress": {"kind": "powersgd"}}), "train.local.compress.kind=powersgd sends matrices"),
        (replicas(2, {"compress": {"ratio": 0.5}}), "train.local.compress.ratio has no effect"),
        (replicas(1, {"steps": 3}), "train.local.steps has no effect with layout.replicas=1"),
        (replicas(2, train={"precision": "fp16"}), "precision=fp16 has a loss scale"),
        (replicas(2, comm={"reduce": {"kind": "int8"}}), "and train.local.compress.kind what"),
        (replicas(2, zero={"stage": 1, "offload": {"optimizer": "cpu"}}), "moves states that layout.replicas=2"),
    ]  # fmt: skip
    for sections, sentence in wrong:
        with pytest.raises(UserError, match=sentence):
            check(small_config(**sections), 8)


@pytest.mark.wide
@pytest.mark.parametrize(
    "sections",
    [
        replicas(2, {"steps": 10}, {"tp": 2}, zero={"stage": 1}),
        replicas(2, {"steps": 10, "fragments": 3, "delay": 4}, {"pp": 2}, zero={"stage": 3}),
        replicas(2, {"steps": 10, "delay": 2, "compress": {"kind": "topk"}}, {"tp": 2}, zero={"stage": 2}),
        replicas(2, {"steps": 10, "outer": "average", "shares": [3, 1], "compress": {"kind": "int8"}}, {"pp": 2}),
    ],
)
def test_a_dry_rank_is_the_planned_one(sections: Sections) -> None:
    """This compares the bytes of states, the calls, and the schedule of the last step of a round."""
    config = small_config(**sections | {"train": sections["train"] | {"global_batch": 16}})
    for rank in (0, 5):
        one = compare(rank, run_rank(config, 8, rank, Device("meta")), planned_rank(checked_job(config, 8), rank))
        assert one["equal"], one
