"""Import and export adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT has one adapter per linear module of its model. We have one per kind of rows (queries, keys, values). If a PEFT
module holds several of ours, like GPT-2's fused projection, it gets one adapter whose rank is the sum of our ranks. Its
A stacks our A factors, and its B holds each of our B factors in separate rows and columns. On import, each of our
adapters gets a copy of A. The base is only read for DoRA: PEFT stores the norms of rows, and we store their change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint import tensor_file
from meshwright.checkpoint.base import Base, check_digest, digest, fill_range, open_base
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.merged import AdapterValues, AdapterWeights, box_record
from meshwright.checkpoint.tensor_file import DTYPE_CODES, TensorEntry
from meshwright.config.sections import ModelConfig
from meshwright.config.tune import TuneConfig
from meshwright.errors import UserError
from meshwright.interop.hf import METADATA, WEIGHTS_FILE, config_of, origin_of, written_aside
from meshwright.interop.peft_experts import (
    DOWN,
    UP,
    TheirAdapter,
    adapter_of_experts,
    expert_tensors,
    targeted,
    targets_of,
    unstacked,
)
from meshwright.nn.adapters.nf4 import round_by_packing
from meshwright.outside import of_kind, read_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import Index, SavedBlock
from meshwright.record.companions import NOTE, ORIGIN, copy_files, read_note
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.description import describe
from meshwright.spec.model.hf import FAMILIES, family_for
from meshwright.spec.model.hf.family import Family, model_section
from meshwright.spec.model.hf.rows import SourceRows, TensorMapping
from meshwright.spec.model.part import SINGLE_RANK
from meshwright.spec.model.tuning import is_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NORMS = "lora_magnitude_vector"
ROWS = 4096  # The rows of a base's weight that are read at a time to compute their norms.


class AdapterConfig(TypedDict, total=False):
    """The keys of adapter_config.json that are read."""

    peft_type: str
    base_model_name_or_path: str | None
    r: int
    lora_alpha: float
    lora_dropout: float
    use_rslora: bool
    use_dora: bool
    bias: str
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    modules_to_save: list[str] | None
    target_parameters: list[str] | None


def family_of(base: str, model: ModelConfig) -> Family:
    """Return the family whose names the adapters use: the base's family, or the first one that fits."""
    origin = origin_of(fmt.model_folder(base))
    model_type = str(origin.config.get("model_type")) if origin is not None else ""
    fits = model_type in FAMILIES and not FAMILIES[model_type].misfits(model)
    return family_for(model, model_type if fits else "")


def export_adapters(checkpoint: Path, to: Path, average: bool = False) -> dict[str, Any]:
    """Write a checkpoint's adapters as the folder `to`, which PEFT can load, and return a summary of the files."""
    own = AdapterWeights(Reader(checkpoint, average=average))
    config, model = own.config.tune, own.config.model
    check_digest(checkpoint, config.base)
    family, base = family_of(config.base, model), open_base(config.base, model)

    # The factors by PEFT's names, and the rank of each module's adapter. Adapters of experts have a different format.
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    of_experts, expert_ranks = expert_tensors(family, own)
    tensors |= {PREFIX + name: value for name, value in of_experts.items()}
    for name in own.adapters:
        if len(own.records[name].shape) > 2:
            continue
        for module, runs in _modules(family.map_tensor(model, own.records[name])):
            changes = [change for change in own.changes(name) if _rows_in(change, runs)]
            if changes:
                tensors |= {f"{PREFIX}{module}.{key}": value for key, value in _stacked(changes, runs).items()}
                ranks[module] = config.rank * len(changes)
                if config.trains_norms:
                    tensors[f"{PREFIX}{module}.{NORMS}"] = _norms(base, own, name, changes, runs)

    # The parameters that are trained whole, beside the adapters.
    trained_whole = [record for record in own.records.values() if record.trained and not is_adapter(record.name)]
    for record in trained_whole:
        tensors |= {PREFIX + source: value for source, value in _in_their_rows(family, model, own, record)}
    linears = {m for record in describe(model).records(SINGLE_RANK).values() if len(record.shape) > 1
               for m, _ in _modules(family.map_tensor(model, record))}  # fmt: skip

    # PEFT's scale is alpha / rank, or alpha / sqrt(rank) with rslora.
    written: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.base, "inference_mode": True,
        "r": config.rank, "lora_alpha": config.scale * (math.sqrt(config.rank) if config.rslora else config.rank),
        "lora_dropout": config.dropout, "use_rslora": config.rslora, "use_dora": config.trains_norms, "bias": "none",
        "fan_in_fan_out": bool(family.transposed), "target_modules": sorted(set(_suffixes(ranks, linears))),
        "modules_to_save": sorted(
            {m.rpartition(".")[2] for r in trained_whole for m, _ in _modules(family.map_tensor(model, r))}
        ) or None,
        **({"target_parameters": targets_of(expert_ranks)} if expert_ranks else {}),
    }  # fmt: skip
    # Fused modules have a higher rank. Their alpha is raised too, so that the scale stays the same.
    wide = {module: rank for module, rank in (ranks | expert_ranks).items() if rank != config.rank}
    written |= {"rank_pattern": wide, "alpha_pattern": {
        module: written["lora_alpha"] * (rank / config.rank) ** (0.5 if config.rslora else 1.0)
        for module, rank in wide.items()
    }}  # fmt: skip
    with written_aside(to) as aside:
        fmt.write_whole(aside / CONFIG, (json.dumps(written, indent=2) + "\n").encode())
        save_file({name: value.contiguous() for name, value in tensors.items()}, aside / WEIGHTS, METADATA)
        beside = copy_files(checkpoint, aside)
    total = sum(value.nbytes for value in tensors.values())
    return {
        "family": family.model_type, "step": own.reader.index.step, "tensors": len(tensors), "bytes": total,
        "files": [WEIGHTS], "beside": [CONFIG, *beside],
    }  # fmt: skip


def _modules(mapped: TensorMapping) -> Iterator[tuple[str, list[SourceRows]]]:
    """Yield the PEFT modules that hold rows of one of our tensors, each with its runs of these rows."""
    for source, runs in mapped.sources().items():
        yield source.rpartition(".")[0], runs


def _rows_in(change: AdapterValues, runs: list[SourceRows]) -> bool:
    """Return True if a module holds the rows of an adapter. No adapter is spread over several modules."""
    count = sum(part.count for run in runs if (part := run.of_ours(change.record.start, change.record.stop)))
    assert count in (0, change.record.stop - change.record.start)
    return count > 0


def _stacked(changes: list[AdapterValues], runs: list[SourceRows]) -> dict[str, Tensor]:
    """Return both factors of the one PEFT adapter that combines several of ours."""
    up = changes[0].up.new_zeros(sum(run.count for run in runs), sum(change.up.shape[1] for change in changes))
    column = 0
    for change in changes:
        width = change.up.shape[1]
        for run in runs:
            if part := run.of_ours(change.record.start, change.record.stop):
                first = part.start - change.record.start
                up[part.theirs, column : column + width] = change.up[first : first + part.count]
        column += width
    return {DOWN: torch.cat([change.down for change in changes]), UP: up}


def row_norms(
    base: Base, record: ParamRecord, first: int, count: int, dtype: torch.dtype, packed: bool = False
) -> Tensor:
    """Return the norms of rows of a base's weight. If it was `packed`, its values are rounded like those."""
    norms = []
    for low in range(first, first + count, ROWS):
        rows = min(ROWS, first + count - low)
        part = box_record(record.name, record.shape, (low, 0), (rows, record.shape[1]))
        values = torch.empty(part.local_shape, dtype=dtype)
        fill_range(base, part, 0, part.numel, values.view(-1))
        norms.append(torch.linalg.vector_norm(round_by_packing(values) if packed else values, dim=1))
    return torch.cat(norms)


def _norms(base: Base, own: AdapterWeights, name: str, changes: list[AdapterValues], runs: list[SourceRows]) -> Tensor:
    """Return the norms of a PEFT module's rows with DoRA. Rows without an adapter keep the base's norms."""
    norms = changes[0].up.new_empty(sum(run.count for run in runs))
    for run in runs:
        where = (own.records[name], run.start, run.count)
        norms[run.theirs] = row_norms(base, *where, norms.dtype, name in own.packed)
    for change in changes:
        for run in runs:
            if (part := run.of_ours(change.record.start, change.record.stop)) and change.norms is not None:
                first = part.start - change.record.start
                norms[part.theirs] += change.norms[first : first + part.count]
    return norms


def _in_their_rows(
    family: Family, model: ModelConfig, own: AdapterWeights, record: ParamRecord
) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight that is trained whole, in PEFT's layout: the name and values of each of its tensors."""
    mapped, values = family.map_tensor(model, record), own.read(record)
    for source, runs in mapped.sources().items():
        theirs = values.new_empty(sum(run.count for run in runs), *values.shape[1:])
        for run in runs:
            theirs[run.theirs] = values[run.start : run.start + run.count]
        yield source, theirs.t() if mapped.transposed else theirs


def _suffixes(modules: dict[str, int], linears: set[str]) -> Iterator[str]:
    """Yield, for each module, the shortest suffix of its name that matches no module without an adapter."""
    for module in modules:
        words = module.split(".")
        for count in range(1, len(words) + 1):
            suffix = ".".join(words[-count:])
            if not any(other.endswith(f".{suffix}") or other == suffix for other in linears - set(modules)):
                yield suffix
                break


class PeftFolder:
    """A folder of adapters that PEFT wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: AdapterConfig = of_kind(read_json(folder / CONFIG), AdapterConfig, "it")
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                self.tensors = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            missing = Path(str(error.filename or WEIGHTS)).name
            raise UserError(f"{folder} has no {missing}: name a folder that PEFT saved adapters in") from None
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{folder} can't be read ({error}): get it again") from None
        kind, bias = self.config.get("peft_type"), self.config.get("bias", "none")
        if kind != "LORA" or bias != "none":
            raise UserError(f"{folder} holds {kind} with bias={bias}: only LORA with bias=none can be imported")

    def adapters(self, family: Family, records: dict[str, ParamRecord]) -> dict[str, TheirAdapter]:
        """Return the adapters by the name of their module or, for stacked experts, of their parameter."""
        adapters, c = {}, self.config
        parameters = targeted(self.folder, family, records, c.get("target_parameters") or [])
        experts = {family.stacked_parameter(name): record.shape[0] for name, record in records.items()}
        # The factors are removed from `tensors`, so that only parameters that are trained whole remain there.
        for name in [each.removesuffix(f".{DOWN}") for each in self.tensors if each.endswith(DOWN)]:
            try:
                down, up = self.tensors.pop(f"{name}.{DOWN}"), self.tensors.pop(f"{name}.{UP}")
                norms = self.tensors.pop(f"{name}.{NORMS}") if c.get("use_dora") else None
            except KeyError as error:
                raise UserError(f"{self.folder} lacks {error.args[0]}: its files are not whole") from None
            adapted = parameters.get(name, name)
            count = experts[adapted] if name in parameters else 1
            rank = down.shape[0] // count
            special_alpha = self._of_pattern("alpha_pattern", adapted)
            alpha = float(c.get("lora_alpha", 8.0) if special_alpha is None else special_alpha)
            one = TheirAdapter(down, up, alpha / (math.sqrt(rank) if c.get("use_rslora") else rank), norms)
            adapters[adapted] = unstacked(self.folder, name, one, count) if name in parameters else one
        return adapters

    def _of_pattern(self, key: str, module: str) -> Any:
        """Return a module's value in a pattern, or None. The keys of a pattern are name suffixes or regular
        expressions."""
        patterns: dict[str, Any] = dict(self.config.get(key) or {})  # type: ignore[call-overload]
        for pattern, value in patterns.items():
            if module == pattern or module.endswith(f".{pattern}") or re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return None


def import_adapters(source: Path, to: Path, base: str) -> TuneConfig:
    """Turn a PEFT folder into a checkpoint of adapters on `base`, and return its tune section."""
    folder = PeftFolder(source)
    weights = fmt.model_folder(base)
    origin = origin_of(weights)
    model = _model_of(base, weights)
    family, opened = family_of(base, model), open_base(base, model)
    records = {record.name: record for record in describe(model).records(SINGLE_RANK).values()}
    theirs = folder.adapters(family, records)
    rank = max((each.rank for each in theirs.values()), default=0)
    if not rank:
        raise UserError(f"{source} holds no adapters of linear layers: name a folder that PEFT saved LoRA in")
    # One rank and one scale must serve all adapters: lower ranks are padded, and other scales are folded into B.
    scale = max(each.scale for each in theirs.values())
    pieces, taken = _our_pieces(source, family, model, records, theirs)
    if strange := sorted(set(theirs) - taken):
        raise UserError(f"{source} adapts {strange[0]}, which no {family.model_type} here has as a linear layer")
    trained_parts = sorted({_part_of(name) for name in _trained_whole(family, model, records, folder.tensors)})
    # Adapters of experts can't have dropout, as in PEFT.
    of_experts = {name for _, name, _, _, weight in _pieces(model) if len(records[weight].shape) > 2}
    dropout = 0.0 if of_experts.intersection(pieces) else float(folder.config.get("lora_dropout", 0.0))
    tune = TuneConfig(
        "dora" if folder.config.get("use_dora") else "lora", base, rank, scale * rank, False, dropout,
        tuple(sorted(pieces)), tuple(trained_parts),
    )  # fmt: skip
    _check_complete(source, model, tune, {f"{each}.lora_a" for names in pieces.values() for each in names})
    values = dict(_expert_values(source, family, model, records, theirs, tune))
    values |= dict(_our_tensors(opened, family, model, records, theirs, tune))
    values |= dict(_whole_tensors(family, model, records, folder.tensors))
    with written_aside(to) as aside:
        _write(aside, config_of(model) | {"tune": asdict(tune)}, values)
        if not copy_files(weights, aside, (ORIGIN,)) and origin is not None:
            fmt.write_json(aside / ORIGIN, {"config": origin.config, "tensors": {}})
        copy_files(source, aside) or copy_files(weights, aside)
        fmt.write_json(aside / NOTE, read_note(weights) | {"base": digest(base)})
    return tune


def _model_of(base: str, folder: Path) -> ModelConfig:
    """Return the model section of a base."""
    if (folder / "config.json").is_file():
        from meshwright.checkpoint.hf_files import HFFolder

        return HFFolder(folder).model
    return model_section(fmt.read_index(folder).config["model"])


def _our_pieces(
    source: Path, family: Family, model: ModelConfig, records: dict[str, ParamRecord], theirs: dict[str, TheirAdapter]
) -> tuple[dict[str, list[str]], set[str]]:
    """Return (the full names of our adapters by the kind of rows that they adapt, the PEFT modules used for them)."""
    adapters: dict[str, list[str]] = {}
    taken: set[str] = set()
    for block, name, first, rows, weight in _pieces(model):
        if len(records[weight].shape) > 2:
            if of_experts := adapter_of_experts(source, family, model, records[weight], (first, rows), theirs):
                adapters.setdefault(name, []).append(f"{block}.{name}")
                taken |= of_experts[1]
            continue
        for module, runs in _modules(family.map_tensor(model, records[weight])):
            if module in theirs and any(run.of_ours(first, first + rows) for run in runs):
                adapters.setdefault(name, []).append(f"{block}.{name}")
                taken.add(module)
    return adapters, taken


def _pieces(model: ModelConfig) -> Iterator[tuple[str, str, int, int, str]]:
    """Yield every kind of rows (queries, keys, ...) in every linear layer, as (part, name, first row, number of rows,
    name of the weight)."""
    described = describe(model)
    for layer, block in enumerate(described.blocks):
        for _, part_name, part in block.parts:
            for linear in part.linears():
                first, prefix = 0, f"layers.{layer}.{part_name}"
                for name, rows in linear.pieces:
                    yield prefix, name, first, rows, f"{prefix}.{linear.name}.weight"
                    first += rows


def _check_complete(source: Path, model: ModelConfig, tune: TuneConfig, there: set[str]) -> None:
    wanted = {f"{prefix}.{name}.lora_a" for prefix, name, *_ in _pieces(model) if name in tune.targets}
    if lacking := sorted(wanted - there):
        raise UserError(
            f"{source} adapts {len(there)} products and not {lacking[0].removesuffix('.lora_a')}: only adapters of "
            "all layers alike can be imported"
        )


def _expert_values(
    source: Path, family: Family, model: ModelConfig, records: dict[str, ParamRecord], theirs: dict[str, TheirAdapter],
    tune: TuneConfig,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield the names and values of our adapters of experts. `_our_tensors` yields all other adapters."""
    for prefix, name, first, rows, weight in _pieces(model):
        record = records[weight]
        if name not in tune.targets or len(record.shape) < 3:
            continue
        if of_experts := adapter_of_experts(source, family, model, record, (first, rows), theirs):
            one = of_experts[0]
            dtype = torch.promote_types(one.up.dtype, torch.float32)
            down = torch.zeros(record.shape[0], tune.rank, record.shape[2], dtype=dtype)
            up = torch.zeros(record.shape[0], rows, tune.rank, dtype=dtype)
            down[:, : one.rank] = one.down
            up[:, :, : one.rank] = one.up.to(dtype) * (one.scale / tune.scale)
            yield f"{prefix}.{name}.lora_a", down
            yield f"{prefix}.{name}.lora_b", up


def _our_tensors(
    base: Base, family: Family, model: ModelConfig, records: dict[str, ParamRecord], theirs: dict[str, TheirAdapter],
    tune: TuneConfig,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield the names and values of our adapters. Lower ranks are padded with zeros, and other scales are folded into
    B."""
    for prefix, name, first, rows, weight in _pieces(model):
        adapted = name in tune.targets and len(records[weight].shape) == 2
        for module, runs in _modules(family.map_tensor(model, records[weight])) if adapted else ():
            parts = [part for run in runs if (part := run.of_ours(first, first + rows))]
            if module not in theirs or not parts:
                continue
            one = theirs[module]
            dtype = torch.promote_types(one.up.dtype, torch.float32)
            down = torch.zeros(tune.rank, one.down.shape[1], dtype=dtype)
            down[: one.down.shape[0]] = one.down
            up = torch.zeros(rows, tune.rank, dtype=dtype)
            norms = torch.zeros(rows, dtype=dtype)
            for part in parts:
                at = slice(part.start - first, part.start - first + part.count)
                up[at, : one.up.shape[1]] = one.up[part.theirs].to(dtype) * (one.scale / tune.scale)
                if one.norms is not None:
                    # PEFT stores the norms themselves. Ours are stored as the difference from the base's.
                    own = row_norms(base, records[weight], part.start, part.count, dtype)
                    norms[at] = one.norms.flatten()[part.theirs].to(dtype) - own
            yield f"{prefix}.{name}.lora_a", down
            yield f"{prefix}.{name}.lora_b", up
            if one.norms is not None:
                yield f"{prefix}.{name}.norms", norms


def _trained_whole(
    family: Family, model: ModelConfig, records: dict[str, ParamRecord], tensors: dict[str, Tensor]
) -> list[str]:
    """Return the names of our tensors that a folder holds whole, in addition to its adapters."""
    return [name for name, record in records.items()
            if all(source in tensors for source in family.map_tensor(model, record).sources())]  # fmt: skip


def _part_of(name: str) -> str:
    """Return the name of the model part that a parameter belongs to, without its layer."""
    return re.sub(r"^layers\.\d+\.", "", name).split(".")[0]


def _whole_tensors(
    family: Family, model: ModelConfig, records: dict[str, ParamRecord], tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of our tensors that a folder holds whole."""
    for name in _trained_whole(family, model, records, tensors):
        mapped = family.map_tensor(model, records[name])
        ours = torch.empty(records[name].shape)
        for source, runs in mapped.sources().items():
            values = tensors[source].t() if mapped.transposed else tensors[source]
            for run in runs:
                ours[run.start : run.start + run.count] = values[run.theirs].float()
        yield name, ours


def _write(folder: Path, config: dict[str, Any], values: dict[str, Tensor]) -> None:
    """Write a checkpoint of these parameters, one block per parameter."""
    index = Index(step=0, consumed=0, world=1, config=config)
    entries = [TensorEntry(str(n), DTYPE_CODES[value.dtype], tuple(value.shape)) for n, value in
               enumerate(values.values())]  # fmt: skip
    sums = tensor_file.write_tensors(folder / WEIGHTS_FILE, entries, values.values())
    for n, ((name, value), crc) in enumerate(zip(values.items(), sums, strict=True)):
        full, shape = f"param/{name}", tuple(value.shape)
        index.tensors[full] = {"shape": list(shape), "dtype": str(value.dtype).removeprefix("torch.")}
        index.blocks.append(SavedBlock(full, (0,) * len(shape), shape, WEIGHTS_FILE, str(n), crc))
    index.files[WEIGHTS_FILE] = (folder / WEIGHTS_FILE).stat().st_size
    fmt.write_index(folder, index)
