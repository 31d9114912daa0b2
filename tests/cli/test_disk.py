"""Errors of the operating system are reported in one sentence with a fix for the cause, before the work if possible."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from meshwright import disk
from meshwright.cli import main as command
from meshwright.disk import check_writable, mistake_of, refusal
from meshwright.errors import UserError
from meshwright.interop.hf import written_aside
from meshwright.launch.launch import run_guarded
from tests.support.waiting import HANG_S

CAUSES = {
    errno.ENOSPC: "the disk is full: free some space there (`df -h {at}` shows it), or choose another run.dir",
    errno.EDQUOT: "your share of the disk is used up",
    errno.EACCES: "you have no permission for {at}: get it, or choose another run.dir",
    errno.EROFS: "{at} can only be read: choose another run.dir",
    errno.ENOENT: "there is no folder {at}/a: make it, or choose another run.dir",
    errno.ENAMETOOLONG: "its name is too long: choose another run.dir",
    errno.EIO: "look at that disk, or choose another run.dir",
}


def error_of(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([str(path)] if path else []))


@pytest.mark.parametrize("number", CAUSES, ids=errno.errorcode.get)
def test_each_cause_has_its_fix(number: int, tmp_path: Path) -> None:
    message = str(refusal("it can't be written", error_of(number), tmp_path / "a" / "b", "another run.dir"))
    assert message.startswith(f"it can't be written ({os.strerror(number)}): {CAUSES[number].format(at=tmp_path)}")


def test_a_name_in_a_folder_that_takes_none(tmp_path: Path) -> None:
    assert f"there is no 'a' in {tmp_path}: choose another place" in str(
        refusal("x", error_of(errno.ENOENT), tmp_path / "a")
    )


def test_what_nobody_expected_is_a_mistake_or_a_bug(tmp_path: Path) -> None:
    for number, path in ((errno.ENOSPC, None), (errno.EACCES, tmp_path / "a"), (errno.ENOENT, tmp_path / "a" / "b")):
        assert mistake_of(error_of(number, path)) is not None
    for number, path in ((errno.EACCES, None), (errno.ECONNREFUSED, tmp_path / "a"), (errno.ENOENT, tmp_path / "a")):
        assert mistake_of(error_of(number, path)) is None


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "run.dir=a/b", "another run.dir")
    check_writable(tmp_path, "run.dir", "another run.dir")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link is not a folder: choose another run.dir"):
        check_writable(tmp_path / "link", "run.dir=link", "another run.dir")


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.dir"])
def test_train_refuses_before_anything_starts(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tempfile.TemporaryDirectory

    def read_only(*, prefix: str, dir: Path) -> Any:  # noqa: A002
        if dir == tmp_path:
            raise error_of(errno.EROFS)
        return made(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", read_only)
    monkeypatch.setattr("meshwright.cli.train.warm_up", lambda: pytest.fail("ranks were prepared"))
    words = ["model.preset=gpt2-124m", f"{key}={tmp_path}/a"]
    (tmp_path / "c.yaml").write_text("data: {prefixes: [nowhere]}\n")
    assert command.main(["train", str(tmp_path / "c.yaml"), *words, "--nproc", "2"]) == 2
    stderr = capsys.readouterr().err
    fix = f"{key}={tmp_path}/a can't be written (Read-only file system): {tmp_path} can only be read"
    assert stderr == f"meshwright: {fix}: choose another {key}\n"


def test_files_that_commands_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"there is no folder {tmp_path}/no: make it, or choose another file"):
        disk.write(tmp_path / "no" / "page.html", lambda: "text")

    def half(path: Path, text: str, **options: Any) -> None:
        path.write_bytes(text[:1].encode())
        raise error_of(errno.ENOSPC)

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(UserError, match="the disk is full: free some space there"):
        disk.write(tmp_path / "page.html", lambda: "text")
    with (
        pytest.raises(UserError, match="the disk is full: free some space there"),
        written_aside(tmp_path / "to") as to,
    ):
        (to / "config.json").write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_under_a_rank_is_no_bug(tmp_path: Path) -> None:
    def rank() -> None:
        raise error_of(errno.ENOSPC, tmp_path / "a")

    with pytest.raises(SystemExit) as ended:
        run_guarded(str(tmp_path), False, rank)
    assert ended.value.code == 2
    assert "the disk is full" in (tmp_path / "mistake-0-0").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_that_has_no_room() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S,
        )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "can't be written (No space left on device): free some space" in done.stderr
