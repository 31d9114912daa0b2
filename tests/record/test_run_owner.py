"""The owner of a run's folder: one job at a time, whoever owned it before and however many start at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.record import run_owner
from meshwright.record.run_owner import Owner, Ownership, refuse_owned

# Starts when the file `go` appears, and owns the folder until all others have tried.
STARTER = """
import sys, time
from pathlib import Path
from meshwright.errors import UserError
from meshwright.record import run_owner
run_owner.UNWRITTEN_S = 0.3
folder, go = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
while not go.exists():
    time.sleep(0.0005)
try:
    run_owner.Ownership(folder)
    print("owns", flush=True)
except UserError as error:
    print("refused", error, flush=True)
sys.stdin.read()
"""


def note(folder: Path, owner: Owner, number: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f".owner-{number}").write_text(json.dumps(asdict(owner)))


@pytest.fixture
def gone() -> Owner:
    """A process that has ended, though its number may be used again."""
    return replace(Owner.this_process(), began="1")


@pytest.mark.parametrize("before", ["nobody", "gone", "unwritten"])
def test_of_many_that_start_at_once_one_owns_the_folder(tmp_path: Path, gone: Owner, before: str) -> None:
    folder, go = tmp_path / "run", tmp_path / "go"
    if before == "gone":
        note(folder, gone, 7)
    elif before == "unwritten":
        folder.mkdir()
        (folder / ".owner-3").touch()
    command = [sys.executable, "-c", STARTER, str(folder), str(go)]
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert all(starter.stdout is not None and starter.stdout.readline() == "ready\n" for starter in starters)
    go.touch()
    said = [starter.stdout.readline() for starter in starters]  # type: ignore[union-attr]
    for starter in starters:
        starter.communicate("")
    assert sorted(line.split()[0] for line in said) == ["owns"] + 5 * ["refused"], said
    # Two processes that see each other's notes both withdraw and try again, so a refused one may name either.
    named = [f"process {starter.pid} on" for starter in starters]
    assert all(any(name in line for name in named) for line in said if line != "owns\n")
    assert len(list(folder.glob(".owner-*"))) == 1


def test_a_dead_owner_is_followed_with_a_sentence(
    tmp_path: Path, gone: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [gone, replace(gone, began=Owner.this_process().began, boot="another start of the machine")]
    for number, owner in enumerate(others):
        note(tmp_path / str(number), owner)
        Ownership(tmp_path / str(number)).release()
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "was left by a run that is gone (process" in said and "takes it over" in said
    Ownership(tmp_path / "0").release()
    assert capsys.readouterr().err == "", "one that has ended is not gone"


def test_a_living_owner_is_not(tmp_path: Path) -> None:
    with Ownership(tmp_path / "run"):
        for attempt in (lambda: refuse_owned(tmp_path / "run"), lambda: Ownership(tmp_path / "run")):
            with pytest.raises(UserError, match=rf"still training \(process {os.getpid()} on .*choose another run.dir"):
                attempt()
    refuse_owned(tmp_path / "run")


def test_an_owner_that_can_not_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is on another machine, or in another container of this one. Only an earlier attempt of this very job is
    followed.
    """
    me = Owner.this_process()
    for owner in (replace(me, host="elsewhere", pid=1, began="1"), replace(me, pids="pid:[1]", began="1")):
        note(tmp_path, owner, 4)
        (tmp_path / "metrics.jsonl").touch()
        with pytest.raises(UserError) as caught:
            Ownership(tmp_path)
        said = str(caught.value)
        assert f"if it is gone, delete {tmp_path / '.owner-4'}" in said
        assert re.search(r"last step was written \d+ s ago", said), said
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for job, attempt, taken in (("77", 0, True), ("77", 1, False), ("76", 0, False)):
        note(tmp_path, replace(me, host="elsewhere", job=job, attempt=attempt), 9)
        if taken:
            Ownership(tmp_path).release()
        else:
            with pytest.raises(UserError, match="nothing can be known"):
                Ownership(tmp_path)
        (tmp_path / ".owner-10").unlink(missing_ok=True)
    # The same script was started twice under one name. The second start must not count as an attempt of the first run.
    living = replace(me, pid=os.getppid(), began=run_owner._began(os.getppid()) or "", job="77", attempt=0)
    note(tmp_path, living, 9)
    with pytest.raises(UserError, match="still training"):
        Ownership(tmp_path)


def test_a_note_that_is_written_late_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer was held up between creating the file and writing it."""
    monkeypatch.setattr(run_owner, "UNWRITTEN_S", 0.0)
    (tmp_path / ".owner-1").touch()
    real = Ownership._create

    def create(self: Ownership, number: int) -> bool:
        made = real(self, number)
        if number == 2:
            note(tmp_path, replace(self.me, pid=os.getppid(), began=run_owner._began(os.getppid()) or ""))
        return made

    monkeypatch.setattr(Ownership, "_create", create)
    with pytest.raises(UserError, match="still training"):
        Ownership(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".owner-1"]


def test_what_a_run_leaves(tmp_path: Path) -> None:
    """A folder that got no files is removed with the run that created it. In any other folder the note stays, and says
    that the run has ended.
    """
    with Ownership(tmp_path / "refused"):
        (tmp_path / "refused" / "checkpoints").mkdir()
    assert not (tmp_path / "refused").exists()
    with Ownership(tmp_path / "run"):
        (tmp_path / "run" / "config.yaml").touch()
    assert json.loads((tmp_path / "run" / ".owner-1").read_text())["ended"]


def test_a_process_is_known_by_its_beginning() -> None:
    child = subprocess.Popen(["sleep", "60"])
    began = run_owner._began(child.pid)
    assert began and began == run_owner._began(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert run_owner._began(child.pid) is None, "one that nobody has waited for is gone too"
    child.wait()
    assert run_owner._began(child.pid) is None
