"""Runs that outlive their ranks: what is left after a loss goes on, and grows back. No torch.

One launcher on each node starts the node's ranks, *generation* after generation: when a rank or a node is lost, all
ranks end, and the launchers that are left start as many as the planner has a layout for, from the newest checkpoint or
memory copy. The device of a rank that failed rests for a while, and longer each time. When a device or a node is there
again, the ranks are asked to stop, save, and start once more. `nodes.py` says how launchers agree.
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
from meshwright.launch.launch import SHUTDOWN_S, STOP, Outcome, Team, in_short, is_final, signal_ranks
from meshwright.launch.nodes import Board, Generation, Node, Share, knock, new_node
from meshwright.launch.processes import LOOPBACK, LOST

JOIN_S = 30.0  # a first start waits so long for more nodes than it needs
POLL_S, LOOK_S = 0.1, 0.5
WORD_S = 30.0  # between two words about waiting
END_S = 2.0  # ranks whose peers are gone have so long to end by themselves
BLAME_S = SHUTDOWN_S + 2.0  # within which the other nodes say how their ranks ended: as long as these may take
FAILURES = 3  # in a row and without a new step, after which a run gives up


@dataclass(frozen=True)
class Wishes:
    """What the launcher of one node is told. `choose(n)` gives the number of ranks, up to n, that the planner would
    train with, and the words of their layout; `position()` is the run's last step and when it was written."""

    nproc: int
    choose: Callable[[int], tuple[int, list[str]]]
    position: Callable[[], tuple[int, float]]
    spares: int = 0
    least: int = 1
    most: int = 1  # nodes
    address: str = LOOPBACK
    port: int = 0  # where this node's keeper listens; 0: it has none
    keyed: Callable[[str], None] = lambda key: None  # tells that one the job's key
    folder: Path | None = None  # of the notes of several nodes
    lost_after: float = 15.0
    rest: float = 600.0
    tell: Callable[[str, str], None] = lambda kind, text: None

    @property
    def target(self) -> int:
        return self.most * self.nproc


class Places:
    """The devices of this node, of which those rest whose ranks have failed: twice as long each time."""

    def __init__(self, count: int, rest: float) -> None:
        self.all, self.rest = list(range(count)), rest
        self._until: dict[int, float] = {}
        self._times: dict[int, int] = {}

    def failed(self, place: int) -> float:
        """Has a device rest; for how many seconds."""
        self._times[place] = self._times.get(place, 0) + 1
        seconds = self.rest * 2.0 ** min(self._times[place] - 1, 10)
        self._until[place] = time.monotonic() + seconds
        return seconds

    def free(self) -> list[int]:
        """Those that don't rest; all, if none were left."""
        now = time.monotonic()
        return [place for place in self.all if self._until.get(place, 0.0) <= now] or self.all


def divide(ranks: int, offered: list[int], nproc: int) -> list[int]:
    """How many of the ranks each node starts: equally many where that is possible, else as they come, spares last."""
    even, rest = divmod(ranks, len(offered))
    if not rest and even <= min(offered):
        return [even] * len(offered)
    counts = [0] * len(offered)
    for limit in (nproc, max(offered)):
        for n, has in enumerate(offered):
            counts[n] += max(0, min(limit, has) - counts[n]) if sum(counts) < ranks else 0
            counts[n] -= max(0, sum(counts) - ranks)
    return counts


@dataclass
class Watch:
    """What the launcher notices while its ranks run."""

    lost: list[str] = field(default_factory=list)  # nodes
    killed: bool = False  # it has killed the node's own ranks, whose peers are gone


class Elastic:
    """The launcher of one node. `start(team, words)` runs the node's ranks once."""

    def __init__(self, wishes: Wishes, folder: Path, start: Callable[[Team, list[str]], Outcome]) -> None:
        self.wishes, self.folder, self.start = wishes, folder, start
        self.places = Places(wishes.nproc + wishes.spares, wishes.rest)
        me = new_node(wishes.address, wishes.port, self.places.free())
        self.board = Board(wishes.folder or folder / "nodes", me, wishes.lost_after)
        self.last: Generation | None = None  # the newest one that was seen under way
        self._door: socket.socket | None = None
        self._chosen: dict[int, tuple[int, list[str]]] = {}
        self._loss: dict[str, float] | None = None  # when the run's last step was, and when the loss was seen
        self._why = ""

    @property
    def stopped(self) -> bool:
        return (self.folder / STOP).exists()

    def run(self) -> Outcome:
        best, failures, ended = 0, 0, Outcome(0)
        with self.board.beating():
            while (generation := self._next()) is not None:
                ended = self._run(generation)
                if ended.code == 0 and self.board.is_reshaped(generation.number) and not self.stopped:
                    self._why, self._loss = "", None
                    continue
                if is_final(ended.code):
                    break
                step, when = self.wishes.position()
                failures = 0 if step > best else failures + 1
                best = max(best, step)
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
            seconds = self.places.failed(place)
            self._why += f"; its device, {place}, rests for {seconds:.0f} s"
        notice(f"meshwright: {self._why}; what is left goes on")
        if index:  # the first node tells of the restart
            self.wishes.tell("fault", self._why)

    # Agreeing on the next generation.

    def _next(self) -> Generation | None:
        """Waits for the next generation that this node is a part of; None if the launcher is asked to stop."""
        self.board.say(state="ready", places=self.places.free())
        begun, word = time.monotonic(), WORD_S
        while not self.stopped:
            nodes, newest = self.board.look(), self.board.newest()
            if newest is not None and any(newest.index_of(node.name) is not None for node in nodes):
                fresh = self.last is None or newest.number > self.last.number
                if fresh and newest.index_of(self.board.me.name) is not None:
                    return newest
                self.last = newest
            if self.last is not None and self._has_ended(nodes):
                notice("meshwright: the run has ended on the other nodes")
                return None
            waited = time.monotonic() - begun
            if self._leads(nodes) and (made := self._lead(nodes, waited)):
                return made
            if waited > word:
                word += WORD_S
                notice(f"meshwright: waits for other nodes ({len(nodes)} of {self.wishes.least} to {self.wishes.most})")
            time.sleep(POLL_S)
        return None

    def _leads(self, nodes: list[Node]) -> bool:
        return next(node.name for node in nodes if node.state != "left") == self.board.me.name

    def _has_ended(self, nodes: list[Node]) -> bool:
        """Whether the last generation has come to the run's end, or was stopped, while this node waited."""
        assert self.last is not None
        number = self.last.number
        ended = any(n.state == "left" and n.code == 0 and n.generation == number for n in nodes)
        return ended and not self.board.is_reshaped(number)

    def _lead(self, nodes: list[Node], waited: float) -> Generation | None:
        """The next generation, if it can be made now: nobody still runs, and enough nodes are there."""
        wishes, first = self.wishes, self.last is None
        ready = self._reachable([node for node in nodes if node.state == "ready"])
        if any(node.state == "running" for node in nodes) or len(ready) < wishes.least:
            return None
        if len(ready) < wishes.most and first and waited < JOIN_S:
            return None
        ready = ready[: wishes.most]
        ranks, words = self._layout_for(sum(len(node.places) for node in ready))
        counts = divide(ranks, [len(node.places) for node in ready], wishes.nproc)
        shares = [
            Share(node.name, node.address, node.port, node.places[:count])
            for node, count in zip(ready, counts, strict=True) if count
        ]  # fmt: skip
        made = self.board.begin(lambda number: self._generation(number, shares, words, ranks))
        if made is not None:
            self._say(made)
        return made

    def _generation(self, number: int, shares: list[Share], words: list[str], ranks: int) -> Generation:
        self.board.tidy()
        self._door = socket.create_server((shares[0].address, 0))
        last = self.last
        job = last.job if last else f"meshwright-{secrets.token_hex(4)}"
        key = last.key if last else secrets.token_hex(32)
        attempt = last.attempt + 1 if last else 0
        here = {share.name for share in shares}
        beside = [Share(n.name, n.address, n.port, []) for n in self.board.look() if n.port and n.name not in here]
        port, full = self._door.getsockname()[1], ranks == self.wishes.target
        return Generation(number, attempt, job, shares[0].address, port, shares, words, full, key, beside)

    def _say(self, made: Generation) -> None:
        if made.attempt:
            machines = f" of {plural(len(made.shares), 'node')}" if self.wishes.most > 1 else ""
            layout = f" ({' '.join(made.words)})" if made.words else ""
            again = f"goes on with {made.world} of {self.wishes.target} ranks{machines}{layout}"
            notice(f"meshwright: {again}")
            self.wishes.tell("restart" if self._why else "reshape", f"{self._why}{'; ' if self._why else ''}{again}")

    def _reachable(self, nodes: list[Node]) -> list[Node]:
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
        if self.wishes.folder:  # the numbers of a shared folder grow from job to job, and so must attempts
            env["MESHWRIGHT_ATTEMPT"] = str(generation.number - 1)
        if share.port:
            self.wishes.keyed(generation.key)
            known = [[each.address, each.port] for each in (*generation.shares, *generation.beside) if each.port]
            where = {"nodes": len(generation.shares), "node": index, "generation": generation.attempt}
            env |= {KEEPERS: json.dumps(where | {"addresses": known}), KEY: generation.key}
        door = self._door.detach() if index == 0 and self._door else None
        team = Team(
            len(share.places), generation.attempt, tuple(share.places), index, len(generation.shares), generation.host,
            generation.port, door, self.wishes.address, generation.job, env,
        )  # fmt: skip
        self.board.say(state="running", generation=generation.number, fault="")
        with self._watching(generation) as watch:
            ended = self.start(team, generation.words)
        if is_final(ended.code) or len(generation.shares) == 1:
            return ended
        lost = self._to_blame(generation, ended, watch)
        return Outcome(1, f"lost {' and '.join(lost)}") if lost else ended

    def _to_blame(self, generation: Generation, ended: Outcome, watch: Watch) -> list[str]:
        """Returns the other nodes that ended this generation; none if a rank of this one did, or nobody knows.

        A rank that was killed here is to blame. Any other failure may follow from a loss elsewhere, of which this node
        may hear later than its ranks do: so it waits for what the other nodes say before a healthy device rests.
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
        """Returns the other nodes that are gone or say that a rank of theirs failed, and those that say nothing yet."""
        there = {node.name: node for node in self.board.look()}
        failed, silent = [], []
        for share in generation.shares:
            if share.name == self.board.me.name:
                continue
            node, name = there.get(share.name), f"node {share.name}"
            fault = node.fault if node is not None and node.generation == generation.number else ""
            # A node that has gone on, or has left, says nothing more of this generation.
            past = node is not None and (node.generation > generation.number or node.state == "left")
            if node is None or fault in ("own", "unsure") or (name in watch.lost and fault != "others"):
                failed.append(name)
            elif not fault and not past:
                silent.append(name)
        return failed, silent

    @contextlib.contextmanager
    def _watching(self, generation: Generation) -> Iterator[Watch]:
        watch, ended = Watch(), threading.Event()
        began = time.time()

        def look() -> None:
            silent: dict[str, float] = {}
            while not ended.wait(LOOK_S):
                with contextlib.suppress(OSError):  # a disk that is away for a moment
                    self.board.say(places=self.places.free())
                    nodes = self.board.look()
                    if lost := self._lost(generation, nodes, silent):
                        watch.lost = lost
                        if not ended.wait(END_S):
                            watch.killed = True
                            signal_ranks(self.folder, SIGKILL)
                        return
                    leads = self._leads(nodes) and not generation.full
                    if leads and self.wishes.position()[1] > began and self._grows(generation, nodes):
                        self.board.reshape(generation.number)
                        signal_ranks(self.folder, SIGTERM)
                        return

        thread = threading.Thread(target=look, name="meshwright-nodes", daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            ended.set()
            thread.join()

    def _lost(self, generation: Generation, nodes: list[Node], silent: dict[str, float]) -> list[str]:
        """The nodes of this generation that are gone, have failed, or can't be reached any more."""
        there, now, lost = {node.name: node for node in nodes}, time.monotonic(), []
        for share in generation.shares:
            node = there.get(share.name)
            if share.name == self.board.me.name or (node and node.state == "left" and node.code == 0):
                continue
            if node is not None and share.port and knock(share.address, share.port) == "open":
                silent[share.name] = now
            quiet = now - silent.setdefault(share.name, now) > self.wishes.lost_after
            running = node is not None and node.state == "running" and node.generation == generation.number
            starting = node is not None and node.state == "ready" and node.generation < generation.number
            if quiet and share.port or not (running or starting):
                lost.append(f"node {share.name}")
        return lost

    def _grows(self, generation: Generation, nodes: list[Node]) -> bool:
        """Whether more ranks could train now than do."""
        offered = self._reachable([node for node in nodes if node.state in ("ready", "running")])[: self.wishes.most]
        total = sum(len(node.places) for node in offered)
        with contextlib.suppress(UserError):  # there is no layout for so many
            return total > generation.world and self._layout_for(total)[0] > generation.world
        return False
