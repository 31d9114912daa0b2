"""One rank of a world whose other ranks are not there: its share of the work, with communication that costs nothing but
the memory it fills. For timing a layout's compute on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.group import DONE, Group, Pending


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


def receive_noise(group: Group) -> None:
    """What would come from a neighbour becomes small random numbers: memory as it is may hold anything."""

    def receive(x: Tensor, source: int, tag: int = 0) -> Pending:
        x.normal_(0.0, 1e-2)
        return DONE

    changed: Any = group
    changed.receive = receive
