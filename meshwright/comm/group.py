"""The one door: every collective and every send of the project is a method of `Group`.

A group is one axis (or product of axes) of the layout as this rank sees it. It counts each call in the ledger and
notes it in the flight record. A group of one rank does nothing and records nothing. Underneath is torch.distributed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight import FlightRecord
from meshwright.comm.ledger import Ledger

# Registered operators may only take plain arguments, so they find their group by its name here. It is the only
# process-wide table of groups, and nothing else reads it.
_BY_NAME: WeakValueDictionary[str, Group] = WeakValueDictionary()
_NUMBERS = itertools.count()
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# torch 2.13 renames these two; torch 2.11 knows only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_named(name: str) -> Group:
    return _BY_NAME[name]


class Pending:
    """A call under way; `wait` ends it (on an accelerator: orders the stream after it)."""

    def __init__(self, group: Group, key: int, work: Any, tally: Any) -> None:
        self._group, self._key, self._work, self._tally = group, key, work, tally

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        seconds = self._group.flight.end(self._key)
        if self._tally is not None:
            self._tally.seconds += seconds


class _Done(Pending):
    def __init__(self) -> None:
        self._work = None


DONE = _Done()


class Group:
    """One group of ranks. `index` is this rank's place in it; peers are named by their place too."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        process_group: Any,
        ledger: Ledger,
        flight: FlightRecord,
        crosses_node: bool = False,
    ) -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank) if rank in self.ranks else -1
        self.size = len(self.ranks)
        self.process_group = process_group
        self.ledger = ledger
        self.flight = flight
        self.crosses_node = crosses_node
        self.name = f"{axis}/{next(_NUMBERS)}"
        self.label = f"{axis}:{self.ranks[0]}" if self.ranks else axis
        _BY_NAME[self.name] = self

    def __repr__(self) -> str:
        return f"Group({self.axis}, ranks={list(self.ranks)}, index={self.index})"

    @property
    def alone(self) -> bool:
        return self.size <= 1

    def _call(self, op: str, payload: int, launch: Callable[[], Any], count: bool = True) -> Pending:
        ledger = self.ledger
        tally = ledger.record(self.axis, op, payload, self.size, self.crosses_node) if count else None
        key = self.flight.begin(self.label, self.axis, op, ledger.current_phase, ledger.current_layer, payload)
        return Pending(self, key, launch(), tally)

    def all_reduce(self, x: Tensor, op: str = "sum", wait: bool = True) -> Pending:
        """In place."""
        if self.alone:
            return DONE
        return _finish(
            self._call("all_reduce", _bytes(x), lambda: dist.all_reduce(x, _OPS[op], self.process_group, async_op=True)),
            wait,
        )

    def all_gather(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        """`out` becomes the pieces `x` of all ranks along dim 0."""
        if self.alone:
            out.copy_(x)
            return DONE
        return _finish(
            self._call("all_gather", _bytes(out), lambda: _all_gather(out, x, self.process_group, async_op=True)), wait
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        """`out` becomes this rank's piece, along dim 0, of the sum of all `x`."""
        if self.alone:
            out.copy_(x)
            return DONE
        launch = lambda: _reduce_scatter(out, x, dist.ReduceOp.SUM, self.process_group, async_op=True)  # noqa: E731
        return _finish(self._call("reduce_scatter", _bytes(x), launch), wait)

    def broadcast(self, x: Tensor, source: int = 0, wait: bool = True) -> Pending:
        """In place, from the rank at place `source`. The ledger counts it on every rank that takes part."""
        if self.alone:
            return DONE
        launch = lambda: dist.broadcast(x, self.ranks[source], self.process_group, async_op=True)  # noqa: E731
        return _finish(self._call("broadcast", _bytes(x), launch), wait)

    def send(self, x: Tensor, to: int, tag: int = 0) -> Pending:
        assert x.is_contiguous()
        launch = lambda: dist.isend(x, self.ranks[to], self.process_group, tag)  # noqa: E731
        return self._call("send", _bytes(x), launch)

    def receive(self, x: Tensor, source: int, tag: int = 0) -> Pending:
        """Into `x`. The sender counts it."""
        launch = lambda: dist.irecv(x, self.ranks[source], self.process_group, tag)  # noqa: E731
        return self._call("receive", _bytes(x), launch, count=False)



def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _finish(pending: Pending, wait: bool) -> Pending:
    if wait:
        pending.wait()
        return DONE
    return pending
