"""Whole tensors that are spread over the files of another program's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf_files import NamedWeights
from meshwright.checkpoint.tensor_file import DTYPE_CODES
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.spec.model.hf.family import Family

# Whole tensors that are kept while blocks of them are read. Ours may be made of three of theirs, in turn.
KEPT = 4


@contextmanager
def unknown_forms(folder: Path) -> Iterator[None]:
    """Turn the errors of values that break their format into one that names the folder."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{folder} holds values in an unknown form ({why}): save it again with a current version"
        ) from error


@dataclass(frozen=True)
class Spread:
    """A tensor in parts: its shape, its dtype, and a function that reads and joins the parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def rows(self, count: int) -> Spread:
        """Return the first rows of this tensor."""
        return Spread((count, *self.shape[1:]), self.dtype, lambda: self.read()[:count])


class SpreadWeights(NamedWeights):
    """The weights of a checkpoint of another program, and a report on its contents."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        family: Family,
        model: ModelConfig,
        parts: Mapping[str, Spread],
        described_by: str = "config.json",
    ) -> None:
        self.described_by = described_by
        self.parts = parts
        self.names = parts.keys()
        self.report: list[str] = []
        self._read = lru_cache(maxsize=KEPT)(lambda name: parts[name].read())
        super().__init__(folder, config, family, model)

    def slice(self, name: str) -> Any:
        return _Handle(self.parts[name], lambda: self._read(name))


@dataclass(frozen=True)
class _Handle:
    """A tensor with the methods of safetensors' files: shape, dtype and slices."""

    spread: Spread
    read: Callable[[], Tensor]

    def get_shape(self) -> list[int]:
        return list(self.spread.shape)

    def get_dtype(self) -> str:
        return DTYPE_CODES.get(self.spread.dtype, str(self.spread.dtype))

    def __getitem__(self, where: Any) -> Tensor:
        return self.read()[where]


def joined(name: str, folder: Path, shards: list[Any], dim: int | None, gated: bool = False) -> Spread:
    """Return the tensor whose parts along `dim` the shards hold. Without `dim`, each shard holds all of it.

    With `gated`, each shard holds its part of the gate, then its part of the other half.
    """
    first = shards[0]
    if dim is None or len(shards) == 1:
        if any(each.shape != first.shape for each in shards):
            raise UserError(f"{name} has different shapes in the files of {folder}: get it again")
        return Spread(first.shape, first.dtype, first.read)
    shape = list(first.shape)
    if dim >= len(shape) or any(each.shape[:dim] + each.shape[dim + 1 :] != (*shape[:dim], *shape[dim + 1 :])
                                for each in shards):  # fmt: skip
        raise UserError(f"{name} has shapes that don't fit together in the files of {folder}: get it again")
    shape[dim] = sum(each.shape[dim] for each in shards)

    def read() -> Tensor:
        values = [each.read() for each in shards]
        if gated:
            values = [half for halves in zip(*(each.chunk(2) for each in values), strict=True) for half in halves]
        return torch.cat(values, dim)

    return Spread(tuple(shape), first.dtype, read)
