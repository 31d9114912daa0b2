"""Finds the rank of this process as given by torchrun, srun or mpirun, and joins the other ranks.

torch is imported only to join, since the launcher asks for its place before torch is loaded.
"""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from meshwright.errors import UserError, notice
from meshwright.launch.signals import ends_at_once

if TYPE_CHECKING:
    from meshwright.device import Device


OWN_RUN = "meshwright-"  # The id of a run that our own launcher starts begins with this.
LOOPBACK = "127.0.0.1"
SIOCGIFCONF = 0x8912  # On Linux, this ioctl returns all IPv4 addresses of all interfaces.
IFREQ_BYTES, MOST_ADDRESSES = 40, 1024  # Bytes of one answer on 64-bit systems, and the most answers to ask for.
ROUTED = ("192.0.2.1", 9)  # An address reserved for documentation. Every default route leads to it.
JOB_AND_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")
# From 32768 on, Linux chooses ports for outgoing connections at random.
FIRST_PORT, PORTS = 10000, 20000
# Launchers of MPI, and the variables in which they pass the rank, world, local rank and local world.
MPI = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpiexec of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip
LOST = "MESHWRIGHT_LOST"  # The variable with the times of a loss, for ranks that start after it.
DEVICE = "MESHWRIGHT_DEVICE"  # The variable with the number of a rank's device, if it is not the local rank.


@dataclass(frozen=True)
class ProcessPlace:
    """The position of this process among all: its rank, the world size, and the same on its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launched: bool = False  # True if torchrun, srun, mpirun or our own launcher started this process.
    device: int | None = None  # The number of its device on this machine; None: the local rank.


def find_place(env: Mapping[str, str] = os.environ) -> ProcessPlace:
    """Return the place that the launcher gave this process, from the environment."""
    place = ProcessPlace()
    if "RANK" in env and "WORLD_SIZE" in env:
        place = _place_by_name(env)
    # A batch script without srun has SLURM_PROCID too, but no step.
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        place = _place_in_step(env)
    else:
        place = _place_in_mpi(env)
    if place.rank >= place.world:
        raise UserError(f"the environment says rank {place.rank} of {place.world}: unset it, or start by a launcher")
    return place


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}={text} in the environment is no number: unset it, or start by a launcher")
    return int(text)


def _place_by_name(env: Mapping[str, str]) -> ProcessPlace:
    """Return the place that torchrun or a script gives by RANK and WORLD_SIZE.

    A script may leave out the ranks of this machine if mpirun knows them, or if all ranks can be on this machine.
    """
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    device = _number(env, DEVICE) if DEVICE in env else None
    mpi = next((names for names in MPI if names[4] in env), None)
    if "LOCAL_WORLD_SIZE" in env or mpi is None:
        if "LOCAL_WORLD_SIZE" not in env and world > 1 and not is_loopback(env.get("MASTER_ADDR", LOOPBACK)):
            raise UserError(
                "RANK and WORLD_SIZE are set, and LOCAL_WORLD_SIZE, the number of ranks on this machine, is not: set "
                "it and LOCAL_RANK, or start by torchrun, srun or mpirun"
            )
        local_rank, local_world = _number(env, "LOCAL_RANK", rank), _number(env, "LOCAL_WORLD_SIZE", world)
    else:
        local_rank = _number(env, "LOCAL_RANK", _number(env, mpi[3]))
        local_world = _number(env, mpi[4])
    return ProcessPlace(rank, world, local_rank, local_world, True, device)


def _place_in_step(env: Mapping[str, str]) -> ProcessPlace:
    """Return the place of a task of srun. A step may have fewer nodes and tasks than its job.

    If nodes have different numbers of tasks, all get the largest number, since every rank must assume the same size of
    machine.
    """
    world = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if world <= 1:
        return ProcessPlace()
    nodes = max(1, _number(env, "SLURM_STEP_NUM_NODES", _number(env, "SLURM_NNODES", 1)))
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_world = max(map(int, counts), default=max(1, world // nodes))
    return ProcessPlace(_number(env, "SLURM_PROCID"), world, _number(env, "SLURM_LOCALID"), local_world, True)


def _place_in_mpi(env: Mapping[str, str]) -> ProcessPlace:
    """Return the place that a launcher of MPI gives, or the place of a single process."""
    for who, rank, world, local_rank, local_world in MPI:
        if rank not in env or world not in env or _number(env, world) <= 1:
            continue
        if local_rank not in env or local_world not in env:
            raise UserError(
                f"this process is rank {env[rank]} of {env[world]} of {who}, which does not say how many ranks are on "
                "this machine: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or start by torchrun or srun"
            )
        numbers = [_number(env, name) for name in (rank, world, local_rank, local_world)]
        return ProcessPlace(numbers[0], numbers[1], numbers[2], numbers[3], launched=True)
    # With one of these, the world size is known to be 1.
    alone = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"} & env.keys()
    if "PMIX_RANK" in env and not alone:
        raise UserError(
            f"this process is rank {env['PMIX_RANK']} of a launcher of PMIx, which does not say how many ranks there "
            "are: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or start by torchrun, srun or mpirun"
        )
    return ProcessPlace()


def joined_place() -> ProcessPlace | None:
    """Return the place of this process if the calling program has joined torch.distributed already; otherwise None.

    The local rank is the one that the launcher gives, if there is one. Otherwise it is the number of the device that
    the program has chosen.
    """
    import torch.distributed as dist

    from meshwright.device import accelerator_count, current_index

    if not dist.is_initialized():
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    local = find_place()
    if local.world == world:
        return ProcessPlace(rank, world, local.local_rank, local.local_world)
    return ProcessPlace(rank, world, current_index(), min(world, accelerator_count() or world))


def rendezvous(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port at which rank 0 listens.

    Under srun, the host is the first node of the step. The port follows from the numbers of the job and the step, so
    that two steps of a job don't meet.
    """
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], int(env.get("MASTER_PORT", "29500"))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    place = find_place(env)
    if not nodes and place.local_world < place.world:
        raise UserError(
            f"{place.local_world} of {place.world} ranks are on this machine, and nothing says where rank 0 is: set "
            "MASTER_ADDR to its machine and MASTER_PORT to a free port there (mpirun -x MASTER_ADDR=HOST)"
        )
    job, step = (int(text) if (text := env.get(name, "")).isdecimal() else 0 for name in JOB_AND_STEP)
    # 31 and 997 have no common factor with the number of ports, so neighbouring jobs and steps get different ports.
    return first_host(nodes or LOOPBACK), FIRST_PORT + (31 * job + 997 * step) % PORTS


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface with this address; None if no interface has it."""
    with suppress(OSError, ValueError):
        return (_ipv6_interfaces() if ":" in address else _ipv4_interfaces()).get(ip_address(address))
    return None


def _ipv4_interfaces() -> dict[IPv4Address | IPv6Address, str]:
    """Return the interface of each IPv4 address of this machine. An interface may have several addresses."""
    import fcntl

    # The kernel fills an array of `struct ifreq`: 16 bytes of name, then the socket address. It returns the used bytes.
    answers = array.array("B", bytes(IFREQ_BYTES * MOST_ADDRESSES))
    where, size = answers.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, struct.pack("iL", size, where))
    data = answers.tobytes()[: struct.unpack("iL", answer)[0]]
    interfaces: dict[IPv4Address | IPv6Address, str] = {}
    for start in range(0, len(data), IFREQ_BYTES):
        # A further address may be listed under a label such as eth0:1.
        name = data[start : start + 16].split(b"\0")[0].decode().split(":")[0]
        interfaces[IPv4Address(data[start + 20 : start + 24])] = name
    return interfaces


def _ipv6_interfaces(table: str = "/proc/net/if_inet6") -> dict[IPv4Address | IPv6Address, str]:
    """Return the interface of each IPv6 address of this machine."""
    with open(table, encoding="ascii") as file:
        rows = [line.split() for line in file]
    return {IPv6Address(bytes.fromhex(row[0])): row[-1] for row in rows if row}


def loopback() -> str:
    """Return the name of this machine's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0] if names else "lo")


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def outward_address() -> str | None:
    """Return the address from which this machine reaches others; None if it has no route."""
    # Connecting a datagram socket sends nothing: the system only looks up the route.
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect(ROUTED)
        return str(unsent.getsockname()[0])
    return None


def first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list: gpu07 for `gpu[07-09,12],x1`, rack1n0 for `rack[1-2]n[0-3]`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]+\])+", nodes)
    if not first:
        raise UserError(f"can't read the node list '{nodes}': set MASTER_ADDR and MASTER_PORT")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def enter(
    place: ProcessPlace, kind: str, backend: str, timeout: float, precision: str | None = None
) -> tuple[Device, bool]:
    """Choose this rank's device and join the other ranks. Return the device, and whether `leave` must be called.

    There is nothing to join if this process is alone, or if the calling program has joined already. Settings that the
    device does not support are refused before.
    """
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
    # Ranks of our launcher meet unless a node is lost. With another launcher, a rank may never come, so the user
    # must be able to interrupt the wait.
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
        if own:  # A node was lost: another start may succeed.
            raise CommError(f"{missed} ({reason})") from None
        raise UserError(f"{missed} ({reason}): start all ranks, with the same MASTER_ADDR and MASTER_PORT") from None
    except UserError as error:
        raise CommError(str(error)) if own else error from None
    return device, True


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def address_of(address: str | None, most: int) -> str:
    """Return the address at which this machine's ranks can be reached. `most`: the most machines of the run.

    With one machine it is loopback, so that no other machine can reach them. With several machines it is the value of
    --address, otherwise the address of the machine's name. Debian and Ubuntu give that name the address 127.0.1.1,
    which other machines can't reach. Then it is the address of the default route.
    """
    if most == 1 and not address:
        return LOOPBACK
    try:
        ip: str | None = socket.gethostbyname(address or socket.gethostname())
    except OSError as error:
        if address:
            raise UserError(f"--address {address} is not known ({error.strerror}): give an IP address") from None
        ip = None
    if most > 1 and (ip is None or is_loopback(ip)) and not address:
        ip = outward_address()
    if ip is None:
        problem = "no address is known by which other machines reach this one"
        raise UserError(f"{problem}: give the one on whose network the ranks talk with --address IP")
    if most > 1 and is_loopback(ip):
        # Not an error: this may be a test with several launchers on one machine, each with its own loopback address.
        notice(f"meshwright: --address {address} is reached from this machine alone")
    return ip
