"""Predicts throughput over the number of devices, with one kind of parallelism and with the best mix. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.errors import UserError
from meshwright.plan.cluster import Cluster
from meshwright.plan.job import Job
from meshwright.plan.search import MAX_DEVICES, Candidate, SearchSpace, search, usable_gib
from meshwright.spec.layout.layout import check_world

WAYS = ("data", "tensor", "pipeline", "hybrid")


@dataclass(frozen=True)
class ScalingPoint:
    """One way of scaling on one number of devices. `best` is None if the way is impossible or the model doesn't fit."""

    way: str
    devices: int
    global_batch: int
    best: Candidate | None
    efficiency: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of all devices."""
        return self.best.cost.tokens_per_s_device * self.devices if self.best else 0.0

    @property
    def sent_bytes(self) -> dict[str, float]:
        """The bytes that a device sends in a step, by axis."""
        return {} if not self.best else {axis: float(t.wire_bytes) for axis, t in self.best.cost.traffic.items()}

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """The seconds of a step in which compute waits for communication, by axis."""
        return {} if not self.best else {axis: time.exposed_seconds for axis, time in self.best.cost.axes.items()}

    @property
    def comm_share(self) -> float:
        """The share of a step in which compute waits for communication."""
        if not self.best:
            return 0.0
        return sum(axis.exposed_seconds for axis in self.best.cost.axes.values()) / self.best.cost.step_s


def device_counts(text: str) -> list[int]:
    """Parse device counts: `8:64` means 8, 16, 32, 64; `8,24,96` means exactly these."""
    try:
        if ":" in text:
            first, last = (int(part) for part in text.split(":"))
            doubled = (first * 2**times for times in range(last.bit_length()))
            counts = [count for count in doubled if count <= last]
        else:
            counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UserError(f"--devices {text} is no range: write e.g. 8:16384 (doubling) or 8,24,96")
    check_world(counts[-1], "--devices", MAX_DEVICES)
    return counts


def space_for_way(way: str, devices: int) -> SearchSpace:
    """Return the search space of `meshwright plan`, restricted to one way of scaling."""
    sizes = {"data": (1, 1), "tensor": (devices, 1), "pipeline": (1, devices)}
    tp, pp = ((size,) for size in sizes[way]) if way in sizes else ((), ())
    return SearchSpace(tp=tp, pp=pp)


def sweep(
    base: Job,
    cluster: Cluster,
    counts: list[int],
    weak: bool,
    ways: tuple[str, ...] = WAYS,
    found: Callable[[ScalingPoint], None] = lambda point: None,
) -> list[ScalingPoint]:
    """Search every way of scaling on every number of devices, and call `found` with each point.

    With `weak` scaling, the batch grows with the devices, and `base` has the batch of the smallest count. With strong
    scaling, the batch stays the same.
    """
    points = []
    for devices in counts:
        batch = base.global_batch * devices // counts[0] if weak else base.global_batch
        sized = replace(base.with_keys(train={"global_batch": batch}), world=devices, samples=None)
        for way in ways:
            result = search(sized, cluster, usable_gib(cluster), space_for_way(way, devices), best_only=True)
            points.append(ScalingPoint(way, devices, batch, result.candidates[0] if result.candidates else None))
            found(points[-1])
    # Efficiency is the throughput per device relative to the best of any way on the fewest devices that fit.
    fits = [p for p in points if p.best]
    if not fits:
        return points
    fewest = min(p.devices for p in fits)
    unit = max(p.tokens_per_s / p.devices for p in fits if p.devices == fewest)
    return [replace(p, efficiency=p.tokens_per_s / p.devices / unit) for p in points]
