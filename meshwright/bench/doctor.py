"""One rank of `meshwright doctor`: it gathers facts about its machine, and about the network with the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

import meshwright
from meshwright.bench.comm import join_world
from meshwright.bench.diagnosis import Facts
from meshwright.bench.request import MeasurementRequest
from meshwright.comm.group import Group
from meshwright.comm.watchdog import open_store
from meshwright.device import Device, cores_of_rank, host_memory_bytes
from meshwright.launch.processes import LOOPBACK, interface_of

LINK_BYTES = 8 * 2**20
DISK_BYTES = 64 * 2**20
BARRIERS = 5
ROUNDS = 5
MAX_SUMS = 1000
SHOWN_S = 10.0  # A network disk may take a while to show a new file.
MATRIX_SIZE = 512  # The size of the burn-in's square matrices.
PRODUCTS = 32  # The products in a round of the burn-in.
WAIT = timedelta(seconds=120)


def examine(request: MeasurementRequest, folder: Path, burn_s: float) -> list[Facts]:
    """Examine this rank. Return the facts of all ranks on rank 0, and an empty list on the others."""
    with join_world(request) as (mesh, device, place):
        facts = Facts(mesh.rank, socket.gethostname(), device.name)
        _look_at_machine(facts, device)
        _look_at_network(facts, device.backend(request.backend))
        facts.cores = cores_of_rank(place.local_world)
        together = partial(mesh.world.max_over_ranks, 0.0, device.torch)
        _look_at_disk(facts, folder, together, first_on_machine=place.local_rank == 0)
        facts.clock = _clock_offset(mesh.world, device)
        facts.links = _links(mesh.world, device)
        together()
        facts.burn, facts.round_s = burn_in(device, burn_s)
        return _gather_facts(facts, mesh.layout.world)


def _look_at_machine(facts: Facts, device: Device) -> None:
    facts.versions = {"meshwright": meshwright.__version__, "torch": str(torch.__version__),
                      "python": platform.python_version()}  # fmt: skip
    facts.host_free = host_memory_bytes()
    if device.module is not None:
        free, whole = device.module.mem_get_info()
        facts.device_free, facts.device_bytes = float(free), float(whole)
    address = os.environ.get("MASTER_ADDR", LOOPBACK)
    try:
        socket.create_server((LOOPBACK if address in (LOOPBACK, "localhost") else "", 0)).close()
    except OSError as error:
        facts.port = f"no port can be opened ({error.strerror})"


def _look_at_network(facts: Facts, backend: str) -> None:
    """Record the interface that leads to rank 0, and the one that the environment sets for the back end."""
    facts.backend = backend
    facts.named_interface = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing. It only makes the system choose a route.
        probe.connect((os.environ.get("MASTER_ADDR", LOOPBACK), 9))
        facts.interface = interface_of(probe.getsockname()[0]) or ""


def _look_at_disk(facts: Facts, folder: Path, together: Callable[[], object], first_on_machine: bool) -> None:
    """Record whether this rank sees a file of rank 0 and, on one rank of each machine, how fast it writes."""
    mark = folder / ".doctor"
    if facts.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(facts.host, encoding="utf-8")
    together()
    end = time.monotonic() + SHOWN_S
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.1)
    facts.sees_folder = mark.exists()
    if facts.sees_folder:
        facts.disk_free = float(shutil.disk_usage(folder).free)
        if first_on_machine:
            facts.write_mb_s = _write_speed(folder / f".doctor-{facts.rank}")
    together()
    if facts.rank == 0:
        mark.unlink()


def _write_speed(path: Path) -> float:
    """Return the MB/s of writing a file that is flushed to disk, or almost 0 if it can't be written."""
    # Random bytes, since a file system may compress others.
    chunk = os.urandom(2**20)
    begun = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(chunk)):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / 1e6 / (time.perf_counter() - begun)
    except OSError:
        return 0.001
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _clock_offset(world: Group, device: Device) -> float:
    """Return the seconds that this rank's clock is ahead of rank 0's.

    All ranks read their clocks as they leave the same collective; the result is the median over several. They leave it
    within milliseconds of each other.
    """
    offsets = []
    for _ in range(BARRIERS):
        world.max_over_ranks(0.0, device.torch)
        now = time.time()
        first = torch.tensor([now], dtype=torch.float64, device=device.torch)
        world.broadcast(first)
        offsets.append(now - float(first.item()))
    return statistics.median(offsets)


def _links(world: Group, device: Device) -> dict[str, float]:
    """Return the GB/s to this rank's neighbours, by their rank. All pairs that begin with an even rank are measured at
    once, then all others."""
    rates: dict[str, float] = {}
    if world.size == 1:
        return rates
    x = torch.ones(LINK_BYTES // 4, device=device.torch)
    for odd in (0, 1):
        lower = (world.index - odd) % 2 == 0
        other = world.index + 1 if lower else world.index - 1
        has_partner = 0 <= other < world.size
        took = []
        for _ in range(ROUNDS):
            world.max_over_ranks(0.0, device.torch)
            begun = time.perf_counter()
            if has_partner:
                # The pair must use opposite orders, or both ends would wait to send.
                for call in (world.send, world.receive) if lower else (world.receive, world.send):
                    call(x, other).wait()
                device.synchronize()
            took.append((time.perf_counter() - begun) / 2)
        if has_partner:
            rates[str(other)] = LINK_BYTES / 1e9 / min(took)
    return rates


def burn_in(device: Device, duration: float) -> tuple[list[int], float]:
    """Compute the same products again and again for `duration` seconds. Return (a checksum of each round's result, the
    median seconds of a round)."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator).to(device.torch)
    factor = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator) / MATRIX_SIZE**0.5).to(device.torch)
    sums: list[int] = []
    took: list[float] = []
    end = time.monotonic() + duration
    while len(sums) < 2 or time.monotonic() < end:
        begun = time.perf_counter()
        x = first
        for _ in range(PRODUCTS):
            x = torch.tanh(x @ factor)
        sums.append(zlib.crc32(x.cpu().numpy().tobytes()))
        took.append(time.perf_counter() - begun)
    return sums, statistics.median(took[1:])


def _gather_facts(facts: Facts, world: int) -> list[Facts]:
    """Return the facts of all ranks on rank 0, and an empty list on the others. Only JSON goes through the store."""
    # Equal checksums beyond the first ones add no information.
    facts.burn = facts.burn if len({*facts.burn}) > 1 else facts.burn[:MAX_SUMS]
    store = open_store() if world > 1 else None
    if store is None:
        return [facts]
    store.set_timeout(WAIT)
    store.set(f"doctor/{facts.rank}", json.dumps(asdict(facts)))
    if facts.rank:
        # The store may live in rank 0's process, so wait until rank 0 has read the facts of all ranks.
        store.get("doctor/seen")
        return []
    all_facts = [Facts(**json.loads(store.get(f"doctor/{rank}"))) for rank in range(world)]
    store.set("doctor/seen", "1")
    return all_facts
