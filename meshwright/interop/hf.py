"""Import Hugging Face folders as checkpoints, and export checkpoints as Hugging Face folders.

Both directions work block by block, so memory does not grow with the model. The checkpoint also stores the information
of a folder that our model section does not cover: its config.json, and the names and dtypes of its tensors. A round
trip therefore restores it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from meshwright.checkpoint import tensor_file
from meshwright.checkpoint.hf_files import PRECISION_CODES, HFFolder, NamedWeights
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.merged import MergedWeights, config_in, open_weights
from meshwright.checkpoint.tensor_file import DTYPE_CODES, TORCH_DTYPES, TensorEntry
from meshwright.config.sections import ModelConfig
from meshwright.disk import hub_hint, refusal
from meshwright.errors import UserError, plural
from meshwright.interop.upcycle import Upcycled
from meshwright.outside import of_kind, read_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import SAFETENSORS_DTYPES, Index, SavedBlock, blocks_of
from meshwright.record.companions import ORIGIN, copy_files, copy_tokenizer, end_token
from meshwright.spec.layout.params import Box, Init, ParamRecord
from meshwright.spec.model.hf import FAMILIES, family_for
from meshwright.spec.model.hf.family import Family
from meshwright.spec.model.hf.folder import SHARDED_INDEX, SINGLE_FILE, has_weights
from meshwright.spec.model.hf.rows import SourceRows, TensorMapping

NO_DATA = "imported"
WEIGHTS_FILE = "rank-00000.safetensors"
SHARD_BYTES = 5 * 10**9
METADATA = {"format": "pt"}  # transformers refuses a file without this entry.


class Exported(Protocol):
    """A tensor to write to a file."""

    @property
    def entry(self) -> TensorEntry: ...


T = TypeVar("T", bound=Exported)


@contextmanager
def written_aside(to: Path) -> Iterator[Path]:
    """Yield a new folder that gets its final name only when everything has been written."""
    to = Path(os.path.abspath(to))
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists already: name a new folder")
    aside = to.with_name(f".writing-{to.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        fmt.sync_folder(aside)
        os.replace(aside, to)
    except OSError as error:
        raise refusal(f"{to} can't be written", error, to, "another folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def import_folder(source: Path, to: Path, dtype: str = "", seq: int = 0, upcycle: str | None = None) -> ModelConfig:
    """Turn a Hugging Face folder into the checkpoint `to`, as `import_weights` does."""
    return import_weights(HFFolder(source, seq), source, to, dtype, upcycle)


def import_weights(
    given: NamedWeights, beside: Path, to: Path, dtype: str = "", upcycle: str | None = None
) -> ModelConfig:
    """Write weights as the checkpoint `to` (only weights, step 0) and return its model section.

    The tokenizer and other files that travel with a model are copied from the folder `beside`. `dtype` is fp32, bf16,
    fp16 or fp64. Without it, tensors become float32, except that float64 stays float64. `upcycle`, e.g.
    "count=8,top_k=2", turns a dense model into a mixture of experts (upcycle.py).
    """
    weights = given if upcycle is None else Upcycled(given, upcycle)
    with written_aside(to) as aside:
        index = Index(step=0, consumed=0, world=1, config=config_of(weights.model))
        entries: list[TensorEntry] = []
        for name, whole in weights.shapes.items():
            stored = weights.stored_as(name, dtype)
            kind, size = SAFETENSORS_DTYPES[stored]
            index.tensors[f"param/{name}"] = {"shape": list(whole), "dtype": kind}
            # The checksums are known only after the blocks have been written.
            for start, shape in blocks_of(whole, size):
                index.blocks.append(SavedBlock(f"param/{name}", start, shape, WEIGHTS_FILE, str(len(entries)), 0))
                entries.append(TensorEntry(str(len(entries)), stored, shape))
        sums = tensor_file.write_tensors(aside / WEIGHTS_FILE, entries, _values(weights, index.blocks, entries))
        index.files[WEIGHTS_FILE] = (aside / WEIGHTS_FILE).stat().st_size
        index.blocks = [block._replace(crc32=crc) for block, crc in zip(index.blocks, sums, strict=True)]
        assert not index.incomplete(), f"not all elements of {index.incomplete()} were written"
        if given.family.model_type in FAMILIES:
            fmt.write_json(aside / ORIGIN, _origin(given))
        copy_files(beside, aside)
        fmt.write_index(aside, index)
    return weights.model


def _origin(folder: NamedWeights) -> dict[str, Any]:
    """Return the data of a folder that is stored next to its weights, and print which tensors were left out."""
    config = folder.config
    if folder.left_out:
        print(
            f"meshwright: left out {plural(len(folder.left_out), 'tensor')} of layers after the last "
            f"({folder.left_out[0]}, ...), which predict further tokens",
            file=sys.stderr,
        )
        config = config | {folder.family.extra_layers: 0}
    return {"config": config, "tensors": {full: [name, folder.dtype(full)] for full, name in folder.stored.items()}}


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Return the config of a checkpoint that no run wrote: its model, and a placeholder for the data."""
    return {"model": asdict(model), "data": {"prefixes": [NO_DATA]}}


def _values(weights: NamedWeights | Upcycled, wanted: list[SavedBlock], entries: list[TensorEntry]) -> Iterator[Tensor]:
    """Yield the blocks' values in order."""
    for block, entry in zip(wanted, entries, strict=True):
        values = weights.block(block.tensor.removeprefix("param/"), block.start, block.shape)
        yield values.to(TORCH_DTYPES[entry.dtype])


class OriginFile(TypedDict):
    """The contents of an origin file: the config.json and, by a tensor's full name, its name and safetensors code."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Origin:
    """The Hugging Face folder that a model comes from, or that an export follows.

    `tensors`: by a tensor's full name, its name in the folder and its dtype.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, list[str]]


def origin_of(folder: Path) -> Origin | None:
    """Return the origin of an imported checkpoint or of a Hugging Face folder, or None if the folder is neither."""
    for name in (ORIGIN, "config.json"):
        if (folder / name).is_file():
            try:
                content = read_json(folder / name)
                content = content if name == ORIGIN else {"config": content, "tensors": {}}
                of_kind(content, OriginFile, "it")
                if strange := {code for _, code in content["tensors"].values()} - set(TORCH_DTYPES):
                    raise ValueError(f"it names the unknown dtype {min(strange)}")
                return Origin(folder, content["config"], content["tensors"])
            except (OSError, ValueError) as error:
                raise UserError(f"{folder / name} can't be read ({error}): get it again") from None
    return None


def context_length(folder: Path, model: ModelConfig) -> int:
    """Return the number of tokens that the model in a checkpoint's folder can read.

    A run may train on samples that are shorter than the context of the Hugging Face model that it began with. Rotary
    positions lose nothing by that, so the model keeps its context.
    """
    origin = origin_of(folder) if model.position == "rope" else None
    if origin is None:
        return model.seq
    family = FAMILIES.get(str(origin.config.get("model_type")))
    names = family.keys.get("seq", ()) if family else ("max_position_embeddings",)
    lengths = [origin.config.get(name) for name in names]
    return max([model.seq, *(length for length in lengths if isinstance(length, int))])


@dataclass(frozen=True)
class ExportedTensor:
    """A Hugging Face tensor to write: its entry, the name of our tensor that holds its rows, and these rows."""

    entry: TensorEntry
    ours: str
    mapped: TensorMapping
    runs: list[SourceRows]


def export_folder(
    checkpoint: Path, to: Path, dtype: str = "", family: str = "", like: Path | None = None, average: bool = False
) -> dict[str, Any]:
    """Write a checkpoint's weights as the Hugging Face folder `to`, and return a summary of the written files.

    `dtype` is fp32, fp16, bf16 or fp64. Without it, tensors get the dtype that they had in the folder that the model
    comes from, or else the checkpoint's. `like` names a Hugging Face folder (or an imported checkpoint) whose
    config.json and tokenizer to follow. With `average` the weights are their moving average.
    """
    reader = open_weights(checkpoint, average)
    model = config_in(reader.index).model
    if model.kind_facts.is_foreign:
        return exportplanned_tensors(reader, Path(like or model.hf), to, dtype)
    origin = origin_of(like or checkpoint)
    if like is not None and origin is None:
        lacks = f"{like} has no config.json{hub_hint(like)}"
        raise UserError(f"{lacks}: --like takes a Hugging Face folder or an imported checkpoint")
    base = origin.config if origin is not None else {}
    known = str(base.get("model_type")) in FAMILIES and not FAMILIES[base["model_type"]].misfits(model)
    chosen = family_for(model, family or (base["model_type"] if known else ""))
    origin_config, beside_of = base, origin.folder if origin is not None else checkpoint
    prefixes = _prefixes(reader)
    # The export uses another family than the origin, so the origin's keys and names do not apply.
    if base.get("model_type") != chosen.model_type:
        origin, base = None, {}
    stored = origin.tensors if origin is not None else {}
    planned = list(planned_tensors(reader, chosen, model, stored, dtype))
    context = context_length(beside_of, model) if base else model.seq
    config = chosen.config_of(replace(model, seq=context), base or None)
    with written_aside(to) as aside:
        beside = copy_files(beside_of, aside) or copy_tokenizer(prefixes, aside)
        if not base:
            end = end_token(checkpoint, prefixes)
            ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
            config |= {key: origin_config.get(key, value) for key, value in ends.items()}
        # config.json keeps its dtype if all tensors keep theirs.
        if dtype or not {each.entry.name for each in planned} <= {name for name, _ in stored.values()}:
            keys = [key for key in ("dtype", "torch_dtype") if key in base] or ["torch_dtype"]
            config |= dict.fromkeys(keys, _dtype_word(planned))
        fmt.write_whole(aside / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        files = write_shards(aside, planned, lambda shard: chunks_of(reader, shard))
    total = sum(each.entry.bytes for each in planned)
    return {
        "family": chosen.model_type, "step": reader.index.step, "tensors": len(planned), "bytes": total,
        "files": files, "beside": beside,
    }  # fmt: skip


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write in the form of a transformers model's folder: a box of one of its parameters.

    `name`: the parameter, or an empty string for an untrained buffer, which is copied from the folder.
    """

    entry: TensorEntry
    name: str
    box: Box


def exportplanned_tensors(reader: Reader | MergedWeights, like: Path, to: Path, dtype: str) -> dict[str, Any]:
    """Write the weights of a model that transformers builds, in the form of the folder that it comes from."""
    from meshwright.checkpoint.planned_files import PlannedFolder, named_shapes

    saved = reader.index.tensors
    folder = PlannedFolder(like) if has_weights(like) else None
    planned: list[PlannedTensor] = []
    for name, shape in named_shapes(str(like)).items():
        own = DTYPE_CODES[getattr(torch, saved[f"param/{name}"]["dtype"])]
        whole = Box((0,) * len(shape), shape, (0,) * len(shape))
        for source, box, stacked in folder.pieces[name] if folder else [(name, whole, False)]:
            if dtype:
                code = PRECISION_CODES[dtype]
            else:
                code = folder.dtype(source) if folder else own
            planned.append(PlannedTensor(TensorEntry(source, code, box.shape[stacked:]), name, box))
    for name, shape in folder.buffers.items() if folder else ():
        source = folder.pieces[name][0].source  # type: ignore[union-attr]
        whole = Box((0,) * len(shape), shape, (0,) * len(shape))
        planned.append(PlannedTensor(TensorEntry(source, folder.dtype(source), shape), "", whole))  # type: ignore[union-attr]

    def values(shard: list[PlannedTensor]) -> Iterator[Tensor]:
        for each in shard:
            tensor = torch.empty(each.box.shape, dtype=TORCH_DTYPES[each.entry.dtype])
            if each.name:
                record = ParamRecord(each.name, tuple(saved[f"param/{each.name}"]["shape"]), each.box.shape,
                                     (each.box,), Init("zeros"))  # fmt: skip
                reader.fill(f"param/{each.name}", record, tensor)
            elif folder:
                tensor = folder.file_of[each.entry.name].get_tensor(each.entry.name)
            yield tensor

    config = read_json(like / "config.json")
    with written_aside(to) as aside:
        beside = copy_files(like, aside) or copy_tokenizer(_prefixes(reader), aside)
        config |= {"dtype": str(TORCH_DTYPES[PRECISION_CODES[dtype]]).removeprefix("torch.")} if dtype else {}
        fmt.write_whole(aside / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        files = write_shards(aside, planned, values)
    return {
        "family": str(config.get("model_type")), "step": reader.index.step, "tensors": len(planned),
        "bytes": sum(each.entry.bytes for each in planned), "files": files, "beside": beside,
    }  # fmt: skip


def _prefixes(reader: Reader | MergedWeights) -> list[str]:
    """Return the path prefixes of the token files of a checkpoint's run."""
    prefixes = reader.index.config.get("data", {}).get("prefixes")
    return [str(prefix) for prefix in prefixes] if isinstance(prefixes, list) else []


def planned_tensors(
    reader: Reader | MergedWeights, family: Family, model: ModelConfig, stored: dict[str, list[str]], dtype: str
) -> Iterator[ExportedTensor]:
    """Yield the tensors to write. The output layer of a tied model is written if its origin had one."""
    for ours, mapped in family.tensors(model).items():
        saved = reader.index.tensors.get(f"param/{ours}")
        if saved is None:
            raise UserError(f"{reader.folder} has no param/{ours}: it is not a whole model of its model section")
        twice = ours == "embedding.weight" and model.tied_embeddings and family.head in stored
        runs = mapped.sources()
        for source, shape in mapped.source_shapes().items():
            for name in (source, family.head) if twice else (source,):
                actual, kind = stored.get(name, [name, DTYPE_CODES[getattr(torch, saved["dtype"])]])
                entry = TensorEntry(actual, PRECISION_CODES[dtype] if dtype and not mapped.wide else kind, shape)
                yield ExportedTensor(entry, ours, mapped, runs[source])


def _dtype_word(planned: list[ExportedTensor]) -> str:
    """Return the name of the weights' dtype for config.json. It is the smallest dtype that holds all weights, because
    transformers loads them in it. Tensors that are always stored in a wide dtype are ignored."""
    dtypes = (TORCH_DTYPES[each.entry.dtype] for each in planned if not each.mapped.wide)
    return str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")


def write_shards(folder: Path, planned: Sequence[T], chunks: Callable[[list[T]], Iterator[Tensor]]) -> list[str]:
    """Write one file, or several of at most SHARD_BYTES with an index, and return their names. `chunks(tensors)` yields
    the values of these tensors in order."""
    shards: list[list[T]] = [[]]
    size = 0
    for each in planned:
        if shards[-1] and size + each.entry.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size += each.entry.bytes
    count = len(shards)
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)] if count > 1 else [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        tensor_file.write_tensors(folder / name, [each.entry for each in shard], chunks(shard), METADATA)
    if count > 1:
        where = {each.entry.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(each.entry.bytes for each in planned)
        value = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        fmt.write_whole(folder / SHARDED_INDEX, (json.dumps(value, indent=2) + "\n").encode())
    return names


def chunks_of(reader: Reader | MergedWeights, shard: list[ExportedTensor]) -> Iterator[Tensor]:
    """Yield the values of some tensors in order, a block of rows at a time."""
    for each in shard:
        dtype = TORCH_DTYPES[each.entry.dtype]
        # The rows of a transposed tensor are our columns, so it is read whole.
        if each.mapped.transposed:
            yield _rows(reader, each, 0, each.mapped.shape[0], dtype).t()
            continue
        for (low, *_), (rows, *_) in blocks_of(each.entry.shape, max(4, dtype.itemsize)):
            yield _rows(reader, each, low, low + rows, dtype)


def _rows(reader: Reader | MergedWeights, theirs: ExportedTensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Return rows [low, high) of a Hugging Face tensor, gathered from ours."""
    mapped, boxes, wanted = theirs.mapped, [], []
    # In a stack of matrices, each run of rows is in one matrix.
    leading = (1,) * (len(mapped.shape) - len(mapped.tail) - 1)
    count = 0
    for run in theirs.runs:
        part = run.of_theirs(low, high)
        if part is not None:
            at = (*(0 for _ in leading), count, *(0 for _ in mapped.tail))
            boxes.append(Box(mapped.corner(part.start), (*leading, part.count, *mapped.tail), at))
            wanted.append(part)
            count += part.count
    record = ParamRecord(theirs.ours, mapped.shape, (*leading, count, *mapped.tail), tuple(boxes), Init("zeros"))
    values = torch.empty(record.local_shape, dtype=dtype)
    reader.fill(f"param/{theirs.ours}", record, values)
    values = values.view(count, *mapped.tail)
    if len(wanted) == 1 and wanted[0].step == 1:
        return values

    # Bring our rows into the order of theirs. A run may have a step, if their rows are interleaved.
    ordered = torch.empty_like(values)
    for part, rows in zip(wanted, values.split([part.count for part in wanted]), strict=True):
        where = part.theirs
        ordered[where.start - low : where.stop - low : where.step] = rows
    return ordered
