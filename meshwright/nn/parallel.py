"""The settings that a layer is built with (process groups, dtype, device, random streams), and the initial values of
parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.comm.by_node import NodeGroups
from meshwright.comm.group import Group
from meshwright.config.memory import RecomputeConfig
from meshwright.nn.adapters.nf4 import pack
from meshwright.nn.offload import HostActivations
from meshwright.nn.random import Streams
from meshwright.spec.layout.context import ContextPlan
from meshwright.spec.layout.params import TILE, ParamRecord, tiles


@dataclass(frozen=True)
class ExpertGroups:
    """The process groups of a mixture of experts."""

    # Each expert is sharded over `etp`, and whole experts are distributed over `ep`.
    etp: Group
    ep: Group
    # The ranks that hold different tokens of the same sequences, along tp and cp.
    sequence: Group
    # The ranks that hold different tokens of the same sequences, along cp alone.
    cp: Group
    # True if experts are sharded over the same ranks as everything else (`Coordinate.cuts_experts_alike`).
    alike: bool
    # The two subgroups of `ep` of a hierarchical exchange, in which rows travel inside a node first.
    by_node: NodeGroups | None = None


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that hold different tokens of the same sequences, along the two axes of a plan."""

    plan: ContextPlan
    inner: Group
    outer: Group


@dataclass(frozen=True)
class Parallel:
    """The settings with which a rank builds its layers: their groups, precision, device and random streams."""

    tp: Group
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    streams: Streams
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    # True if norms and activations are fused with the products after them.
    fused: bool = False
    # The precision in which linear layers multiply, if it is not `dtype` (see nn/products.py).
    products: str = ""
    # True if sharding allocates and initialises the parameters later.
    unallocated: bool = False
    # True on a CPU, and in a dry run of one.
    host: bool = False
    # The groups of experts and of context parallelism; None if the model or the layout has none.
    experts: ExpertGroups | None = None
    context: ContextGroups | None = None
    # The least FLOPs of a product for each send, if linear layers communicate over tp while they multiply
    # (spec/model/pieces.py).
    piece_flops: float | None = None
    # The host memory to which inputs of recomputed blocks are offloaded.
    offload: HostActivations | None = None
    # The group of each axis, if the tensor-parallel ranks form a grid.
    grid: dict[str, Group] | None = None

    @property
    def splits_tokens(self) -> bool:
        """True if each tp rank holds only its own tokens between the products (sequence parallelism)."""
        return self.sequence_parallel and not self.tp.alone

    @property
    def divides_stream(self) -> bool:
        """True if each tp rank holds a different part of the activations between the products."""
        return self.splits_tokens or self.grid is not None

    def local_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that every tp rank holds with the rows of all tokens."""
        if not self.splits_tokens:
            return x
        rows = x.shape[0] // self.tp.size
        return x[self.tp.index * rows : (self.tp.index + 1) * rows]

    def parameter(self, record: ParamRecord) -> nn.Parameter:
        """Return an empty parameter that carries its record."""
        dtype = torch.promote_types(self.dtype, torch.float32) if record.wide else self.dtype
        dtype = torch.uint8 if record.packs else dtype
        values = torch.empty(record.local_shape, dtype=dtype, device=self.device)
        parameter = nn.Parameter(values, requires_grad=record.trained)
        if self.unallocated:
            # This keeps the shape but releases the memory.
            parameter.untyped_storage().resize_(0)
        parameter.record = record  # type: ignore[attr-defined]
        return parameter


def record_of(parameter: nn.Parameter) -> ParamRecord | None:
    return getattr(parameter, "record", None)


def is_unallocated(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has no memory yet."""
    return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0 and not parameter.is_meta


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Initialise all parameters that have a record and memory, with the same numbers in every layout and precision."""
    for parameter in module.parameters():
        record = record_of(parameter)
        if record is not None and not is_unallocated(parameter):
            draw_parameter(record, parameter, seed)


# The constant that each kind of `Init` starts from. None: the module has set the values itself. The values of "normal"
# are drawn afterwards.
FIRST_VALUES = {"ones": 1.0, "zeros": 0.0, "normal": 0.0, "given": None, "placed": None}


@torch.no_grad()
def draw_parameter(record: ParamRecord, out: Tensor, seed: int) -> None:
    """Set a parameter's initial values, which depend on the seed and its global name alone."""
    if record.packs is not None and not out.is_meta:
        values = torch.empty(record.packs.local_shape, device=out.device)
        draw_parameter(record.packs, values, seed)
        out.copy_(pack(values))
        return
    kind = record.init.kind
    value = FIRST_VALUES[kind]
    if value is not None:
        out.fill_(value)
    if kind != "normal" or out.is_meta:
        return
    # Values are drawn tile by tile, on the CPU and in float32, so that every layout and device gets the same ones.
    generator = torch.Generator()
    local = torch.zeros(record.local_shape, dtype=torch.float32)
    sides = (*(1 for _ in record.shape[2:]), TILE, TILE)
    for tile_seed, wanted, place in tiles(record, seed):
        generator.manual_seed(tile_seed)
        local[place] = torch.randn(*sides, generator=generator)[wanted]
    local.mul_(record.init.std)
    for box in record.boxes if record.init.first else ():
        rows = max(0, min(box.shape[0], record.init.first - box.start[0]))
        local[box.local_start[0] : box.local_start[0] + rows] *= record.init.first_std / record.init.std
    out.copy_(local)


def share_tied_parameters(modules: list[nn.Module]) -> None:
    """Make tied weights one parameter if this rank holds both of them, in different model chunks."""
    by_tie: dict[str, nn.Parameter] = {}
    for module in modules:
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                record = record_of(parameter)
                if record is not None and record.tied:
                    setattr(layer, name, by_tie.setdefault(record.tied, parameter))
