"""An all_to_all in two hops: first inside a node, then between nodes (`comm.algorithm.ep: hierarchical`).

With g ranks of a group on each of N nodes, a rank gives its neighbour j all rows for the j-th ranks of all nodes, and
then sends the rows that its neighbours gave it to the ranks of its own number on the other nodes. The rows arrive as
they do by one all_to_all, to the bit. Between nodes as many bytes travel, in N - 1 messages of a rank instead of
N g - g, each g times as long; inside the node (g-1)/g of all rows travel once more. Rows that go back take the hops in
reverse, so what a rank must know of its neighbours' rows is the same both ways: `middle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group, group_named
from meshwright.comm.registered import operator, shapes_of


class ByNode(NamedTuple):
    """The ranks of a group on one's own node, and those of one's own number on all nodes."""

    inside: Group
    across: Group


def _reordered(x: Tensor, rows: Sequence[int], slow: int, fast: int) -> Tensor:
    """Returns x, pieces of so many rows in the order [slow, fast], in the order [fast, slow]."""
    pieces = x.split(list(rows))
    return torch.cat([pieces[s * fast + f] for f in range(fast) for s in range(slow)])


def _turned(rows: Sequence[int], slow: int, fast: int) -> list[int]:
    return [rows[s * fast + f] for f in range(fast) for s in range(slow)]


def _sums(rows: Sequence[int], each: int) -> list[int]:
    return [sum(rows[at : at + each]) for at in range(0, len(rows), each)]


def _hop(x: Tensor, group: Group, sends: list[int], receives: list[int]) -> Tensor:
    out = x.new_empty((sum(receives), *x.shape[1:]))
    group.all_to_all(out, x, sends=sends, receives=receives)
    return out


@operator("meshwright::exchange_by_node")
def _exchange_by_node(
    x: Tensor, inside: str, across: str, sends: list[int], receives: list[int], middle: list[int], back: bool
) -> Tensor:
    near, far = group_named(inside), group_named(across)
    here, nodes = near.size, far.size
    if back:
        crossed = _hop(x.contiguous(), far, _sums(sends, here), _sums(_turned(middle, here, nodes), here))
        crossed = _reordered(crossed, _turned(middle, here, nodes), nodes, here)
        given = _turned(receives, nodes, here)
        return _reordered(_hop(crossed, near, _sums(middle, nodes), _sums(given, nodes)), given, here, nodes)
    first = _reordered(x, sends, nodes, here)
    passing = _hop(first, near, _sums(_turned(sends, nodes, here), nodes), _sums(middle, nodes))
    passing = _reordered(passing, middle, here, nodes)
    return _hop(passing, far, _sums(_turned(middle, here, nodes), here), _sums(receives, here))


@shapes_of(_exchange_by_node)
def _(
    x: Tensor, inside: str, across: str, sends: list[int], receives: list[int], middle: list[int], back: bool
) -> Tensor:
    return x.new_empty((sum(receives), *x.shape[1:]))


class _Exchange(torch.autograd.Function):
    """The gradient of a row goes back to the rank that the row came from, by the way on which it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        inside, across, sends, receives, middle, back = settings
        ctx.settings = (inside, across, receives, sends, middle, not back)
        out: Tensor = _exchange_by_node(x, *settings)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_by_node(grad, *ctx.settings), *(None,) * 6


def exchange_by_node(
    x: Tensor, inside: str, across: str, sends: list[int], receives: list[int], middle: list[int], back: bool
) -> Tensor:
    """Sends `sends[n]` rows of x to place n of the group, and receives `receives[n]` rows from there. `middle`: of the
    rows that pass through this rank, by [neighbour, node], those between this neighbour and this node's rank of one's
    own number. `back`: the rows go from nodes to neighbours."""
    out: Tensor = _Exchange.apply(x, inside, across, sends, receives, middle, back)  # type: ignore[no-untyped-call]
    return out


def exchange_evenly(x: Tensor, groups: ByNode) -> tuple[Tensor, Tensor]:
    """Sends the n-th of x's equal pieces [ranks, ...] to place n of the group. Returns what arrives, by sender, and
    what passed through this rank, [neighbour, node, ...]."""
    here, nodes = groups.inside.size, groups.across.size
    first = x.view(nodes, here, *x.shape[1:]).transpose(0, 1).contiguous()
    passed, arrived = torch.empty_like(first), torch.empty_like(x)
    groups.inside.all_to_all(passed, first)
    groups.across.all_to_all(arrived, passed.transpose(0, 1).contiguous().view(x.shape))
    return arrived, passed
