"""One rank of `meshwright doctor`: what it finds on its machine, and together with the others."""

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
from meshwright.bench.comm import joined
from meshwright.bench.diagnosis import Facts
from meshwright.bench.request import Request
from meshwright.comm.group import Group
from meshwright.comm.watchdog import open_store
from meshwright.device import Device, cores_of_rank, host_memory_bytes
from meshwright.launch.processes import LOOPBACK, interface_of

LINK_BYTES = 8 * 2**20
DISK_BYTES = 64 * 2**20
BARRIERS = 5
ROUNDS = 5
MOST_SUMS = 1000
SHOWN_S = 10.0  # a network disk may take a while to show a new file
SIDE = 512  # of the burn-in's matrices
PRODUCTS = 32  # in a round
WAIT = timedelta(seconds=120)


def examine(request: Request, folder: Path, burn_s: float) -> list[Facts]:
    """Examines this rank; the first one gets what all have found, the others nothing."""
    with joined(request) as (mesh, device, place):
        facts = Facts(mesh.rank, socket.gethostname(), device.name)
        _look_at_machine(facts, device)
        _look_at_network(facts, device.backend(request.backend))
        facts.cores = cores_of_rank(place.local_world)
        together = partial(mesh.world.agreed, 0.0, device.torch)
        _look_at_disk(facts, folder, together, first_on_machine=place.local_rank == 0)
        facts.clock = _clock_offset(mesh.world, device)
        facts.links = _links(mesh.world, device)
        together()
        facts.burn, facts.round_s = burn_in(device, burn_s)
        return _gathered(facts, mesh.layout.world)


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
    """Notes by which interface this rank reaches the first, and which one the environment names for the back end."""
    facts.backend, facts.named_interface = backend, os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # Nothing is sent: connecting only has the system choose the way.
        asked.connect((os.environ.get("MASTER_ADDR", LOOPBACK), 9))
        facts.interface = interface_of(asked.getsockname()[0]) or ""


def _look_at_disk(facts: Facts, folder: Path, together: Callable[[], object], first_on_machine: bool) -> None:
    """Whether this rank sees what the first one wrote and, on one rank of each machine, how fast it writes."""
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
    """MB/s of a file that is flushed to disk."""
    piece, begun = os.urandom(2**20), time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / 1e6 / (time.perf_counter() - begun)
    except OSError:
        return 0.001
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _clock_offset(world: Group, device: Device) -> float:
    """How far this rank's clock is ahead of rank 0's, in seconds: the median of times that all take as they leave the
    same call. What of it is due to leaving it at different moments is milliseconds."""
    offsets = []
    for _ in range(BARRIERS):
        world.agreed(0.0, device.torch)
        now = time.time()
        first = torch.tensor([now], dtype=torch.float64, device=device.torch)
        world.broadcast(first)
        offsets.append(now - float(first.item()))
    return statistics.median(offsets)


def _links(world: Group, device: Device) -> dict[str, float]:
    """GB/s to this rank's neighbours, by their numbers: first all pairs that begin with an even rank, at once, then the
    others."""
    found: dict[str, float] = {}
    if world.size == 1:
        return found
    x = torch.ones(LINK_BYTES // 4, device=device.torch)
    for odd in (0, 1):
        lower = (world.index - odd) % 2 == 0
        other = world.index + 1 if lower else world.index - 1
        there = 0 <= other < world.size
        took = []
        for _ in range(ROUNDS):
            world.agreed(0.0, device.torch)
            begun = time.perf_counter()
            if there:
                for call in (world.send, world.receive) if lower else (world.receive, world.send):
                    call(x, other).wait()
                device.synchronize()
            took.append((time.perf_counter() - begun) / 2)
        if there:
            found[str(other)] = LINK_BYTES / 1e9 / min(took)
    return found


def burn_in(device: Device, duration: float) -> tuple[list[int], float]:
    """Computes the same products again and again for so many seconds: a checksum of each round's result, and the median
    seconds of a round."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(SIDE, SIDE, generator=generator).to(device.torch)
    factor = (torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5).to(device.torch)
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


def _gathered(facts: Facts, world: int) -> list[Facts]:
    """What all ranks found, on the first; only JSON goes through the store."""
    facts.burn = facts.burn if len({*facts.burn}) > 1 else facts.burn[:MOST_SUMS]  # those that are alike say no more
    store = open_store() if world > 1 else None
    if store is None:
        return [facts]
    store.set_timeout(WAIT)
    store.set(f"doctor/{facts.rank}", json.dumps(asdict(facts)))
    if facts.rank:
        store.get("doctor/seen")  # the store may be the first rank's
        return []
    found = [Facts(**json.loads(store.get(f"doctor/{rank}"))) for rank in range(world)]
    store.set("doctor/seen", "1")
    return found
