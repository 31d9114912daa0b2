"""A Hugging Face folder of a model that transformers builds itself, read by boxes of the module's own parameters.

Files may hold a parameter in pieces (each expert's matrix, gates and ups apart): transformers says how it puts them
together, and as far as that is stacking and joining, every piece is a box of the parameter.
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
from meshwright.spec.model.part import ALONE


class Piece(NamedTuple):
    """A tensor of the files, and where it lies in the parameter. `stacked`: it is one of many along the first dim."""

    source: str
    box: Box
    stacked: bool


class PlannedFolder:
    """The parameters of a folder's model, and its buffers that files hold, by their names in the module."""

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

    def _pieces(self, module: nn.Module, own: dict[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        known: list[Any] = get_model_conversion_mapping(module)  # type: ignore[arg-type]
        converters = [each for each in known if isinstance(each, WeightConverter)]
        renamings = [each for each in known if not isinstance(each, WeightConverter)]
        grouped: dict[str, dict[str, list[str]]] = {}
        for key in sorted(self.file_of, key=dot_natural_key):
            prefix = str(getattr(module, "base_model_prefix", ""))
            target, pattern = rename_source_key(key, renamings, converters, prefix, module.state_dict())
            if target not in own and key in own:  # a renaming that takes too much
                target, pattern = key, None
            grouped.setdefault(target, {}).setdefault(pattern or "", []).append(key)
        found: dict[str, list[Piece]] = {}
        for target, sources in grouped.items():
            if target not in own:
                continue
            if list(sources) == [""]:
                found[target] = [self._whole(source) for source in sources[""][:1]]
                continue
            converter = next(each for each in converters if set(sources) <= set(each.source_patterns))
            words = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
            order = [sources[each] for each in converter.source_patterns if each in sources]
            found[target] = self._joined(target, words, order)
        return found

    def _whole(self, source: str) -> Piece:
        shape = self._shape(source)
        return Piece(source, Box((0,) * len(shape), shape, (0,) * len(shape)), False)

    def _joined(self, target: str, words: Sequence[tuple[str, Any]], sources: list[list[str]]) -> list[Piece]:
        """The pieces of a parameter that is stacked from many tensors, joined from a few, or both."""
        stacked = bool(words) and words[0] == ("MergeModulelist", 0)
        rest = list(words[1:] if stacked else words)
        if len(rest) > 1 or (rest and rest[0][0] != "Concatenate"):
            names = ", ".join(name for name, _ in words)
            raise UserError(
                f"{self.folder} holds {target} in a form that can't be read by boxes ({names}): use another model"
            )
        dim = int(rest[0][1]) if rest else 0
        found, offset = [], 0
        for each in sources:
            shape = self._shape(each[0])
            for number, source in enumerate(each):
                own = (1, *shape) if stacked else shape
                start = [0] * len(own)
                start[0] = number if stacked else 0
                start[dim] += offset if rest else 0
                found.append(Piece(source, Box(tuple(start), own, (0,) * len(own)), stacked))
            offset += ((1, *shape) if stacked else shape)[dim] if rest else 0
        return found

    def dtype(self, source: str) -> str:
        return str(self.file_of[source].get_slice(source).get_dtype())

    def _shape(self, source: str) -> tuple[int, ...]:
        return tuple(self.file_of[source].get_slice(source).get_shape())

    def _check(self) -> None:
        """Raises unless the files hold every parameter, whole."""
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
        """Returns the rectangle of a parameter that begins at `start`."""
        out: Tensor | None = None
        if not shape:
            source = self.pieces[name][0].source
            return self.file_of[source].get_tensor(source)  # type: ignore[no-any-return]
        for source, box, stacked in self.pieces[name]:
            if where := overlap(start, shape, box):
                inside, at = where
                part = self.file_of[source].get_slice(source)
                values = part[at[1:] if stacked else at] if len(shape) > stacked else part[:]
                out = values.new_empty(shape) if out is None else out
                out[inside] = values[None] if stacked else values
        assert out is not None
        return out

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Sets `local`, of the record's local shape, as a checkpoint's reader does from `param/NAME`."""
        for box in record.boxes:
            local[slices_of(box.local_start, box.shape)] = self.block(record.name, box.start, box.shape).to(local.dtype)

    @torch.no_grad()
    def fill_buffers(self, modules: Sequence[nn.Module]) -> None:
        """Sets the buffers of stages that the files hold: nobody trains them, and checkpoints don't hold them."""
        for module in modules:
            held = dict(module.net.named_buffers())  # type: ignore[union-attr]
            for name in self.buffers.keys() & held.keys():
                held[name].copy_(self.whole(name))

    def whole(self, name: str) -> Tensor:
        shape = {**self.shapes, **self.buffers}[name]
        return self.block(name, (0,) * len(shape), shape)


def named_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a folder's model, by its name in the module."""
    return {record.name: record.shape for record in blueprint(folder).model.records(ALONE).values()}


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))
