"""Launchers of elastic runs with simulated ranks: which ranks they start after a loss, and when."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.config.sections import CheckpointConfig
from meshwright.launch import elastic, nodes
from meshwright.launch.elastic import Elastic, LauncherOptions, Places, divide
from meshwright.launch.launch import STOP, Outcome, Team
from meshwright.record.run_notes import time_between_failures
from meshwright.run.loop import SaveHook
from tests.support.waiting import HANG_S, until

LOST = Outcome(1, "rank 1 was killed by SIGKILL", failed=1)


class Clock:
    """The launchers' clock. It stands still until a test moves it, so that a busy machine causes no losses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time, self.sleep = time.time, time.sleep

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


class Gone(BaseException):
    """The end of a launcher that disappears without a trace."""


class Played:
    """A node with simulated ranks: each start runs the next act, which gets its team and returns the outcome."""

    def __init__(self, at: Path, acts: list[Callable[[Played, Team], Outcome]], **wishes: Any) -> None:
        at.mkdir(parents=True, exist_ok=True)
        self.folder, self.acts, self.step = at, acts, 0
        self.teams: list[Team] = []
        self.words: list[list[str]] = []
        self.told: list[tuple[str, str]] = []
        self.signalled = threading.Event()

        def chosen(ranks: int) -> tuple[int, list[str]]:
            return ranks // 2 * 2, [f"layout.tp={ranks}"]

        given: dict[str, Any] = {"nproc": 4, "rest": 60.0, "lost_after": 0.6} | wishes
        told = lambda kind, text: self.told.append((kind, text))  # noqa: E731
        asked = LauncherOptions(choose=chosen, position=lambda: (self.step, time.time()), tell=told, **given)
        self.launcher = Elastic(asked, at, self.start)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.ended: Outcome | None = None

    def _run(self) -> None:
        with contextlib.suppress(Gone):
            self.ended = self.launcher.run()

    def start(self, team: Team, words: list[str]) -> Outcome:
        self.teams.append(team)
        self.words.append(words)
        self.signalled.clear()
        if team.door is not None:
            nodes.socket.socket(fileno=team.door).close()
        return self.acts[len(self.teams) - 1](self, team)

    def finish(self) -> Outcome:
        self.thread.join(HANG_S)
        assert self.ended is not None, "the launcher goes on and on"
        return self.ended


def done(node: Played, team: Team) -> Outcome:
    return Outcome(0)


def lost(node: Played, team: Team) -> Outcome:
    return LOST


def until_signalled(node: Played, team: Team) -> Outcome:
    node.step += 1
    assert node.signalled.wait(HANG_S)
    return Outcome(0)


def until_rested(node: Played, team: Team) -> Outcome:
    CLOCK.now += 601.0
    return until_signalled(node, team)


def until_killed(node: Played, team: Team) -> Outcome:
    until_signalled(node, team)
    return Outcome(1, "rank 0 was killed by SIGKILL", failed=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Played]:
    """Shorten the pauses, stop the clock, and send signals to the simulated ranks."""
    made: list[Played] = []
    monkeypatch.setattr(nodes, "time", CLOCK)
    monkeypatch.setattr(elastic, "time", CLOCK)
    for module, name, value in (
        (nodes, "BEAT_S", 0.05), (elastic, "LOOK_S", 0.05), (elastic, "POLL_S", 0.01), (elastic, "END_S", 0.05),
        (elastic, "BLAME_S", 0.3),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)

    def signalled(folder: Path, number: int) -> None:
        for node in made:
            if node.folder == folder:
                node.signalled.set()

    monkeypatch.setattr(elastic, "signal_ranks", signalled)
    return made


def started(made: list[Played], *given: Played) -> None:
    made.extend(given)
    for node in given:
        node.thread.start()


def test_the_device_of_a_lost_rank_rests_and_comes_back(tmp_path: Path, quick: list[Played]) -> None:
    """Three devices are left, and the planner uses two of those. Later all four train again, on the layout that the run
    was started with.
    """
    node = Played(tmp_path, [lost, until_rested, done], rest=600.0)
    started(quick, node)
    assert node.finish() == Outcome(0)
    assert [team.devices for team in node.teams] == [(0, 1, 2, 3), (0, 2), (0, 1, 2, 3)]
    assert node.words == [[], ["layout.tp=3"], []]
    assert [team.attempt for team in node.teams] == [0, 1, 2] and len({team.job for team in node.teams}) == 1
    assert [kind for kind, _ in node.told] == ["restart", "reshape"]
    assert "its device, 1, rests" in node.told[0][1] and "continues with 2 of 4 ranks" in node.told[0][1]
    assert "MESHWRIGHT_LOST" in node.teams[1].env and "MESHWRIGHT_LOST" not in node.teams[2].env


def test_a_spare_takes_the_place_of_a_lost_one(tmp_path: Path, quick: list[Played]) -> None:
    node = Played(tmp_path, [lost, done], nproc=2, spares=1)
    started(quick, node)
    assert node.finish() == Outcome(0)
    assert [team.devices for team in node.teams] == [(0, 1), (0, 2)] and node.words == [[], []]


def test_it_gives_up_on_a_run_that_fails_without_a_new_step(tmp_path: Path, quick: list[Played]) -> None:
    node = Played(tmp_path, [lost] * 9)
    started(quick, node)
    ended = node.finish()
    assert ended.code == 1 and "without a new step" in ended.why and len(node.teams) == elastic.FAILURES
    assert node.teams[-1].ranks == 2


@pytest.mark.parametrize("code", [2, 130])
def test_a_mistake_and_a_second_ctrl_c_end_it(code: int, tmp_path: Path, quick: list[Played]) -> None:
    node = Played(tmp_path, [lambda node, team: Outcome(code, "so it is")])
    started(quick, node)
    assert node.finish() == Outcome(code, "so it is")


def test_a_node_that_is_lost_and_one_that_comes(tmp_path: Path, quick: list[Played]) -> None:
    """Two launchers meet by their notes. One becomes silent, and the other continues alone. A third one joins, and both
    train.
    """
    shared: dict[str, Any] = {"most": 2, "folder": tmp_path / "notes"}

    def dies(node: Played, team: Team) -> Outcome:
        first.step += 1
        node.launcher.board.say = lambda **changes: None  # type: ignore[method-assign]
        while len(first.teams) < 2:
            CLOCK.now += 0.1
            time.sleep(0.01)
        raise Gone

    first = Played(tmp_path / "a", [until_killed, until_signalled, done], **shared)
    second = Played(tmp_path / "b", [dies], **shared)
    started(quick, first, second)
    until(lambda: len(first.teams) == 2)
    third = Played(tmp_path / "c", [done], **shared)
    started(quick, third)
    assert first.finish() == Outcome(0) and third.finish() == Outcome(0)
    assert [(team.node, team.nodes, team.ranks) for team in first.teams] == [(0, 2, 4), (0, 1, 4), (0, 2, 4)]
    assert [(team.node, team.nodes, team.ranks) for team in third.teams] == [(1, 2, 4)]
    assert second.teams[0].port == first.teams[0].port != 0 and second.teams[0].job == third.teams[0].job
    assert first.teams[1].devices == (0, 1, 2, 3), "the ranks that the launcher itself ended are not to blame"
    assert "lost node" in dict(first.told)["restart"] and first.words[1] == ["layout.tp=4"]


UNSURE = Outcome(1, "rank 0 ended with exit code 1", failed=0)
KILLED = Outcome(1, "rank 1 was killed by SIGKILL", failed=1, certain=True)
FOLLOWED = Outcome(75, "rank 1 does not answer (stopped or dead)")


@pytest.mark.parametrize(
    ("here", "there", "resting", "why"),
    [
        (KILLED, FOLLOWED, [[1], []], "was killed"),
        (UNSURE, KILLED, [[], [1]], "lost node"),
        (UNSURE, FOLLOWED, [[0], []], "ended with exit code"),
        (FOLLOWED, FOLLOWED, [[], []], "does not answer"),
    ],
)
def test_of_two_nodes_only_the_device_of_the_rank_that_failed_rests(
    here: Outcome, there: Outcome, resting: list[list[int]], why: str, tmp_path: Path, quick: list[Played],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The ranks of the two nodes end at different times.

    The launcher that sees the end first waits for the report of the other one. Its limit is long here, since the report
    always arrives.
    """
    monkeypatch.setattr(elastic, "BLAME_S", 60.0)
    monkeypatch.setattr(elastic, "END_S", 60.0)
    shared: dict[str, Any] = {"most": 2, "least": 2, "folder": tmp_path / "notes", "lost_after": 60.0}
    begun, ended = threading.Event(), threading.Event()

    def ends_first(node: Played, team: Team) -> Outcome:
        node.step += 1
        assert begun.wait(HANG_S)
        ended.set()
        return here

    def ends_later(node: Played, team: Team) -> Outcome:
        begun.set()
        assert ended.wait(HANG_S)
        time.sleep(0.2)
        return there

    first = Played(tmp_path / "a", [ends_first, done], **shared)
    second = Played(tmp_path / "b", [ends_later, done], **shared)
    started(quick, first)
    time.sleep(0.05)
    started(quick, second)
    assert first.finish() == Outcome(0) and second.finish() == Outcome(0)
    free = [node.launcher.places.free() for node in (first, second)]
    assert [sorted({0, 1, 2, 3} - set(each)) for each in free] == resting
    assert why in " ".join(text for _, text in first.told)


def test_one_that_is_asked_to_stop_while_it_waits(tmp_path: Path, quick: list[Played]) -> None:
    node = Played(tmp_path, [], least=2, most=2, folder=tmp_path / "notes")
    started(quick, node)
    (tmp_path / STOP).touch()
    assert node.finish() == Outcome(0) and node.teams == []


def test_strange_notes_are_no_nodes(tmp_path: Path) -> None:
    """A note that is no longer rewritten is no node either: an earlier job has left it."""
    nodes.Board(tmp_path, nodes.new_node("127.0.0.1", 0, [0]), 1.0)
    board = nodes.Board(tmp_path, nodes.new_node("127.0.0.1", 0, [0]), 1.0)
    (tmp_path / "node-x.json").write_text('{"name": "x"}')
    (tmp_path / "node-y.json").write_text("[" * 100_000)
    (tmp_path / "generation-7.json").write_text('{"number": 7}')
    assert board.look() == [board.me] and board.newest() is None


def test_a_number_is_given_to_one_generation_alone(tmp_path: Path) -> None:
    """Two launchers both think that they lead, and one of them creates the generation."""
    boards = [nodes.Board(tmp_path, nodes.new_node("127.0.0.1", 0, [0]), 1.0) for _ in range(2)]

    def made(number: int) -> nodes.Generation:
        if not boards[1]._numbers():
            assert boards[1].begin(lambda other: nodes.Generation(other, 0, "second", "", 0, [], [], True)) is not None
        return nodes.Generation(number, 0, "first", "", 0, [], [], True)

    assert boards[0].begin(made) is None
    newest = boards[0].newest()
    assert newest is not None and newest.job == "second"


@pytest.mark.parametrize("links", [True, False])
def test_the_key_can_be_read_by_nobody_else_at_any_time(links: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """The key is private before a file's mode is changed, and on a disk without links."""

    def no_links(*paths: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", lambda *args: None)
    if not links:
        monkeypatch.setattr(nodes.os, "link", no_links)
    board = nodes.Board(tmp_path, nodes.new_node("127.0.0.1", 0, [0]), 1.0)
    for number in (1, 2):
        made = board.begin(lambda one: nodes.Generation(one, 0, "job", "127.0.0.1", 1, [], [], True, "secret"))
        assert made is not None and board.newest() == made
        assert (tmp_path / f"generation-{number}.json").stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob(".*.part"))


def test_devices_rest_twice_as_long_each_time() -> None:
    places = Places(2, 10.0)
    assert [places.let_rest(1), places.let_rest(1)] == [10.0, 20.0] and places.free() == [0]
    places.let_rest(0)
    assert places.free() == [0, 1], "none is left: all are tried"


@pytest.mark.parametrize(
    ("ranks", "offered", "nproc", "counts"),
    [(8, [4, 4], 4, [4, 4]), (6, [4, 3], 4, [3, 3]), (7, [4, 3], 4, [4, 3]), (8, [5, 3], 4, [5, 3]),
     (5, [4, 4], 4, [4, 1]),
     (4, [5, 5], 4, [2, 2])],
)  # fmt: skip
def test_ranks_are_dealt_to_nodes(ranks: int, offered: list[int], nproc: int, counts: list[int]) -> None:
    assert divide(ranks, offered, nproc) == counts


def test_the_time_between_failures_is_that_of_the_run_under_way(tmp_path: Path) -> None:
    """The run trained for 400 s and for 100 s, and failed twice. The night before it was resumed does not count."""
    kinds = [(0, "start"), (300, "restart"), (310, "resume"), (400, "failure"), (40_000, "resume"), (40_100, "end")]
    text = "".join(f'{{"time": {at}, "kind": "{kind}"}}\n' for at, kind in kinds) + "cut off"
    assert time_between_failures(tmp_path) == math.inf
    (tmp_path / "events.jsonl").write_text(text)
    assert time_between_failures(tmp_path) == (400 + 100) / 2


def test_auto_saves_as_young_and_daly_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a stall of 0.5 s and a failure every 3.1 h saves every 106 s, and one without failures every 900 s."""
    saver = SimpleNamespace(trainer=SimpleNamespace(writes=False), blocked_s=0.5, is_writing=False)
    saving = SaveHook(saver, CheckpointConfig())  # type: ignore[arg-type]
    # The times start at zero: (t + 900.0) - t is less than 900.0 for some times t of a machine's clock.
    saving.saved_at = now = 0.0
    monkeypatch.setattr("meshwright.run.loop.time", SimpleNamespace(monotonic=lambda: now))
    wanted = []
    for between in (math.inf, 3.1 * 3600):
        saving.between_failures, now = between, 0.0
        while not saving.wants_save():
            now += 1.0
        wanted.append(now)
    assert wanted == [900, 106]
