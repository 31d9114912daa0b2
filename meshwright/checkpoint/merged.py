"""A checkpoint of adapters and its base as one set of whole weights: each weight with its change added, read by boxes
like any checkpoint's. What reads a model to use it (to write text, evaluate, export) reads it this way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.base import Base, adapts, check_digest, fill_range, open_base
from meshwright.checkpoint.load import Reader
from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.nn.adapters.nf4 import rounded
from meshwright.record.checkpoint_format import SAFETENSORS_DTYPES, Index, SavedTensor, blocks_of
from meshwright.spec.layout.params import AdapterRecord, Box, Init, ParamRecord, slices_of
from meshwright.spec.model.description import model_of
from meshwright.spec.model.part import ALONE
from meshwright.spec.model.tuning import is_adapter


def config_in(index: Index) -> Config:
    """Returns the config of a checkpoint as far as it says what the model is and how it is adapted."""
    run = {"plugins": index.config.get("run", {}).get("plugins", ())}
    tune = index.config.get("tune", {})  # imported models have none
    return config_from({"model": index.config["model"], "tune": tune, "data": {"prefixes": ["none"]}, "run": run})


def box_record(name: str, shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> ParamRecord:
    """Returns the record of a rectangle of a global tensor, which is all that the local one holds."""
    return ParamRecord(name, shape, size, (Box(start, size, (0,) * len(size)),), Init("zeros"))


class AdapterWeights:
    """The factors of a checkpoint's adapters, read whole: they are small."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.config = reader, config_in(reader.index)
        records = model_of(self.config).records(ALONE).values()
        self.records = {record.name: record.values for record in records}
        self.packed = {record.name for record in records if record.packs is not None}
        self.adapters = {record.name: record.values.adapters for record in records if record.adapters}

    def changes(self, name: str) -> list[Change]:
        """Returns the values of a weight's adapters."""
        found = []
        for each in self.adapters.get(name, ()):
            norms = None if each.norms is None else self.read(each.norms)
            found.append(Change(each, self.read(each.down), self.read(each.up), norms))
        return found

    def read(self, record: ParamRecord) -> Tensor:
        """Returns a whole tensor, in float32 at least."""
        stored = getattr(torch, self.reader.index.tensors[f"param/{record.name}"]["dtype"])
        values = torch.empty(record.shape, dtype=torch.promote_types(stored, torch.float32))
        self.reader.fill(f"param/{record.name}", record, values)
        return values


class Change(NamedTuple):
    """An adapter's values."""

    record: AdapterRecord
    down: Tensor
    up: Tensor
    norms: Tensor | None

    def add_to(self, weight: Tensor, *where: slice) -> None:
        """Adds the change of some rows and columns (of experts: of some experts' rows and columns) to that part of the
        weight, which has whole rows where they are scaled to a norm."""
        *experts, rows, columns = where
        old = torch.linalg.vector_norm(weight, dim=-1)
        weight += self.record.scale * (self.up[(*experts, rows)] @ self.down[(*experts, slice(None), columns)])
        if self.norms is not None:
            weight *= ((old + self.norms[rows]) / torch.linalg.vector_norm(weight, dim=1))[:, None]


class MergedWeights:
    """The whole weights that a checkpoint of adapters and its base stand for."""

    def __init__(self, reader: Reader) -> None:
        self.folder, self.own = reader.folder, AdapterWeights(reader)
        config = self.own.config
        self.base: Base = open_base(config.tune.base, config.model)
        check_digest(reader.folder, config.tune.base)
        told = {name: value for name, value in reader.index.config.items() if name != "tune"}
        self.index = replace(reader.index, config=told, tensors=dict(self._tensors(reader)), files={}, blocks=[])
        self._changes = lru_cache(maxsize=8)(self.own.changes)

    def _tensors(self, reader: Reader) -> Iterator[tuple[str, SavedTensor]]:
        for name, record in self.own.records.items():
            if not is_adapter(name):
                stored: SavedTensor = {"shape": list(record.shape), "dtype": self._dtype(name)}
                yield f"param/{name}", reader.index.tensors[f"param/{name}"] if record.trained else stored

    def _dtype(self, name: str) -> str:
        """Returns in what the base stores a weight or, of a Hugging Face folder, what an import would store it in."""
        if isinstance(self.base, Reader):
            return self.base.index.tensors[f"param/{name}"]["dtype"]
        return SAFETENSORS_DTYPES[self.base.stored_as(name)][0]

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Sets `local`, of the record's local shape, from the global tensor, as a checkpoint's reader does."""
        name = record.name
        if self.own.records[name].trained:
            self.own.reader.fill(tensor, record, local)
            return
        fill_range(self.base, record, 0, record.numel, local.view(-1))
        for box in record.boxes if name in self.own.adapters or name in self.own.packed else ():
            for start, shape in blocks_of(box.shape, 8):
                corner, at = (tuple(map(sum, zip(begin, start, strict=True))) for begin in (box.start, box.local_start))
                local[slices_of(at, shape)] = self._changed(record, corner, shape).to(local.dtype)

    def _changed(self, record: ParamRecord, corner: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Returns a rectangle of the weight with its changes, which were trained beside the values that its bytes stand
        for, where it is packed. Where rows are scaled to a norm, or packed, whole rows are read."""
        (*before, first, left), (*experts, count, width) = corner, shape
        changes, packed = self._changes(record.name), record.name in self.own.packed
        whole_rows = packed or any(change.norms is not None for change in changes)
        read = (0, record.shape[-1]) if whole_rows else (left, width)
        part = box_record(record.name, record.shape, (*before, first, read[0]), (*experts, count, read[1]))
        values = torch.empty(part.local_shape, dtype=changes[0].down.dtype if changes else torch.float32)
        fill_range(self.base, part, 0, part.numel, values.view(-1))
        values = rounded(values) if packed else values
        for change in changes:
            low, high = max(first, change.record.start), min(first + count, change.record.stop)
            if low < high:
                rows = slice(low - change.record.start, high - change.record.start)
                where = (*slices_of(tuple(before), tuple(experts)), rows, slice(read[0], sum(read)))
                change.add_to(values[..., low - first : high - first, :], *where)
        return values[..., left : left + width] if whole_rows else values


def open_weights(folder: Path) -> Reader | MergedWeights:
    """Opens a checkpoint to read its whole weights: with its base, where it holds adapters."""
    reader = Reader(folder)
    return MergedWeights(reader) if adapts(reader.index.config) else reader
