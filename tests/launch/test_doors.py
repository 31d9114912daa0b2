"""The sockets of a run: on one machine none listens beyond loopback, and rubbish sent to any port changes nothing."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch import launch
from meshwright.watch.server import Runs, Server
from tests.checkpoint.runs import assert_same, complete, steps
from tests.support.commands import ended, sections
from tests.support.rubbish import RUBBISH
from tests.support.waiting import until


def listening(session: int) -> list[tuple[str, int]]:
    """Return the address and port of every socket on which a process of this session, or a child of one, listens."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,sid="], capture_output=True, text=True, check=True).stdout
    rows = [[int(word) for word in line.split()] for line in listing.splitlines()]
    ours = {pid for pid, _, sid in rows if sid == session}
    while more := {pid for pid, parent, _ in rows if parent in ours} - ours:
        ours |= more
    inodes = set()
    for pid in ours:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(handle)):
                    inodes.add(found.group(1))
            except OSError:
                continue
    doors = []
    for table, wide in (("tcp", False), ("tcp6", True)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            # The kernel writes 0A for the state LISTEN, and an address as 32-bit words in the machine's byte order.
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                groups = [bytes.fromhex(address[n : n + 8])[::-1] for n in range(0, len(address), 8)]
                kind = socket.AF_INET6 if wide else socket.AF_INET
                doors.append((socket.inet_ntop(kind, b"".join(groups)), int(port, 16)))
    return doors


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_rubbish_at_every_door_of_a_run_changes_nothing(folder: Path, start: Any) -> None:
    """The launcher's store, the ranks' sockets and the keeper receive rubbish while ranks train. No number differs from
    an undisturbed run.
    """
    words = ("train.steps=60", "checkpoint.every=20", "faults.elastic=true", "checkpoint.memory_every=5")
    process = start("--nproc", "2", *words)
    run = folder / "run"
    until(lambda: len(steps(run)) >= 2, process)
    doors = listening(process.pid)
    assert len(doors) >= 4, "the store's, two ranks' and the keeper's"
    assert {address for address, _ in doors} <= {"127.0.0.1", "::1"}, doors
    peers = []
    for _, port in doors:
        for data in RUBBISH:
            try:
                peer = socket.create_connection(("127.0.0.1", port), 5.0)
                peer.sendall(data)
                peers.append(peer)
            except OSError:
                continue
        time.sleep(0.02)
    code, said = ended(process)
    assert code == 0 and "Traceback" not in said, said
    for peer in peers:
        peer.close()
    more: dict[str, Any] = {"checkpoint": {"every": 20}}
    assert_same(run, complete(2, sections(folder, "straight", 60, **more)))


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "lo"), ("10.0.0.7", "eth1")])
def test_ranks_are_told_the_interface_of_their_address(address: str, name: str, monkeypatch: Any) -> None:
    """Gloo and NCCL get the same interface, unless the user names another one."""
    monkeypatch.setattr(launch, "interface_of", {"127.0.0.1": "lo", "10.0.0.7": "eth1"}.get)
    monkeypatch.setattr(launch, "run_guarded", lambda *args: None)
    for theirs in ({}, {"NCCL_SOCKET_IFNAME": "ib0"}):
        monkeypatch.setattr(os, "environ", {**theirs})
        launch._rank(launch.Team(1, address=address), "", False, lambda: None)
        assert os.environ["GLOO_SOCKET_IFNAME"] == name
        assert os.environ["NCCL_SOCKET_IFNAME"] == theirs.get("NCCL_SOCKET_IFNAME", f"={name}")


def test_with_several_nodes_ranks_are_never_told_to_use_loopback(monkeypatch: Any) -> None:
    """The interface of an unknown address can't be guessed, so the back ends choose one themselves."""
    monkeypatch.setattr(launch, "interface_of", lambda address: None)
    monkeypatch.setattr(launch, "run_guarded", lambda *args: None)
    for nodes, interface in ((1, launch.loopback()), (2, None)):
        monkeypatch.setattr(os, "environ", {})
        launch._rank(launch.Team(1, nodes=nodes, address="10.0.0.9"), "", False, lambda: None)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
        assert os.environ.get("NCCL_SOCKET_IFNAME") == (interface and f"={interface}")


def test_the_page_of_a_run_is_served_on_loopback_alone(tmp_path: Path) -> None:
    """The page is served on the loopback address that it names, and on no other address of this machine."""
    with Server(Runs([str(tmp_path)]), 0) as server:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 1.0)
