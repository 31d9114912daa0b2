"""The single entry point to communication: every collective and every send of the project is a method of `Group`.

A group is one axis (or product of axes) of the layout as this rank sees it. It counts each call in the ledger and
records it in the flight record, then calls torch.distributed. A group of one rank does nothing and records nothing.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight import FlightRecord, RecordedCall
from meshwright.device import accelerator
from meshwright.spec.traffic.ledger import CallTotals, Ledger, wire_bytes

# Registered operators may only take plain arguments, so they look up their group by its name here. It is the only
# process-wide table of groups, and nothing else reads it.
_BY_NAME: WeakValueDictionary[str, Group] = WeakValueDictionary()
_NUMBERS = itertools.count()
# The flight record's names of calls that consist of several transfers.
SHIFT, EXCHANGE = "shift", "exchange"
# The op as which the ledger counts them.
_COUNTED_AS = {SHIFT: "send", EXCHANGE: "send"}
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

# torch 2.13 renames these two; torch 2.11 knows only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_named(name: str) -> Group:
    return _BY_NAME[name]


class CommError(RuntimeError):
    """A collective or transfer that torch gave up. The message is one sentence that names it.

    `lost`: it failed because another rank, or the connection to it, is gone. Otherwise torch refused the call, which is
    a mistake in the program.
    """

    def __init__(self, text: str, lost: bool = True) -> None:
        super().__init__(text)
        self.lost = lost

    # An exception is pickled with its text alone by default, which would lose the flag.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.lost)


# Words in the back ends' messages when the other end of a connection is gone.
_GONE = (
    "peer", "connection", "socket", "remote", "refused", "reset", "broken pipe", "timed out", "timeout", "aborted",
    "closed", "unhandled system error", "remote process exited",
)  # fmt: skip


class Pending:
    """A call in flight. `wait` waits for its end; on an accelerator it makes the current stream wait, not the host."""

    __slots__ = ("_call", "_device", "_group", "_tally", "_work")

    def __init__(self, group: Group, call: RecordedCall, work: Any, tally: Any, device: torch.device) -> None:
        self._group, self._call, self._work, self._tally, self._device = group, call, work, tally, device

    def wait(self) -> None:
        if self._work is None:
            return
        call, work, self._work = self._call, self._work, None
        begun = self._group._begin_wait()
        call.since = begin = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._group._error_of(call, error) from error
        self._group._end(call, begin, self._tally, self._device, begun)


class _Done(Pending):
    """A call that has ended already."""

    __slots__ = ()

    def __init__(self) -> None:
        self._work = None


DONE = _Done()


class SlowLinks(Protocol):
    """Slow links that are emulated by delays."""

    def begin(self, op: str, wire: int, ranks: Sequence[int], peer: int | None, launch: Callable[[], Any]) -> Any:
        """Begin a call that sends `wire` bytes, among `ranks` or to `peer`. Return an object with a `wait` method."""


@dataclass(eq=False)
class Group:
    """One group of ranks. `index` is the place of this rank in it. The methods also name peers by their places."""

    axis: str
    ranks: tuple[int, ...]
    rank: int
    process_group: Any
    ledger: Ledger
    flight: FlightRecord
    crosses_node: bool = False
    links: SlowLinks | None = None  # Set if slow links are emulated.

    def __post_init__(self) -> None:
        self.index = self.ranks.index(self.rank) if self.rank in self.ranks else -1
        self.size = len(self.ranks)
        self.alone = self.size <= 1
        self.name = f"{self.axis}/{next(_NUMBERS)}"
        self.label = f"{self.axis}:{self.ranks[0]}" if self.ranks else self.axis
        self._entries: Any = None  # The ledger's entries that `_totals` caches.
        self._totals: dict[tuple[str, str, int | None], CallTotals] = {}
        self._directions: dict[tuple[str, int], tuple[str, tuple[int, int]]] = {}
        _BY_NAME[self.name] = self

    def _call(
        self, op: str, whole: Sequence[Tensor], launch: Callable[[bool], Any], wait: bool = False,
        peer: int | None = None, wire: int | None = None,
    ) -> Pending:  # fmt: skip
        """Count, record and launch a call whose payload is `whole`. `launch(asynchronous)` makes the call in torch.

        `peer`: the other rank, if the call is one end of a transfer. The flight record numbers transfers by direction,
        so that both ends give a message the same number. `wait`: the program waits at once, so the call is synchronous.
        torch then uses the compute stream, without a separate stream and the two events between them. `wire`: the bytes
        that this rank sends, if the ledger can't derive them from the payload.
        """
        payload = sum(x.nbytes for x in whole)
        counted = _COUNTED_AS.get(op, op)
        tally = None if op == "receive" else self._count(counted, payload, wire)
        label, ranks = (self.label, self.ranks) if peer is None else self._direction(op, peer)
        ledger, links = self.ledger, self.links
        call = self.flight.begin(RecordedCall(
            label, self.axis, op, ledger.current_phase, ledger.current_layer, payload, ranks, peer
        ))  # fmt: skip
        at_once = wait and links is None
        begun = self._begin_wait() if at_once else None
        try:
            if links is None or op == EXCHANGE:  # An exchange delays its two ends itself.
                work = launch(not at_once)
            else:
                kind = "send" if peer is not None else counted
                sent = wire_bytes(kind, payload, self.size) if wire is None else wire
                work = links.begin(counted, sent, self.ranks, peer, partial(launch, True))
        except RuntimeError as error:
            raise self._error_of(call, error) from error
        if at_once:
            self._end(call, call.started, tally, whole[0].device, begun)
            return DONE
        # The launch is over. From here on the call only holds up the program while it waits for the call.
        call.since = None
        pending = Pending(self, call, work, tally, whole[0].device)
        if wait:
            pending.wait()
        return pending

    def _count(self, op: str, payload: int, wire: int | None) -> CallTotals:
        """Count a call in the ledger. The totals of each phase, op and layer are looked up once until the next `clear`
        of the ledger, because building the ledger's key takes longer than everything else here."""
        ledger = self.ledger
        if ledger.entries is not self._entries:
            self._entries, self._totals = ledger.entries, {}
        key = (ledger.current_phase, op, ledger.current_layer)
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = ledger.totals_of(self.axis, op, self.crosses_node)
        totals.count(payload, wire_bytes(op, payload, self.size) if wire is None else wire)
        return totals

    def _direction(self, op: str, peer: int) -> tuple[str, tuple[int, int]]:
        """Return the flight record's name for the messages to or from a rank, and both ranks, the sender first."""
        direction = self._directions.get((op, peer))
        if direction is None:
            ranks = (self.rank, peer) if op == "send" else (peer, self.rank)
            direction = self._directions[op, peer] = f"{self.label} {ranks[0]}>{ranks[1]}", ranks
        return direction

    def _begin_wait(self) -> Any:
        """Mark where the device's stream begins to wait for a call, in steps that time these waits."""
        waits = self.ledger.stream_waits
        return None if waits is None else waits.begin_wait()

    def _end(
        self, call: RecordedCall, begin: float, tally: CallTotals | None, device: torch.device, begun: Any
    ) -> None:
        """Record that a call is done or, on an accelerator, that the stream waits for it. `begin`: the time when the
        host began to wait. `begun`: the result of `_begin_wait`."""
        flight, ledger = self.flight, self.ledger
        if begun is not None and ledger.stream_waits is not None:
            ledger.stream_waits.end_wait(self.axis, begun)
        if accelerator(device) is not None:
            event = flight.spare_events.pop() if flight.spare_events else torch.Event(device)
            event.record()
            call.event = event
        seconds = flight.end(call)
        waited = call.started + seconds - begin
        ledger.waited[self.axis] += waited
        ledger.waited_in[ledger.current_phase] += waited
        if tally is not None:
            tally.seconds += seconds

    def _error_of(self, call: RecordedCall, error: RuntimeError) -> CommError:
        """Return the error for a call that torch gave up, and end its record so that the watchdog ignores it."""
        self.flight.end(call)
        # Keep only the reason: remove the position in torch's source before it and the advice after it.
        text = re.sub(r"^\[\S*\]\s*", "", str(error).strip()) or type(error).__name__
        reason = text.splitlines()[0].split(". ")[0][:200]
        gone = any(word in reason.lower() for word in _GONE)
        guess = "another rank has probably stopped" if gone else "torch refused it"
        where = f"of ranks {list_ranks(self.ranks)} failed on rank {self.rank}"
        return CommError(f"{call.describe()} {where}: {guess} ({reason})", lost=gone)

    def all_reduce(self, x: Tensor, op: str = "sum", wait: bool = True) -> Pending:
        """Reduce `x` in place."""
        if self.alone:
            return DONE
        launch = lambda later: dist.all_reduce(x, _OPS[op], self.process_group, async_op=later)  # noqa: E731
        return self._call("all_reduce", (x,), launch, wait)

    def max_over_ranks(self, value: float, device: torch.device) -> float:
        """Return the largest of the ranks' numbers on every rank. With `float(condition)` it is 1.0 if the condition
        holds on any rank, so that all ranks decide alike."""
        number = torch.tensor([value], dtype=torch.float64, device=device)
        self.all_reduce(number, "max")
        return float(number.item())

    def broadcast_text(self, text: str, device: torch.device) -> str:
        """Return the first rank's text on every rank. The other ranks' `text` is ignored."""
        own = list(text.encode()) if self.index == 0 else []
        size = int(self.max_over_ranks(float(len(own)), device))
        letters = torch.tensor(own or [0] * size, dtype=torch.int32, device=device)
        if size:
            # All other ranks add zeros, so the sum is the first rank's text.
            self.all_reduce(letters)
        return bytes(letters.tolist()).decode()

    def unlike_first(self, number: int, device: torch.device) -> list[int]:
        """Return the places of the ranks whose number differs from the first rank's."""
        everyone = torch.empty(self.size, dtype=torch.int64, device=device)
        self.all_gather(everyone, torch.tensor([number], device=device))
        first, *others = everyone.tolist()
        return [index for index, other in enumerate(others, 1) if other != first]

    def all_gather(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        """Fill `out` with the shards `x` of all ranks, concatenated along dim 0."""
        if self.alone:
            out.copy_(x)
            return DONE
        launch = lambda later: _all_gather(out, x, self.process_group, async_op=later)  # noqa: E731
        return self._call("all_gather", (out,), launch, wait)

    def reduce_scatter(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        """Fill `out` with this rank's shard, along dim 0, of the sum of all ranks' `x`."""
        if self.alone:
            out.copy_(x)
            return DONE
        launch = lambda later: _reduce_scatter(out, x, dist.ReduceOp.SUM, self.process_group, async_op=later)  # noqa: E731
        return self._call("reduce_scatter", (x,), launch, wait)

    def all_to_all(
        self, out: Tensor, x: Tensor, wait: bool = True, sends: list[int] | None = None,
        receives: list[int] | None = None,
    ) -> Pending:  # fmt: skip
        """Send the n-th chunk of `x` along dim 0 to place n, and fill `out` with the chunks that arrive, ordered by
        sender. The chunks have equal size unless `sends` and `receives` give their rows. Every rank must call this,
        even without rows."""
        if self.alone:
            out.copy_(x)
            return DONE
        group = self.process_group
        launch = lambda later: dist.all_to_all_single(out, x, receives, sends, group, async_op=later)  # noqa: E731
        wire = None if sends is None else x.nbytes - x[: sends[self.index]].nbytes
        return self._call("all_to_all", (x,), launch, wait, wire=wire)

    def broadcast(self, x: Tensor, source: int = 0, wait: bool = True) -> Pending:
        """Fill `x` from the rank at place `source`. The ledger counts the call on every rank of the group."""
        if self.alone:
            return DONE
        launch = lambda later: dist.broadcast(x, self.ranks[source], self.process_group, async_op=later)  # noqa: E731
        return self._call("broadcast", (x,), launch, wait)

    def send(self, x: Tensor, to: int) -> Pending:
        assert x.is_contiguous()
        peer = self.ranks[to]
        return self._call("send", (x,), lambda later: dist.isend(x, peer, self.process_group), peer=peer)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Receive into `x`. Only the sender's ledger counts the transfer."""
        peer = self.ranks[source]
        return self._call("receive", (x,), lambda later: dist.irecv(x, peer, self.process_group), peer=peer)

    def shift(self, x: Tensor, by: int, out: Tensor | None = None) -> Shift:
        """Begin to send `x` to the rank `by` places ahead, cyclically, and to receive as much from the rank `by` places
        behind. `out`: the tensor to receive into; None allocates one."""
        out = torch.empty_like(x) if out is None else out
        return Shift(self.shifts([(x, by, out)]), x, out)

    def shifts(self, moves: Sequence[tuple[Tensor, int, Tensor]]) -> Pending:
        """Begin several shifts of equal size as one call. Each is (tensor to send, places ahead, tensor to receive).

        As one batch they can't deadlock, whatever the order of the ranks, and the host launches once.
        """
        group, ranks, at, size = self.process_group, self.ranks, self.index, self.size
        first = moves[0][0]

        def launch(later: bool) -> _All:
            if first.is_meta:  # A dry run has no data to send.
                return _All([], moves)
            ops = []
            for x, by, out in moves:
                ops += [dist.P2POp(dist.isend, x, ranks[(at + by) % size], group),
                        dist.P2POp(dist.irecv, out, ranks[(at - by) % size], group)]  # fmt: skip
            return _All(dist.batch_isend_irecv(ops), moves)

        # Recorded without a peer: like a collective, it needs every rank of the group.
        return self._call(SHIFT, [x for x, *_ in moves], launch)

    def exchange(self, sent: Tensor, to: int, found: Tensor, source: int) -> Pending:
        """Begin to send `sent` to place `to` and to receive `found` from place `source`, as one call. Every rank of the
        group must call this, even with nothing to send or to receive: empty tensors are not transferred.

        Separate NCCL sends and receives would deadlock. NCCL creates a communicator for each pair at its first transfer
        and waits there for the other rank, so in a ring whose ranks all send first, no rank reaches its receive. A
        batch has no order inside, and uses the communicator of the whole group.
        """
        group, links = self.process_group, self.links
        ends: list[tuple[str, Any, Tensor, int]] = []
        if sent.numel():
            ends.append(("send", dist.isend, sent, self.ranks[to]))
        if found.numel():
            ends.append(("receive", dist.irecv, found, self.ranks[source]))

        def launch(later: bool) -> _All:
            if not ends or sent.is_meta:  # A dry run has no data to send.
                return _All([], ends)
            return _All(dist.batch_isend_irecv([dist.P2POp(op, x, peer, group) for _, op, x, peer in ends]), ends)

        def launch_delayed(later: bool) -> _All:
            """Launch each end separately through the emulated links. Only Gloo is emulated, and its sends do not wait
            for the receiver."""
            assert links is not None
            works = [links.begin(name, x.nbytes, self.ranks, peer, partial(op, x, peer, group))
                     for name, op, x, peer in ends]  # fmt: skip
            return _All(works, ends)

        return self._call(EXCHANGE, (sent,), launch if links is None else launch_delayed)


class _All:
    """Several torch calls as one. It also keeps the tensors being sent alive."""

    def __init__(self, works: list[Any], moves: Any) -> None:
        self.works, self.moves = works, moves

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Shift(NamedTuple):
    """A shift in flight. `sent` must not change before it has arrived."""

    pending: Pending
    sent: Tensor
    received: Tensor

    def receive(self) -> Tensor:
        """Wait for the shift and return the received tensor."""
        self.pending.wait()
        return self.received


def list_ranks(ranks: Sequence[int], most: int = 16) -> str:
    """Return e.g. `[0, 1, 5]`, shortened if there are more than `most` ranks."""
    shown = ", ".join(map(str, ranks[:most]))
    return f"[{shown}]" if len(ranks) <= most else f"[{shown} and {len(ranks) - most} more]"
