"""`meshwright.plan` and `meshwright.memory`: the commands of these names, called by a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cli import memory as memory_command
from meshwright.cli import plan as plan_command
from meshwright.cli.main import arguments
from meshwright.config.load import GivenConfig, config_from
from meshwright.config.sections import Config
from meshwright.config.yaml_text import parse_yaml
from meshwright.disk import write
from meshwright.library.results import Result, stacked_bars
from meshwright.plan.account import layout_of_cost, layout_words
from meshwright.plan.explain import parts_of, yaml_of
from meshwright.plan.memory import GIB
from meshwright.plan.page import ranking_cells
from meshwright.plan.rank import bytes_at_peak, memory_bytes
from meshwright.plan.search import Candidate
from meshwright.show.units import seconds


@dataclass(frozen=True)
class PlannedLayout:
    """One layout of a plan, with its predicted figures.

    Attributes:
        layout: its choices by name, as `--layout` takes them: tp, pp, dp, zero, recompute, micro_batch, ...
        step_s: the seconds of a step.
        tokens_per_s_device: the tokens that a device trains in a second.
        mfu: the share of the device's peak that the model's own FLOPs are.
        bubble: the idle share of a pipeline's ranks.
        memory_gib: the GiB that a device needs.
        parts_s: the seconds of a step by the work that takes them.
    """

    layout: Mapping[str, Any]
    step_s: float
    tokens_per_s_device: float
    mfu: float
    bubble: float
    memory_gib: float
    parts_s: Mapping[str, float] = field(repr=False)
    yaml: str = field(repr=False)
    cells: Sequence[str] = field(repr=False)

    @property
    def config(self) -> Config:
        """The config that trains with this layout. Its `data.prefixes` are a placeholder unless the planned config
        named its data."""
        return config_from(parse_yaml(self.yaml, "the plan"))

    def __str__(self) -> str:
        return layout_words(dict(self.layout))


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """The best layouts of a model on a cluster, the best one first.

    Attributes:
        model, devices, device, cluster: what was planned.
        layouts: the ranking.
        reasons: sentences on why the best is the best.
        published: the layout of the model's published run on these devices, or None.
    """

    model: str
    devices: int
    device: str
    cluster: str
    layouts: Sequence[PlannedLayout]
    reasons: Sequence[str]
    published: PlannedLayout | None = None

    @property
    def best(self) -> PlannedLayout:
        """The fastest layout that fits."""
        return self.layouts[0]

    @property
    def config(self) -> Config:
        """The config that trains with the best layout."""
        return self.best.config

    def save(self, path: str | Path) -> None:
        """Write the best layout's config as YAML, for `meshwright train`."""
        write(Path(path), lambda: self.best.yaml)

    def title(self) -> str:
        return f"{self.model} on {self.devices:,} x {self.device} ({self.cluster})"

    def table(self) -> Sequence[Sequence[str]]:
        head = ("layout", "step", "tokens/s/device", "MFU", "bubble", "GiB")
        return [head, *(one.cells for one in self.layouts)]

    def notes(self) -> Sequence[str]:
        return self.reasons

    def drawing(self) -> str:
        """Return a bar for each layout that shows where the time of its step goes."""
        longest = max(one.step_s for one in self.layouts)
        return stacked_bars([(one.parts_s, seconds(one.step_s)) for one in self.layouts], longest, "s")


def plan(
    model: GivenConfig,
    *overrides: str,
    cluster: str | Path | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    network: str | None = None,
    node_devices: int | None = None,
    fit: float | None = None,
    top: int = 10,
    tp_grids: bool = False,
) -> Plan:
    """Search the layouts of a model on a cluster, and return the fastest that fit.

    >>> found = meshwright.plan("llama3-8b", cluster="h100-80g-dgx", devices=16, global_batch=128)
    >>> found.best.layout["tp"], found.best.mfu
    >>> found.save("llama3-8b.yaml")
    >>> meshwright.plan("config.yaml", "layout.tp=8", cluster="h100-80g-dgx", devices=64)

    `model` is a preset, a recipe, a config (path, mapping or `Config`) or a Hugging Face folder. Keys of the layout in
    `overrides` stay fixed. `fit` is the GiB to fit into. The defaults are those of `meshwright plan`.
    """
    _, args = arguments("plan", ["MODEL", *overrides])
    args.target, args.devices, args.network, args.node_devices = model, devices, network, node_devices
    args.global_batch, args.seq, args.fit, args.top, args.tp_grids = global_batch, seq, fit, top, tp_grids
    found = plan_command.ranked(args, str(cluster) if cluster else None)
    of = found.of
    return Plan(
        of.target.name, found.base.world, of.cluster.device.name, of.cluster.name,
        tuple(map(_planned, found.shown)), tuple(found.reasons), _planned(found.known) if found.known else None,
    )  # fmt: skip


def _planned(candidate: Candidate) -> PlannedLayout:
    cost = candidate.cost
    return PlannedLayout(
        layout_of_cost(cost), cost.step_s, cost.tokens_per_s_device, cost.mfu, cost.bubble, candidate.memory_gib,
        parts_of(cost), yaml_of(candidate), ranking_cells(candidate),
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class MemoryUse(Result):
    """The predicted memory of one rank.

    Attributes:
        model, ranks, rank, cluster: what was counted.
        device_gib: the GiB that the device needs, the sum of `parts_gib`.
        capacity_gib: the GiB that the device has.
        parts_gib: the GiB at the peak by kind, the allocator's reserve, and the device's context.
        most_bytes: the most bytes of each kind at any time in a step.
    """

    model: str
    ranks: int
    rank: int
    cluster: str
    device_gib: float
    capacity_gib: float
    parts_gib: Mapping[str, float]
    most_bytes: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """True if the device has as much memory as a step needs."""
        return self.device_gib <= self.capacity_gib

    def title(self) -> str:
        verdict = "fits" if self.fits else "DOES NOT FIT"
        need = f"{self.device_gib:.1f} of {self.capacity_gib:.1f} GiB"
        return f"{self.model}, rank {self.rank} of {self.ranks:,} on {self.cluster}: {need}, {verdict}"

    def table(self) -> Sequence[Sequence[str]]:
        rows = [(name, f"{value:.2f}") for name, value in self.parts_gib.items() if value]
        return [("at the peak", "GiB"), *rows, ("all", f"{self.device_gib:.2f}")]

    def drawing(self) -> str:
        """Return a bar of the parts. A full bar is the memory of the device."""
        whole = max(self.capacity_gib, self.device_gib)
        return stacked_bars([(self.parts_gib, f"{self.device_gib:.1f} GiB")], whole, "GiB")


def memory(
    config: GivenConfig,
    *overrides: str,
    devices: int | None = None,
    cluster: str | Path | None = None,
    rank: int | None = None,
    layout: str = "",
    global_batch: int | None = None,
    seq: int | None = None,
) -> MemoryUse:
    """Return the memory of one rank by kind, by default of the rank with the largest peak.

    >>> use = meshwright.memory("llama3-8b", "zero.stage=3", devices=8, global_batch=8, cluster="h100-80g-dgx")
    >>> use.fits, use.device_gib
    >>> use.parts_gib["activations"]
    >>> meshwright.memory("config.yaml", devices=64, layout="tp=8,recompute=full")
    """
    _, args = arguments("memory", ["CONFIG", *overrides])
    args.target, args.cluster, args.world, args.rank = config, cluster and str(cluster), devices, rank
    args.layout, args.global_batch, args.seq = layout, global_batch, seq
    one = memory_command.counted(args)
    device, at_peak = one.device, bytes_at_peak(one.memory)
    parts = {name: value / GIB for name, value in at_peak.items() if name != "peak"}
    parts |= {"allocator reserve": device.reserve, "context and communicators": device.context}
    capacity = one.cluster.device.memory_gib
    most = memory_bytes(one.memory)
    name = one.target.name
    return MemoryUse(name, one.job.world, one.rank, one.cluster.name, device.total, capacity, parts, most)
