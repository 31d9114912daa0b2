"""Time every collective, and sends, on the real groups of a layout, over a range of sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.bench.fit import Measurement
from meshwright.comm.group import Group
from meshwright.comm.mesh import Mesh
from meshwright.device import Device
from meshwright.spec.traffic.ledger import OPERATIONS

# The rounds of each measurement, and of calls that exceed their time budget.
ROUNDS, SLOW_ROUNDS = 5, 3
ELEMENT = 4  # The bytes of a float32.
MAX_CALLS = 2000  # The most calls per round.


def time_work(world: Group, device: Device, work: Callable[[], Any], seconds: float) -> float:
    """Return the seconds per call of `work` on the slowest rank: the median of a few rounds that all ranks begin
    together. `seconds` is the approximate time budget for all rounds."""
    work()
    once = world.max_over_ranks(_round(world, device, work, 1), device.torch)
    calls = min(MAX_CALLS, max(1, int(seconds / ROUNDS / once)))
    rounds = ROUNDS if once < seconds else SLOW_ROUNDS
    middle = statistics.median(_round(world, device, work, calls) for _ in range(rounds))
    return world.max_over_ranks(middle, device.torch)


def _round(world: Group, device: Device, work: Callable[[], Any], calls: int) -> float:
    """Return the seconds per call of a round on this rank."""
    device.synchronize()
    world.max_over_ranks(0.0, device.torch)  # A barrier: all ranks begin at once.
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    device.synchronize()
    return (time.perf_counter() - begin) / calls


def call_of(op: str, group: Group, payload: int, device: Device) -> Callable[[], Any]:
    """Return one call of `op` with this payload, whose number of elements is a multiple of the group's size."""
    whole, shard = (_written_zeros(payload // ELEMENT // parts, device) for parts in (1, group.size))
    other = _written_zeros(payload // ELEMENT if OPERATIONS[op].is_exchange else 0, device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather(whole, shard),
        "reduce_scatter": lambda: group.reduce_scatter(shard, whole),
        "all_to_all": lambda: group.all_to_all(other, whole),
        "broadcast": lambda: group.broadcast(whole),
        "send": lambda: there_and_back(group, whole),
    }
    return calls[op]


def there_and_back(group: Group, x: Tensor) -> None:
    """Send to a neighbour and back, in pairs of ranks. The last rank of an odd number has no partner."""
    other = group.index ^ 1
    if other >= group.size:
        return
    for call in (group.send, group.receive) if group.index < other else (group.receive, group.send):
        call(x, other).wait()


def _written_zeros(elements: int, device: Device) -> Tensor:
    """Return zeros that were really written. The system maps untouched memory to one page of zeros, which is never
    fetched."""
    return torch.empty(elements, dtype=torch.float32, device=device.torch).zero_()


def measure_links(
    mesh: Mesh, device: Device, axes: Sequence[str], ops: Sequence[str], sizes: Sequence[int], seconds: float,
    say: Callable[[str], None],
) -> list[Measurement]:  # fmt: skip
    """Time every op with every size, on all groups of an axis at the same time, as a training step uses them."""
    layout, points = mesh.layout, []
    for axis in axes:
        group = mesh.group(axis)
        # Payloads are rounded up to a multiple of this, so that they divide evenly among the ranks.
        unit = ELEMENT * group.size
        node = layout.node_size or layout.world
        # The group that spans the most nodes decides which links its axis uses.
        per_node = min(max(sum(r // node == n for r in ranks) for n in {r // node for r in ranks})
                       for ranks in layout.groups(axis))  # fmt: skip
        for op in ops:
            say(f"measuring {axis} {op}, {len(sizes)} sizes")
            for size in sizes:
                payload = -(-size // unit) * unit
                took = time_work(mesh.world, device, call_of(op, group, payload, device), seconds)
                one_way = took / 2 if OPERATIONS[op].is_message else took  # A send is timed as a round trip.
                points.append(Measurement(axis, op, group.size, per_node, payload, one_way))
    return points
