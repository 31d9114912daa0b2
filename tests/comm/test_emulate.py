"""Emulated links take the time that their bytes take, one after the other, and hide behind what is computed."""

from __future__ import annotations

import time

import torch

from meshwright.comm.mesh import Mesh
from meshwright.config.comm import EmulateConfig
from meshwright.layout import Layout
from tests.support.ranks import run_ranks

MB = 250_000  # float32 numbers
SLOW = EmulateConfig(link_gb_s=0.02, network_gb_s=0.01)  # 50 ms for a megabyte in the node, 100 ms between nodes


def times(rank: int, world: int) -> dict[str, float]:
    """Seconds of a few calls. Ranks 0 and 1 are on one node, 2 and 3 on another."""
    inside = Mesh(Layout(world, tp=2, node_size=2), rank, emulate=SLOW)
    node, across, found = inside.tp, inside.samples, {}

    def timed(name: str, work: object) -> None:
        inside.world.agreed(0.0, torch.device("cpu"))
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
    ranks, shared = run_ranks(4, times), "both ranks of a node send to the other"
    least = {"in a node": 0.05, "two at once": 0.1, "hidden": 0.1, "between nodes": 0.2, shared: 0.1}
    for found in ranks:
        for name, seconds in least.items():
            assert 0.97 * seconds <= found[name] < seconds + 0.25, (name, found)
    assert max(found[shared] for found in ranks) >= 0.19, "the second message waits for the first"
