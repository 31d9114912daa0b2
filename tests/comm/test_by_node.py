"""Rows that travel inside a node first and then between nodes arrive bit for bit as with one all_to_all, and so do
their gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.comm.by_node import NodeGroups, exchange_by_node, exchange_evenly
from meshwright.comm.mesh import Mesh
from meshwright.comm.ops import all_to_all
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import predict_rank
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import job_of
from meshwright.spec.layout import Layout, exchange_parts
from tests.support.oracle import make_trainer, small_config, true_gradients
from tests.support.ranks import run_ranks


def layout_of(world: int, here: int) -> Layout:
    layout = Layout(world, ep=world, node_size=here)
    return Layout(world, ep=world, node_size=here, parts=exchange_parts(layout))


def rows_sent(world: int) -> list[list[int]]:
    """Return the numbers of rows sent, indexed by [source][target]. They are unequal, and some are zero."""
    return [[(3 * source + 5 * to + source * to) % 4 for to in range(world)] for source in range(world)]


def exchanged(rank: int, world: int, here: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the received rows and the gradient of the sent ones, with one call and by node, on the way there and
    back.
    """
    mesh, rows = Mesh(layout_of(world, here), rank), rows_sent(world)
    ep, by_node = mesh.group("ep"), NodeGroups(mesh.group("ep.node"), mesh.group("ep.across"))
    sends, receives = rows[rank], [each[rank] for each in rows]
    _, passed = exchange_evenly(torch.tensor(sends)[:, None], by_node)
    middle, found = passed.flatten().tolist(), []
    names = (by_node.inside.name, by_node.across.name)
    for back in (False, True):
        there, arriving = (receives, sends) if back else (sends, receives)
        x = torch.arange(3.0 * sum(there), dtype=torch.float64).view(-1, 3) + 1000 * rank
        for hops in (False, True):
            leaf = x.clone().requires_grad_()
            by = (exchange_by_node, *names) if hops else (all_to_all, ep.name)
            y = by[0](leaf, *by[1:], there, arriving, *((middle, back) if hops else ()))  # type: ignore[call-arg]
            (y.square().sum() * (rank + 1)).backward()
            found.append((y.detach(), leaf.grad))
    return found


def train(rank: int, world: int, sections: list[dict[str, Any]]) -> list[Any]:
    """Return for each config the gradients, the loss, and the axes of ep that had calls."""
    found = []
    for each in sections:
        trainer = make_trainer(small_config(**each), rank, world)
        grads = [(record.name, grad) for record, grad in true_gradients(trainer)]
        loss = trainer.step().loss
        axes = {entry.axis for entry in trainer.ctx.ledger.entries if entry.axis.startswith("ep")}
        found.append((grads, loss, axes))
    return found


def both(rank: int, world: int, here: int, sections: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    return exchanged(rank, world, here), train(rank, world, sections)


EXPERTS = {"count": 24, "top_k": 3, "ffn": 24}
MODEL = {"layers": 2, "seq": 12, "hidden": 24, "heads": 4, "vocab": 53, "experts": EXPERTS}
PLAIN = {"model": MODEL, "layout": {"ep": 4, "node_size": 2}, "train": {"precision": "fp64", "global_batch": 4}}


def check(world: int, here: int, *layouts: dict[str, Any]) -> None:
    batch = {"train": {"precision": "fp64", "global_batch": world}}
    plain = [PLAIN | batch | {"layout": layout} for layout in layouts]
    own = [each | {"comm": {"algorithm": "hierarchical"}} for each in plain]
    for moved, trained in run_ranks(world, both, here, [*plain, *own]):
        for one, other in zip(moved[::2], moved[1::2], strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        for one, other in zip(trained[: len(plain)], trained[len(plain) :], strict=True):
            assert one[2] == {"ep"} and other[2] == {"ep.node", "ep.across"}
            assert one[1] == pytest.approx(other[1], rel=1e-13)
            for (name, grad), (_, same) in zip(one[0], other[0], strict=True):
                assert torch.allclose(grad, same, rtol=1e-12, atol=1e-15), name


def test_rows_arrive_as_by_one_call() -> None:
    check(4, 2, {"ep": 4, "node_size": 2})


@pytest.mark.wide
def test_rows_arrive_as_by_one_call_on_many_layouts() -> None:
    check(8, 4, {"ep": 8, "node_size": 4}, {"tp": 2, "ep": 4, "node_size": 4},
          {"tp": 2, "sequence_parallel": True, "ep": 8, "etp": 1, "node_size": 2})  # fmt: skip
    check(8, 2, {"ep": 8, "node_size": 2}, {"pp": 2, "ep": 4, "node_size": 2})
    check(6, 3, {"ep": 6, "node_size": 3})


def test_parts_of_ep() -> None:
    def parts(world: int, node_size: int, **axes: Any) -> Any:
        found = exchange_parts(Layout(world, node_size=node_size, **axes))
        return [size for _, size in found[0][1]] if found else None

    assert parts(16, 8, ep=16) == [8, 2]
    assert parts(16, 8, tp=2, ep=8) == [4, 2]
    assert parts(16, 8, ep=8) is None, "inside a node"
    assert parts(16, 8, tp=8, ep=2) is None, "one on each node"
    assert parts(12, 8, ep=12) is None, "not equally many"


def test_planned_bytes_and_seconds() -> None:
    """Both hops carry the whole payload. Between nodes as many bytes travel as with one call. Inside a node, (g-1)/g of
    the payload travels in addition.
    """
    sections = PLAIN | {"model": MODEL | {"experts": EXPERTS | {"capacity": 1.0}}, "layout": {"ep": 8, "node_size": 4}}
    sections |= {"train": {"global_batch": 8, "precision": "fp32"}}
    plain, own = (small_config(**sections, comm={"algorithm": {"ep": kind}}) for kind in ("torch", "hierarchical"))
    before, after = (predict_rank(c, 8, 0) for c in (plain, own))
    for line, traffic in before.items():
        if line.axis == "ep":
            near, far = (after[line._replace(axis=axis)] for axis in ("ep.node", "ep.across"))
            assert near.payload_bytes == far.payload_bytes == traffic.payload_bytes
            assert (near.wire_bytes, far.wire_bytes) == (traffic.payload_bytes * 3 // 4, traffic.payload_bytes // 2)
        # The traffic over world differs, since it includes the sum of each axis's calls and bytes.
        elif line.axis != "world":
            assert after[line] == traffic
    cluster = load_cluster("h100-80g-dgx")
    times = [predict_cost(job_of(c, 8), cluster).axes["ep"].seconds for c in (plain, own)]
    assert times[1] > times[0] > 0
