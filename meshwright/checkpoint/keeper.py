"""The keeper of a node: a process that outlives the ranks and holds copies of their shards in its memory.

The launcher starts the keeper, passes it the job's key on standard input, and stops it when it ends itself. Any process
with the key may store a copy, list the copies, and read them. This module does not import torch.

Both ends of a connection first send a random number. Every message then begins with a line of fixed length, which holds
the length of a JSON header and its signature. The signature is an HMAC of both numbers, the sender's role, the number
of messages that this end has sent before, and the header. An overheard message is therefore useless on another
connection, and can't be replayed on the same one. The header holds the SHA-256 of each byte string that follows. A
message that fails a check is ignored. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, TypedDict

from meshwright.outside import of_kind, parse_json

# Environment variables of a rank: the keepers that it knows, as JSON, and the job's key.
KEEPERS, KEY = "MESHWRIGHT_KEEPERS", "MESHWRIGHT_KEY"
MAGIC = b"MWK2"
# The magic, the header's length and its signature, both in hexadecimal, with separators.
LINE = len(MAGIC) + 1 + 8 + 1 + 64 + 1
LONGEST_HEADER = 2**20
NONCE = 16  # The bytes of each end's random number.
KEPT_STEPS = 2  # The number of newest steps whose copies are kept.
WAIT_S = 30.0  # The time limit for a silent peer.
PIECE = 2**22  # The most bytes that one call receives.

Buffer: TypeAlias = bytes | bytearray | memoryview


class Header(TypedDict, total=False):
    """The header of a message. `sizes` and `hashes` describe the byte strings that follow it."""

    op: str
    step: int
    rank: int
    world: int
    generation: int
    start: int
    size: int
    sizes: list[int]
    hashes: list[str]
    found: list[list[int]]
    error: str


class KeeperError(Exception):
    """A request that a keeper refused or did not answer."""


class Channel:
    """One end of a connection. Each message is signed for this connection and for its position in it.

    `calls`: this end sends the requests. The methods raise KeeperError and OSError.
    """

    def __init__(self, peer: socket.socket, key: bytes, calls: bool) -> None:
        # Without this option short messages wait 40 ms for an acknowledgement.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.key, self.calls = peer, key, calls
        self._sent = self._received = 0
        mine = secrets.token_bytes(NONCE)
        peer.sendall(mine)
        theirs = bytes(_exactly(peer, NONCE))
        self._nonces = mine + theirs if calls else theirs + mine

    def _signature(self, by_caller: bool, number: int, text: bytes) -> bytes:
        place = self._nonces + b"%d %016x " % (by_caller, number)
        return hmac.new(self.key, place + text, hashlib.sha256).hexdigest().encode()

    def send(self, header: Header, parts: Sequence[Buffer] = ()) -> None:
        sizes = [memoryview(part).nbytes for part in parts]
        hashes = [hashlib.sha256(part).hexdigest() for part in parts]
        text = json.dumps(header | {"sizes": sizes, "hashes": hashes}).encode()
        signature = self._signature(self.calls, self._sent, text)
        self._sent += 1
        self.peer.sendall(b"%s %08x %s\n" % (MAGIC, len(text), signature) + text)
        for part in parts:
            self.peer.sendall(part)

    def receive(self) -> tuple[Header, list[bytearray]]:
        """Receive one message. Raise KeeperError if its signature or a hash is wrong."""
        line = bytes(_exactly(self.peer, LINE))
        magic = line[:4]
        length = line[5:13]
        signature = line[14:-1]
        try:
            size = int(length, 16)
        except ValueError:
            size = LONGEST_HEADER + 1
        if magic != MAGIC or not 0 <= size <= LONGEST_HEADER:
            raise KeeperError("this is no message of ours")
        text = bytes(_exactly(self.peer, size))
        if not hmac.compare_digest(self._signature(not self.calls, self._received, text), signature):
            raise KeeperError("it is not signed with the job's key for this connection")
        self._received += 1
        try:
            header: Header = of_kind(parse_json(text), Header, "the header")
        except ValueError as error:
            raise KeeperError(str(error)) from None
        parts = [_exactly(self.peer, size) for size in header.get("sizes", [])]
        if [hashlib.sha256(part).hexdigest() for part in parts] != header.get("hashes", []):
            raise KeeperError("its bytes are not those that were signed")
        return header, parts


def _exactly(peer: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        read = peer.recv_into(view[at : at + PIECE])
        if not read:
            raise KeeperError("the connection ended in the middle of a message")
        at += read
    return data


class StoredCopy(NamedTuple):
    """A rank's copy: the run's number of ranks and its generation, the list of the blocks, and their bytes."""

    world: int
    generation: int
    blocks: bytearray
    data: bytearray


class Copies:
    """The newest copies, by step and rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], StoredCopy] = {}

    def store(self, step: int, rank: int, new: StoredCopy) -> None:
        """Store a copy, and drop all copies except those of the newest steps.

        After a loss a run may go back to an earlier step. Copies of an earlier generation from this step on are then
        dropped too.
        """
        with self._lock:
            late = [at for at, held in self._held.items() if at[0] >= step and held.generation < new.generation]
            late += [at for at in self._held if at[0] > step and at[1] == rank]
            for at in {*late}:
                del self._held[at]
            self._held[step, rank] = new
            old = sorted({at[0] for at in self._held})[:-KEPT_STEPS]
            for at in [at for at in self._held if at[0] in old]:
                del self._held[at]

    def list_copies(self) -> list[list[int]]:
        """Return [step, rank, world, generation] of every copy."""
        with self._lock:
            return [[*at, held.world, held.generation] for at, held in sorted(self._held.items())]

    def get(self, step: int, rank: int) -> StoredCopy:
        with self._lock:
            held = self._held.get((step, rank))
        if held is None:
            raise KeeperError(f"there is no copy of rank {rank} at step {step}")
        return held


def answer(copies: Copies, header: Header, parts: list[bytearray]) -> tuple[Header, list[Buffer]]:
    """Return a keeper's reply to a request: a header and byte strings. Raise KeeperError if the request is wrong."""
    op = header.get("op")
    try:
        if op == "put" and len(parts) == 2:
            copies.store(header["step"], header["rank"], StoredCopy(header["world"], header["generation"], *parts))
            return {}, []
        if op == "found":
            return {"found": copies.list_copies()}, []
        if op == "list":
            return {}, [copies.get(header["step"], header["rank"]).blocks]
        if op == "get":
            data = copies.get(header["step"], header["rank"]).data
            return {}, [memoryview(data)[header["start"] : header["start"] + header["size"]]]
    except KeyError as error:
        raise KeeperError(f"the request lacks {error}") from None
    raise KeeperError("there is no such request")


class Keeper:
    """A server for requests at an address of this machine, with one thread per connection."""

    def __init__(self, address: str) -> None:
        self.server = socket.create_server((address, 0))
        self.port: int = self.server.getsockname()[1]
        self.copies, self.key = Copies(), b""

    def serve(self) -> None:
        while True:
            try:
                peer, _ = self.server.accept()
            except OSError:
                return  # The socket was closed.
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(WAIT_S)
            try:
                channel = Channel(peer, self.key, calls=False) if self.key else None
                while channel:
                    header, parts = channel.receive()
                    try:
                        reply, reply_parts = answer(self.copies, header, parts)
                    except KeeperError as error:
                        reply, reply_parts = {"error": str(error)}, []
                    channel.send(reply, reply_parts)
            except (KeeperError, OSError, MemoryError):
                return  # A peer without a valid signature gets no answer.


def main(address: str) -> None:
    """Run the keeper's process: print its port, and serve until standard input ends. Each line of it sets the key."""
    keeper = Keeper(address)
    print(keeper.port, flush=True)
    threading.Thread(target=keeper.serve, daemon=True).start()
    for line in sys.stdin:
        keeper.key = bytes.fromhex(line.strip())


class KeeperProcess:
    """The keeper process of a launcher, which ends with the launcher."""

    def __init__(self, address: str) -> None:
        words = [sys.executable, "-m", "meshwright.checkpoint.keeper", address]
        # The keeper gets a separate process group, because signals that a terminal or a scheduler sends to all ranks
        # must not reach it.
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline() or 0)

    def tell(self, key: str) -> None:
        """Pass the job's key to the process."""
        assert self.process.stdin is not None
        with suppress(OSError):  # If the keeper has died, its node has no copies.
            self.process.stdin.write(f"{key}\n")
            self.process.stdin.flush()

    def __enter__(self) -> KeeperProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                end.close()  # type: ignore[union-attr]


class KeeperLink:
    """A connection to a keeper."""

    def __init__(self, address: str, port: int, key: bytes, wait: float = WAIT_S) -> None:
        try:
            self.peer = socket.create_connection((address, port), wait)
        except OSError as error:
            raise KeeperError(f"no keeper answers at {address}:{port} ({error})") from None
        try:
            self.channel = Channel(self.peer, key, calls=True)
        except (OSError, KeeperError) as error:
            self.peer.close()
            raise KeeperError(f"the keeper at {address}:{port} does not answer ({error})") from None

    def ask(self, header: Header, parts: Sequence[Buffer] = ()) -> tuple[Header, list[bytearray]]:
        """Send a request and return the reply. Raise KeeperError if the keeper refuses it or does not answer."""
        try:
            self.channel.send(header, parts)
            reply, reply_parts = self.channel.receive()
        except OSError as error:
            raise KeeperError(f"the keeper does not answer ({error})") from None
        if "error" in reply:
            raise KeeperError(reply["error"])
        return reply, reply_parts

    def __enter__(self) -> KeeperLink:
        return self

    def __exit__(self, *error: object) -> None:
        self.peer.close()


if __name__ == "__main__":
    main(sys.argv[1])
