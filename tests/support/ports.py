"""Ports for servers that need a fixed number, such as torchrun's.

Binding to port 0 and passing the number on is a race: once the socket is closed, any process may get the port. The
kernel never gives out the ports below its own range by itself, so only a process that asks for one by number gets it.
Among test processes each port is reserved by a lock that lasts as long as its process.
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
        # Processes begin at different ports, so that they rarely try the same one.
        port = _FIRST + (os.getpid() * 12 + step) % count
        # Another user's file can't be opened, so each user has separate files, and binding decides between users.
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
