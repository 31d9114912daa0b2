"""Tests of the copies of ranks' shards in the memory of keepers.

They cover which copies are kept, how a run resumes from them, and that strangers can neither read nor change them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.keeper import (
    KEEPERS,
    KEY,
    Copies,
    Header,
    Keeper,
    KeeperError,
    KeeperLink,
    KeeperProcess,
    StoredCopy,
)
from meshwright.checkpoint.memory_copy import Keepers, MemoryCopies, MemoryReader, newest_whole
from meshwright.checkpoint.save import Snapshot
from meshwright.checkpoint.tensor_file import raw
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.plan.job import job_of
from meshwright.plan.memory import copied_bytes
from meshwright.record.checkpoint_format import DamagedCheckpoint
from tests.checkpoint.runs import lines, tensors, tiny, train
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks
from tests.support.rubbish import RUBBISH
from tests.support.waiting import HANG_S, until

SECRET = bytes(range(32))


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    """Two keepers that serve in threads of this process."""
    made = [Keeper("127.0.0.1") for _ in range(2)]
    for one in made:
        one.key = SECRET
        threading.Thread(target=one.serve, daemon=True).start()
    yield made
    for one in made:
        one.server.close()


def environment(made: list[Keeper], node: int, generation: int = 0) -> dict[str, str]:
    where = {"addresses": [["127.0.0.1", one.port] for one in made], "nodes": len(made), "node": node}
    return {KEEPERS: json.dumps(where | {"generation": generation}), KEY: SECRET.hex()}


def held(world: int = 2, generation: int = 0) -> StoredCopy:
    return StoredCopy(world, generation, bytearray(b"list"), bytearray(b"data"))


def test_a_run_goes_on_from_memory_without_a_disk(
    keepers: list[Keeper], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumes from memory after the loss of one of two nodes and of every checkpoint on disk.

    The keepers of both nodes hold the whole copy. The loaded state is bit-identical to the saved one. A copy with one
    wrong bit is refused.
    """
    sections = tiny(tmp_path / "run", train={"steps": 4}, checkpoint={"every": 4, "memory_every": 2, "keep": 0})
    sections["faults"] = {"elastic": True}
    for name, value in environment(keepers, node=1).items():
        monkeypatch.setitem(os.environ, name, value)
    assert train(0, 1, sections, None, None)[0] == 4
    until(lambda: keepers[0].copies.list_copies())
    assert [one.copies.list_copies() for one in keepers] == [[[2, 0, 1, 0]]] * 2, "the last step is on disk"
    config = small_config(**sections)
    assert len(keepers[0].copies.get(2, 0).data) == copied_bytes(job_of(config, 1, host=True)) == 12 * 7216

    shutil.rmtree(tmp_path / "run" / "checkpoints")
    keepers[1].server.close()
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setitem(os.environ, "MESHWRIGHT_LOST", json.dumps({"last": time.time(), "seen": time.time()}))
    assert train(0, 1, sections, None, None)[0] == 4
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    (back,) = [event for event in lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "recovered"]
    assert (back["step"], back["source"]) == (3, "memory")

    straight = tiny(tmp_path / "straight", train={"steps": 4}, checkpoint={"every": 2, "keep": 0})
    monkeypatch.delitem(os.environ, "TORCHELASTIC_RESTART_COUNT")
    train(0, 1, straight, None, None)
    ours, theirs = (tensors(tmp_path / name / "checkpoints" / "step-00000004") for name in ("run", "straight"))
    assert ours.keys() == theirs.keys()
    assert all(values.tobytes() == theirs[name].tobytes() for name, values in ours.items())

    known = Keepers.from_environment(environment(keepers, node=0))
    assert known is not None and newest_whole(known) == 2
    reader = MemoryReader(known, 2)
    at_two = tensors(tmp_path / "straight" / "checkpoints" / "step-00000002")
    for block in reader.index.blocks:
        corner = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
        assert reader.block(block).numpy().tobytes() == at_two[block.tensor][corner].tobytes()
    keepers[0].copies.get(2, 0).data[40] ^= 1
    with pytest.raises(DamagedCheckpoint, match="not what was sent"):
        for block in reader.index.blocks:
            reader.block(block)


def test_a_copy_goes_into_the_same_memory_each_time_and_is_that_of_its_step(tmp_path: Path) -> None:
    """Training may change the state as soon as the copy is made. The next copy waits until this one is sent."""
    trainer = make_trainer(small_config(**tiny(tmp_path)))
    copies = MemoryCopies(trainer, Keepers([("", 0)], 1, 0, 0, b""))
    addresses, sent, go = list[set[int]](), list[list[bytes]](), threading.Event()

    def send(index: Any, snapshot: Any) -> None:
        assert go.wait(60)
        values = [as_tensor(values) for _, _, values in snapshot.blocks]
        addresses.append({each.data_ptr() for each in values})
        sent.append([bytes(raw(each.contiguous())) for each in values])

    copies._send = send  # type: ignore[method-assign]
    expected = []
    for _ in range(2):
        trainer.step()
        go.clear()
        copies.save()
        expected.append([bytes(raw(as_tensor(v).detach().contiguous())) for _, _, v in Snapshot(trainer).blocks])
        # Change the state before the copy may be sent.
        trainer.step()
        go.set()
    copies.wait()
    assert sent == expected and addresses[0] == addresses[1] and copies.bytes == sum(map(len, sent[1]))


BF16 = {"precision": "bf16", "global_batch": 8, "micro_batch": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {}, "tp": {"layout": {"tp": 2}}, "pp x tp": {"layout": {"pp": 2, "tp": 2}}, "zero 1": {"zero": {"stage": 1}},
    "zero 3": {"zero": {"stage": 3}}, "bf16": {"train": BF16}, "bf16, zero 2": {"train": BF16, "zero": {"stage": 2}},
    "bf16 masters": {"train": BF16, "optimizer": {"master_dtype": "bf16"}},
    "experts": {"layout": {"ep": 2}, "model": {"experts": {"count": 4, "top_k": 2}}},
}  # fmt: skip


def copied(rank: int, world: int, cases: list[dict[str, Any]]) -> list[int]:
    """Return the bytes that this rank sends with one copy, in each case."""
    sizes = []
    for sections in cases:
        copies = MemoryCopies(make_trainer(small_config(**sections), rank, world), Keepers([("", 0)], 1, 0, 0, b""))
        copies._send = lambda index, values: None  # type: ignore[method-assign]
        copies.save()
        copies.wait()
        sizes.append(copies.bytes)
    return sizes


@pytest.mark.wide
def test_the_plan_knows_the_bytes_of_a_copy_on_every_layout(tmp_path: Path) -> None:
    cases = [tiny(tmp_path, **sections) for sections in LAYOUTS.values()]
    by_rank = run_ranks(4, copied, cases)
    for name, sections, parts in zip(LAYOUTS, cases, zip(*by_rank, strict=True), strict=True):
        assert sum(parts) == copied_bytes(job_of(small_config(**sections), 4, host=True)), name


def test_a_copy_is_whole_when_every_rank_of_one_generation_has_given_its_part(keepers: list[Keeper]) -> None:
    """Until then it is not loaded: a run never resumes from shards of two different states."""
    known = Keepers.from_environment(environment(keepers, node=0))
    assert known is not None and newest_whole(known) == 0
    for rank in range(3):
        keepers[0].copies.store(10, rank, held(4))
    assert newest_whole(known) == 0
    keepers[1].copies.store(10, 3, held(4, generation=1))
    assert newest_whole(known) == 0, "the last shard is of another generation"
    keepers[1].copies.store(10, 3, held(4))
    assert newest_whole(known) == 10
    keepers[0].copies.store(20, 0, held(4))
    assert newest_whole(known) == 10


def test_each_rank_is_kept_by_its_own_node_and_the_next() -> None:
    addresses = [["10.0.0.1", 1], ["10.0.0.2", 2], ["10.0.0.3", 3]]
    for node, names in ((0, ["10.0.0.1", "10.0.0.2"]), (2, ["10.0.0.3", "10.0.0.1"])):
        text = json.dumps({"addresses": addresses, "nodes": 3, "node": node, "generation": 0})
        known = Keepers.from_environment({KEEPERS: text, KEY: "00"})
        assert known is not None and [host for host, _ in known.holders] == names
    alone = Keepers([("127.0.0.1", 1)], 1, 0, 0, b"")
    assert alone.holders == [("127.0.0.1", 1)] and Keepers.from_environment({}) is None


def test_what_is_forgotten() -> None:
    copies = Copies()
    for step in (2, 4, 6):
        copies.store(step, 0, held())
    copies.store(6, 1, held())
    assert copies.list_copies() == [[4, 0, 2, 0], [6, 0, 2, 0], [6, 1, 2, 0]]
    # The run went back to an earlier step, with fewer ranks.
    copies.store(3, 0, held(1, generation=1))
    assert copies.list_copies() == [[3, 0, 1, 1]], "later steps of an earlier generation would be loaded otherwise"


PUT: Header = {"op": "put", "step": 9, "rank": 0, "world": 1, "generation": 0}
SIGNED: list[Any] = [
    {"op": "nothing"}, {"op": "put", "rank": "x"}, {"op": "get", "step": 7, "rank": 0}, {"op": "put", "step": 9}, PUT,
]  # fmt: skip


class Overheard:
    """A socket that records all bytes that are sent with it, and replaces those in `put_in`."""

    def __init__(self, peer: socket.socket, put_in: dict[bytes, bytes]) -> None:
        self.peer, self.put_in, self.sent = peer, put_in, b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.peer.sendall(self.put_in.get(data, data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.peer, name)


def refused(link: KeeperLink) -> bool:
    """Return whether the keeper closes the connection without an answer."""
    try:
        return link.peer.recv(1) == b""
    except ConnectionError:
        return True


def test_what_was_overheard_is_good_for_nothing(keepers: list[Keeper]) -> None:
    """A signed request is refused when it is repeated, used on another connection, or sent with other bytes."""
    with KeeperLink("127.0.0.1", keepers[0].port, SECRET) as link:
        overheard = link.channel.peer = Overheard(link.peer, {})  # type: ignore[assignment]
        link.ask(PUT, [b"list", b"data"])
        assert overheard.sent.endswith(b"listdata")
        link.peer.sendall(overheard.sent)
        assert refused(link), "a repeated request is refused"
    with KeeperLink("127.0.0.1", keepers[0].port, SECRET) as link:
        link.peer.sendall(overheard.sent)
        assert refused(link), "a request of another connection is refused"
    with KeeperLink("127.0.0.1", keepers[0].port, SECRET) as link:
        link.channel.peer = Overheard(link.peer, {b"data": b"DATA"})  # type: ignore[assignment]
        with pytest.raises(KeeperError):
            link.ask(PUT, [b"list", b"data"])
    assert keepers[0].copies.get(9, 0).data == b"data"


def test_rubbish_changes_nothing(keepers: list[Keeper]) -> None:
    """Malformed requests change no copy, and the keeper answers others while they are open and afterwards."""
    keepers[0].copies.store(5, 0, held(1))
    open_ones = []
    for header in SIGNED:
        with KeeperLink("127.0.0.1", keepers[0].port, SECRET) as link, pytest.raises(KeeperError):
            link.ask(header)
    for data in RUBBISH:
        peer = socket.create_connection(("127.0.0.1", keepers[0].port))
        peer.sendall(data)
        open_ones.append(peer)
    with KeeperLink("127.0.0.1", keepers[0].port, SECRET) as link:
        assert link.ask({"op": "found"})[0]["found"] == [[5, 0, 1, 0]]
        with pytest.raises(KeeperError, match="lacks"):
            link.ask({"op": "get", "step": 5, "rank": 0})
        assert link.ask({"op": "get", "step": 5, "rank": 0, "start": 1, "size": 2})[1] == [bytearray(b"at")]
    with KeeperLink("127.0.0.1", keepers[0].port, b"another key") as link, pytest.raises(KeeperError):
        link.ask({"op": "found"})
    for peer in open_ones:
        peer.close()


def test_the_process_listens_on_its_address_alone_and_ends_with_its_launcher() -> None:
    with KeeperProcess("127.0.0.1") as process:
        with pytest.raises(KeeperError, match="does not answer"):
            # The keeper answers no request before it has its key.
            KeeperLink("127.0.0.1", process.port, SECRET)
        process.tell(SECRET.hex())

        def answers() -> bool:
            try:
                with KeeperLink("127.0.0.1", process.port, SECRET) as link:
                    return link.ask({"op": "found"})[0]["found"] == []
            except KeeperError:
                return False

        until(answers)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", process.port), 1.0)
        assert process.process.stdin is not None
        process.process.stdin.close()
        assert process.process.wait(HANG_S) == 0
