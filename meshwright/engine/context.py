"""The context of a run: the config and this rank's position in the mesh, passed around instead of globals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.comm.by_node import NodeGroups
from meshwright.comm.mesh import Mesh
from meshwright.config.memory import Place
from meshwright.config.sections import Config
from meshwright.device import PRECISION_DTYPES, Device, return_freed_memory
from meshwright.errors import UserError
from meshwright.nn.offload import HostActivations
from meshwright.nn.parallel import ContextGroups, ExpertGroups, Parallel
from meshwright.nn.random import Streams
from meshwright.plugins import load_object
from meshwright.spec.layout import Layout
from meshwright.spec.layout.grid import GRID_AXES
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.description import layout_of
from meshwright.spec.model.grid_products import SHARED_BY
from meshwright.spec.model.part import Coordinate, coordinate_of
from meshwright.spec.traffic.ledger import Ledger
from meshwright.spec.traffic.placement import shard_axes


@dataclass(frozen=True)
class Context:
    """The run's config, layout, mesh and device, which every provider and `forward_step` receive."""

    config: Config
    layout: Layout
    mesh: Mesh
    device: Device
    parallel: Parallel

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def ledger(self) -> Ledger:
        return self.mesh.ledger

    @property
    def pp_rank(self) -> int:
        return self.mesh.coordinate["pp"]

    @cached_property
    def at(self) -> Coordinate:
        """This rank's position in the mesh, in the form that the parts of its model take."""
        return self.at_rank(self.mesh.rank)

    def at_rank(self, rank: int) -> Coordinate:
        """Return the position of any rank in the mesh."""
        return place_of(self.config, self.layout, rank)


def place_of(c: Config, layout: Layout, rank: int) -> Coordinate:
    return coordinate_of(layout, rank, c.layout.sequence_parallel, c.context_plan, c.comm.overlap.piece_flops)


def build_context(
    config: Config,
    rank: int,
    world: int,
    device: Device,
    node_size: int = 0,
    process_groups: dict[str, Any] | None = None,
    trains: bool = False,
) -> Context:
    """Build the mesh, the random streams and the settings of layers for one rank.

    `trains` says that a Trainer will be made; then no rank ever allocates the full weights that ZeRO stage 3 shards.
    """
    if trains and Place.DISK in config.zero.offload.places:
        return_freed_memory()
    layout = layout_of(config, world, node_size)
    emulate = config.comm.emulate
    if emulate.on and device.module is not None:
        raise UserError(f"comm.emulate delays calls of CPUs only, and this is {device.name}: set run.device=cpu")
    mesh = Mesh(layout, rank, made_elsewhere=process_groups, timeout=config.comm.timeout)
    if emulate.on:
        load_object(emulate.emulation)(mesh, emulate)
    at = mesh.coordinate
    # Ranks that process different samples or different tokens must draw different random numbers.
    data_rank = (mesh.replica * layout.dp + at["dp"]) * layout.cp + at["cp"]
    streams = Streams(config.train.seed, data_rank, at["tp"], device.torch, at["pp"])
    streams.active = config.drops
    parallel = Parallel(
        mesh.tp, config.layout.sequence_parallel, PRECISION_DTYPES[config.train.precision], device.torch, streams,
        config.recompute, fused=fuses(config, device), products=config.train.products,
        unallocated=trains and shard_axes(layout, config.zero).stage == 3, host=is_host(config, device),
        experts=expert_groups(mesh, place_of(config, layout, rank)) if config.model.experts.count else None,
        context=context_groups(mesh, config),
        piece_flops=config.comm.overlap.piece_flops,
        offload=HostActivations(device.torch) if config.recompute.offload and not is_host(config, device) else None,
        grid={axis: mesh.group(axis) for axis in GRID_AXES} if config.layout.grid else None,
    )  # fmt: skip
    return Context(config, layout, mesh, device, parallel)


def expert_groups(mesh: Mesh, at: Coordinate) -> ExpertGroups:
    by_node = "ep" in dict(mesh.layout.parts)
    parts = NodeGroups(mesh.group(EP_NODE), mesh.group(EP_ACROSS)) if by_node else None
    etp, ep, sequence, cp = (mesh.group(axis) for axis in ("etp", "ep", "tp-cp", "cp"))
    return ExpertGroups(etp, ep, sequence, cp, at.cuts_experts_alike, parts)


def context_groups(mesh: Mesh, config: Config) -> ContextGroups | None:
    """Return the ranks that share sequences, or None if every rank has whole ones.

    They are the ranks along cp, or along one axis of a grid if a micro-batch has too few sequences to distribute.
    """
    grid = config.layout.grid
    if grid is not None and grid.shares(config.train.micro_batch) > 1:
        return ContextGroups(SHARED_BY, mesh.alone, mesh.group(grid.sharing_axis))
    if config.layout.cp == 1:
        return None
    plan = config.context_plan
    inner, outer = (mesh.group(axis) if axis else mesh.alone for axis in (plan.inner, plan.outer))
    return ContextGroups(plan, inner, outer)


def is_host(config: Config, device: Device) -> bool:
    """Return True if the run's device is a CPU.

    A dry run, on `meta`, goes by the device that the config names, so that it allocates the same tensors as the real
    run.
    """
    return config.run.on_cpu if device.is_meta else device.is_cpu


def fuses(config: Config, device: Device) -> bool:
    """Return True if blocks use the parts of nn/fused.py, whose forward a compiler must fuse to be fast."""
    return config.compiles and (not is_host(config, device) or config.train.compiles_on_host)


def compiles(config: Config, device: Device) -> bool:
    """Return True if blocks are compiled with torch.compile."""
    return not device.is_meta and fuses(config, device)
