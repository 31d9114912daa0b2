"""Planned redistributions, run: one all_to_all each, through a group's ledger, and differentiable.

Packing before the call and unpacking after it are plain indexing, so autograd runs the plan backwards by itself: the
gradient of what arrived goes back to the rank that sent it, by the same all_to_all with its counts exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ops import all_to_all
from meshwright.spec.layout.redistribute import Redistribution


def redistribute(xs: Sequence[Tensor], plan: Redistribution, group: Group, outs: Sequence[Tensor]) -> None:
    """Fills the new boxes in this rank's `outs` from all ranks' `xs`, one local tensor per tensor of the plan; what no
    box covers is left as it is.

    In a layer, every rank's loss must depend on its `outs`: backward is a call of all ranks too. Where several ranks
    hold a box, the gradient of what was sent reaches its sender alone, so it is a partial sum over the holders.
    """
    assert plan.ranks == group.size, f"a plan for {plan.ranks} ranks on a group of {group.size}"
    assert len({x.dtype for x in (*xs, *outs)}) == 1, "one call moves one dtype"
    me = group.index
    for move in plan.kept(me):
        outs[move.tensor][move.slices(move.target_start)] = xs[move.tensor][move.slices(move.source_start)]
    if not plan.communicates:  # the plan is the same on every rank, so they all leave the call out
        return
    # The empty pieces tie the call to this rank's graph even where it sends or receives nothing: without them autograd
    # would leave the call out of its backward, and the other ranks would wait for it.
    sent = [xs[move.tensor][move.slices(move.source_start)].reshape(-1) for move in plan.sends(me)]
    wire = torch.cat([*sent, xs[0].reshape(-1)[:0]])
    arrived = all_to_all(wire, group.name, plan.sent_counts(me), plan.received_counts(me))
    received = plan.receives(me)
    *pieces, nothing = arrived.split([*(move.numel for move in received), 0])
    for move, piece in zip(received, pieces, strict=True):
        outs[move.tensor][move.slices(move.target_start)] = piece.view(move.shape)
    outs[0].unsqueeze(0)[:0] = nothing.view(0, *outs[0].shape)
