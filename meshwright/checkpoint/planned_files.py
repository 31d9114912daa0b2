"""Read a Hugging Face folder of a model that transformers builds itself, by boxes of the module's parameters.

The files may store a parameter as several tensors, e.g. one matrix per expert, or gate and up projections separately.
transformers' conversion mapping says how to combine them. If that is stacking or concatenation, each stored tensor is a
box of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.checkpoint.hf_files import opened_weights
from meshwright.errors import UserError
from meshwright.models.wrapped.blueprint import blueprint, read_config, skeleton
from meshwright.spec.layout.params import Box, ParamRecord, overlap, slices_of
from meshwright.spec.model.part import SINGLE_RANK


class SourceTensor(NamedTuple):
    """A tensor in the files, and its box in the parameter. `stacked`: it is one of many along a new first dim."""

    source: str
    box: Box
    stacked: bool


class PlannedFolder:
    """A folder whose parameters and stored buffers can be read by their names in the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_config(str(folder))
        self.file_of = opened_weights(folder, bool(getattr(config, "quantization_config", None)))
        module = skeleton(config, torch.float32)
        self.shapes = named_shapes(str(folder))
        own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        self.buffers = {name: own[name] for name in own if name not in dict(_parameters(module))}
        self.pieces = self._pieces(module, own)
        self._check()

    def _pieces(self, module: nn.Module, own: dict[str, tuple[int, ...]]) -> dict[str, list[SourceTensor]]:
        """Return the stored tensors of each entry of the state dict. `own`: the shapes of these entries."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        mappings: list[Any] = get_model_conversion_mapping(module)  # type: ignore[arg-type]
        converters = [mapping for mapping in mappings if isinstance(mapping, WeightConverter)]
        renamings = [mapping for mapping in mappings if not isinstance(mapping, WeightConverter)]

        # Group the stored tensors by the parameter that they belong to, and by the converter's pattern.
        grouped: dict[str, dict[str, list[str]]] = {}
        for key in sorted(self.file_of, key=dot_natural_key):
            prefix = str(getattr(module, "base_model_prefix", ""))
            target, pattern = rename_source_key(key, renamings, converters, prefix, module.state_dict())
            if target not in own and key in own:  # A renaming matched a name that was right already.
                target, pattern = key, None
            grouped.setdefault(target, {}).setdefault(pattern or "", []).append(key)

        pieces: dict[str, list[SourceTensor]] = {}
        for target, sources in grouped.items():
            if target not in own:
                continue
            if list(sources) == [""]:
                pieces[target] = [self._whole(source) for source in sources[""][:1]]
                continue
            converter = next(each for each in converters if set(sources) <= set(each.source_patterns))
            operations = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
            order = [sources[pattern] for pattern in converter.source_patterns if pattern in sources]
            pieces[target] = self._source_tensors(target, operations, order)
        return pieces

    def _whole(self, source: str) -> SourceTensor:
        shape = self._shape(source)
        return SourceTensor(source, Box((0,) * len(shape), shape, (0,) * len(shape)), False)

    def _source_tensors(
        self, target: str, operations: Sequence[tuple[str, Any]], sources: list[list[str]]
    ) -> list[SourceTensor]:
        """Return the stored tensors of a parameter that is stacked from many, concatenated from a few, or both.

        `operations`: (name, dim) of the converter's steps. `sources`: the stored tensors of each source pattern.
        """
        stacked = bool(operations) and operations[0] == ("MergeModulelist", 0)
        rest = list(operations[1:] if stacked else operations)
        if len(rest) > 1 or (rest and rest[0][0] != "Concatenate"):
            names = ", ".join(name for name, _ in operations)
            raise UserError(
                f"{self.folder} holds {target} in a form that can't be read by boxes ({names}): use another model"
            )
        dim = int(rest[0][1]) if rest else 0
        pieces, offset = [], 0
        for same_pattern in sources:
            shape = self._shape(same_pattern[0])
            box_shape = (1, *shape) if stacked else shape
            for number, source in enumerate(same_pattern):
                start = [0] * len(box_shape)
                start[0] = number if stacked else 0
                start[dim] += offset if rest else 0
                pieces.append(SourceTensor(source, Box(tuple(start), box_shape, (0,) * len(box_shape)), stacked))
            offset += box_shape[dim] if rest else 0
        return pieces

    def dtype(self, source: str) -> str:
        return str(self.file_of[source].get_slice(source).get_dtype())

    def _shape(self, source: str) -> tuple[int, ...]:
        return tuple(self.file_of[source].get_slice(source).get_shape())

    def _check(self) -> None:
        """Raise unless the files hold all elements of every parameter and buffer."""
        for name, shape in {**self.shapes, **self.buffers}.items():
            pieces = self.pieces.get(name, [])
            if not pieces:
                raise UserError(f"{self.folder} lacks the tensor {name}: its files don't fit its config.json")
            ends = tuple(max(b.start[d] + b.shape[d] for _, b, _ in pieces) for d in range(len(shape)))
            if ends != shape or sum(box.numel for _, box, _ in pieces) != torch.Size(shape).numel():
                raise UserError(
                    f"{name} in {self.folder} has shape {list(ends)}, and by config.json it has {list(shape)}: its "
                    "files don't fit its config.json"
                )

    def block(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the block of a parameter that begins at `start`."""
        out: Tensor | None = None
        if not shape:  # A scalar can't be sliced.
            source = self.pieces[name][0].source
            return self.file_of[source].get_tensor(source)  # type: ignore[no-any-return]
        for source, box, stacked in self.pieces[name]:
            if where := overlap(start, shape, box):
                inside, at = where
                part = self.file_of[source].get_slice(source)
                inner = at[1:] if stacked else at
                values = part[inner] if len(shape) > stacked else part[:]
                out = values.new_empty(shape) if out is None else out
                out[inside] = values[None] if stacked else values
        assert out is not None
        return out

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Fill `local`, of the record's local shape, like `Reader.fill` does for `param/NAME`."""
        for box in record.boxes:
            local[slices_of(box.local_start, box.shape)] = self.block(record.name, box.start, box.shape).to(local.dtype)

    @torch.no_grad()
    def fill_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Set the buffers of the stages from the files. They are not trained, so checkpoints don't hold them."""
        for module in modules:
            buffers = dict(module.net.named_buffers())  # type: ignore[union-attr]
            for name in self.buffers.keys() & buffers.keys():
                buffers[name].copy_(self.whole(name))

    def whole(self, name: str) -> Tensor:
        """Return a whole parameter or buffer."""
        shape = {**self.shapes, **self.buffers}[name]
        return self.block(name, (0,) * len(shape), shape)


def named_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a folder's model, by its name in the module."""
    return {record.name: record.shape for record in blueprint(folder).model.records(SINGLE_RANK).values()}


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))
