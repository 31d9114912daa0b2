"""One rank of a world whose other ranks are not there: its share of the work, with communication that costs nothing but
the memory it fills. For running a layout's rank on one device, or on none (`dry`)."""

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
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # which torch makes name the rank, for good
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def stand_in(mesh: Mesh) -> None:
    """Gives what would come from others plausible numbers, since memory as it is may hold anything: small noise from a
    neighbouring stage, this rank's own part of a sum. (Of gathered pieces torch's fake group makes copies of our own;
    a sum in place is then this rank's own term.)"""
    for group in mesh.groups.values():
        if not group.alone:
            _fill(group)


def _fill(group: Any) -> None:
    """The calls are made and counted as ever; what they leave open is filled."""
    take, scatter = group.receive, group.reduce_scatter

    def receive(x: Tensor, source: int, tag: int = 0) -> Pending:
        pending: Pending = take(x, source, tag)
        x.normal_(0.0, 1e-2)
        return pending

    def reduce_scatter(out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        pending: Pending = scatter(out, x, wait)
        out.copy_(x[group.index * out.shape[0] :][: out.shape[0]])
        return pending

    group.receive, group.reduce_scatter = receive, reduce_scatter
