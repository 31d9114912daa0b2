"""One rank of a world whose other ranks are not there: its share of the work, with communication that costs nothing but
the memory it fills. For timing a layout's compute on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.group import DONE, Pending
from meshwright.comm.mesh import Mesh


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def stand_in(mesh: Mesh) -> None:
    """Gives what would come from others plausible numbers, since memory as it is may hold anything: small noise from a
    neighbouring stage, this rank's own part of a sum over tp."""
    tp: Any = mesh.tp
    pp: Any = mesh.pp
    count = tp.reduce_scatter

    def receive(x: Tensor, source: int, tag: int = 0) -> Pending:
        x.normal_(0.0, 1e-2)
        return DONE

    def reduce_scatter(out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        pending: Pending = count(out, x, wait)
        out.copy_(x[: out.shape[0]])
        return pending

    pp.receive = receive
    if not tp.alone:
        tp.reduce_scatter = reduce_scatter
