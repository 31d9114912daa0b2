"""Read rows of our global tensors from a Hugging Face folder. Pickled weights are never read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.tensor_file import DTYPE_CODES
from meshwright.config.sections import ModelConfig
from meshwright.disk import hub_hint
from meshwright.errors import UserError
from meshwright.outside import of_kind, read_json
from meshwright.record.checkpoint_format import blocks_of
from meshwright.spec.layout.params import ParamRecord, slices_of
from meshwright.spec.model.hf import family_of_name
from meshwright.spec.model.hf.family import Family
from meshwright.spec.model.hf.folder import SHARDED_INDEX, SINGLE_FILE
from meshwright.spec.model.hf.rows import TensorMapping

# The rows of two tables that are compared at a time.
HEAD_ROWS = 4096

# The safetensors codes of the precisions that weights may have.
PRECISION_CODES = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}


# The names of scales end in this, where those of their weights end in .weight.
SCALES = ".weight_scale_inv"


class WeightMap(TypedDict):
    """The index of weights in several files: the file of each tensor."""

    weight_map: dict[str, str]


class NamedWeights:
    """A model's weights under the names of a family. Our global tensors are read from them.

    Subclasses set `names`, the tensors that there are, and define `slice`.
    """

    described_by = "config.json"
    names: Collection[str]

    def __init__(self, folder: Path, config: dict[str, Any], family: Family, model: ModelConfig) -> None:
        self.folder, self.config, self.family, self.model = folder, config, family, model
        self.tensors: dict[str, TensorMapping] = family.tensors(model)
        self.shapes = {name: mapped.shape for name, mapped in self.tensors.items()}
        self.left_out: list[str] = []  # Tensors of additional layers that the model does not use.
        self.stored = self._locate()  # By a tensor's full name, its name in this folder.

    def slice(self, name: str) -> Any:
        """Return a handle on a stored tensor, from which slices can be read."""
        raise NotImplementedError

    def _locate(self) -> dict[str, str]:
        """Find every tensor that the model needs and check its shape. Raise if the files hold tensors that the model
        can't use."""
        shapes = {name: shape for m in self.tensors.values() for name, shape in m.source_shapes().items()}
        stored: dict[str, str] = {}
        for name, shape in shapes.items():
            # Some files leave out the prefix of the names.
            short = name.removeprefix(self.family.prefix)
            actual = next((candidate for candidate in (name, short) if candidate in self.names), None)
            if actual is None:
                raise UserError(f"{self.folder} lacks the tensor {name}: its files don't fit its {self.described_by}")
            found = self.slice(actual).get_shape()
            if tuple(found) != shape:
                raise UserError(
                    f"{name} in {self.folder} has shape {list(found)}, and by {self.described_by} it has "
                    f"{list(shape)}: its files don't fit its {self.described_by}"
                )
            stored[name] = actual
        head = self.family.head
        if self.model.tied_embeddings and head in self.names:
            stored[head] = head
        unread = set(self.names) - set(stored.values())
        self.left_out = sorted(name for name in unread if self.family.is_extra(name, self.config))
        unread -= set(self.left_out)
        strange = sorted(name for name in unread if not re.fullmatch(self.family.buffers, name))
        if strange:
            raise UserError(
                f"{self.folder} holds {strange[0]}, which no {self.family.model_type} of its {self.described_by} has: "
                "the model has parts that can't be imported"
            )
        return stored

    def dtype(self, name: str) -> str:
        """Return the safetensors code of a tensor's dtype. Raise if it can't be imported."""
        code = str(self.slice(self.stored[name]).get_dtype())
        if code not in PRECISION_CODES.values():
            known = ", ".join(PRECISION_CODES.values())
            raise UserError(f"{name} in {self.folder} is of type {code}: only {known} can be imported")
        return code

    def stored_as(self, name: str, precision: str = "") -> str:
        """Return the dtype code that our global tensor `name` gets in a checkpoint of this precision. Without a
        precision it is float32, or float64 if the folder stores float64."""
        mapped = self.tensors[name]
        if precision and not mapped.wide:
            return PRECISION_CODES[precision]
        sources = [self.dtype(source) for source in mapped.source_shapes()]
        double = PRECISION_CODES["fp64"]
        return double if double in (*sources, PRECISION_CODES.get(precision)) else PRECISION_CODES["fp32"]

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Return rows [low, high) of our global tensor `name`."""
        mapped = self.tensors[name]
        parts = []
        for run in mapped.runs:
            part = run.of_ours(low, high)
            if part is not None:
                source = self.slice(self.stored[run.source])
                where = part.theirs
                low_row, end = where.start, where.stop
                rows = source[:, low_row:end].t() if mapped.transposed else source[low_row:end]
                parts.append(rows[:: where.step])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def block(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the block of our global tensor `name` that begins at `start`."""
        mapped = self.tensors[name]
        # Whole rows are read first, then cut to the columns of the block.
        whole_rows = torch.cat([self.rows(name, low, high) for low, high in mapped.row_ranges(start, shape)])
        leading = len(shape) - len(mapped.tail)
        whole_rows = whole_rows.view(*shape[:leading], *mapped.tail)
        return whole_rows[(slice(None),) * leading + slices_of(start[leading:], shape[leading:])]

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Fill `local`, of the record's local shape, like `Reader.fill` does for `param/NAME`."""
        assert tensor == f"param/{record.name}" and self.shapes[record.name] == record.shape
        for box in record.boxes:
            for start, shape in blocks_of(box.shape, 4):
                corner, at = (_sum(begin, start) for begin in (box.start, box.local_start))
                local[slices_of(at, shape)] = self.block(record.name, corner, shape).to(local.dtype)


class HFFolder(NamedWeights):
    """A folder that transformers wrote, with its model section."""

    def __init__(self, folder: Path, seq: int = 0) -> None:
        config = _json(folder / "config.json", folder)
        family = family_of_name(config.get("model_type"))
        model = family.model_of(config, seq)
        self._block = fp8_block(config.get("quantization_config"))
        self.file_of = opened_weights(folder, bool(config.get("quantization_config")) and not self._block)
        self.names: Collection[str] = self.file_of.keys()
        if self._block:
            # Weights are read in full precision, so their config must not call them quantised.
            config = dict(config)
            del config["quantization_config"]
            self.names = [name for name in self.file_of if not name.endswith(SCALES)]
        if family.decoder_layers and model.tied_embeddings and self._has_own_head(family):
            model = replace(model, tied_embeddings=False)
        super().__init__(folder, config, family, model)

    def slice(self, name: str) -> Any:
        values = self.file_of[name].get_slice(name)
        scales = name + SCALES.removeprefix(".weight")
        if scales not in self.file_of or not self._block:
            return values
        return ScaledBlocks(values, self.file_of[scales].get_slice(scales), self._block)

    def _has_own_head(self, family: Family) -> bool:
        """Return True if the output layer differs from the embedding, whatever config.json says. transformers calls
        every T5 model tied, but loads both tensors from its files."""
        names = [family.head, f"{family.names['embedding'][0]}.weight"]
        if not all(name in self.file_of for name in names):
            return False
        head, table = (self.slice(name) for name in names)
        rows = range(0, head.get_shape()[0], HEAD_ROWS)
        return any(not torch.equal(head[at : at + HEAD_ROWS], table[at : at + HEAD_ROWS]) for at in rows)


def fp8_block(quantised: Any) -> tuple[int, int] | None:
    """Return the rows and columns of the blocks that share a scale, for weights in DeepSeek's fp8 form; else None."""
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if not block or (quantised.get("quant_method"), quantised.get("fmt", "e4m3")) != ("fp8", "e4m3"):
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise UserError(f"weight_block_size={block!r} in config.json must be two numbers above zero: correct it")
    return block[0], block[1]


@dataclass(frozen=True)
class ScaledBlocks:
    """A handle on a matrix of float8 numbers, each to be multiplied by the scale of its block, in float32."""

    values: Any
    scales: Any
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        shape = list(self.values.get_shape())
        wanted = [-(-size // block) for size, block in zip(shape, self.block, strict=True)]
        is_fp8 = self.values.get_dtype() == DTYPE_CODES[torch.float8_e4m3fn]
        if len(shape) != 2 or list(self.scales.get_shape()) != wanted or not is_fp8:
            found = f"a matrix of shape {shape} and type {self.values.get_dtype()} has scales of shape"
            blocks = f"which don't fit blocks of {self.block[0]} x {self.block[1]}"
            raise UserError(f"{found} {list(self.scales.get_shape())}, {blocks}: get the folder again")
        return shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, where: Any) -> Tensor:
        if not isinstance(where, slice):
            return self[:][where]
        low, high, _ = where.indices(self.get_shape()[0])
        rows, columns = self.block
        values: Tensor = self.values[low:high].float()
        # The scales of the blocks that these rows are in, one for each row and column.
        scales = self.scales[low // rows : -(-high // rows)].float().repeat_interleave(rows, 0)
        scales = scales[low % rows :][: high - low].repeat_interleave(columns, 1)[:, : values.shape[1]]
        return values.mul_(scales)


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


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} can't be read ({error}): get it again") from None


def opened_weights(folder: Path, quantised: bool) -> dict[str, Any]:
    """Return the opened file of each tensor of a folder. `quantised`: config.json says that the weights are quantised,
    which is an error."""
    if quantised:
        raise UserError(
            f"{folder} holds quantised weights (quantization_config in config.json), which can't be read: load the "
            "model with transformers in bfloat16, save it again, and name that"
        )
    file_of: dict[str, Any] = {}
    for name in weight_files(folder):
        file = open_file(folder / name)
        file_of |= dict.fromkeys(file.keys(), file)
    return file_of


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the weights."""
    if (folder / SHARDED_INDEX).is_file():
        index = _json(folder / SHARDED_INDEX, folder, WeightMap)
        files = sorted(set(index["weight_map"].values()))
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
