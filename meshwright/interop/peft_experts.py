"""Import and export adapters of experts in PEFT's format.

transformers stores a weight of all experts of a layer as one parameter, [experts, rows, in]. PEFT adapts it by its name
(`target_parameters`) and wraps the module once for each such parameter, the first one innermost. The factors of all
experts are stacked in two matrices: A as [experts x rank, in] and B as [rows, rank x experts], with the experts varying
fastest. Older versions had a module for each expert and each of its products, with an adapter for each of these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.merged import AdapterValues, AdapterWeights
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.hf.family import Family

WRAPPED = ".base_layer"  # PEFT's name of the module inside a wrapper.
DOWN, UP = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True)
class TheirAdapter:
    """One of PEFT's adapters: its factors, its scale, and with DoRA the norms of rows.

    Factors of experts are stacked: [experts, rank, in] and [experts, rows, rank].
    """

    down: Tensor
    up: Tensor
    scale: float
    norms: Tensor | None

    @property
    def rank(self) -> int:
        return self.up.shape[-1]


def wrappers(parameters: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (the name under which PEFT stores the adapter, the parameter) for these parameters, which are in the order
    of their modules."""
    by_module: dict[str, list[str]] = {}
    for parameter in parameters:
        by_module.setdefault(parameter.rpartition(".")[0], []).append(parameter)
    # The last parameter is adapted by the outermost wrapper, which has the name of the module itself.
    for module, adapted in by_module.items():
        yield from ((module + WRAPPED * depth, parameter) for depth, parameter in enumerate(reversed(adapted)))


def expert_tensors(family: Family, own: AdapterWeights) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return (the factors of all adapters of experts by PEFT's names, the rank of each parameter's adapter)."""
    named = {parameter: name for name in own.adapters if (parameter := family.stacked_parameter(name))}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for wrapper, parameter in wrappers(named):
        changes = own.changes(named[parameter])
        down, up = _stacked(changes, own.records[named[parameter]])
        ranks[parameter] = down.shape[1]
        tensors[f"{wrapper}.{DOWN}"] = down.flatten(0, 1)
        tensors[f"{wrapper}.{UP}"] = up.permute(1, 2, 0).flatten(1)
    return tensors, ranks


def _stacked(changes: list[AdapterValues], weight: ParamRecord) -> tuple[Tensor, Tensor]:
    """Return A and B of the one PEFT adapter of a weight. Each of our adapters has separate rows and columns in B."""
    down = torch.cat([change.down for change in changes], 1)
    up = down.new_zeros(weight.shape[0], weight.shape[1], down.shape[1])
    column = 0
    for change in changes:
        width = change.up.shape[2]
        up[:, change.record.start : change.record.stop, column : column + width] = change.up
        column += width
    return down, up


def targets_of(parameters: Collection[str]) -> list[str]:
    """Return the names by which PEFT matches these parameters in all layers."""
    return sorted({re.sub(r"^.*\.\d+\.", "", parameter) for parameter in parameters})


def targeted(source: Path, family: Family, records: Mapping[str, ParamRecord], targets: list[str]) -> dict[str, str]:
    """Return the parameters that a folder adapts, by the names under which it stores their adapters."""
    known = [parameter for name in records if (parameter := family.stacked_parameter(name))]
    for target in targets:
        if not any(_ends_with(parameter, target) for parameter in known):
            raise UserError(
                f"{source} adapts the parameter {target}: of parameters, only experts' weights of the families that "
                "are known here can be imported, and it has none of that name"
            )
    return dict(wrappers([each for each in known if any(_ends_with(each, target) for target in targets)]))


def _ends_with(parameter: str, target: str) -> bool:
    return parameter == target or parameter.endswith(f".{target}")


def unstacked(source: Path, name: str, one: TheirAdapter, experts: int) -> TheirAdapter:
    """Return a parameter's adapter with its factors stacked by expert, from PEFT's two matrices for all experts."""
    if one.down.dim() != 2 or one.up.dim() != 2 or one.down.shape[0] % experts or one.up.shape[1] != one.down.shape[0]:
        shapes = " and ".join(str(list(each.shape)) for each in (one.down, one.up))
        raise UserError(f"{source} holds factors {shapes} of {name}, which are not those of {experts} experts: name "
                        "the base that they were trained on")  # fmt: skip
    up = one.up.unflatten(1, (-1, experts)).permute(2, 0, 1)
    return TheirAdapter(one.down.unflatten(0, (experts, -1)), up, one.scale, None)


def adapter_of_experts(
    source: Path, family: Family, model: ModelConfig, weight: ParamRecord, piece: tuple[int, int],
    theirs: Mapping[str, TheirAdapter],
) -> tuple[TheirAdapter, set[str]] | None:  # fmt: skip
    """Return (the adapter of the rows `piece` of each expert's weight, its names in the folder), or None if there is no
    such adapter. `piece` is (first row, number of rows)."""
    first, rows = piece
    parameter = family.stacked_parameter(weight.name)
    if parameter in theirs:
        one = theirs[parameter]
        return TheirAdapter(one.down, one.up[:, first : first + rows], one.scale, None), {parameter}

    # Older versions of PEFT: one module, and one adapter, for each expert.
    modules = [run.source.rpartition(".")[0] for run in family.map_tensor(model, weight).runs
               if first <= run.start % weight.shape[1] < first + rows]  # fmt: skip
    adapters = [theirs[module] for module in modules if module in theirs]
    if not adapters:
        return None
    shapes_and_scales = {(each.down.shape, each.up.shape, each.scale) for each in adapters}
    if len(adapters) < len(modules) or len(shapes_and_scales) > 1 or adapters[0].norms is not None:
        raise UserError(
            f"{source} adapts the experts of {modules[0]} in different ways, or with DoRA: only LoRA of one rank on "
            "all experts of a layer can be imported"
        )
    down, up = torch.stack([each.down for each in adapters]), torch.stack([each.up for each in adapters])
    return TheirAdapter(down, up, adapters[0].scale, None), set(modules)
