"""The one door: every collective and every send of the project is a method of `Group`.

A group is one axis (or product of axes) of the layout as this rank sees it. It counts each call in the ledger and
notes it in the flight record. A group of one rank does nothing and records nothing. Underneath is torch.distributed.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.emulate import EmulatedLinks
from meshwright.comm.flight import FlightRecord, RecordedCall
from meshwright.comm.ledger import Ledger, wire_bytes
from meshwright.device import accelerator

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


class CommError(RuntimeError):
    """A collective or transfer that torch gave up; the message is one sentence that names it."""


# Words in the back ends' messages when the other end of a connection is gone.
_GONE = ("peer", "connection", "socket", "remote", "refused", "reset", "broken pipe", "timed out", "timeout", "aborted")


class Pending:
    """A call that is under way. `wait` waits for it (on an accelerator, it makes the stream wait and not the host)."""

    def __init__(self, group: Group, call: RecordedCall, work: Any, tally: Any, device: torch.device) -> None:
        self._group, self._call, self._work, self._tally, self._device = group, call, work, tally, device

    def wait(self) -> None:
        if self._work is None:
            return
        call, flight = self._call, self._group.flight
        work, self._work = self._work, None
        waits = self._group.ledger.stream_waits
        begun = None if waits is None else waits.begin_wait()
        call.since = begin = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._group._failed(call, error) from error
        if waits is not None:
            waits.end_wait(self._group.axis, begun)
        if accelerator(self._device) is not None:
            event = flight.spare_events.pop() if flight.spare_events else torch.Event(self._device)
            event.record()
            call.event = event
        ledger, waited = self._group.ledger, time.monotonic() - begin
        ledger.waited[self._group.axis] += waited
        ledger.waited_in[ledger.current_phase] += waited
        seconds = flight.end(call)
        if self._tally is not None:
            self._tally.seconds += seconds


class _Done(Pending):
    def __init__(self) -> None:
        self._work = None


DONE = _Done()


@dataclass(eq=False)
class Group:
    """One group of ranks. `index` is this rank's place in it; peers are named by their place too."""

    axis: str
    ranks: tuple[int, ...]
    rank: int
    process_group: Any
    ledger: Ledger
    flight: FlightRecord
    crosses_node: bool = False
    links: EmulatedLinks | None = None  # where slow links are emulated

    def __post_init__(self) -> None:
        self.index = self.ranks.index(self.rank) if self.rank in self.ranks else -1
        self.size = len(self.ranks)
        self.alone = self.size <= 1
        self.name = f"{self.axis}/{next(_NUMBERS)}"
        self.label = f"{self.axis}:{self.ranks[0]}" if self.ranks else self.axis
        _BY_NAME[self.name] = self

    def _call(
        self, op: str, whole: Tensor, launch: Callable[[], Any], wait: bool = False, peer: int | None = None,
        wire: int | None = None, times: int = 1,
    ) -> Pending:  # fmt: skip
        """Counts, notes and launches a call whose payload is `whole`. With a `peer` (its rank) it is one end of a
        transfer: the flight record counts those by direction, so that both ends give a message the same number.
        `wire`: the bytes that this rank sends, where the ledger can't derive them from the payload. `times`: so many
        tensors of that size are one call."""
        ledger, payload = self.ledger, times * whole.nbytes
        tally = None if op == "receive" else ledger.record(self.axis, op, payload, self.size, self.crosses_node, wire)
        label, ranks = self.label, self.ranks
        if peer is not None:
            ranks = (self.rank, peer) if op == "send" else (peer, self.rank)
            label = f"{label} {ranks[0]}>{ranks[1]}"
        phase, layer = ledger.current_phase, ledger.current_layer
        call = self.flight.begin(RecordedCall(label, self.axis, op, phase, layer, payload, ranks, peer))
        try:
            if self.links is None:
                work = launch()
            else:
                sent = wire_bytes("send" if peer is not None else op, payload, self.size) if wire is None else wire
                work = self.links.begin(op, sent, self.ranks, peer, launch)
        except RuntimeError as error:
            raise self._failed(call, error) from error
        call.since = None
        pending = Pending(self, call, work, tally, whole.device)
        if wait:
            pending.wait()
        return pending

    def _failed(self, call: RecordedCall, error: RuntimeError) -> CommError:
        """Returns the error for a call that torch gave up, and ends its record: the watchdog need not wait for it."""
        self.flight.end(call)
        # The reason alone, without the position in torch's source before it and the advice after it.
        text = re.sub(r"^\[\S*\]\s*", "", str(error).strip()) or type(error).__name__
        reason = text.splitlines()[0].split(". ")[0][:200]
        gone = any(word in reason.lower() for word in _GONE)
        guess = "another rank has probably stopped" if gone else "torch refused it"
        where = f"of ranks {list_ranks(self.ranks)} failed on rank {self.rank}"
        return CommError(f"{call.describe()} {where}: {guess} ({reason})")

    def all_reduce(self, x: Tensor, op: str = "sum", wait: bool = True) -> Pending:
        """Reduces `x` in place."""
        if self.alone:
            return DONE
        return self._call(
            "all_reduce", x, lambda: dist.all_reduce(x, _OPS[op], self.process_group, async_op=True), wait
        )

    def agreed(self, value: float, device: torch.device) -> float:
        """Returns the largest of the ranks' numbers on every rank. For `float(condition)` it tells whether the
        condition holds on any rank, so that all ranks decide alike."""
        number = torch.tensor([value], dtype=torch.float64, device=device)
        self.all_reduce(number, "max")
        return float(number.item())

    def told(self, text: str, device: torch.device) -> str:
        """Returns the first rank's text on every rank; what the others give is not read."""
        own = list(text.encode()) if self.index == 0 else []
        size = int(self.agreed(float(len(own)), device))
        letters = torch.tensor(own or [0] * size, dtype=torch.int32, device=device)
        if size:
            self.all_reduce(letters)
        return bytes(letters.tolist()).decode()

    def unlike_first(self, number: int, device: torch.device) -> list[int]:
        """Returns which ranks, by their index here, have another number than the first one."""
        everyone = torch.empty(self.size, dtype=torch.int64, device=device)
        self.all_gather(everyone, torch.tensor([number], device=device))
        first, *others = everyone.tolist()
        return [index for index, found in enumerate(others, 1) if found != first]

    def all_gather(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        """Fills `out` with the pieces `x` of all ranks along dim 0."""
        if self.alone:
            out.copy_(x)
            return DONE
        return self._call("all_gather", out, lambda: _all_gather(out, x, self.process_group, async_op=True), wait)

    def reduce_scatter(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        """Fills `out` with this rank's piece, along dim 0, of the sum of all `x`."""
        if self.alone:
            out.copy_(x)
            return DONE
        launch = lambda: _reduce_scatter(out, x, dist.ReduceOp.SUM, self.process_group, async_op=True)  # noqa: E731
        return self._call("reduce_scatter", x, launch, wait)

    def all_to_all(
        self, out: Tensor, x: Tensor, wait: bool = True, sends: list[int] | None = None,
        receives: list[int] | None = None,
    ) -> Pending:  # fmt: skip
        """Sends the n-th piece of `x` along dim 0 to place n, and fills `out` with the pieces that arrive, ordered by
        sender. The pieces are equal unless `sends` and `receives` give their rows. Call it even without rows."""
        if self.alone:
            out.copy_(x)
            return DONE
        launch = lambda: dist.all_to_all_single(out, x, receives, sends, self.process_group, async_op=True)  # noqa: E731
        wire = None if sends is None else x.nbytes - x[: sends[self.index]].nbytes
        return self._call("all_to_all", x, launch, wait, wire=wire)

    def broadcast(self, x: Tensor, source: int = 0, wait: bool = True) -> Pending:
        """Fills `x` from the rank at place `source`. The ledger counts it on every rank that takes part."""
        if self.alone:
            return DONE
        launch = lambda: dist.broadcast(x, self.ranks[source], self.process_group, async_op=True)  # noqa: E731
        return self._call("broadcast", x, launch, wait)

    def send(self, x: Tensor, to: int) -> Pending:
        assert x.is_contiguous()
        peer = self.ranks[to]
        return self._call("send", x, lambda: dist.isend(x, peer, self.process_group), peer=peer)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Receives into `x`. Only the sender's ledger counts the transfer."""
        peer = self.ranks[source]
        return self._call("receive", x, lambda: dist.irecv(x, peer, self.process_group), peer=peer)

    def shift(self, x: Tensor, by: int, out: Tensor | None = None) -> Shift:
        """Begins to send `x` to the rank `by` places on, round the group, and to receive as much from the one as far
        back, into `out` if that is given."""
        out = torch.empty_like(x) if out is None else out
        return Shift(self.shifts([(x, by, out)]), x, out)

    def shifts(self, moves: Sequence[tuple[Tensor, int, Tensor]]) -> Pending:
        """Begins several shifts of equal size, each of them (what is sent, places on, where as much arrives), as one
        call, so that no order of the ranks can lock and the host launches once."""
        group, ranks, at, size = self.process_group, self.ranks, self.index, self.size
        first = moves[0][0]

        def launch() -> _All:
            if first.is_meta:  # a dry run has nothing to send
                return _All([], moves)
            ops = []
            for x, by, out in moves:
                ops += [dist.P2POp(dist.isend, x, ranks[(at + by) % size], group),
                        dist.P2POp(dist.irecv, out, ranks[(at - by) % size], group)]  # fmt: skip
            return _All(dist.batch_isend_irecv(ops), moves)

        # A call of all, of which none may be missing.
        return self._call("send", first, launch, times=len(moves))


class _All:
    """Several calls of torch's as one. What is sent is kept as long."""

    def __init__(self, works: list[Any], moves: Any) -> None:
        self.works, self.moves = works, moves

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Shift(NamedTuple):
    """A shift under way: what is sent, which must not change before it has arrived, and what is received."""

    pending: Pending
    sent: Tensor
    received: Tensor

    def arrived(self) -> Tensor:
        self.pending.wait()
        return self.received


def list_ranks(ranks: Sequence[int], most: int = 16) -> str:
    """Returns e.g. `[0, 1, 5]`, shortened where there are many ranks."""
    shown = ", ".join(map(str, ranks[:most]))
    return f"[{shown}]" if len(ranks) <= most else f"[{shown} and {len(ranks) - most} more]"
