"""The running of tests: random orders, shards, shifted clocks, and the areas that a change touches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import areas, ports
from tests.support.clock import sitecustomize as clock
from tests.support.order import SLOWEST, shuffle, slowest_first
from tests.support.ports import reserved_port
from tests.support.processes import tree_below
from tests.support.sharding import files_of_shard, shard_of
from tests.support.trust import conditions
from tests.support.waiting import HANG_S, until

ROOT = Path(__file__).parents[1]


def test_a_seed_gives_one_order_of_all_tests() -> None:
    names = [f"tests/{file}.py::test_{number}" for file in "abcdef" for number in range(5)]

    def ordered(seed: int) -> list[str]:
        items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
        shuffle(items, seed)
        return [item.nodeid for item in items]

    assert ordered(1) == ordered(1) != ordered(2) and sorted(ordered(1)) == names
    files = [name.split("::")[0] for name in ordered(1)]
    assert len(list(dict.fromkeys(files))) == 6 and files == sorted(files, key=files.index), "files stay together"


def test_slow_files_go_first_and_stay_whole() -> None:
    assert all((ROOT / name).is_file() for name in SLOWEST) and len(set(SLOWEST)) == len(SLOWEST)
    names = [f"{file}::test_{n}" for file in ("tests/a.py", SLOWEST[1], "tests/b.py", SLOWEST[0]) for n in range(3)]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    slowest_first(items)
    assert [item.nodeid for item in items] == [*names[9:], *names[3:6], *names[:3], *names[6:9]]


def test_every_file_is_in_one_shard_and_shards_are_alike() -> None:
    tests = Counter({f"tests/test_{number}.py": 1 + number % 17 for number in range(200)})
    shards = [files_of_shard(tests, number, 6) for number in range(1, 7)]
    assert sorted(name for shard in shards for name in shard) == sorted(tests)
    sizes = [sum(tests[name] for name in shard) for shard in shards]
    assert max(sizes) - min(sizes) <= max(tests.values())
    assert shard_of("2/6") == (2, 6)
    for wrong in ("0/6", "7/6", "6", "a/b"):
        with pytest.raises(pytest.UsageError, match="such as 2/6"):
            shard_of(wrong)


def test_the_clock_is_shifted_in_every_process() -> None:
    """The clock is shifted in processes that a process starts, and only once in each."""
    source = "import subprocess, sys, time; print(time.monotonic() - time.unshifted())"
    twice = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {source!r}]).returncode)"
    env = os.environ | {clock.VARIABLE: "1e6", "PYTHONPATH": str(Path(clock.__file__).parent)}
    for code in (source, twice):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0 and float(done.stdout) == pytest.approx(1e6), done.stderr


def test_ports_are_given_once() -> None:
    ports = [reserved_port() for _ in range(3)]
    assert len(set(ports)) == 3 and max(ports) < 32768, "above, the kernel gives them to anybody"


def test_every_folder_of_the_package_has_tests_that_a_change_of_it_runs() -> None:
    known = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert {folder for folders in (*areas.TESTS_OF.values(), *areas.OTHERS.values()) for folder in folders} <= known
    for path in (ROOT / "meshwright").iterdir():
        if path.is_dir() and any(path.glob("*.py")):
            assert areas.areas_of([f"meshwright/{path.name}/x.py"], known), path


@pytest.mark.parametrize(
    "file, areas_", [
        ("meshwright/errors.py", "parity run comm"), ("tests/support/ranks.py", "parity run comm"),
        ("tests/conftest.py", "parity run comm"), ("pyproject.toml", "parity run comm"),
        ("constraints.txt", "parity run comm"), ("meshwright/recipes/t5-11b.yaml", "check config"),
    ],
)  # fmt: skip
def test_files_that_everything_uses_have_areas_too(file: str, areas_: str) -> None:
    known = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert areas.areas_of([file], known) == areas_.split()
    for path in (ROOT / "meshwright").glob("*.py"):
        assert areas.areas_of([f"meshwright/{path.name}"], known), path
    for folder in ("cli", "config", "run"):
        assert "check" in areas.areas_of([f"meshwright/{folder}/x.py"], known)


def test_without_history_the_most_important_areas_come_first() -> None:
    known = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert set(areas.IMPORTANCE) <= known
    assert areas.by_importance(["bench", "comm", "zoo", "parity"]) == ["parity", "comm", "bench", "zoo"]


def test_the_most_relevant_area_comes_first() -> None:
    files = ["meshwright/nn/linear.py", "tests/comm/test_mesh.py", "tests/comm/hanging.py", "README.md", "Makefile"]
    assert areas.areas_of(files, {"comm", "nn", "parity", "plan"}) == ["comm", "nn", "parity"]


def test_what_changed_is_told_where_there_is_little_history_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(areas, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert areas.base_of("") is None and areas.changed_files(None) is None, "no repository"

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    (tmp_path / "a").touch()
    git("add", ".")
    git("commit", "-m", "first")
    assert areas.base_of("") is None and areas.changed_files(None) is None, "one commit, as a shallow clone has"
    (tmp_path / "b").touch()
    git("add", ".")
    git("commit", "-m", "second")
    (tmp_path / "c").touch()
    assert areas.changed_files(areas.base_of("")) == ["b", "c"], "since the first parent, and what is not committed"
    assert areas.changed_files(areas.base_of("HEAD~1")) == ["b", "c"]
    assert areas.changed_files(areas.base_of("no such commit")) == ["b", "c"]


def test_the_recent_commits_of_the_main_branch_are_one_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areas, "ROOT", tmp_path)

    def git(*words: str, hour: float = 0.0) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        env = os.environ | {"GIT_COMMITTER_DATE": f"{1_700_000_000 + int(3600 * hour)} +0000"}
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, env=env)

    git("init", "--initial-branch", "main")
    for name, hour in (("old", 0.0), ("before", 1.0), ("first", 14.0), ("second", 15.0), ("third", 26.0)):
        (tmp_path / name).touch()
        git("add", ".")
        git("commit", "-m", name, hour=hour)
    assert areas.changed_files(areas.base_of("")) == ["first", "second", "third"]
    monkeypatch.setattr(areas, "RECENT_COMMITS", 2)
    assert areas.changed_files(areas.base_of("")) == ["second", "third"]
    assert areas.changed_files(areas.base_of("HEAD~1")) == ["third"], "a base that is given counts"


class Pytest:
    """A fake of `areas.run_pytest` and of the clock: each call takes some seconds and returns the next result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: dict[str, list[tuple[int | None, list[str]]]]) -> None:
        self.results, self.seconds, self.now = results, 200.0, 0.0
        self.calls: list[tuple[str, float]] = []
        monkeypatch.setattr(areas, "run_pytest", self)
        monkeypatch.setattr(areas.time, "monotonic", lambda: self.now)

    def __call__(self, words: list[str], seconds: float) -> tuple[int | None, list[str]]:
        self.calls.append((words[0], seconds))
        self.now += min(seconds, self.seconds)
        return self.results[words[0]].pop(0)


def test_second_tries_share_one_grace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"test_{number}" for number in range(6)]
    fake = Pytest(monkeypatch, {"tests/nn": [(1, names)], **{name: [(0, [])] for name in names}})
    run = areas.WideRun(1000.0, "2")
    run.run_area("nn")
    assert fake.calls == [("tests/nn", 1000.0), ("test_0", 600.0), ("test_1", 400.0), ("test_2", 200.0)]
    assert run.broken == [] and run.not_repeated == names[3:]
    assert run.report(["nn"]) == 1 and "FAILED test_5 (not repeated)" in capsys.readouterr().out


def test_second_tries_end_after_three_confirmed_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"test_{number}" for number in range(6)]
    fake = Pytest(monkeypatch, {"tests/nn": [(1, names)], **{name: [(1, [name])] for name in names}})
    fake.seconds = 1.0
    run = areas.WideRun(1000.0, "2")
    run.run_area("nn")
    assert (run.broken, run.not_repeated) == (names[:3], names[3:])


@pytest.mark.parametrize("second, broken", [((0, []), []), ((3, []), ["tests/nn"]), ((1, ["a"]), ["a"])])
def test_an_error_of_pytest_itself_is_tried_again(
    second: tuple[int, list[str]], broken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Pytest(monkeypatch, {"tests/nn": [(3, []), second], "a": [(1, ["a"])]})
    run = areas.WideRun(1000.0, "2")
    run.run_area("nn")
    assert run.broken == broken and fake.calls[1] == ("tests/nn", 800.0)


def test_no_second_try_of_an_area_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Pytest(monkeypatch, {"tests/nn": [(3, [])]})
    run = areas.WideRun(100.0, "2")
    run.run_area("nn")
    assert run.broken == ["tests/nn"]


def test_descendants_of_all_threads_are_found() -> None:
    """A child that was started by another thread than the main one is found, and so is a grandchild."""
    source = (
        "import subprocess, sys, threading, time\n"
        "def start(): subprocess.Popen(['sh', '-c', 'sleep 1000 & wait'])\n"
        "thread = threading.Thread(target=lambda: (start(), print('', flush=True), time.sleep(1e6)))\n"
        "thread.start()\n"
    )
    command = [sys.executable, "-c", source]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        until(lambda: len(tree_below(process.pid)) == 2, process)
    finally:
        areas.end_tree(process)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_pytest_is_ended_with_the_command(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    started, real = [], subprocess.Popen.wait

    def wait(process: Any, timeout: float | None = None) -> int:
        if timeout == 15.0:
            started.append(process)
            raise error
        return real(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(error):
        areas.run_pytest(["--version"], 15.0)
    assert started[0].poll() is not None


def test_sigterm_is_an_exception() -> None:
    with pytest.raises(SystemExit, match="143"):
        areas.leave(signal.SIGTERM, None)


def test_the_end_of_the_time_is_no_failure_and_failures_until_then_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command runs a file with one test that fails and one that never ends, during which the time is up."""
    file, reached, real = tmp_path / "test_never.py", tmp_path / "reached", subprocess.Popen.wait
    file.write_text(
        "import pathlib, time\ndef test_a():\n    assert False\n"
        f"def test_b():\n    pathlib.Path({str(reached)!r}).touch()\n    time.sleep(1e6)\n"
    )

    def wait(process: Any, timeout: float | None = None) -> int:
        if timeout == 15.0:
            until(reached.exists, process)
            raise subprocess.TimeoutExpired("pytest", timeout)
        return real(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    words = ["-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    code, failed = areas.run_pytest([str(file), *words, "-p", "tests.conftest"], 15.0)
    assert code is None and [name.split("::")[1] for name in failed] == ["test_a"]


def test_one_missed_benchmark_does_not_end_the_others(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "ran $1"\ncase $1 in */b.py) exit 3;; esac\n')
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    words = ["make", "bench", f"VENV={tmp_path}", "BENCHMARKS=a b c"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode != 0 and "failed: b (exit code 3)" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("ran")] == [
        "ran benchmarks/a.py", "ran benchmarks/b.py", "ran benchmarks/c.py",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [("--shard", "7/6"), ("--shuffle", "abc")])
def test_wrong_options_are_refused_in_one_sentence(words: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "tests/test_running.py", "-k", "nothing", "-n", "1", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and f"ERROR: {' '.join(words)}: give a number" in said
    assert "INTERNALERROR" not in said and "Traceback" not in said


def test_the_search_for_a_port_goes_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ports are tried after the last one, and the file of another user is skipped."""
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ports, "_LAST", ports._FIRST + 12)
    monkeypatch.setattr(ports.os, "getpid", lambda: 11)
    real, tried = os.open, []

    def open_(path: Any, *given: Any) -> int:
        tried.append(str(path))
        if len(tried) <= 2:
            raise PermissionError
        return real(path, *given)

    monkeypatch.setattr(ports.os, "open", open_)
    ports.reserved_port()
    numbers = [int(name.rsplit("-", 1)[1]) for name in tried]
    assert len(set(numbers)) == len(numbers) >= 3 and all(f"-{os.getuid()}-" in name for name in tried)
    assert numbers == [ports._FIRST + (132 + each) % 12 for each in range(len(numbers))]


def test_the_conditions_of_trust_are_ten() -> None:
    found = conditions()
    assert len(found) == len({each.name for each in found}) == 10
    assert [sum(word in each.name for each in found) for word in ("order", "clock", "load")] == [5, 3, 2]
