"""Makes a rank's process end when its launcher is gone, and show its rank and run in `ps`. No torch."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from meshwright.errors import notice

LOOK_S = 1.0  # Seconds between two checks of the parent process.
ORPHAN = 1  # The exit code of a rank whose launcher is gone.
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME_BYTES = 15  # The longest process name that Linux keeps, apart from the command line.


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even if this process hangs. Linux only."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def end_with_launcher(lifeline: Path | None = None) -> None:
    """End this rank when its launcher is gone.

    `lifeline` is a FIFO that our own launcher holds open. Ranks of another launcher are its children. The kernel ends
    the rank if it can; a thread works on every system.
    """
    # The kernel's "parent" is a thread. Other launchers may start ranks from a thread that ends before the ranks do.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    if lifeline is not None:
        _watch("lifeline", partial(_wait_for_end, lifeline))
    _watch("parent", partial(_wait_for_other_parent, os.getppid()))


def _watch(what: str, body: Callable[[], None]) -> None:
    """Run `body` in a thread, unless this process has such a thread already."""
    name = f"meshwright-{what}"
    if all(thread.name != name for thread in threading.enumerate()):
        threading.Thread(target=body, name=name, daemon=True).start()


def _wait_for_end(lifeline: Path) -> None:
    """End this process when no process holds the FIFO open for writing any longer."""
    try:
        handle = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        # The launcher has removed it, so it has ended.
        _end()
    while True:
        # The launcher never writes. The FIFO becomes readable when its last writer has gone.
        select.select([handle], [], [])
        if os.read(handle, 1) == b"":
            _end()


def _wait_for_other_parent(parent: int) -> None:
    """End this process when its parent has changed, which means that the original one has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    _end()


def _end() -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        notice(f"rank {os.environ.get('RANK', '0')}: the launcher is gone, so its ranks end")
    os._exit(ORPHAN)


def end_process(code: int) -> NoReturn:
    """End this process at once, after an error.

    Output and logs are flushed first. Nothing that waits for other ranks is run, such as torch's teardown of process
    groups.
    """
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def name_rank(rank: int, world: int, run: str = "") -> None:
    """Name this process for `ps` and `top`, if the system allows it."""
    name = f"meshwright rank {rank}/{world} {run}".rstrip()
    # No space in this name: Slurm's proctrack/linuxproc reads it as one word, and would not find the rank to signal it.
    _prctl(PR_SET_NAME, f"meshwright:{rank}/{world}".encode()[:NAME_BYTES])
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        # The addresses of the command line's words in this process's memory. `ps` reads them there, so overwrite them.
        start, end = int(fields[45]), int(fields[46])
        if 0 < start < end:
            text = name.encode()[: end - start - 1]
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0)
