"""The keeper of a node: a process that outlives the ranks and holds copies of their shares in its memory. No torch.

Its launcher starts it, tells it the job's key on its standard input, and takes it along when it ends. Whoever knows the
key may put a copy, ask what there is, and read it.

Both ends of a connection first say a random number. Every message then begins with a line of fixed length, which holds
the length of a JSON header and its signature: an HMAC of both numbers, of who speaks, of how many messages that end has
sent, and of the header. So a message that was overheard is good for nothing on another connection, nor a second time on
its own. The header holds the SHA-256 of each byte string that follows. What does not fit changes nothing. Nothing is
encrypted.
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

# In the environment of a rank: the keepers that it knows of, as JSON, and the job's key.
KEEPERS, KEY = "MESHWRIGHT_KEEPERS", "MESHWRIGHT_KEY"
MAGIC = b"MWK2"
LINE = len(MAGIC) + 1 + 8 + 1 + 64 + 1  # the magic, the header's length and its signature, both in hexadecimal
LONGEST_HEADER = 2**20
NONCE = 16  # bytes of an end's random number
KEPT = 2  # newest copies of each rank
WAIT_S = 30.0  # for a peer that says nothing
PIECE = 2**22

Buffer: TypeAlias = bytes | bytearray | memoryview


class Header(TypedDict, total=False):
    """What a request says of itself; `sizes` and `hashes` are those of the byte strings that follow it."""

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
    """What a keeper refused, or that it did not answer."""


class Channel:
    """One end of a connection: its messages are signed for this connection, and for their place in it. Raises
    KeeperError and OSError."""

    def __init__(self, peer: socket.socket, key: bytes, calls: bool) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else short ones wait 40 ms for a receipt
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
        """One message. Raises KeeperError for whatever is not signed with the key, or is not what was signed."""
        line = bytes(_exactly(self.peer, LINE))
        magic, length, signature = (line[:4], line[5:13], line[14:-1])
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


class Held(NamedTuple):
    """A rank's copy: of how many ranks, in which generation of the run, the list of its blocks, and their bytes."""

    world: int
    generation: int
    blocks: bytearray
    data: bytearray


class Copies:
    """The newest copies, by step and rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], Held] = {}

    def put(self, step: int, rank: int, new: Held) -> None:
        """Keeps a copy, and of all ranks those of the newest steps alone. After a loss a run may go back: what an
        earlier generation held of later steps is forgotten."""
        with self._lock:
            late = [at for at, held in self._held.items() if at[0] >= step and held.generation < new.generation]
            late += [at for at in self._held if at[0] > step and at[1] == rank]
            for at in {*late}:
                del self._held[at]
            self._held[step, rank] = new
            old = sorted({at[0] for at in self._held})[:-KEPT]
            for at in [at for at in self._held if at[0] in old]:
                del self._held[at]

    def found(self) -> list[list[int]]:
        with self._lock:
            return [[*at, held.world, held.generation] for at, held in sorted(self._held.items())]

    def get(self, step: int, rank: int) -> Held:
        with self._lock:
            held = self._held.get((step, rank))
        if held is None:
            raise KeeperError(f"there is no copy of rank {rank} at step {step}")
        return held


def answer(copies: Copies, header: Header, parts: list[bytearray]) -> tuple[Header, list[Buffer]]:
    """What a keeper says to a request. Raises KeeperError."""
    op = header.get("op")
    try:
        if op == "put" and len(parts) == 2:
            copies.put(header["step"], header["rank"], Held(header["world"], header["generation"], *parts))
            return {}, []
        if op == "found":
            return {"found": copies.found()}, []
        if op == "list":
            return {}, [copies.get(header["step"], header["rank"]).blocks]
        if op == "get":
            data = copies.get(header["step"], header["rank"]).data
            return {}, [memoryview(data)[header["start"] : header["start"] + header["size"]]]
    except KeyError as error:
        raise KeeperError(f"the request lacks {error}") from None
    raise KeeperError("there is no such request")


class Keeper:
    """Answers requests at an address of this machine, one thread for each connection."""

    def __init__(self, address: str) -> None:
        self.server = socket.create_server((address, 0))
        self.port: int = self.server.getsockname()[1]
        self.copies, self.key = Copies(), b""

    def serve(self) -> None:
        while True:
            try:
                peer, _ = self.server.accept()
            except OSError:
                return  # it was closed
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(WAIT_S)
            try:
                channel = Channel(peer, self.key, calls=False) if self.key else None
                while channel:
                    header, parts = channel.receive()
                    try:
                        said, given = answer(self.copies, header, parts)
                    except KeeperError as error:
                        said, given = {"error": str(error)}, []
                    channel.send(said, given)
            except (KeeperError, OSError, MemoryError):
                return  # whoever it was gets no answer


def main(address: str) -> None:
    """The process: says its port, and serves until its standard input ends; each line of that is the key."""
    keeper = Keeper(address)
    print(keeper.port, flush=True)
    threading.Thread(target=keeper.serve, daemon=True).start()
    for line in sys.stdin:
        keeper.key = bytes.fromhex(line.strip())


class KeeperProcess:
    """A launcher's keeper, which ends with it."""

    def __init__(self, address: str) -> None:
        words = [sys.executable, "-m", "meshwright.checkpoint.keeper", address]
        # A group of its own: what a terminal or a scheduler sends to all ranks is not meant for it.
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline() or 0)

    def tell(self, key: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has died: its node has no copies then
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
        try:
            self.channel.send(header, parts)
            said, given = self.channel.receive()
        except OSError as error:
            raise KeeperError(f"the keeper does not answer ({error})") from None
        if "error" in said:
            raise KeeperError(said["error"])
        return said, given

    def __enter__(self) -> KeeperLink:
        return self

    def __exit__(self, *error: object) -> None:
        self.peer.close()


if __name__ == "__main__":
    main(sys.argv[1])
