"""How a process learns which rank it is: from torchrun, from srun, or by being alone.

torch is imported only to join: the launcher asks for its place before torch is loaded.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.train.signals import ends_at_once

if TYPE_CHECKING:
    from meshwright.device import Device


OWN_RUN = "meshwright-"  # how the id of a run begins whose ranks our own launcher starts
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # Linux: asks for an interface's address
LOST = "MESHWRIGHT_LOST"  # in the environment of ranks that start after a loss: when that was
DEVICE = "MESHWRIGHT_DEVICE"  # in the environment: the number of a rank's device, where it is not the rank's own


@dataclass(frozen=True)
class Place:
    """This process among all: its rank, the world, and how many share its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launched: bool = False  # by torchrun, srun or our own launcher
    device: int | None = None  # the number of its device on the machine; None: that of its local rank


def find_place(env: Mapping[str, str] = os.environ) -> Place:
    """The rank that the launcher gave this process."""

    def number(name: str, default: int = 0) -> int:
        text = env.get(name, str(default))
        if not text.isdecimal():
            raise UserError(f"{name}={text} in the environment is no number: unset it, or start by a launcher")
        return int(text)

    place = Place()
    if "RANK" in env and "WORLD_SIZE" in env:
        world = number("WORLD_SIZE")
        local_rank = number("LOCAL_RANK", number("RANK"))
        local_world, device = number("LOCAL_WORLD_SIZE", world), number(DEVICE) if DEVICE in env else None
        place = Place(number("RANK"), world, local_rank, local_world, True, device)
    # A batch script has SLURM_PROCID too; only srun makes steps.
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and number("SLURM_NTASKS", 1) > 1:
        world, nodes = number("SLURM_NTASKS"), max(1, number("SLURM_NNODES", 1))
        place = Place(number("SLURM_PROCID"), world, number("SLURM_LOCALID"), max(1, world // nodes), True)
    if place.rank >= place.world:
        raise UserError(f"the environment says rank {place.rank} of {place.world}: unset it, or start by a launcher")
    return place


def joined_place() -> Place | None:
    """This process in a world that somebody else has joined already, and who has chosen its device unless a launcher
    says which is its place on the machine."""
    import torch.distributed as dist

    from meshwright.device import accelerator_count, current_index

    if not dist.is_initialized():
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    local = find_place()
    if local.world == world:
        return Place(rank, world, local.local_rank, local.local_world)
    return Place(rank, world, current_index(), min(world, accelerator_count() or world))


def rendezvous(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where rank 0 listens. Under srun: the first node of the step and a port that follows from the job's number."""
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], int(env.get("MASTER_PORT", "29500"))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return first_host(nodes), 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000


def interface_of(address: str) -> str:
    """The name of this machine's network interface that has an address; the loopback's if none has."""
    import fcntl

    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return next((name for name in names if name in ("lo", "lo0")), names[0] if names else "lo")


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[07-09,12],x1` is gpu07, `rack[1-2]n[0-3]` is rack1n0."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]+\])+", nodes)
    if not first:
        raise UserError(f"can't read the node list '{nodes}': set MASTER_ADDR and MASTER_PORT")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def enter(place: Place, kind: str, backend: str, timeout: float, precision: str | None = None) -> tuple[Device, bool]:
    """This rank's device, and the world joined, unless this process is alone or somebody did it already; whether
    `leave` is ours to call. What the device can't do is told before."""
    import torch.distributed as dist

    from meshwright.comm.group import CommError
    from meshwright.comm.lost_ranks import leave_errors_to_us
    from meshwright.comm.meeting import meet
    from meshwright.comm.mesh import torch_limit
    from meshwright.comm.process import prepare_process
    from meshwright.device import Device, limit_threads

    prepare_process(timeout)
    limit_threads(place.local_world)
    device = Device.choose(kind, place.local_rank if place.device is None else place.device)
    if precision is not None:
        device.check_precision(precision)
    if place.world > 1:
        device.check_backend(backend)
    backend = device.backend(backend)
    device.check_sharing(backend, place.local_world)
    if place.world == 1 or dist.is_initialized():
        return device, False
    host, port = rendezvous()
    os.environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(port)})
    leave_errors_to_us(os.environ)
    limit = torch_limit(timeout)
    # Ranks of our own launcher will meet, unless a node of theirs is lost; one of another's may never come.
    own = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN)
    try:
        with nullcontext() if own else ends_at_once():
            store = meet(place.rank, place.world, place.local_rank == 0, host, port, limit)
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=limit)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            fix = "choose another with --master_port or MASTER_PORT"
            raise UserError(f"port {port} on {host} is taken: {fix}") from None
        missed = f"rank {place.rank} of {place.world} did not meet the others at {host}:{port}"
        reason = str(error).splitlines()[0]
        if own:  # a loss, which a further start may mend
            raise CommError(f"{missed} ({reason})") from None
        raise UserError(f"{missed} ({reason}): start all ranks, with the same MASTER_ADDR and MASTER_PORT") from None
    except UserError as error:
        raise CommError(str(error)) if own else error from None
    return device, True


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
