"""A checkpoint of adapters merged with its base, readable by boxes like any checkpoint.

Each weight is read with the adapters' change added. Commands that use a model (generate, evaluate, export) read it this
way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.base import Base, adapts, check_digest, fill_range, open_base
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import Reader
from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.nn.adapters.nf4 import round_by_packing
from meshwright.record.checkpoint_format import SAFETENSORS_DTYPES, Index, StoredTensor, blocks_of
from meshwright.spec.layout.params import AdapterRecord, Box, Init, ParamRecord, slices_of
from meshwright.spec.model.description import model_of
from meshwright.spec.model.part import SINGLE_RANK
from meshwright.spec.model.tuning import is_adapter


def config_in(index: Index) -> Config:
    """Return the part of a checkpoint's config that describes the model and its adapters."""
    run = {"plugins": index.config.get("run", {}).get("plugins", ())}
    tune = index.config.get("tune", {})  # Imported models have none.
    return config_from({"model": index.config["model"], "tune": tune, "data": {"prefixes": ["none"]}, "run": run})


def box_record(name: str, shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> ParamRecord:
    """Return the record of a parameter whose local tensor is one rectangle of the global tensor."""
    return ParamRecord(name, shape, size, (Box(start, size, (0,) * len(size)),), Init("zeros"))


class AdapterWeights:
    """The factors of a checkpoint's adapters. They are small, so they are read whole."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.config = config_in(reader.index)
        records = model_of(self.config).records(SINGLE_RANK).values()
        self.records = {record.name: record.values for record in records}
        self.packed = {record.name for record in records if record.packs is not None}
        self.adapters = {record.name: record.values.adapters for record in records if record.adapters}

    def changes(self, name: str) -> list[AdapterValues]:
        """Return the values of a weight's adapters."""
        changes = []
        for adapter in self.adapters.get(name, ()):
            norms = None if adapter.norms is None else self.read(adapter.norms)
            changes.append(AdapterValues(adapter, self.read(adapter.down), self.read(adapter.up), norms))
        return changes

    def read(self, record: ParamRecord) -> Tensor:
        """Return a whole tensor, in at least float32."""
        stored = getattr(torch, self.reader.index.tensors[f"param/{record.name}"]["dtype"])
        values = torch.empty(record.shape, dtype=torch.promote_types(stored, torch.float32))
        self.reader.fill(f"param/{record.name}", record, values)
        return values


class AdapterValues(NamedTuple):
    """The values of one adapter. `norms`: with DoRA, how far the norms of the rows were moved."""

    record: AdapterRecord
    down: Tensor
    up: Tensor
    norms: Tensor | None

    def add_to(self, weight: Tensor, *where: slice) -> None:
        """Add the change of some rows and columns to that part of the weight.

        For experts, `where` also selects the experts. If rows are scaled to a norm, `weight` must hold whole rows.
        """
        *experts, rows, columns = where
        old = torch.linalg.vector_norm(weight, dim=-1)
        weight += self.record.scale * (self.up[(*experts, rows)] @ self.down[(*experts, slice(None), columns)])
        if self.norms is not None:
            weight *= ((old + self.norms[rows]) / torch.linalg.vector_norm(weight, dim=1))[:, None]


class MergedWeights:
    """The weights of a checkpoint of adapters, merged with its base."""

    def __init__(self, reader: Reader) -> None:
        self.folder = reader.folder
        self.own = AdapterWeights(reader)
        config = self.own.config
        self.base: Base = open_base(config.tune.base, config.model)
        check_digest(reader.folder, config.tune.base)
        # The merged weights are those of a model without adapters, so their config has no tune section.
        merged = {name: value for name, value in reader.index.config.items() if name != "tune"}
        self.index = replace(reader.index, config=merged, tensors=dict(self._tensors(reader)), files={}, blocks=[])
        self.shapes = {name.removeprefix("param/"): tuple(each["shape"]) for name, each in self.index.tensors.items()}
        self._changes = lru_cache(maxsize=8)(self.own.changes)

    def _tensors(self, reader: Reader) -> Iterator[tuple[str, StoredTensor]]:
        for name, record in self.own.records.items():
            if not is_adapter(name):
                stored: StoredTensor = {"shape": list(record.shape), "dtype": self._dtype(name)}
                yield f"param/{name}", reader.index.tensors[f"param/{name}"] if record.trained else stored

    def _dtype(self, name: str) -> str:
        """Return the dtype in which the base stores a weight. For a Hugging Face folder it is the dtype that an import
        would store."""
        if isinstance(self.base, HFFolder):
            return SAFETENSORS_DTYPES[self.base.stored_as(name)][0]
        return self.base.index.tensors[f"param/{name}"]["dtype"]

    def block(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a rectangle of a weight, in at least float32."""
        stored = getattr(torch, self.index.tensors[f"param/{name}"]["dtype"])
        values = torch.empty(shape, dtype=torch.promote_types(stored, torch.float32))
        self.fill(f"param/{name}", box_record(name, self.shapes[name], start, shape), values)
        return values

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Fill `local`, of the record's local shape, from the global tensor, like `Reader.fill`."""
        name = record.name
        if self.own.records[name].trained:
            self.own.reader.fill(tensor, record, local)
            return
        fill_range(self.base, record, 0, record.numel, local.view(-1))
        for box in record.boxes if name in self.own.adapters or name in self.own.packed else ():
            for start, shape in blocks_of(box.shape, 8):
                corner, at = (tuple(map(sum, zip(begin, start, strict=True))) for begin in (box.start, box.local_start))
                local[slices_of(at, shape)] = self._merged_rectangle(record, corner, shape).to(local.dtype)

    def _merged_rectangle(self, record: ParamRecord, corner: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a rectangle of a weight with its changes added.

        If the weight was packed (quantised), the changes were trained on the rounded values, so they are added to
        these. If rows are scaled to a norm or packed, whole rows are read.
        """
        (*before, first, left), (*experts, count, width) = corner, shape
        changes = self._changes(record.name)
        packed = record.name in self.own.packed
        whole_rows = packed or any(change.norms is not None for change in changes)
        read = (0, record.shape[-1]) if whole_rows else (left, width)
        part = box_record(record.name, record.shape, (*before, first, read[0]), (*experts, count, read[1]))
        values = torch.empty(part.local_shape, dtype=changes[0].down.dtype if changes else torch.float32)
        fill_range(self.base, part, 0, part.numel, values.view(-1))
        values = round_by_packing(values) if packed else values
        for change in changes:
            low = max(first, change.record.start)
            high = min(first + count, change.record.stop)
            if low < high:
                rows = slice(low - change.record.start, high - change.record.start)
                where = (*slices_of(tuple(before), tuple(experts)), rows, slice(read[0], sum(read)))
                change.add_to(values[..., low - first : high - first, :], *where)
        return values[..., left : left + width] if whole_rows else values


def open_weights(folder: Path, average: bool = False) -> Reader | MergedWeights:
    """Open a checkpoint to read its whole weights, or with `average` their moving average. If it holds adapters, they
    are merged with the base."""
    reader = Reader(folder, average=average)
    return MergedWeights(reader) if adapts(reader.index.config) else reader
