"""A Hugging Face folder, read by rows of any of our tensors. Pickled weights are never read."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.config.sections import ModelConfig
from meshwright.disk import hub_hint
from meshwright.errors import UserError
from meshwright.outside import of_kind, read_json
from meshwright.record.checkpoint_format import blocks_of
from meshwright.spec.layout.params import ParamRecord, slices_of
from meshwright.spec.model.hf import family_named
from meshwright.spec.model.hf.family import Family
from meshwright.spec.model.hf.folder import SHARDED_INDEX, SINGLE_FILE
from meshwright.spec.model.hf.rows import Mapped

HEAD_ROWS = 4096  # of two tables that are compared at a time

# What safetensors calls the precisions that weights may have.
PRECISION_CODES = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}


class WeightMap(TypedDict):
    """The index of weights in several files: in which file each tensor is."""

    weight_map: dict[str, str]


class HFFolder:
    """A folder that transformers wrote: its model, and our global tensors read from its files."""

    def __init__(self, folder: Path, seq: int = 0) -> None:
        self.folder = folder
        self.config = _json(folder / "config.json", folder)
        self.family: Family = family_named(self.config.get("model_type"))
        self.model: ModelConfig = self.family.model_of(self.config, seq)
        self.file_of = opened_weights(folder, bool(self.config.get("quantization_config")))
        if self.family.decoder_layers and self.model.tied_embeddings and self._has_own_head():
            self.model = replace(self.model, tied_embeddings=False)
        self.tensors: dict[str, Mapped] = self.family.tensors(self.model)
        self.shapes = {name: mapped.shape for name, mapped in self.tensors.items()}
        self.left_out: list[str] = []  # tensors of layers that the model has no use for
        self.stored = self._locate()  # their full name -> the name in this folder

    def _has_own_head(self) -> bool:
        """Whether the output layer differs from the embedding, whatever config.json says: transformers calls every T5
        tied, and keeps what their files hold."""
        names = [self.family.head, f"{self.family.names['embedding'][0]}.weight"]
        if not all(name in self.file_of for name in names):
            return False
        head, table = (self.slice(name) for name in names)
        rows = range(0, head.get_shape()[0], HEAD_ROWS)
        return any(not torch.equal(head[at : at + HEAD_ROWS], table[at : at + HEAD_ROWS]) for at in rows)

    def _locate(self) -> dict[str, str]:
        """Finds every tensor that the model needs, checks its shape, and raises for tensors that the model has no use
        for."""
        shapes = {name: shape for m in self.tensors.values() for name, shape in m.source_shapes().items()}
        stored: dict[str, str] = {}
        for name, shape in shapes.items():
            short = name.removeprefix(self.family.prefix)
            found = next((each for each in (name, short) if each in self.file_of), None)
            if found is None:
                raise UserError(f"{self.folder} lacks the tensor {name}: its files don't fit its config.json")
            if tuple(self.slice(found).get_shape()) != shape:
                raise UserError(
                    f"{name} in {self.folder} has shape {self.slice(found).get_shape()}, and by config.json it has "
                    f"{list(shape)}: its files don't fit its config.json"
                )
            stored[name] = found
        head = self.family.head
        if self.model.tied_embeddings and head in self.file_of:
            stored[head] = head
        unread = set(self.file_of) - set(stored.values())
        self.left_out = sorted(name for name in unread if self.family.is_extra(name, self.config))
        unread -= set(self.left_out)
        strange = sorted(name for name in unread if not re.fullmatch(self.family.buffers, name))
        if strange:
            raise UserError(
                f"{self.folder} holds {strange[0]}, which no {self.family.model_type} of its config.json has: the "
                "model has parts that can't be imported"
            )
        return stored

    def slice(self, name: str) -> Any:
        """Returns a handle on a stored tensor, from which parts can be read."""
        return self.file_of[name].get_slice(name)

    def dtype(self, name: str) -> str:
        found = str(self.slice(self.stored[name]).get_dtype())
        if found not in PRECISION_CODES.values():
            known = ", ".join(PRECISION_CODES.values())
            raise UserError(f"{name} in {self.folder} is of type {found}: only {known} can be imported")
        return found

    def stored_as(self, name: str, precision: str = "") -> str:
        """Returns the dtype that our global tensor `name` gets in a checkpoint of this precision; without one, float32,
        or float64 if it is."""
        mapped = self.tensors[name]
        if precision and not mapped.wide:
            return PRECISION_CODES[precision]
        sources = [self.dtype(each) for each in mapped.source_shapes()]
        return "F64" if "F64" in sources or precision == "fp64" else "F32"

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Returns rows [low, high) of our global tensor `name`."""
        mapped = self.tensors[name]
        parts = []
        for run in mapped.runs:
            part = run.of_ours(low, high)
            if part is not None:
                source, where = self.slice(self.stored[run.source]), part.theirs
                low_row, end = where.start, where.stop
                found = source[:, low_row:end].t() if mapped.transposed else source[low_row:end]
                parts.append(found[:: where.step])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def block(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Returns the rectangle of our global tensor `name` that begins at `start`."""
        mapped = self.tensors[name]
        found = torch.cat([self.rows(name, low, high) for low, high in mapped.row_ranges(start, shape)])
        leading = len(shape) - len(mapped.tail)
        found = found.view(*shape[:leading], *mapped.tail)
        return found[(slice(None),) * leading + slices_of(start[leading:], shape[leading:])]

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Sets `local`, of the record's local shape, as a checkpoint's reader does from `param/NAME`."""
        assert tensor == f"param/{record.name}" and self.shapes[record.name] == record.shape
        for box in record.boxes:
            for start, shape in blocks_of(box.shape, 4):
                corner, at = (_sum(begin, start) for begin in (box.start, box.local_start))
                local[slices_of(at, shape)] = self.block(record.name, corner, shape).to(local.dtype)


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _json(path: Path, folder: Path, kind: Any = dict[str, Any]) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], of_kind(read_json(path), kind, "it"))
    except FileNotFoundError:
        lacks = f"{folder} has no {path.name}{hub_hint(folder)}"
        raise UserError(f"{lacks}: name a folder that transformers saved a model in") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): get it again") from None


def opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} can't be read ({error}): get it again") from None


def opened_weights(folder: Path, quantised: bool) -> dict[str, Any]:
    """Returns the opened file that holds each tensor of a folder, whose config.json says whether it is `quantised`."""
    if quantised:
        raise UserError(
            f"{folder} holds quantised weights (quantization_config in config.json), which can't be read: load the "
            "model with transformers in bfloat16, save it again, and name that"
        )
    file_of: dict[str, Any] = {}
    for name in weight_files(folder):
        file = opened(folder / name)
        file_of |= dict.fromkeys(file.keys(), file)
    return file_of


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the files that hold the weights."""
    if (folder / SHARDED_INDEX).is_file():
        found = _json(folder / SHARDED_INDEX, folder, WeightMap)
        files = sorted(set(found["weight_map"].values()))
        if not files:
            raise UserError(f"{folder} is incomplete: {SHARDED_INDEX} names no files")
        for name in files:
            if os.path.basename(name) != name or not (folder / name).is_file():
                raise UserError(f"{folder} is incomplete: {name}, which {SHARDED_INDEX} names, is missing")
        return files
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise UserError(
            f"{folder} holds its weights as {pickles[0]}, a pickle, which is never read here: load it with "
            "transformers and save it again with save_pretrained(DIR, safe_serialization=True)"
        )
    raise UserError(f"{folder} has no {SINGLE_FILE}: name a folder that transformers saved a model in")
