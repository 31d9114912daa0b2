"""Judge whether machines and ranks are fit for a long run, from the facts that each rank gathered. No torch."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.device_kinds import accelerators
from meshwright.errors import plural
from meshwright.show.units import seconds, size

# The largest offset between two machines' clocks. Events and traces of several machines are ordered by these clocks.
LARGEST_OFFSET_S = 1.0
# The least free share of a device's memory before we allocate anything.
MIN_FREE = 0.9
MIN_WRITE_MB_S = 20.0
# The cores that a rank with an accelerator needs: for Python, autograd, the data reader and NCCL's threads.
MIN_CORES = 4
# A link is slow below this share of the profile's rate, or of the median rate of such links.
SLOW_LINK = 0.5
# A device is slow if it takes this many times the median of devices of its kind.
SLOW_DEVICE = 1.25
# The number of checkpoints that a run's disk must hold: two that are kept, and the one being written.
CHECKPOINTS = 3
# A checkpoint that takes longer to write is of little use.
SAVING_S = 600.0
LOOPBACKS = ("lo", "lo0")


@dataclass
class Facts:
    """The facts that one rank gathered.

    `links` are GB/s by the rank at the other end. `burn` holds a checksum for each round of the same products.
    """

    rank: int
    host: str
    device: str
    device_bytes: float = 0.0
    device_free: float = 0.0
    host_free: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0  # The seconds that its clock is ahead of rank 0's.
    sees_folder: bool = True
    disk_free: float = 0.0
    write_mb_s: float = 0.0
    port: str = ""  # The reason why no port can be opened; empty if one can.
    links: dict[str, float] = field(default_factory=dict)
    burn: list[int] = field(default_factory=list)
    round_s: float = 0.0
    backend: str = ""  # nccl, gloo or hccl
    interface: str = ""  # The local network interface that leads to rank 0.
    named_interface: str = ""  # The interface that the environment sets for the back end; empty if it chooses itself.
    cores: int = 0  # The cores for this rank alone; 0 if less than one.


class Requirements(NamedTuple):
    """The needs of a run, if a config is given, and the profile's rates in GB/s. 0 stands for an unknown value."""

    checkpoint_bytes: float = 0.0
    states_bytes: float = 0.0  # A rank's weights, gradients and optimizer states.
    link_gb_s: float = 0.0
    network_gb_s: float = 0.0
    folder: str = "."


class Check(NamedTuple):
    """The result of one check."""

    name: str
    ok: bool
    text: str


def judge(facts: Sequence[Facts], wanted: Requirements) -> list[Check]:
    """Return the results of all checks. The text of a failed one names the problem and the ranks or machines."""
    judges: list[tuple[str, Callable[[Sequence[Facts], Requirements], tuple[list[str], str]]]] = [
        ("versions", _versions), ("devices", _devices), ("cores", _cores), ("memory", _memory), ("disk", _disk),
        ("folder", _folder), ("clocks", _clocks), ("ports", _ports), ("network", _network), ("links", _links),
        ("burn-in", _burn),
    ]  # fmt: skip
    checks = []
    for name, judge_one in judges:
        problems, summary = judge_one(facts, wanted)
        checks.append(Check(name, not problems, "; ".join(problems) or summary))
    return checks


def _most(values: Sequence[Hashable]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _apart(facts: Sequence[Facts], value: Callable[[Facts], Hashable]) -> dict[Any, list[int]]:
    """Return the ranks whose value differs from the most frequent one, by their value."""
    usual = _most([value(one) for one in facts])
    apart: dict[Any, list[int]] = {}
    for one in facts:
        if value(one) != usual:
            apart.setdefault(value(one), []).append(one.rank)
    return apart


def _versions(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    off = []
    for name in facts[0].versions:
        usual = _most([one.versions.get(name, "none") for one in facts])
        for value, ranks in _apart(facts, lambda one, name=name: one.versions.get(name, "none")).items():  # type: ignore[misc]
            off.append(f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {name} {value}, the others {usual}")
    return off, ", ".join(f"{name} {value}" for name, value in facts[0].versions.items()) + ", on all ranks"


def _devices(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    usual = _most([one.device for one in facts])
    off = [f"{_ranks(ranks)}: {name}, the others {usual}" for name, ranks in _apart(facts, lambda f: f.device).items()]
    used = [one for one in facts if one.device_bytes and one.device_free < MIN_FREE * one.device_bytes]
    off += [
        f"the device of rank {one.rank} on {one.host} has only {size(one.device_free)} of {size(one.device_bytes)} "
        "free: see which process uses it"
        for one in used
    ]
    hosts = len({one.host for one in facts})
    each = f", {size(facts[0].device_bytes)} each" if facts[0].device_bytes else ""
    return off, f"{len(facts)} x {usual}{each}, on {plural(hosts, 'machine')}"


def _cores(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    """Judge the cores of ranks with an accelerator: their host must launch work ahead of the device."""
    few = [one for one in facts if one.device_bytes and one.cores < MIN_CORES]
    off = []
    for host in dict.fromkeys(one.host for one in few):
        here = [one for one in few if one.host == host]
        has = "less than one core each" if here[0].cores < 1 else f"{plural(here[0].cores, 'core')} each"
        fix = f"ask the scheduler for {MIN_CORES} or more (Slurm: --cpus-per-task)"
        off.append(f"{_ranks([one.rank for one in here])} ({host}) may use {has}: {fix}")
    return off, f"{min(one.cores for one in facts)} or more for each rank"


def _memory(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    local = Counter(one.host for one in facts)
    off = []
    for one in {one.host: one for one in facts}.values():
        # Ranks on CPUs share the memory of their host.
        room = one.device_bytes or one.host_free / local[one.host]
        if wanted.states_bytes > room:
            off.append(f"{one.host} has {size(room)} for a rank, whose states take {size(wanted.states_bytes)}")
    least = min(facts, key=lambda one: one.host_free)
    need = f"; a rank's states take {size(wanted.states_bytes)}" if wanted.states_bytes else ""
    return off, f"{size(least.host_free)} of host memory free at least{need}"


def _disk(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    first, off = facts[0], []
    need = CHECKPOINTS * wanted.checkpoint_bytes
    if first.disk_free < need:
        off.append(f"{wanted.folder} has {size(first.disk_free)} free, and {CHECKPOINTS} checkpoints take {size(need)}")
    writers = [one for one in facts if one.write_mb_s]
    rate = sum(one.write_mb_s for one in writers)
    took = wanted.checkpoint_bytes / (rate * 1e6) if rate else 0.0
    slow = [one for one in writers if one.write_mb_s < MIN_WRITE_MB_S]
    off += [f"{one.host} writes {one.write_mb_s:.0f} MB/s to {wanted.folder}: use a faster disk" for one in slow]
    if took > SAVING_S:
        off.append(f"a checkpoint of {size(wanted.checkpoint_bytes)} takes {seconds(took)} to write")
    save = f"; a checkpoint of {size(wanted.checkpoint_bytes)} in {seconds(took)}" if took else ""
    return off, f"{size(first.disk_free)} free, {rate:.0f} MB/s written by {plural(len(writers), 'machine')}{save}"


def _folder(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    blind = [one for one in facts if not one.sees_folder]
    off = []
    if blind:
        hosts = ", ".join(sorted({one.host for one in blind}))
        off = [f"{_ranks([one.rank for one in blind])} ({hosts}): {wanted.folder} is not the folder that rank 0 sees"]
    return off, f"{wanted.folder} is the same for all ranks"


def _clocks(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    wrong = {one.host: one for one in facts if abs(one.clock) > LARGEST_OFFSET_S}
    off = [f"the clock of {host} is {one.clock:+.1f} s off rank 0's: synchronise it" for host, one in wrong.items()]
    return off, f"within {seconds(max(abs(one.clock) for one in facts))} of each other"


def _ports(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    shut = {one.host: one.port for one in facts if one.port}
    return [f"{host}: {why}" for host, why in shut.items()], "ranks can listen on their address, and have met"


def _network(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    """Judge the network interface that NCCL or Gloo uses: the one set in the environment, or its own choice.

    On a machine with several networks or with containers, its own choice may be an interface that leads nowhere.
    """
    if len(facts) == 1:
        return [], "one rank needs none"
    machines = {one.host: one for one in facts}
    off = []
    for host, one in machines.items():
        name = one.named_interface.removeprefix("=")
        if len(machines) > 1 and name in LOOPBACKS:
            fix = f"set {_variable(one)}={one.interface}"
            off.append(f"{host}: {_variable(one)}={one.named_interface} does not lead to the other machines: {fix}")
    chosen = sorted({_chosen(one) for one in machines.values()})
    return off, "; ".join(chosen)


def _chosen(one: Facts) -> str:
    """Return a sentence about the interface that the back end of a machine uses."""
    if one.named_interface:
        return f"{one.backend} uses {one.named_interface.removeprefix('=')} ({_variable(one)})"
    way = f"{one.interface} leads to rank 0" if one.interface else "the way to rank 0 is not known"
    advice = f"name one by {_variable(one)}={one.interface or 'eth0'}"
    return f"{one.backend or 'the back end'} chooses by itself, {way}: {advice}"


def _variable(one: Facts) -> str:
    """Return the environment variable that sets a back end's interface."""
    return f"{(one.backend or next(iter(accelerators().values())).backend).upper()}_SOCKET_IFNAME"


def _links(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    if len(facts) == 1:
        return [], "one rank has none"
    hosts = {one.rank: one.host for one in facts}
    # The links by whether they connect two machines.
    kinds: dict[bool, list[tuple[int, int, float]]] = {}
    for one in facts:
        for other, rate in one.links.items():
            if one.rank < int(other):
                kinds.setdefault(hosts[one.rank] != hosts[int(other)], []).append((one.rank, int(other), rate))
    off, fine = [], []
    for across, links in sorted(kinds.items()):
        known = wanted.network_gb_s if across else wanted.link_gb_s
        usual = known or statistics.median(rate for _, _, rate in links)
        against = "the profile's" if known else "a median of"
        where = "between machines" if across else "within a machine"
        off += [
            f"rank {a} to {b} ({hosts[a]} to {hosts[b]}): {rate:.2g} GB/s, {against} {usual:.2g} GB/s"
            for a, b, rate in links if rate < SLOW_LINK * usual
        ]  # fmt: skip
        fine.append(f"{min(rate for _, _, rate in links):.2g} GB/s at least {where} ({against} {usual:.2g})")
    return off, ", ".join(fine)


def _burn(facts: Sequence[Facts], wanted: Requirements) -> tuple[list[str], str]:
    off = []
    for device in sorted({one.device for one in facts}):
        same = [one for one in facts if one.device == device]
        # All ranks compute the same products, so devices of one kind must get the same checksum in every round.
        usual = _most([sum_ for one in same for sum_ in one.burn] or [0])
        for one in same:
            if wrong := sum(sum_ != usual for sum_ in one.burn):
                off.append(f"rank {one.rank} on {one.host} computed wrongly in {wrong} of {len(one.burn)} rounds")
        middle = statistics.median(one.round_s for one in same)
        slow = [one for one in same if one.round_s > SLOW_DEVICE * middle]
        off += [f"rank {one.rank} on {one.host} takes {one.round_s / middle:.2f} times the median" for one in slow]
    rounds = sum(len(one.burn) for one in facts)
    return off, f"{plural(rounds, 'round')} of products, all alike, {seconds(facts[0].round_s)} each"
