"""The parameter server. Without staleness it is data parallelism. With staleness every gradient is summed once, and
never later than allowed. The traffic of all ranks together is planned.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.config.rules import check
from meshwright.errors import UserError
from meshwright.lab.server import ServerReducer, steps_late
from meshwright.plan.communication import predict_detail
from tests.engine.replica_runs import Sections, furthest, trained
from tests.engine.sums import added, kept_of, reduced, trainer_of
from tests.support.oracle import small_config
from tests.support.ranks import run_ranks

EXACT = 1e-12
SGD: Sections = {"optimizer": {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}, "lr": {"schedule": "constant"}}


def served(ranks: int, staleness: int = 0, **more: Any) -> Sections:
    return SGD | {"train": {"server": {"ranks": ranks, "staleness": staleness}}} | more


def check_is_data_parallelism(world: int, cases: list[Sections], steps: int = 3) -> None:
    """Compare with one process, and with the same layout without a server. The latter must be equal bit for bit if two
    ranks sum.
    """
    plain = [{name: keys for name, keys in case.items() if name != "train"} for case in cases]
    references = trained(0, 1, [SGD] * len(cases), steps)
    for found in run_ranks(world, trained, [*cases, *plain], steps):
        for case, one, other, reference in zip(cases, found, found[len(cases) :], references, strict=False):
            assert one.losses == pytest.approx(reference.losses, rel=EXACT), case
            assert furthest(one.parameters, reference.parameters) < EXACT, case
            if world // (case.get("layout", {}).get("tp", 1) * case.get("layout", {}).get("pp", 1)) == 2:
                assert one.losses == other.losses
                assert all(np.array_equal(x, other.parameters[n], equal_nan=True) for n, x in one.parameters.items())


def test_a_server_that_waits_for_all_is_data_parallelism() -> None:
    check_is_data_parallelism(2, [served(1)], steps=2)


@pytest.mark.wide
def test_so_are_several_servers_beside_other_axes() -> None:
    cases = [served(1), served(4), served(8), served(2, layout={"tp": 2, "pp": 2}), served(2, layout={"cp": 2})]
    check_is_data_parallelism(8, cases)


class Alone:
    """A group of one rank."""

    alone, index, size = True, 0, 1


@pytest.mark.parametrize("staleness", [1, 3])
def test_every_gradient_arrives_once_and_never_later_than_allowed(staleness: int) -> None:
    """Each gradient is nonzero only at the index of its step, which shows when it is summed."""
    steps, reducer = 40, ServerReducer(1, staleness, seed=5)
    bucket: Any = object()
    late = [torch.zeros(steps, dtype=torch.float64) for _ in range(staleness)]
    reducer._late[bucket] = deque(late)
    arrived: dict[int, int] = {}
    for step in range(steps):
        reducer.begin_step(step, 4.0)
        grads = torch.zeros(steps, dtype=torch.float64)
        grads[step] = 4.0
        reducer.all_reduce(bucket, grads, Alone()).wait()  # type: ignore[arg-type]
        for sent in grads.nonzero().flatten().tolist():
            assert grads[sent] == 4.0 and sent not in arrived
            arrived[sent] = step - sent
    assert all(0 <= age <= staleness for age in arrived.values())
    assert all(age == steps_late(5, sent, 0, staleness) for sent, age in arrived.items())
    assert set(Counter(arrived.values())) == set(range(staleness + 1))
    assert set(range(steps - staleness)) <= set(arrived)


def sums_of(rank: int, world: int, sections: Sections, steps: int) -> tuple[Any, Any, Any]:
    """Return the sums that arrived over all steps, the gradients that are still late, and the plain sums."""
    late, plain = trainer_of(rank, world, sections, None), trainer_of(rank, world, SGD, None)
    arrived = [added(pairs) for pairs in reduced(late, steps)]
    found = {name: sum(each[name] for each in arrived) for name in arrived[0]}
    every = [added(pairs) for pairs in reduced(plain, steps)]
    return found, added(kept_of(late)), {name: sum(each[name] for each in every) for name in every[0]}


@pytest.mark.wide
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_what_arrived_and_what_is_late_are_all_gradients(steps: int) -> None:
    ranks = run_ranks(4, sums_of, served(2, staleness=3), steps)
    late = {name: sum(rank[1][name] for rank in ranks) for name in ranks[0][1]}
    assert any(np.abs(value).max() > 0 for value in late.values())
    for arrived, _, every in ranks:
        for name, value in every.items():
            assert np.abs(arrived[name] + late[name] - value).max() <= EXACT * max(1.0, np.abs(value).max())


@pytest.mark.wide
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_step_that_no_gradient_reaches_makes_no_update(seed: int) -> None:
    """Weight decay would otherwise change weights that nothing was learned for."""
    server = {"ranks": 1, "staleness": 1}
    optimizer = {"name": "sgd", "lr": 0.5, "weight_decay": 0.5}
    trainer = trainer_of(0, 1, SGD | {"train": {"server": server, "seed": seed}, "optimizer": optimizer}, None)
    seen = set()
    for _ in range(8):
        before = [parameter.detach().clone() for parameter in trainer.modules[0].parameters()]
        result = trainer.step()
        assert result.skipped == (result.grad_norm == 0.0)
        unchanged = all(map(torch.equal, before, trainer.modules[0].parameters()))
        assert unchanged == result.skipped and ("reached the servers" in result.why_skipped) == result.skipped
        seen.add(result.skipped)
    assert seen == {False, True}


def test_what_all_ranks_send_is_planned() -> None:
    for sections in (served(1), served(2, staleness=2), served(2, layout={"tp": 2})):
        found = run_ranks(4, trained, [sections], 1)
        whole: Any = {}
        for (one,) in found:
            for line, traffic in one.calls[0].items():
                whole[line] = whole[line].plus(traffic) if line in whole else traffic
        assert whole == predict_detail(small_config(**sections), 4)


def test_a_server_knows_what_it_cannot_do() -> None:
    wrong: list[tuple[Sections, str]] = [
        (served(3), r"train.server.ranks=3 must divide the 8 ranks that sum a gradient \(dp x cp\): try 1, 2, 4 or 8"),
        (served(2, zero={"stage": 1}), "ranks=2 can't be combined with zero.stage=1 yet: set zero.stage=0 or"),
        (served(2, comm={"reduce": {"kind": "int8"}}), "with comm.reduce.kind=int8 yet: set comm.reduce.kind=plain"),
        (served(2, comm={"algorithm": "ring"}), "with comm.algorithm.dp=ring yet: set comm.algorithm.dp=torch"),
        (served(2, layout={"replicas": 2}), "with layout.replicas=2 yet: set layout.replicas=1"),
        (served(0, staleness=1), "staleness=1 has no effect without a server"),
    ]  # fmt: skip
    for sections, sentence in wrong:
        with pytest.raises(UserError, match=sentence):
            check(small_config(**sections), 8)
