"""One rank of `meshwright comm bench`: it joins the world and measures together with the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from meshwright.bench.fit import Link, Measurement, fit_links
from meshwright.bench.links import measure_links
from meshwright.bench.profile import cluster_fields
from meshwright.bench.rates import measure_rates
from meshwright.bench.request import MeasurementRequest
from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import watchdog_for
from meshwright.device import Device
from meshwright.errors import UserError
from meshwright.launch.processes import ProcessPlace, enter, find_place, leave
from meshwright.spec.traffic.ledger import bus_factor

TIMEOUT = 600.0  # The seconds until a hanging call is reported.
PAYLOAD_SHARE = 8  # The largest payload may take 1/8 of a device's memory.


@contextlib.contextmanager
def join_world(request: MeasurementRequest) -> Iterator[tuple[Mesh, Device, ProcessPlace]]:
    """Join the world and yield this rank's mesh, device and place. Leave the world when the context ends."""
    place = find_place()
    device, own = enter(place, request.device, request.backend, TIMEOUT)
    mesh = Mesh(request.layout, place.rank, timeout=TIMEOUT)
    with watchdog_for(mesh, TIMEOUT, device, own):
        yield mesh, device, place
    if own:
        leave()


def measure(
    request: MeasurementRequest, mesh: Mesh, device: Device, local_world: int, quiet: bool = False
) -> dict[str, Any]:
    """Measure everything and return the command's output, the same on every rank. `cluster` holds the planner's
    cluster."""

    def say(text: str) -> None:
        if mesh.rank == 0 and not quiet:
            print(text, file=sys.stderr, flush=True)

    largest = request.sizes[-1]
    if not device.is_cpu and largest > device.memory_bytes() // PAYLOAD_SHARE:
        raise UserError(f"--sizes goes up to {largest} bytes, too much for {device.name}: lower the upper end")
    points = measure_links(mesh, device, request.axes, request.ops, request.sizes, request.seconds, say)
    # Read the ledger now: measuring the rates adds further calls to it.
    ledger = count_calls(mesh, request.axes)
    rates = measure_rates(mesh, device, local_world, request.seconds, say)
    inside, across = fit_links(points)
    axes = {axis: request.layout.axis_size(axis) for axis in ("tp", "cp", "ep", "dp", "pp")}
    return {
        "device": device.name, "backend": device.backend(request.backend), "torch": torch.__version__,
        "world": request.layout.world, "node_size": request.node_size, "layout": axes | {"order": request.layout.order},
        "points": [measurement_json(point) for point in points],
        "links": {name: link_json(link) for name, link in (("in_node", inside), ("across_nodes", across))},
        "rates": asdict(rates), "ledger": ledger,
        "cluster": cluster_fields(request.name, rates, request.node_size, inside, across),
    }  # fmt: skip


def count_calls(mesh: Mesh, axes: tuple[str, ...]) -> dict[str, dict[str, dict[str, int]]]:
    """Return this rank's ledger counts on the measured axes, by axis and op."""
    names = {mesh.group(axis).axis: axis for axis in axes}
    by_axis: dict[str, dict[str, dict[str, int]]] = {}
    for entry, tally in mesh.ledger.entries.items():
        if entry.axis in names:
            counts = {"calls": tally.calls, "payload_bytes": tally.payload_bytes, "wire_bytes": tally.wire_bytes}
            by_axis.setdefault(names[entry.axis], {})[entry.op] = counts
    return by_axis


def measurement_json(point: Measurement) -> dict[str, Any]:
    factor = bus_factor(point.op, point.ranks)
    return asdict(point) | {
        "link": "across_nodes" if point.across else "in_node", "bus_factor": factor,
        "wire_bytes": point.payload * factor, "algorithm_gb_s": point.algorithm_gb_s, "bus_gb_s": point.bus_gb_s,
    }  # fmt: skip


def link_json(link: Link | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        "latency_us": link.latency * 1e6, "gb_s": link.rate / 1e9,
        "gb_s_by_op": {op: rate / 1e9 for op, rate in link.rates.items()},
        "error": link.error, "worst_error": link.worst, "points": link.points,
    }  # fmt: skip
