"""Bytes that a stranger may send to a port of a run."""

from __future__ import annotations

import random

from meshwright.checkpoint.keeper import MAGIC, NONCE

# The last two begin like a request to a keeper of checkpoints in memory, with a wrong length or signature.
RUBBISH = [
    b"", b"\n" * 500, random.Random(0).randbytes(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    *(bytes(NONCE) + MAGIC + rest for rest in (b" ffffffff " + b"0" * 64 + b"\n", b" 00000002 " + b"0" * 64 + b"\n{}")),
]  # fmt: skip
