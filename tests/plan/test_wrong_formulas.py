"""Wrong formulas that circulate, compared with counted bytes and predicted times: the table in
docs/communication.md.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from meshwright.config.comm import ReduceConfig
from meshwright.engine.sharding.compression.quantised import Int8
from meshwright.engine.sharding.compression.sparse import TopK
from meshwright.lab.algorithms import rounds_of
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import stage_calls, unit_collectives
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import job_of
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.traffic.ledger import wire_bytes
from tests.plan.test_golden import config


@pytest.mark.parametrize("n", [2, 4, 64])
def test_an_all_reduce_sends_both_halves(n: int) -> None:
    assert wire_bytes("all_reduce", 64 * n, n) == 2 * (n - 1) * 64 != (n - 1) * 64


def test_tensor_parallel_bytes_grow_with_tp() -> None:
    sent = []
    for tp in (2, 4, 8):
        job = job_of(config(tp=tp), world=tp)
        calls = unit_collectives(job.model.blocks[0], job.at, job.batch)
        sent.append(sum(call.times * wire_bytes(call.op, call.payload, tp) for call in calls))
        assert sent[-1] == 8 * (tp - 1) / tp * 2 * 2**30, "8 (t-1)/t H"
    assert sent == sorted(sent)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_ring_sends_pieces(n: int) -> None:
    rounds = list(rounds_of("ring", n, 0, "all_reduce"))
    assert len(rounds) == 2 * (n - 1) and all(len(each.sent) == 1 for each, _ in rounds), "one of n pieces each time"


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (8, 8), (8, 64)])
def test_a_bubble_depends_on_micro_batches(pp: int, micro_batches: int) -> None:
    found = simulate(build("1f1b", pp, micro_batches, 1), lambda *_: 1.0, lambda *_: 2.0, 0.0).bubble
    assert found == pytest.approx((pp - 1) / (micro_batches + pp - 1))
    assert abs(found - 0.1 * pp) > 0.05


def test_gathered_and_reduced_bytes_do_not_fall_with_dp() -> None:
    """A rank has the same gradients on any number of data-parallel ranks, and ring bytes rise to twice their size."""
    sent = []
    for world in (2, 8, 32):
        job = job_of(config(micro_batch=1), world=world)
        sent.append(sum(c.traffic.wire_bytes for c in stage_calls(job, 0) if c.source == "gradients"))
    assert sent == sorted(sent) and sent[-1] < 2 * sent[0] * 1.01


def test_efficiency_is_no_function_of_the_number_alone() -> None:
    """64 devices keep nearly all of the throughput per device of 8 devices with dp = 8, and less than half of it with
    tp = 64.
    """
    cluster = load_cluster("h100-80g-dgx")

    def each(world: int, tp: int) -> float:
        job = job_of(config(tp=tp, micro_batch=1), world, samples=world // tp)
        return predict_cost(job, cluster).tokens_per_s_device

    kept = {tp: each(64, tp) / each(8, 8) for tp in (8, 64)}
    assert min(1.0, 100 / math.sqrt(64)) == 1.0, "the claim for all layouts alike"
    assert kept[8] > 0.95 and kept[64] < 0.5, kept


def test_a_bubble_beside_the_ideal_time_is_not_its_share_of_the_step() -> None:
    """(p-1)/m compares the idle time with the busy time, so with few micro-batches it exceeds 1."""
    pp, micro_batches = 8, 4
    found = simulate(build("gpipe", pp, micro_batches, 1), lambda *_: 1.0, lambda *_: 2.0, 0.0).bubble
    idle, busy = pp - 1, micro_batches
    assert found == pytest.approx(idle / (busy + idle)) and idle / busy > 1 > found


def test_column_parallel_outputs_are_gathered_along_features() -> None:
    """Each rank has some features of all rows. Concatenated along rows, the result has the right number of elements and
    the wrong meaning.
    """
    x, whole = torch.randn(8, 6), nn.Linear(6, 8, bias=False)
    parts = [x @ shard.T for shard in whole.weight.chunk(2)]
    assert torch.allclose(torch.cat(parts, dim=-1), whole(x), atol=1e-6)
    assert not torch.allclose(torch.cat(parts, dim=0).view(8, 8), whole(x), atol=1e-6)


def test_quantised_codes_are_decoded_before_they_are_summed() -> None:
    """Each rank has its own scale, and a sum of two codes leaves int8."""
    codec, elements = Int8(ReduceConfig(kind="int8", block=16)), 4
    ranks = [torch.tensor([[1.0, -0.5, 0.25, 1.0]]), torch.tensor([[100.0, 50.0, -25.0, 100.0]])]
    messages = [codec.encode(x, None) for x in ranks]
    decoded = sum(codec.decode(message, elements, torch.float32) for message in messages)
    torch.testing.assert_close(decoded, ranks[0] + ranks[1], rtol=0.01, atol=0.5)
    codes = [message[:, :elements].view(torch.int8) for message in messages]
    assert (codes[0] + codes[1])[0, 0] == -2, "127 + 127 wraps"
    mean_scale = (1.0 + 100.0) / 127 / 2
    wrong = (codes[0].int() + codes[1].int()) * mean_scale
    assert (wrong - ranks[0] - ranks[1]).abs().max() > 20


def test_top_k_sends_k_elements_even_if_several_are_equal() -> None:
    """`x > kth largest` drops the k-th element itself and, of equal elements, all of them."""
    block, x = 16, torch.tensor([[3.0] + 15 * [1.0]])
    codec = TopK(ReduceConfig(kind="topk", ratio=0.5, block=block))
    kept = codec.decode(codec.encode(x, None), block, torch.float32)
    threshold = x.topk(block // 2).values[0, -1]
    assert int((kept != 0).sum()) == block // 2 and int((x > threshold).sum()) == 1
