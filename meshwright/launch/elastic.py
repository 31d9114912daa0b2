"""Elastic launches: a run survives the loss of ranks or nodes, continues with the rest, and grows back. No torch.

One launcher on each node starts the node's ranks, one *generation* after another. When a rank or a node is lost, all
ranks end. The remaining launchers start as many ranks as the planner has a layout for, from the newest checkpoint or
memory copy. The device of a rank that failed rests for a while, longer each time. When a device or a node is available
again, the ranks are asked to save and stop, and the next generation starts. `nodes.py` describes how launchers agree.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL, SIGTERM

from meshwright.checkpoint.keeper import KEEPERS, KEY
from meshwright.errors import UserError, notice, plural
from meshwright.launch.launch import REGROUP, SHUTDOWN_S, STOP, Outcome, Team, in_short, is_final, signal_ranks
from meshwright.launch.nodes import Board, Generation, LauncherNote, NodeShare, knock, new_node
from meshwright.launch.processes import LOOPBACK, LOST

JOIN_S = 30.0  # A first start waits this long for more nodes than it needs.
POLL_S, LOOK_S = 0.1, 0.5
WORD_S = 30.0  # Seconds between two notices about waiting.
END_S = 2.0  # Ranks whose peers are gone get this long to end by themselves.
# The other nodes report how their ranks ended within this time: ranks that are stopped may take SHUTDOWN_S.
BLAME_S = SHUTDOWN_S + 2.0
FAILURES = 3  # A run gives up after this many failures in a row without a new step.


@dataclass(frozen=True)
class LauncherOptions:
    """The options of one node's launcher.

    `choose(n)` returns the number of ranks, at most n, that the planner would train with, and their layout as words
    (key=value). `position()` returns the run's last step and the time at which it was written.
    """

    nproc: int  # Ranks per node.
    choose: Callable[[int], tuple[int, list[str]]]
    position: Callable[[], tuple[int, float]]
    spares: int = 0  # Devices of this node that replace failed ones.
    # Numbers of nodes.
    least: int = 1
    most: int = 1
    address: str = LOOPBACK
    port: int = 0  # The port of this node's keeper; 0: there is none.
    keyed: Callable[[str], None] = lambda key: None  # Passes the job's key to the keeper.
    folder: Path | None = None  # The shared folder of the nodes' notes, if there are several nodes.
    lost_after: float = 15.0  # Seconds of silence after which a node counts as lost.
    rest: float = 600.0  # Seconds that a device rests after its first failure.
    tell: Callable[[str, str], None] = lambda kind, text: None  # Receives the run's events.

    @property
    def target(self) -> int:
        """The number of ranks of a complete run."""
        return self.most * self.nproc


class Places:
    """The devices of this node. A device whose rank has failed rests, twice as long each time."""

    def __init__(self, count: int, rest: float) -> None:
        self.all, self.rest = list(range(count)), rest
        self._until: dict[int, float] = {}
        self._times: dict[int, int] = {}

    def let_rest(self, place: int) -> float:
        """Let a device rest. Return the seconds that it will rest."""
        self._times[place] = self._times.get(place, 0) + 1
        seconds = self.rest * 2.0 ** min(self._times[place] - 1, 10)
        self._until[place] = time.monotonic() + seconds
        return seconds

    def free(self) -> list[int]:
        """Return the devices that do not rest. If all of them rest, return all."""
        now = time.monotonic()
        return [place for place in self.all if self._until.get(place, 0.0) <= now] or self.all


def divide(ranks: int, offered: list[int], nproc: int) -> list[int]:
    """Return the number of ranks that each node starts, given the number of devices that each one offers.

    Nodes start equally many ranks if possible. Otherwise they are filled in order: first up to `nproc` ranks each, then
    with spare devices.
    """
    even, rest = divmod(ranks, len(offered))
    if not rest and even <= min(offered):
        return [even] * len(offered)
    counts = [0] * len(offered)
    for limit in (nproc, max(offered)):
        for n, devices in enumerate(offered):
            counts[n] += max(0, min(limit, devices) - counts[n]) if sum(counts) < ranks else 0
            # Take back any ranks beyond the wanted number.
            counts[n] -= max(0, sum(counts) - ranks)
    return counts


@dataclass
class Watch:
    """The findings of the thread that watches the other nodes while this node's ranks run."""

    lost: list[str] = field(default_factory=list)  # Names of lost nodes.
    killed: bool = False  # The launcher has killed this node's ranks, since their peers are gone.


class Elastic:
    """The launcher of one node. `start(team, words)` runs the node's ranks once and returns how they ended."""

    def __init__(self, wishes: LauncherOptions, folder: Path, start: Callable[[Team, list[str]], Outcome]) -> None:
        self.wishes, self.folder, self.start = wishes, folder, start
        self.places = Places(wishes.nproc + wishes.spares, wishes.rest)
        me = new_node(wishes.address, wishes.port, self.places.free())
        self.board = Board(wishes.folder or folder / "nodes", me, wishes.lost_after)
        self.last: Generation | None = None  # The newest generation that was seen running.
        self._door: socket.socket | None = None  # The socket on which the ranks of the next generation meet.
        self._chosen: dict[int, tuple[int, list[str]]] = {}  # The planner's layouts by number of devices.
        self._loss: dict[str, float] | None = None  # Times of the run's last step and of noticing the loss.
        self._why = ""  # The reason for the next generation.

    @property
    def is_stopped(self) -> bool:
        return (self.folder / STOP).exists()

    def run(self) -> Outcome:
        """Run one generation after another until the run ends. Return the outcome of the last one."""
        best_step = 0
        failures = 0
        ended = Outcome(0)
        with self.board.heartbeat():
            while (generation := self._next()) is not None:
                ended = self._run(generation)
                # The ranks stopped only to start again with more of them.
                if ended.code == 0 and self.board.is_reshaped(generation.number) and not self.is_stopped:
                    self._why, self._loss = "", None
                    continue
                if is_final(ended.code):
                    break
                step, when = self.wishes.position()
                failures = 0 if step > best_step else failures + 1
                best_step = max(best_step, step)
                if failures == FAILURES:
                    ended = replace(ended, why=f"{in_short(ended)}; it failed {failures} times without a new step")
                    break
                self._note_loss(ended, generation, when)
            self.board.leave(ended.code)
        return ended

    def _note_loss(self, ended: Outcome, generation: Generation, last_step: float) -> None:
        self._why = in_short(ended)
        now = time.time()
        self._loss = {"last": min(last_step, now) if last_step else now, "seen": now}
        index = generation.index_of(self.board.me.name)
        if ended.failed is not None and index is not None:
            place = generation.shares[index].places[ended.failed]
            seconds = self.places.let_rest(place)
            self._why += f"; its device, {place}, rests for {seconds:.0f} s"
        notice(f"meshwright: {self._why}; the rest continues")
        # The first node need not report the fault: it will report the restart, with the same reason.
        if index:
            self.wishes.tell("fault", self._why)

    # Agreeing on the next generation.

    def _next(self) -> Generation | None:
        """Wait for the next generation that this node takes part in, or make it if this node leads.

        Return None if the launcher is asked to stop, or if the run has ended on the other nodes.
        """
        self.board.say(state="ready", places=self.places.free())
        began, notice_after = time.monotonic(), WORD_S
        while not self.is_stopped:
            nodes, newest = self.board.look(), self.board.newest()
            if newest is not None and any(newest.index_of(node.name) is not None for node in nodes):
                is_new = self.last is None or newest.number > self.last.number
                if is_new and newest.index_of(self.board.me.name) is not None:
                    return newest
                self.last = newest
            if self.last is not None and self._has_ended(nodes):
                notice("meshwright: the run has ended on the other nodes")
                return None
            waited = time.monotonic() - began
            if self._leads(nodes) and (made := self._lead(nodes, waited)):
                return made
            if waited > notice_after:
                notice_after += WORD_S
                notice(f"meshwright: waits for other nodes ({len(nodes)} of {self.wishes.least} to {self.wishes.most})")
            time.sleep(POLL_S)
        return None

    def _leads(self, nodes: list[LauncherNote]) -> bool:
        return next(node.name for node in nodes if not node.has_left) == self.board.me.name

    def _has_ended(self, nodes: list[LauncherNote]) -> bool:
        """Return True if the last generation finished the run or was stopped while this node waited."""
        assert self.last is not None
        number = self.last.number
        ended = any(n.ended_well and n.generation == number for n in nodes)
        return ended and not self.board.is_reshaped(number)

    def _lead(self, nodes: list[LauncherNote], waited: float) -> Generation | None:
        """Make and return the next generation if no node still runs ranks and enough nodes are ready; else None."""
        wishes, first = self.wishes, self.last is None
        ready = self._reachable([node for node in nodes if node.is_ready])
        if any(node.is_running for node in nodes) or len(ready) < wishes.least:
            return None
        # At the first start, more nodes may still be about to join.
        if len(ready) < wishes.most and first and waited < JOIN_S:
            return None
        ready = ready[: wishes.most]
        ranks, words = self._layout_for(sum(len(node.places) for node in ready))
        counts = divide(ranks, [len(node.places) for node in ready], wishes.nproc)
        shares = [
            NodeShare(node.name, node.address, node.port, node.places[:count])
            for node, count in zip(ready, counts, strict=True) if count
        ]  # fmt: skip
        made = self.board.begin(lambda number: self._generation(number, shares, words, ranks))
        if made is not None:
            self._say(made)
        return made

    def _generation(self, number: int, shares: list[NodeShare], words: list[str], ranks: int) -> Generation:
        self.board.tidy()
        # The socket listens before any rank starts, so no other process can take its port.
        self._door = socket.create_server((shares[0].address, 0))
        last = self.last
        job = last.job if last else f"meshwright-{secrets.token_hex(4)}"
        key = last.key if last else secrets.token_hex(32)
        attempt = last.attempt + 1 if last else 0
        here = {share.name for share in shares}
        # Nodes without ranks may have keepers that hold memory copies.
        beside = [NodeShare(n.name, n.address, n.port, []) for n in self.board.look() if n.port and n.name not in here]
        port = self._door.getsockname()[1]
        full = ranks == self.wishes.target
        return Generation(number, attempt, job, shares[0].address, port, shares, words, full, key, beside)

    def _say(self, made: Generation) -> None:
        if made.attempt:
            machines = f" of {plural(len(made.shares), 'node')}" if self.wishes.most > 1 else ""
            layout = f" ({' '.join(made.words)})" if made.words else ""
            again = f"continues with {made.world} of {self.wishes.target} ranks{machines}{layout}"
            notice(f"meshwright: {again}")
            self.wishes.tell("restart" if self._why else "reshape", f"{self._why}{'; ' if self._why else ''}{again}")

    def _reachable(self, nodes: list[LauncherNote]) -> list[LauncherNote]:
        """Return the nodes whose keepers accept connections. This node, and nodes without a keeper, always count."""
        mine = self.board.me.name
        return [n for n in nodes if n.name == mine or not n.port or knock(n.address, n.port) == "open"]

    def _layout_for(self, places: int) -> tuple[int, list[str]]:
        if places >= self.wishes.target:
            return self.wishes.target, []
        if places not in self._chosen:
            self._chosen[places] = self.wishes.choose(places)
        return self._chosen[places]

    # One generation.

    def _run(self, generation: Generation) -> Outcome:
        self.last, name = generation, self.board.me.name
        index = generation.index_of(name)
        assert index is not None
        share = generation.shares[index]
        env = {LOST: json.dumps(self._loss)} if self._loss and index == 0 else {}
        # In a shared folder, generations are numbered on from job to job. Attempts must grow in the same way.
        if self.wishes.folder:
            env["MESHWRIGHT_ATTEMPT"] = str(generation.number - 1)
        if share.port:
            self.wishes.keyed(generation.key)
            known = [[node.address, node.port] for node in (*generation.shares, *generation.beside) if node.port]
            where = {"nodes": len(generation.shares), "node": index, "generation": generation.attempt}
            env |= {KEEPERS: json.dumps(where | {"addresses": known}), KEY: generation.key}
        door = self._door.detach() if index == 0 and self._door else None
        team = Team(
            len(share.places), generation.attempt, tuple(share.places), index, len(generation.shares), generation.host,
            generation.port, door, self.wishes.address, generation.job, env,
        )  # fmt: skip
        (self.folder / REGROUP).unlink(missing_ok=True)
        self.board.say(state="running", generation=generation.number, fault="")
        with self._watch_nodes(generation) as watch:
            ended = self.start(team, generation.words)
        if is_final(ended.code) or len(generation.shares) == 1:
            return ended
        lost = self._to_blame(generation, ended, watch)
        return Outcome(1, f"lost {' and '.join(lost)}") if lost else ended

    def _to_blame(self, generation: Generation, ended: Outcome, watch: Watch) -> list[str]:
        """Return the other nodes that caused the end of this generation; empty if this node did or no node is known.

        If a rank was killed here, it is the cause. Any other failure may follow from a loss elsewhere, which the ranks
        may notice before the launcher does. So wait for the other nodes' reports before letting a healthy device rest.
        """
        if watch.killed:
            return watch.lost
        if ended.certain:
            self.board.say(fault="own")
            return []
        self.board.say(fault="others" if ended.failed is None else "unsure")
        end = time.monotonic() + BLAME_S
        while True:
            failed, silent = self._failed_nodes(generation, watch)
            if failed or not silent or time.monotonic() >= end:
                return failed
            time.sleep(POLL_S)

    def _failed_nodes(self, generation: Generation, watch: Watch) -> tuple[list[str], list[str]]:
        """Return the other nodes that are gone or report a failed rank, and the nodes that have not reported yet."""
        present = {node.name: node for node in self.board.look()}
        failed, silent = [], []
        for share in generation.shares:
            if share.name == self.board.me.name:
                continue
            node = present.get(share.name)
            name = f"node {share.name}"
            fault = node.fault if node is not None and node.generation == generation.number else ""
            # A node that is in a later generation, or has left, will not report on this one.
            past = node is not None and (node.generation > generation.number or node.has_left)
            if node is None or fault in ("own", "unsure") or (name in watch.lost and fault != "others"):
                failed.append(name)
            elif not fault and not past:
                silent.append(name)
        return failed, silent

    @contextlib.contextmanager
    def _watch_nodes(self, generation: Generation) -> Iterator[Watch]:
        """Watch the other nodes in a thread while this node's ranks run.

        If a node is lost, kill this node's ranks, which wait for it. If this node leads and more ranks could train, ask
        the ranks to save and stop.
        """
        watch, ended = Watch(), threading.Event()
        began = time.time()

        def look() -> None:
            last_heard: dict[str, float] = {}
            while not ended.wait(LOOK_S):
                # The shared disk may be unavailable for a moment.
                with contextlib.suppress(OSError):
                    self.board.say(places=self.places.free())
                    nodes = self.board.look()
                    if lost := self._lost_nodes(generation, nodes, last_heard):
                        watch.lost = lost
                        if not ended.wait(END_S):
                            watch.killed = True
                            signal_ranks(self.folder, SIGKILL)
                        return
                    leads = self._leads(nodes) and not generation.full
                    # Only after a step of this generation: otherwise it would be stopped before it made any progress.
                    if leads and self.wishes.position()[1] > began and self._grows(generation, nodes):
                        self.board.reshape(generation.number)
                        (self.folder / REGROUP).touch()
                        signal_ranks(self.folder, SIGTERM)
                        return

        thread = threading.Thread(target=look, name="meshwright-nodes", daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            ended.set()
            thread.join()

    def _lost_nodes(self, generation: Generation, nodes: list[LauncherNote], last_heard: dict[str, float]) -> list[str]:
        """Return the nodes of this generation that are gone, have failed, or can no longer be reached.

        `last_heard` keeps the time at which each node was last reached from call to call.
        """
        present = {node.name: node for node in nodes}
        now = time.monotonic()
        lost = []
        for share in generation.shares:
            node = present.get(share.name)
            # A node whose ranks ended well is not lost.
            if share.name == self.board.me.name or (node and node.ended_well):
                continue
            if node is not None and share.port and knock(share.address, share.port) == "open":
                last_heard[share.name] = now
            is_silent = now - last_heard.setdefault(share.name, now) > self.wishes.lost_after
            running = node is not None and node.is_running and node.generation == generation.number
            # It has not read this generation's file yet.
            starting = node is not None and node.is_ready and node.generation < generation.number
            if is_silent and share.port or not (running or starting):
                lost.append(f"node {share.name}")
        return lost

    def _grows(self, generation: Generation, nodes: list[LauncherNote]) -> bool:
        """Return True if more ranks could train now than this generation has."""
        offered = self._reachable([node for node in nodes if node.is_ready or node.is_running])[: self.wishes.most]
        total = sum(len(node.places) for node in offered)
        # The planner raises this error if it has no layout for that many ranks.
        with contextlib.suppress(UserError):
            return total > generation.world and self._layout_for(total)[0] > generation.world
        return False
