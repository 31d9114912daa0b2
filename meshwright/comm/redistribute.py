"""Execute a planned redistribution: one differentiable all_to_all, counted by the group's ledger.

Packing before the call and unpacking after it are plain indexing, so autograd derives the backward by itself. The
gradient of each received element goes back to its sender, by the same all_to_all with its counts swapped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ops import all_to_all
from meshwright.spec.layout.redistribute import Redistribution


def redistribute(xs: Sequence[Tensor], plan: Redistribution, group: Group, outs: Sequence[Tensor]) -> None:
    """Fill the new boxes in this rank's `outs` from all ranks' `xs`. Elements that no box covers stay unchanged.

    `xs` and `outs` have one local tensor per tensor of the plan. In a layer, every rank's loss must depend on its
    `outs`, because backward is a collective too. If several ranks hold a box, only the rank that sent it receives the
    gradient, so the gradient is a partial sum over the holders.
    """
    assert plan.ranks == group.size, f"a plan for {plan.ranks} ranks on a group of {group.size}"
    assert len({x.dtype for x in (*xs, *outs)}) == 1, "one call moves one dtype"
    me = group.index
    for move in plan.kept(me):
        outs[move.tensor][move.slices(move.target_start)] = xs[move.tensor][move.slices(move.source_start)]
    if not plan.communicates:  # The plan is the same on every rank, so all ranks skip the call together.
        return

    # The empty slices tie the call to this rank's graph even if it sends or receives nothing. Without them autograd
    # would omit the call from its backward, and the other ranks would wait for it.
    sent = [xs[move.tensor][move.slices(move.source_start)].reshape(-1) for move in plan.sends(me)]
    wire = torch.cat([*sent, xs[0].reshape(-1)[:0]])
    arrived = all_to_all(wire, group.name, plan.sent_counts(me), plan.received_counts(me))
    received = plan.receives(me)
    *chunks, empty = arrived.split([*(move.numel for move in received), 0])
    for move, chunk in zip(received, chunks, strict=True):
        outs[move.tensor][move.slices(move.target_start)] = chunk.view(move.shape)
    outs[0].unsqueeze(0)[:0] = empty.view(0, *outs[0].shape)
