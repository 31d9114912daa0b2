"""Redistributions and rows of experts on real ranks: values, gradients and bytes are as planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from meshwright.comm.group import Group
from meshwright.comm.mesh import Mesh
from meshwright.comm.ops import all_to_all
from meshwright.comm.redistribute import redistribute
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Box
from meshwright.spec.layout.redistribute import redistribution
from meshwright.spec.layout.rows import by_key
from tests.support.ranks import run_ranks

SHAPE = (8, 6)
# Columns are on ranks 0 to 2, the first ones on rank 1 too. Rank 3 holds nothing.
COLUMNS = [
    (Box((0, 0), (8, 2), (0, 0)),),
    (Box((0, 2), (8, 2), (0, 2)), Box((0, 0), (8, 2), (0, 0))),
    (Box((0, 4), (8, 2), (0, 0)),),
    (),
]
# Of the rows rank 0 wants none, and rank 3 also wants those of rank 2. Rank 1's begin in the second row of its tensor.
ROWS = [(), (Box((0, 0), (3, 6), (1, 0)),), (Box((3, 0), (5, 6), (0, 0)),), (Box((2, 0), (6, 6), (0, 0)),)]
VECTOR = [[(Box((0,), (5,), (0,)),)], [()]]  # It is on rank 0 and wanted nowhere.


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + int(np.prod(shape)), dtype=torch.float64).sin().reshape(shape)


def local_part(boxes: tuple[Box, ...], whole: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    found = whole.new_zeros(shape)
    for box in boxes:
        found[at(box.local_start, box)] = whole[at(box.start, box)]
    return found


def at(start: tuple[int, ...], box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))


def counted(group: Group, phase: str) -> tuple[int, int, int]:
    tallies = [t for entry, t in group.ledger.entries.items() if entry.phase == phase and entry.op == "all_to_all"]
    return tuple(sum(getattr(t, key) for t in tallies) for key in ("calls", "payload_bytes", "wire_bytes"))


def boxes_moved(rank: int, world: int) -> dict[str, Any]:
    group = Mesh(Layout(world), rank).world
    whole, weight = numbers(*SHAPE), numbers(7, 6).cos()
    plan = redistribution([COLUMNS], [ROWS])
    x = local_part(COLUMNS[rank], whole, (8, 4)).requires_grad_()
    out = x.new_zeros(7, 6)
    with group.ledger.phase("forward"):
        redistribute([x], plan, group, [out])
    with group.ledger.phase("backward"):
        (out * out * weight).sum().backward()
    return {
        "wrong": float((out - local_part(ROWS[rank], whole, (7, 6))).abs().max()), "gradient": x.grad.numpy(),
        "forward": counted(group, "forward"), "backward": counted(group, "backward"),
    }  # fmt: skip


def test_boxes_move_and_their_gradients_return() -> None:
    plan = redistribution([COLUMNS], [ROWS])
    expected = numbers(*SHAPE).requires_grad_()
    weight = numbers(7, 6).cos()
    sum((local_part(boxes, expected, (7, 6)) ** 2 * weight).sum() for boxes in ROWS).backward()
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for rank, found in enumerate(run_ranks(4, boxes_moved)):
        assert found["wrong"] == 0.0
        sent, received = (8 * sum(counts(rank)) for counts in (plan.sent_counts, plan.received_counts))
        assert found["forward"] == (1, sent, sent) and found["backward"] == (1, received, received)
        for box in COLUMNS[rank]:
            total[at(box.start, box)] += torch.from_numpy(found["gradient"])[at(box.local_start, box)]
    assert (total - expected.grad).abs().max() < 1e-14, "summed over the holders of a box, the whole gradient"


# The expert of each row, by rank. Each rank has two experts, and no row goes to experts 4 to 6.
ROUTED = [[3, 0, 3], [7, 3, 0, 1], [], [2, 2, 7, 0, 3]]


def dispatched(rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    """Send rows to their experts and back. Each rank knows only its own rows, so counts are exchanged beforehand."""
    group = Mesh(Layout(world), rank).world
    x, weight = numbers(12, 3)[rows_of(rank)].requires_grad_(), numbers(8, 3)[2 * rank : 2 * rank + 2].requires_grad_()
    mine = by_key(ROUTED[rank], world, keys_per_rank=2)
    counts = torch.tensor(np.bincount(ROUTED[rank], minlength=8)).reshape(world, 2)
    group.all_to_all(arriving := torch.empty_like(counts), counts)
    sends, receives = mine.counts.tolist(), arriving.sum(1).tolist()
    # Rows arrive sorted by sender and must be sorted by expert.
    by_expert = by_key(np.repeat([0, 1] * world, arriving.flatten()), 2)
    y = all_to_all(x[mine.order], group.name, sends, receives)[by_expert.order]
    y = torch.cat([rows * own.cos() for rows, own in zip(y.split(by_expert.counts.tolist()), weight, strict=True)])
    z = all_to_all(y[by_expert.inverse], group.name, receives, sends)[mine.inverse]
    (z * numbers(12, 3).exp()[rows_of(rank)]).sum().backward()
    return x.grad.numpy(), weight.grad.numpy()


def rows_of(rank: int) -> slice:
    before = sum(map(len, ROUTED[:rank]))
    return slice(before, before + len(ROUTED[rank]))


def test_rows_find_their_experts() -> None:
    x, weight = numbers(12, 3).requires_grad_(), numbers(8, 3).requires_grad_()
    (x * weight.cos()[[expert for row in ROUTED for expert in row]] * numbers(12, 3).exp()).sum().backward()
    found = run_ranks(4, dispatched)
    np.testing.assert_allclose(np.concatenate([rows for rows, _ in found]), x.grad, rtol=1e-14)
    np.testing.assert_allclose(np.concatenate([own for _, own in found]), weight.grad, rtol=1e-13)


def test_without_others_nothing_is_called() -> None:
    group = Mesh(Layout(1), 0).world
    plan = redistribution([[COLUMNS[1]], [VECTOR[0][0]]], [[(Box((1, 0), (2, 4), (0, 0)),)], [VECTOR[1][0]]])
    out = [torch.zeros(2, 4), torch.zeros(1)]
    x = local_part(COLUMNS[1], numbers(*SHAPE), (8, 4)).float()
    redistribute([x, torch.ones(5)], plan, group, out)
    assert torch.equal(out[0], x[1:3]) and not group.ledger.entries and not plan.communicates
