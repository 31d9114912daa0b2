"""A world in which only one rank exists: torch's fake process group makes its collectives free, except for the memory
that they fill."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.group import Pending
from meshwright.comm.mesh import Mesh


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Initialises torch.distributed as rank `rank` of `world`, without the other ranks."""
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it permanently with one that names the rank
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def stand_in(mesh: Mesh) -> None:
    """Fills what would come from other ranks with plausible numbers, since uninitialised memory may hold anything:
    small noise from a neighbouring stage, this rank's own term of a sum. (torch's fake group already fills gathered
    pieces with copies of this rank's own, and leaves a sum in place at this rank's own term.)"""
    for group in mesh.groups.values():
        if not group.alone:
            _fill(group)


def _fill(group: Any) -> None:
    """Wraps the calls that leave their output unwritten: it is filled after the call was made and counted as usual."""
    take, scatter = group.receive, group.reduce_scatter

    def receive(x: Tensor, source: int) -> Pending:
        pending: Pending = take(x, source)
        x.normal_(0.0, 1e-2)
        return pending

    def reduce_scatter(out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        pending: Pending = scatter(out, x, wait)
        out.copy_(x[group.index * out.shape[0] :][: out.shape[0]])
        return pending

    group.receive, group.reduce_scatter = receive, reduce_scatter
