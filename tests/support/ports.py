"""Ports for servers that can only be told a number, such as torchrun's.

Binding to port 0 and passing the number on is a race: once it is closed, anybody may get the port. Those below
the range from which the kernel gives out ports are given to nobody who does not ask for them by name, and among
test processes each is reserved by a lock that lasts as long as its process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _LAST = 20000, 32000
_HELD: list[int] = []  # open files, whose locks are the reservations


def reserved_port() -> int:
    """Return a port of the loopback address that no other test process uses."""
    for port in range(_FIRST + os.getpid() % 1000 * 12, _LAST):
        lock = os.open(Path(tempfile.gettempdir()) / f"meshwright-port-{port}", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as tried:
                tried.bind(("127.0.0.1", port))
        except OSError:
            os.close(lock)
            continue
        _HELD.append(lock)
        return port
    raise AssertionError(f"no port between {_FIRST} and {_LAST} is free")
