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
    count = _LAST - _FIRST
    for step in range(count):
        # Processes begin at different places, so that few of them meet at one port.
        port = _FIRST + (os.getpid() * 12 + step) % count
        # A file of another user can't be opened: each has files of their own, and the socket decides between users.
        name = f"meshwright-port-{os.getuid()}-{port}"
        try:
            lock = os.open(Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            continue
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
