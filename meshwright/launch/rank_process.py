"""A rank as a process: it ends when its launcher is gone, and `ps` says which rank of which run it is. No torch."""

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

LOOK_S = 1.0  # between two looks at who the parent is
ORPHAN = 1  # exit code of a rank whose launcher is gone
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME_BYTES = 15  # of what Linux calls a process's name, beside its command line


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends (Linux), even if it handles nothing."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def end_with_launcher(lifeline: Path | None = None) -> None:
    """Ends this rank when its launcher is gone. `lifeline` is a FIFO that our own launcher holds open; the ranks of
    another launcher are its children. The kernel sees to it where it can, and a thread everywhere."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # others may start ranks from a thread that ends before they do
        end_with_parent()
    if lifeline is not None:
        _watch("lifeline", partial(_wait_for_end, lifeline))
    _watch("parent", partial(_wait_for_other_parent, os.getppid()))


def _watch(what: str, body: Callable[[], None]) -> None:
    name = f"meshwright-{what}"
    if all(thread.name != name for thread in threading.enumerate()):  # once in a process, whoever asks
        threading.Thread(target=body, name=name, daemon=True).start()


def _wait_for_end(lifeline: Path) -> None:
    try:
        handle = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        _end()  # the launcher has removed it
    while True:
        select.select([handle], [], [])  # nobody writes, so this is the end of the last writer
        if os.read(handle, 1) == b"":
            _end()


def _wait_for_other_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    _end()


def _end() -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        notice(f"rank {os.environ.get('RANK', '0')}: the launcher is gone, so its ranks end")
    os._exit(ORPHAN)


def end_process(code: int) -> NoReturn:
    """Ends this process at once, after an error. What was printed or logged is flushed first; nothing that waits for
    other ranks, such as torch's teardown of process groups, is run."""
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def name_rank(rank: int, world: int, run: str = "") -> None:
    """Names this process for `ps` and `top`, where the system allows it."""
    name = f"meshwright rank {rank}/{world} {run}".rstrip()
    # Without a space: Slurm's proctrack/linuxproc reads the name as one word, and would not find the rank to signal it.
    _prctl(PR_SET_NAME, f"meshwright:{rank}/{world}".encode()[:NAME_BYTES])
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # where the words of the command line lie in memory
        if 0 < start < end:
            text = name.encode()[: end - start - 1]
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0)
