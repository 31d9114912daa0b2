"""Texts that the first rank sends to the other ranks, which wait outside any collective."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from meshwright.comm import announce
from meshwright.comm.announce import Announcements
from meshwright.comm.group import CommError


def test_every_text_reaches_every_rank_in_order_however_late_it_comes() -> None:
    store, heard = HashStore(), dict[int, list[str]]()
    looked = threading.Event()

    class Looked:
        """The store, which signals when a rank has looked in vain."""

        def check(self, keys: list[str]) -> bool:
            there = bool(store.check(keys))
            if not there:
                looked.set()
            return there

        def get(self, key: str) -> bytes:
            return store.get(key)

    def listen(rank: int) -> None:
        end = Announcements(rank, Looked())  # type: ignore[arg-type]
        heard[rank] = [end.next("not read") for _ in range(3)]

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    assert looked.wait(20.0)
    first = Announcements(0, store)
    assert [first.next(text) for text in ("one", "", "three")] == ["one", "", "three"]
    for thread in threads:
        thread.join(20.0)
    assert heard == {1: ["one", "", "three"], 2: ["one", "", "three"]}


def test_a_store_that_is_lost_is_an_error_of_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nand more")

    with pytest.raises(CommError, match=r"has lost the ranks' store while it waited \(Connection reset by peer\)"):
        Announcements(1, Lost()).next()  # type: ignore[arg-type]
    monkeypatch.setattr(announce, "open_store", lambda: None)
    with pytest.raises(CommError, match="rank 2 does not reach the ranks' store"):
        Announcements(2)
