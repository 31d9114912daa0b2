"""The rank of a process under each launcher, where ranks meet, and on which address and interface."""

from __future__ import annotations

import contextlib
import re
import socket
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import device
from meshwright.config.precision import PRECISIONS
from meshwright.errors import UserError
from meshwright.launch import processes
from meshwright.launch.processes import ProcessPlace, find_place, interface_of, rendezvous

MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5"}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "3", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "16",
        "SLURM_NNODES": "4", "PMIX_RANK": "5", "PMI_RANK": "5", "PMI_SIZE": "8"}  # fmt: skip


@pytest.mark.parametrize("env", [MPIRUN, MPICH])
def test_ranks_of_mpirun(env: dict[str, str]) -> None:
    assert find_place(env) == ProcessPlace(5, 8, 1, 4, True)
    assert rendezvous(env | {"MASTER_ADDR": "h", "MASTER_PORT": "12"}) == ("h", 12)
    with pytest.raises(UserError, match="4 of 8 ranks are on this machine.* set MASTER_ADDR"):
        rendezvous(env)


def test_all_ranks_of_mpirun_on_one_machine_meet_there() -> None:
    env = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
    assert rendezvous(env)[0] == "127.0.0.1"


def test_one_process_under_mpirun_is_alone() -> None:
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}
    assert find_place(one) == ProcessPlace() and find_place({"PMI_RANK": "0", "PMI_SIZE": "1"}) == ProcessPlace()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "rank 5 of 8 of mpiexec of MPICH or Intel MPI, which does not say"),
        ({"PMIX_RANK": "5"}, "rank 5 of a launcher of PMIx, which does not say how many ranks there are"),
    ],
)
def test_a_launcher_that_says_too_little_is_named(env: dict[str, str], said: str) -> None:
    """Each process of such a launcher would train alone otherwise."""
    with pytest.raises(UserError, match=f"{re.escape(said)}.* start by torchrun"):
        find_place(env)


def test_rank_and_world_without_the_ranks_of_this_machine() -> None:
    """RANK and WORLD_SIZE are believed if all ranks can be on this machine. The variables of mpirun fill the gap."""
    named = {"RANK": "5", "WORLD_SIZE": "8"}
    assert find_place(named | {"MASTER_ADDR": "127.0.0.1"}) == find_place(named) == ProcessPlace(5, 8, 5, 8, True)
    assert find_place(named | {"MASTER_ADDR": "node1"} | MPIRUN) == ProcessPlace(5, 8, 1, 4, True)
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE, the number of ranks on this machine, is not"):
        find_place(named | {"MASTER_ADDR": "node1", "LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("more", "local"),
    [
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2,3(x2)"}, 3),
        ({"SLURM_STEP_NUM_NODES": "2"}, 4),
        ({}, 2),
    ],
)
def test_a_step_counts_its_own_nodes_and_tasks(more: dict[str, str], local: int) -> None:
    """The job has 16 tasks on four nodes, and the step has 8. Every rank counts unequal nodes as the largest one."""
    assert find_place(STEP | {"SLURM_STEP_NUM_TASKS": "8"} | more) == ProcessPlace(5, 8, 1, local, True)


def test_one_task_of_a_larger_job_is_alone() -> None:
    assert find_place(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == ProcessPlace()


def test_ports_of_steps_differ_and_are_below_those_of_the_system() -> None:
    def port(job: int, step: int) -> int:
        env = STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_JOB_NODELIST": "n1"}
        return rendezvous(env)[1]

    steps = {port(123456, step) for step in range(1000)}
    assert len(steps) == 1000 and len({port(job, 0) for job in range(5000, 6000)}) == 1000
    assert min(steps) >= 10000 and max(steps) < 30000


# Addresses and interfaces.


def test_an_interface_with_two_addresses_and_one_with_ipv6(monkeypatch: Any, tmp_path: Path) -> None:
    both = {IPv4Address("10.0.0.7"): "eth1", IPv4Address("10.0.0.8"): "eth1", IPv4Address("127.0.0.1"): "lo"}
    monkeypatch.setattr(processes, "_ipv4_interfaces", lambda: both)
    assert interface_of("10.0.0.8") == "eth1" and interface_of("10.0.0.9") is None
    table = tmp_path / "if_inet6"
    table.write_text("fe80000000000000a8bbccfffedd0001 02 40 20 80     ib0\n"
                     "00000000000000000000000000000001 01 80 10 80       lo\n")  # fmt: skip
    real = processes._ipv6_interfaces
    monkeypatch.setattr(processes, "_ipv6_interfaces", lambda: real(str(table)))
    assert interface_of("fe80::a8bb:ccff:fedd:1") == "ib0" and interface_of("::1") == "lo"
    assert real(str(table))[IPv6Address("::1")] == "lo" and interface_of("not an address") is None


def test_every_address_of_this_machine_has_its_interface() -> None:
    """The interfaces are among those that the system lists, and 127.0.0.1 is on the loopback interface."""
    found = processes._ipv4_interfaces()
    assert found[IPv4Address("127.0.0.1")] == processes.loopback()
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}


def resolves_to(monkeypatch: Any, address: str | None, outward: str | None) -> None:
    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return name if name[0].isdigit() else address

    monkeypatch.setattr(processes.socket, "gethostbyname", resolve)
    monkeypatch.setattr(processes, "outward_address", lambda: outward)


@pytest.mark.parametrize("name", ["127.0.1.1", None])
def test_a_machine_whose_name_is_loopback_is_reached_by_its_route(name: str | None, monkeypatch: Any) -> None:
    resolves_to(monkeypatch, name, "10.0.0.7")
    assert processes.address_of(None, 1) == "127.0.0.1"
    assert processes.address_of(None, 2) == "10.0.0.7"
    resolves_to(monkeypatch, name, None)
    with pytest.raises(UserError, match="give the one on whose network the ranks talk with --address IP"):
        processes.address_of(None, 2)


def test_a_machine_s_name_or_the_given_address_count_first(monkeypatch: Any, capsys: Any) -> None:
    resolves_to(monkeypatch, "10.0.0.5", "10.0.0.7")
    assert processes.address_of(None, 2) == "10.0.0.5" and processes.address_of("10.9.9.9", 2) == "10.9.9.9"
    assert capsys.readouterr().err == "" and processes.address_of("127.0.0.2", 2) == "127.0.0.2"
    assert "--address 127.0.0.2 is reached from this machine alone" in capsys.readouterr().err


# Cores.


@pytest.mark.parametrize(
    ("env", "cores"), [({}, 3), ({"SLURM_PROCID": "1", "SLURM_CPUS_PER_TASK": "12"}, 12), ({"SLURM_PROCID": "1"}, 3)]
)
def test_ranks_share_the_cores_that_they_may_use(env: dict[str, str], cores: int, monkeypatch: Any) -> None:
    """This process may use 12 of 64 cores. Four ranks share these, unless Slurm bound the task to a number of cores."""
    monkeypatch.setattr(device.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    for name in ("SLURM_PROCID", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert device.cores_of_rank(4) == cores


def test_devices_name_the_precisions_that_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    refused: dict[str, list[str]] = {}
    for kind in ("cpu", "cuda", "npu"):
        for precision in PRECISIONS:
            with contextlib.suppress(UserError):
                device.Device(kind).check_precision(precision)
                continue
            refused.setdefault(kind, []).append(precision)
    assert refused == {"cuda": ["bf16", "fp8"], "npu": ["fp64", "fp8"]}
