"""Errors of the operating system, turned into user errors that name a fix; and an early check that a folder is
writable, before the work whose results it will hold. No torch."""

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
    """Write the text that `make` returns to a file and say so on stderr; do nothing if no path was given."""
    if path is None:
        return
    text, is_new = make(), not path.exists()
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        # A new file that holds only the beginning of the text is of no use.
        if is_new:
            path.unlink(missing_ok=True)
        raise refusal(f"cannot write {path}", error, path, "another file") from None
    print(f"wrote {path}", file=sys.stderr)


def tell_files(files: Iterable[str], column: int = 12) -> None:
    """Print the names and sizes of files that were written. Names begin at `column`, aligned with earlier lines."""
    for path in files:
        print(f"{'wrote':{column}}{path} ({os.path.getsize(path):,} bytes)")


FULL = "the disk is full: free some space there (`df -h {at}` shows it), or choose {instead}"
DENIED = "you have no permission for {at}: get it, or choose {instead}"
# The fix for each cause. {at} is the nearest existing file or folder.
FIXES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL.replace("the disk is full", "your share of the disk is used up"),
    errno.EFBIG: "no file may be so large: raise the limit (`ulimit -f`), free some space, or choose {instead}",
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: "{at} can only be read: choose {instead}",
    errno.ENOENT: "there is no folder {missing}: make it, or choose {instead}",
    errno.ENOTDIR: "{at} is not a folder: choose {instead}",
    errno.EEXIST: "{at} already exists and is not a folder: choose {instead}",
    errno.EISDIR: "it is a folder: choose {instead}",
    errno.ENAMETOOLONG: "its name is too long: choose {instead}",
    errno.ELOOP: "its links lead in a circle: choose {instead}",
}
# Errors that `write` raises without naming the file.
NAMELESS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# First parts of local paths. Such a name means a folder on the user's disk, not an owner on Hugging Face's hub.
OWN_FOLDERS = ("runs", "models", "data", "checkpoints", "exported")


def refusal(
    what: str, error: OSError, path: str | os.PathLike[str] | None = None, instead: str = "another place"
) -> UserError:
    """Return the user error for an action that the operating system refused, with the fix for its cause.

    `what` states the refused action ("x can't be written"). `path` is the file or folder concerned (None: the one that
    the error names). `instead` is the alternative that the fix suggests.
    """
    # Find the nearest folder that exists (`at`), and its first missing child.
    place = missing = at = Path(path if path is not None else error.filename or ".")
    while not os.path.lexists(at):
        missing, at = at, at.parent
    fix = FIXES.get(error.errno or 0, "look at that disk, or choose {instead}")
    if error.errno == errno.ENOENT and missing == place:
        fix = "there is no '{missing.name}' in {at}: choose {instead}"
    at = at.absolute() if at == Path() else at
    return UserError(f"{what} ({error.strerror or error}): {fix.format(at=at, missing=missing, instead=instead)}")


def mistake_of(error: OSError) -> UserError | None:
    """Return the user error behind an OSError that no code expected, or None where it may as well be a bug."""
    if error.errno in NAMELESS and not error.filename:
        what = f"a file or the output can't be written ({error.strerror})"
        return UserError(f"{what}: free some space on its disk, or write it elsewhere")
    named = error.errno in FIXES and isinstance(error.filename, (str, bytes))
    path = Path(os.fsdecode(error.filename)) if named else Path()
    # A file that is missing from an existing folder may as well be a bug.
    if not named or (error.errno == errno.ENOENT and os.path.lexists(path.parent)):
        return None
    return refusal(f"{path} can't be used", error, path)


def hub_hint(name: str | os.PathLike[str]) -> str:
    """Return a hint for a user who gave a model's name on Hugging Face's hub in place of a folder; else an empty text.

    The hint says how to download the model.
    """
    owner, _, model = str(name).partition("/")
    shaped = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(name))
    if not shaped or owner in OWN_FOLDERS or os.path.exists(owner):
        return ""
    to = f"models/{model}"
    return f" (if it is a model of Hugging Face's hub, `hf download {name} --local-dir {to}` gets it: then name {to})"


def check_writable(folder: Path, what: str, instead: str) -> None:
    """Raise UserError if `folder`, which need not exist yet, can't be created or written to.

    A test file is written to the nearest existing folder, and removed afterwards.
    """
    at = folder
    try:
        # `os.path.lexists` returns False for any error. This call raises those that have another cause.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.lstat()
        while not os.path.lexists(at):
            at = at.parent
        if not at.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryDirectory(prefix=".meshwright-", dir=at) as made:
            (Path(made) / "written").write_bytes(b"1")
    except OSError as error:
        raise refusal(f"{what} can't be written", error, folder, instead) from None
    except ValueError:
        raise UserError(f"{what} contains a character that is not allowed in a path: choose {instead}") from None
