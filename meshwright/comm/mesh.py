"""Process groups made from a layout: the thin object between the pure value and torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

from meshwright.comm.flight import FlightRecord
from meshwright.comm.group import Group
from meshwright.comm.ledger import Ledger
from meshwright.errors import UserError
from meshwright.layout import Layout


def torch_limit(timeout: float) -> timedelta:
    """Returns torch's own time limit for calls, which is longer than the watchdog's `timeout`, so that the watchdog
    reports first."""
    return timedelta(seconds=2 * timeout + 30)


class Mesh:
    """The groups that hold this rank, by the layout's names. Groups of one have no process group."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        ledger: Ledger | None = None,
        made_elsewhere: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Every rank must call this together. `made_elsewhere`: process groups by axis to use instead of new ones.
        `timeout`: seconds until the watchdog reports a call; torch's own limit stands behind it."""
        self.layout = layout
        self.rank = rank
        self.ledger = ledger or Ledger()
        self.flight = FlightRecord()
        self._limit = torch_limit(timeout) if timeout else None
        self._given = {layout.without_ones(name): group for name, group in (made_elsewhere or {}).items()}
        for name in self._given:
            if name not in layout.step_groups():
                known = ", ".join(layout.step_groups())
                raise UserError(f"process group '{name}' is not used by this layout: name one of {known}")
        self._groups: dict[str, Group] = {}
        for name in layout.step_groups():
            self.group(name)
        self.coordinate = layout.coordinate(rank)

    def group(self, axes: str) -> Group:
        """Returns the group over `axes` that holds this rank. It is made on first use, which all its members must do
        together."""
        name = self.layout.without_ones(axes)
        if name not in self._groups:
            self._groups[name] = self._make(name)
        return self._groups[name]

    def _make(self, name: str) -> Group:
        ranks = self.layout.group(name, self.rank)
        if not ranks and self.layout.size(name) > 1 and name not in self._given:
            # torch names a group after the number of groups its maker has made before, so every rank makes as many.
            dist.new_group([self.rank], timeout=self._limit, use_local_synchronization=True)
        process_group = self._given.get(name)
        if process_group is None and len(ranks) > 1:
            process_group = dist.new_group(list(ranks), timeout=self._limit, use_local_synchronization=True)
        crosses = self.layout.crosses_node(ranks) if ranks else False
        return Group(name, ranks, self.rank, process_group, self.ledger, self.flight, crosses)

    def is_first(self, *axes: str) -> bool:
        """Whether this rank is the first of its group over each of these axes (or in none). Makes no process group."""
        groups = (self.layout.group(axis, self.rank) for axis in axes)
        return all(not ranks or ranks[0] == self.rank for ranks in groups)

    @cached_property
    def alone(self) -> Group:
        """The group of this rank by itself, for what is not divided."""
        return Group("alone", (self.rank,), self.rank, None, self.ledger, self.flight)

    @property
    def groups(self) -> dict[str, Group]:
        return dict(self._groups)

    @property
    def tp(self) -> Group:
        return self.group("tp")

    @property
    def pp(self) -> Group:
        return self.group("pp")

    @property
    def samples(self) -> Group:
        """The ranks that read different samples."""
        return self.group("dp")

    @property
    def tokens(self) -> Group:
        """The ranks that hold different tokens of the same sequences."""
        return self.group("cp")

    @property
    def world(self) -> Group:
        return self.group("world")
