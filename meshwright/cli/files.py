"""Files that a command writes besides its output. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwright.disk import refused


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
