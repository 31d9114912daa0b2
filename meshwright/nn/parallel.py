"""What a layer is told about the mesh: its groups, dtype, device and random streams. Also parameters' first values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.comm.by_node import ByNode
from meshwright.comm.group import Group
from meshwright.config.sections import RecomputeConfig
from meshwright.nn.adapters.nf4 import pack
from meshwright.nn.offload import HostActivations
from meshwright.nn.random import Streams
from meshwright.spec.layout.context import ContextPlan
from meshwright.spec.layout.params import TILE, ParamRecord, tiles


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of a mixture of experts: experts are divided over `ep` and each of them over `etp`. `sequence` are the
    ranks that hold different tokens of the same sequences; `by_node` the parts of `ep`, where rows go inside a node
    first. `cp` is the context-parallel group: ranks that hold different tokens of a sequence regardless of tp. `alike`:
    experts are divided over the same ranks as everything else (`Coordinate.cuts_experts_alike`)."""

    etp: Group
    ep: Group
    sequence: Group
    cp: Group
    alike: bool
    by_node: ByNode | None = None


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that hold different tokens of the same sequences, along the two axes of a plan."""

    plan: ContextPlan
    inner: Group
    outer: Group


@dataclass(frozen=True)
class Parallel:
    """How a rank's layers are cut, and in what precision and where they compute."""

    tp: Group
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    streams: Streams
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    fused: bool = False  # whether norms and activations are fused with the products after them
    products: str = ""  # the precision in which linear layers multiply, if not `dtype` (see nn/products.py)
    unallocated: bool = False  # sharding allocates and initialises the parameters later
    host: bool = False  # this is a CPU, or a dry run of one
    experts: ExpertGroups | None = None  # where the model has experts
    context: ContextGroups | None = None  # where ranks share sequences
    piece_flops: float | None = None  # linear layers communicate over tp while they multiply (spec/model/pieces.py)
    offload: HostActivations | None = None  # where inputs of recomputed blocks go to host memory
    grid: dict[str, Group] | None = None  # the axes of a grid of tensor-parallel ranks, where tp is one

    @property
    def splits_tokens(self) -> bool:
        """Whether, between the products, each tp rank holds only its rows of the tokens."""
        return self.sequence_parallel and not self.tp.alone

    @property
    def divides_stream(self) -> bool:
        """Whether, between the products, each tp rank holds a part of the activations of its own."""
        return self.splits_tokens or self.grid is not None

    def local_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor that every tp rank holds for all tokens."""
        if not self.splits_tokens:
            return x
        rows = x.shape[0] // self.tp.size
        return x[self.tp.index * rows : (self.tp.index + 1) * rows]

    def parameter(self, record: ParamRecord) -> nn.Parameter:
        """Returns an empty parameter that carries its record."""
        dtype = torch.promote_types(self.dtype, torch.float32) if record.wide else self.dtype
        dtype = torch.uint8 if record.packs else dtype
        values = torch.empty(record.local_shape, dtype=dtype, device=self.device)
        parameter = nn.Parameter(values, requires_grad=record.trained)
        if self.unallocated:
            parameter.untyped_storage().resize_(0)  # keeps the shape but releases the memory
        parameter.record = record  # type: ignore[attr-defined]
        return parameter


def record_of(parameter: nn.Parameter) -> ParamRecord | None:
    return getattr(parameter, "record", None)


def is_unallocated(parameter: nn.Parameter) -> bool:
    """Whether a parameter has no memory yet."""
    return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0 and not parameter.is_meta


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Draws every parameter that carries a record and has memory, the same numbers in every layout and precision."""
    for parameter in module.parameters():
        record = record_of(parameter)
        if record is not None and not is_unallocated(parameter):
            draw_parameter(record, parameter, seed)


# By the kind of `Init`; None where the module has set its values itself. Normal ones are drawn on top.
FIRST_VALUES = {"ones": 1.0, "zeros": 0.0, "normal": 0.0, "given": None, "placed": None}


@torch.no_grad()
def draw_parameter(record: ParamRecord, out: Tensor, seed: int) -> None:
    """Sets a parameter's first values, which follow from the seed and its global name alone."""
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
    """Makes both ends of a tie one parameter, where one rank holds them in different chunks."""
    kept: dict[str, nn.Parameter] = {}
    for module in modules:
        for layer in module.modules():
            for name, parameter in list(layer.named_parameters(recurse=False)):
                record = record_of(parameter)
                if record is not None and record.tied:
                    setattr(layer, name, kept.setdefault(record.tied, parameter))
