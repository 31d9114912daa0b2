"""Emulated links take the time of their bytes, one message after the other, and hide behind computation."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.config.comm import EmulateConfig
from meshwright.lab import emulate
from meshwright.lab.emulate import Adapters, EmulatedLinks
from meshwright.spec.layout import Layout
from tests.support.ranks import run_ranks

MB = 250_000  # Elements in float32.
SLOW = EmulateConfig(link_gb_s=0.02, network_gb_s=0.01)  # 50 ms for a megabyte in the node, 100 ms between nodes


def times(rank: int, world: int) -> dict[str, float]:
    """Return the seconds of a few calls. Ranks 0 and 1 are on one node, 2 and 3 on another."""
    inside = Mesh(Layout(world, tp=2, node_size=2), rank)
    emulate.emulate_links(inside, SLOW)
    node, across, found = inside.tp, inside.samples, {}

    def timed(name: str, work: object) -> None:
        inside.world.max_over_ranks(0.0, torch.device("cpu"))
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        found[name] = time.perf_counter() - begin

    x, y = torch.ones(MB), torch.ones(MB)

    def hidden() -> None:
        pending = node.all_reduce(y, wait=False)
        time.sleep(0.1)
        pending.wait()

    def exchange() -> None:
        sent, taken = across.send(x, 1 - across.index), across.receive(torch.empty(MB), 1 - across.index)
        sent.wait()
        taken.wait()

    timed("in a node", lambda: node.all_reduce(x))
    timed("two at once", lambda: [each.wait() for each in [node.all_reduce(y, wait=False) for _ in range(2)]])
    timed("hidden", hidden)
    timed("between nodes", lambda: across.all_gather(torch.empty(2 * MB), x))
    timed("both ranks of a node send to the other", exchange)
    assert float(x[0]) == 2.0
    return found


def test_bytes_take_their_time() -> None:
    """They take at least this time. Any excess only shows how busy the machine is."""
    ranks, shared = run_ranks(4, times), "both ranks of a node send to the other"
    least = {"in a node": 0.05, "two at once": 0.1, "hidden": 0.1, "between nodes": 0.2, shared: 0.1}
    for found in ranks:
        for name, seconds in least.items():
            assert 0.97 * seconds <= found[name], (name, found)
    assert max(found[shared] for found in ranks) >= 0.19, "the second message waits for the first"


def test_bytes_take_no_longer_than_their_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that stands still shows when each call is due, counted from the moment at which its link is free."""
    clock = SimpleNamespace(now=1e6)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(emulate, "time", clock)
    file = os.open(tmp_path / "adapters", os.O_CREAT | os.O_RDWR)
    links = EmulatedLinks(SLOW, 0, 2, Adapters(file))

    def due(op: str, ranks: tuple[int, ...], peer: int | None = None, megabytes: int = 1) -> float:
        return links._until(op, megabytes * 1_000_000, ranks, peer) - clock.now

    assert [due("all_reduce", (0, 1)) for _ in range(2)] == pytest.approx([0.05, 0.1]), "one after the other"
    clock.now += 1.0
    assert due("all_reduce", (0, 1)) == pytest.approx(0.05), "what was computed meanwhile hides the first two"
    clock.now += 1.0
    assert due("all_gather", (0, 2)) == pytest.approx(0.2), "its half of the adapters, which the node's ranks share"
    clock.now += 1.0
    assert [due("send", (0, 2), peer=2) for _ in range(2)] == pytest.approx([0.1, 0.2]), "all of them, in turn"
    os.close(file)
