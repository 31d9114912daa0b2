"""The ways in which the ranks of a case communicate: over NCCL on one shared GPU, or over Gloo. No torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Transport:
    """A backend with its device. `patience` is the number of seconds that a case may take, after which a hang becomes a
    failure.
    """

    name: str
    device: str
    patience: float

    def environment(self, rank: int, world: int, port: int = 0) -> dict[str, str]:
        """Return the environment of one rank, which makes it look alone on its machine."""
        found = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if port:
            found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if self.name == "nccl":
            # NCCL refuses two ranks on one GPU of one host, and tells hosts apart by this name. Pairs of ranks then
            # communicate over loopback sockets, because the shortcuts inside a host would find the same GPU on both
            # sides.
            found |= {
                "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
                "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
                # The contexts of about 16 processes with 32 queues each, as a run sets, are more than one H200 has:
                # CUDA then reports that it is out of memory.
                "CUDA_DEVICE_MAX_CONNECTIONS": "8",
            }  # fmt: skip
        return found


TRANSPORTS = {"nccl": Transport("nccl", "cuda", 150.0), "gloo": Transport("gloo", "cpu", 400.0)}


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
