"""The process groups of a layout: a thin layer between the layout, a pure value, and torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.flight import FlightRecord
from meshwright.comm.group import Group, SlowLinks
from meshwright.device import group_options
from meshwright.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout import INNER, REPLICAS
from meshwright.spec.traffic.communicators import (
    MAX_BLOCKS,
    PP,
    PP_BACK,
    WORLD,
    Communicator,
    is_urgent,
    shared_by_world,
)
from meshwright.spec.traffic.ledger import Ledger

# The additional seconds that ranks wait at most for a rank that compiles.
COMPILING_S = 1800.0


def torch_limit(timeout: float) -> timedelta:
    """Return torch's time limit for the rendezvous. It exceeds the watchdog's `timeout`, so the watchdog reports
    first."""
    return timedelta(seconds=2 * timeout + 30)


def call_limit(timeout: float) -> timedelta:
    """Return torch's time limit for calls. It must not end calls that the watchdog still allows to wait."""
    return torch_limit(timeout) + timedelta(seconds=COMPILING_S)


def set_options(options: Any, group: str) -> None:
    """Set NCCL's options of a group's communicators."""
    options.is_high_priority_stream = is_urgent(group)
    if group in MAX_BLOCKS:
        options.config.max_ctas = MAX_BLOCKS[group]


class Mesh:
    """The groups that contain this rank, by the layout's names. Groups of one rank have no process group.

    `samples` are the ranks that read different samples. `tokens` are the ranks that hold different tokens of the same
    sequences. `alone` is a group of this rank only, for work that is not divided.
    """

    def __init__(
        self, layout: Layout, rank: int, made_elsewhere: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> None:
        """Create the groups. All ranks must call this together. `made_elsewhere`: existing process groups by axis, used
        instead of new ones. `timeout`: the seconds until the watchdog reports a call; torch's time limit is longer."""
        self.layout, self.rank = layout, rank
        self.ledger, self.flight = Ledger(), FlightRecord()
        self._limit = call_limit(timeout) if timeout else None
        given = made_elsewhere or {}
        # The group of the pipeline's gradients has the ranks of `pp`, and no separate axis.
        self._given = {name if name == PP_BACK else layout.without_ones(name): group for name, group in given.items()}
        if unused := self._given.keys() - {*layout.step_groups(), PP_BACK}:
            known = ", ".join(layout.step_groups())
            raise UserError(f"process group '{min(unused)}' is not used by this layout: name one of {known}")
        self.groups: dict[str, Group] = {}
        self._links: SlowLinks | None = None
        for name in layout.step_groups():
            self.group(name)
        self.tp, self.pp, self.world = self.group("tp"), self.group(PP), self.group(WORLD)
        self.pp_back = self._make_back()
        self.samples, self.tokens = self.group("dp"), self.group("cp")
        # The ranks that train together: the ranks of this replica, or all ranks if there is one replica.
        self.inner = self.group(INNER) if layout.replicas > 1 else self.world
        self.alone = Group("alone", (rank,), rank, None, self.ledger, self.flight)
        self.coordinate = layout.coordinate(rank)
        self.replica = self.coordinate.get(REPLICAS, 0)

    def use_flight(self, flight: FlightRecord) -> None:
        """Record all further calls in `flight`, the record of another mesh of these ranks that a watchdog watches."""
        self.flight = flight
        for group in self.groups.values():
            group.flight = flight

    def use_links(self, links: SlowLinks) -> None:
        """Send all further calls through emulated links."""
        self._links = links
        for group in self.groups.values():
            group.links = links

    def group(self, axes: str) -> Group:
        """Return the group over `axes` that contains this rank. Its first use creates it, on all its members
        together."""
        name = self.layout.without_ones(axes)
        if name not in self.groups:
            self.groups[name] = self._make(name)
        return self.groups[name]

    def _make(self, name: str) -> Group:
        ranks = self.layout.group(name, self.rank)
        if not ranks and self.layout.size(name) > 1 and name not in self._given:
            # torch names a group after the number of groups that the process has made before. A rank outside of the
            # group makes a dummy one, so that all ranks keep the same count.
            self._new(name, [self.rank])
        process_group = self._given.get(name)
        twin = shared_by_world(self.layout) if name == WORLD else None
        if process_group is None and twin is not None and twin not in self._given:
            process_group = self.group(twin).process_group
        if process_group is None and len(ranks) > 1:
            process_group = self._new(name, ranks)
        return self._group(name, ranks, process_group)

    def _make_back(self) -> Group:
        """Make the group of the pipeline's gradients. The ledger counts its calls under `pp`, like those of the
        activations."""
        if self.pp.alone:
            return self.pp
        process_group = self._given.get(PP_BACK) or self._new(PP_BACK, self.pp.ranks)
        back = self._group(PP, self.pp.ranks, process_group)
        # The two groups are separate sequences of calls to the flight record, so they need separate labels.
        back.label = f"{PP_BACK}:{back.ranks[0]}"
        self.groups[PP_BACK] = back
        return back

    def _new(self, name: str, ranks: Sequence[int]) -> Any:
        """Make a process group. Its back end creates the communicators when the group is first used."""
        options = group_options(dist.get_backend())
        if options is not None:
            set_options(options, name)
        if options is not None and self._limit is not None:
            # torch takes the time limit from the options, and warns on every rank if the `timeout` below differs.
            options._timeout = self._limit
        return dist.new_group(
            list(ranks), timeout=self._limit, pg_options=options, use_local_synchronization=True
        )  # fmt: skip

    def _group(self, name: str, ranks: tuple[int, ...], process_group: Any) -> Group:
        crosses = self.layout.crosses_node(ranks)
        return Group(name, ranks, self.rank, process_group, self.ledger, self.flight, crosses, self._links)

    def warm_up(
        self, wanted: Sequence[Communicator], device: torch.device, notice: Callable[[str], object] | None = None
    ) -> None:
        """Connect communicators with one tiny call each, in the given order, which all ranks must share.

        A back end that connects a group on first use would otherwise do so in the middle of the first step, when the
        device's memory is full. `notice` receives a line about the number of communicators first.
        """
        if notice is not None and wanted:
            notice(f"Connecting {len(wanted)} communicators of this rank, between {len(self.world.ranks)} ranks ...")
        number = torch.zeros(1, device=device)
        for communicator in wanted:
            name, ranks = communicator.group, communicator.ranks
            group = self.groups[name] if name == PP_BACK else self.group(name)
            if not communicator.is_pair:
                group.all_reduce(number)
            elif ranks[0] == self.rank:
                group.send(number, group.ranks.index(ranks[1])).wait()
            else:
                group.receive(number, group.ranks.index(ranks[0])).wait()

    def is_first(self, *axes: str) -> bool:
        """Return True if this rank is the first of its group over each of these axes, or in no such group. Make no
        process group."""
        groups = (self.layout.group(axis, self.rank) for axis in axes)
        return all(not ranks or ranks[0] == self.rank for ranks in groups)
