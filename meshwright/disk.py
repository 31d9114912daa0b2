"""What the operating system refuses, told as a mistake with the fix for its cause; and whether a folder can be written,
found before the work of which it shall hold the results. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwright.errors import UserError


def write(path: Path | None, make: Callable[[], str]) -> None:
    """Writes a file if a path was given, and says so on stderr."""
    if path is None:
        return
    text, is_new = make(), not path.exists()
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        if is_new:  # a beginning of a file is of no use
            path.unlink(missing_ok=True)
        raise refused(f"cannot write {path}", error, path, "another file") from None
    print(f"wrote {path}", file=sys.stderr)


def tell_files(files: Iterable[str], column: int = 12) -> None:
    """Says which files were written, with their sizes; names begin at a column, as the lines above have it."""
    for path in files:
        print(f"{'wrote':{column}}{path} ({os.path.getsize(path):,} bytes)")


FULL = "the disk is full: free some space there (`df -h {at}` shows it), or choose {instead}"
DENIED = "you have no permission for {at}: get it, or choose {instead}"
# By cause; {at} is the nearest file or folder that is there.
FIXES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL.replace("the disk is full", "your share of the disk is used up"),
    errno.EFBIG: "no file may be so large: raise the limit (`ulimit -f`), free some space, or choose {instead}",
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: "{at} can only be read: choose {instead}",
    errno.ENOENT: "there is no folder {missing}: make it, or choose {instead}",
    errno.ENOTDIR: "{at} is no folder: choose {instead}",
    errno.EEXIST: "{at} is there already, and is no folder: choose {instead}",
    errno.EISDIR: "it is a folder: choose {instead}",
    errno.ENAMETOOLONG: "its name is too long: choose {instead}",
    errno.ELOOP: "its links lead in a circle: choose {instead}",
}
NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # such errors of a write don't say of which file

OWN_FOLDERS = ("runs", "models", "data", "checkpoints", "exported")  # as people name what lies on their disk


def refused(
    what: str, error: OSError, path: str | os.PathLike[str] | None = None, instead: str = "another place"
) -> UserError:
    """The mistake behind an error of the operating system. `what` it refused, as in "x can't be written"; `path` is
    what it refused it for (None: as the error says); `instead` is what else the user may choose."""
    place = missing = at = Path(path if path is not None else error.filename or ".")
    while not os.path.lexists(at):
        missing, at = at, at.parent
    fix = FIXES.get(error.errno or 0, "look at that disk, or choose {instead}")
    if error.errno == errno.ENOENT and missing == place:
        fix = "there is no '{missing.name}' in {at}: choose {instead}"
    at = at.absolute() if at == Path() else at
    return UserError(f"{what} ({error.strerror or error}): {fix.format(at=at, missing=missing, instead=instead)}")


def mistake_of(error: OSError) -> UserError | None:
    """The mistake behind an error that nobody expected; None where it may as well be a bug."""
    if error.errno in NAMELESS and not error.filename:
        what = f"a file or the output can't be written ({error.strerror})"
        return UserError(f"{what}: free some space where it shall lie, or write it elsewhere")
    named = error.errno in FIXES and isinstance(error.filename, (str, bytes))
    path = Path(os.fsdecode(error.filename)) if named else Path()
    if not named or (error.errno == errno.ENOENT and os.path.lexists(path.parent)):
        return None
    return refused(f"{path} can't be used", error, path)


def hub_hint(name: str | os.PathLike[str]) -> str:
    """How to get a model whose name on Hugging Face's hub was given for a folder; empty for other names."""
    owner, _, model = str(name).partition("/")
    shaped = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(name))
    if not shaped or owner in OWN_FOLDERS or os.path.exists(owner):
        return ""
    to = f"models/{model}"
    return f" (if it is a model of Hugging Face's hub, `hf download {name} --local-dir {to}` gets it: then name {to})"


def check_writable(folder: Path, what: str, instead: str) -> None:
    """Raises if `folder`, which need not be there yet, can't be made or nothing can be written in it. What is written
    to find out lies in the nearest folder that is there, and is gone afterwards."""
    at = folder
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()
        while not os.path.lexists(at):
            at = at.parent
        if not at.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryDirectory(prefix=".meshwright-", dir=at) as made:
            (Path(made) / "written").write_bytes(b"1")
    except OSError as error:
        raise refused(f"{what} can't be written", error, folder, instead) from None
    except ValueError:
        raise UserError(f"{what} holds a character that no path may hold: choose {instead}") from None
