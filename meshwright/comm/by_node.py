"""An all_to_all in two hops: first inside a node, then between nodes (`comm.algorithm.ep: hierarchical`).

Let a group have g ranks on each of N nodes. In the first hop a rank sends its neighbour j all rows for the j-th ranks
of all nodes. In the second hop it forwards the rows from its neighbours to the ranks with its own local index on the
other nodes. The result equals that of one all_to_all, bit for bit.

The same number of bytes travels between nodes, but each rank sends N - 1 messages instead of N g - g, each g times as
long. In exchange, (g-1)/g of all rows travel once more inside the node. The way back takes the hops in reverse order.
A rank therefore needs the same row counts of its neighbours in both directions: `middle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group, group_named
from meshwright.comm.registered import operator, shapes_of


class NodeGroups(NamedTuple):
    """The two subgroups of a rank: the group's ranks on its node, and those with its local index on all nodes."""

    inside: Group
    across: Group


def _reorder_blocks(x: Tensor, rows: Sequence[int], slow: int, fast: int) -> Tensor:
    """Return the blocks of x in the order [fast, slow]. In x they have the order [slow, fast] and `rows` rows each."""
    blocks = x.split(list(rows))
    return torch.cat([blocks[s * fast + f] for f in range(fast) for s in range(slow)])


def _reorder_counts(rows: Sequence[int], slow: int, fast: int) -> list[int]:
    """Return the row counts of blocks in the order [fast, slow], from their counts in the order [slow, fast]."""
    return [rows[s * fast + f] for f in range(fast) for s in range(slow)]


def _sums(rows: Sequence[int], width: int) -> list[int]:
    """Return the sum of each run of `width` numbers."""
    return [sum(rows[at : at + width]) for at in range(0, len(rows), width)]


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

    # Places in the whole group are ordered [node, local index]; `middle` is ordered [neighbour, node].
    if back:
        crossed = _hop(x.contiguous(), far, _sums(sends, here), _sums(_reorder_counts(middle, here, nodes), here))
        crossed = _reorder_blocks(crossed, _reorder_counts(middle, here, nodes), nodes, here)
        by_neighbour = _reorder_counts(receives, nodes, here)
        arrived = _hop(crossed, near, _sums(middle, nodes), _sums(by_neighbour, nodes))
        return _reorder_blocks(arrived, by_neighbour, here, nodes)
    first = _reorder_blocks(x, sends, nodes, here)
    passing = _hop(first, near, _sums(_reorder_counts(sends, nodes, here), nodes), _sums(middle, nodes))
    passing = _reorder_blocks(passing, middle, here, nodes)
    return _hop(passing, far, _sums(_reorder_counts(middle, here, nodes), here), _sums(receives, here))


@shapes_of(_exchange_by_node)
def _(
    x: Tensor, inside: str, across: str, sends: list[int], receives: list[int], middle: list[int], back: bool
) -> Tensor:
    return x.new_empty((sum(receives), *x.shape[1:]))


class _Exchange(torch.autograd.Function):
    """The exchange with its backward: a row's gradient returns to the sender of the row, by the hops in reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        inside, across, sends, receives, middle, back = settings
        # Backward is the same exchange with senders and receivers swapped.
        ctx.settings = (inside, across, receives, sends, middle, not back)
        out: Tensor = _exchange_by_node(x, *settings)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_by_node(grad, *ctx.settings), *(None,) * 6


def exchange_by_node(
    x: Tensor, inside: str, across: str, sends: list[int], receives: list[int], middle: list[int], back: bool
) -> Tensor:
    """Send `sends[n]` rows of x to place n of the group, and receive `receives[n]` rows from there.

    `middle`: the counts of the rows that pass through this rank, ordered [neighbour, node]: those between a neighbour
    and the rank with this rank's local index on that node. `back`: the hop between nodes comes first.
    """
    out: Tensor = _Exchange.apply(x, inside, across, sends, receives, middle, back)  # type: ignore[no-untyped-call]
    return out


def exchange_evenly(x: Tensor, groups: NodeGroups) -> tuple[Tensor, Tensor]:
    """Exchange x, [ranks, ...]: send x[n] to place n of the group. Return (the entries that arrive, by sender; the
    entries that passed through this rank, [neighbour, node, ...])."""
    here, nodes = groups.inside.size, groups.across.size
    first = x.view(nodes, here, *x.shape[1:]).transpose(0, 1).contiguous()
    passed, arrived = torch.empty_like(first), torch.empty_like(x)
    groups.inside.all_to_all(passed, first)
    groups.across.all_to_all(arrived, passed.transpose(0, 1).contiguous().view(x.shape))
    return arrived, passed
