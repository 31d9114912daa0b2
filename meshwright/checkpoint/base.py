"""The base of a run with adapters: the weights that it does not train.

Checkpoints of such a run hold only the trained parameters and name their base, which is stored once. The base is a
checkpoint or a Hugging Face folder.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import nn

from meshwright.checkpoint.contract import CheckpointedTrainer
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.planned_files import PlannedFolder
from meshwright.config.load import flat, to_plain
from meshwright.config.sections import TRAINING_KEYS, Config, ModelConfig
from meshwright.engine.sharding.buffers import PARAM, REPLICA_STATE, State, regions
from meshwright.engine.sharding.remainders import Values
from meshwright.errors import UserError, notice
from meshwright.nn.adapters.nf4 import ROWS_AT_ONCE, pack
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import blocks_of
from meshwright.record.companions import read_note
from meshwright.spec.layout.params import ParamRecord, slices_of
from meshwright.spec.model.hf.folder import has_weights
from meshwright.spec.model.tuning import is_adapter

if TYPE_CHECKING:
    from meshwright.checkpoint.merged import MergedWeights

Base = Union[Reader, HFFolder, "MergedWeights"]


def with_base(config: Config, source: str | None) -> tuple[Config, str | None]:
    """Return the config with the folder of its weights, and the checkpoint that is loaded after these, or None.

    A Hugging Face folder as `source` becomes `model.hf` or, with adapters, their base. If the config of a run with
    adapters names no base, the run's newest checkpoint names it, or else `source` does if it holds adapters. A `source`
    that holds all weights is the base itself, and without a source `model.hf` is. With `tune.reference=start`, so is a
    `source` that holds adapters: the run trains new ones over both.
    """
    is_folder = source is not None and fmt.is_hf_folder(source)
    if not config.tune.adapts:
        return (replace(config, model=replace(config.model, hf=str(source))), None) if is_folder else (config, source)
    own = [path for _, path in fmt.list_checkpoints(fmt.checkpoint_folder(config))]
    if config.compares and config.tune.reference == "start":
        # A run that continues has recorded its first weights.
        start = _base_of(own[-1]) if own else source
        if start and _base_of(fmt.model_folder(start)):
            return replace(config, tune=replace(config.tune, base=start)), source if own else None
    if config.tune.base:
        if is_folder and Path(str(source)).resolve() != Path(config.tune.base).resolve():
            both = f"--from {source} and tune.base={config.tune.base}"
            raise UserError(f"{both} name two models whose weights stay frozen: leave one of them out")
        return config, None if is_folder else source
    base, named = "", None
    for folder in [*own[-1:], *([fmt.model_folder(source)] if source is not None else [])]:
        named = named or _base_of(folder)
    if source is not None and not _base_of(fmt.model_folder(source)):
        base, source = source, None
    base = named or base or fmt.first_weights(config, None)
    if not base:
        raise UserError(
            f"tune.kind={config.tune.kind} adapts the weights of a model, and none is named: set tune.base, or give "
            "--from, a checkpoint or a Hugging Face folder"
        )
    return replace(config, tune=replace(config.tune, base=base)), source


def _base_of(folder: Path) -> str:
    """Return the base that a checkpoint names, or an empty string if it holds all weights."""
    if not (folder / fmt.INDEX).is_file():
        return ""
    tune = fmt.read_index(folder).config.get("tune", {})
    return str(tune.get("base", "")) if tune.get("kind", "full") != "full" else ""


def open_base(base: str, model: ModelConfig) -> Base:
    """Open a base and check that it belongs to this model. Adapters that it holds are merged with their own base."""
    from meshwright.checkpoint.merged import open_weights

    folder = fmt.model_folder(base)
    source: Base = HFFolder(folder, model.seq) if (folder / "config.json").is_file() else open_weights(folder)
    its_model = to_plain(source.model) if isinstance(source, HFFolder) else source.index.config["model"]
    words = _differences(its_model, model)
    if words:
        raise UserError(f"{folder}, the base, is of another model: {words}; take its model section")
    return source


def _differences(theirs: dict[str, Any], model: ModelConfig) -> str:
    """Return the keys in which a model section differs from ours, in words; "" if the weights mean the same."""
    ours, others = flat(to_plain(model)), flat(theirs)
    # These keys do not change the meaning of the weights, so a source of weights may differ in them.
    ignored = {*TRAINING_KEYS, "seq"} | (set() if model.has_rope else {"rope_theta"})
    strange = [key for key in ours if key not in ignored and key in others and others[key] != ours[key]]
    return ", ".join(f"model.{key} (there {others[key]}, here {ours[key]})" for key in strange[:3])


def digest(base: str) -> str:
    """Return a short string that changes when a base's files are replaced. It is a checksum of a checkpoint's index, or
    of the file sizes and config.json of a Hugging Face folder."""
    folder = fmt.model_folder(base)
    if (folder / fmt.INDEX).is_file():
        return f"{zlib.crc32((folder / fmt.INDEX).read_bytes()):08x}"
    sizes = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    return f"{zlib.crc32(repr(sizes).encode() + (folder / 'config.json').read_bytes()):08x}"


def check_digest(checkpoint: Path, base: str) -> None:
    """Raise if a checkpoint's adapters were trained on other weights than those that the base holds now."""
    trained_on = read_note(checkpoint).get("base")
    if base and trained_on and trained_on != digest(base):
        raise UserError(
            f"{checkpoint} holds adapters of other weights than those in {base}, which were replaced since: set "
            "tune.base to the folder that they were trained on"
        )


def read_base(trainer: CheckpointedTrainer) -> None:
    """Read this rank's shard of the base: all weights except the adapters. No rank waits for another here."""
    config = trainer.ctx.config
    read_weights(trainer, open_base(config.tune.base, config.model))


@torch.no_grad()
def read_weights(trainer: CheckpointedTrainer, source: Base | PlannedFolder) -> None:
    """Read this rank's shard of all weights except the adapters."""
    # A gather in flight would overwrite the new weights with the old ones.
    trainer.data_parallel.weights.wait_for_gathers()
    frozen = [buffer for buffer in trainer.data_parallel.buffers if not buffer.key.trained]
    states = [State(PARAM, buffer, [bucket.own_params for bucket in buffer.buckets]) for buffer in frozen]
    for state in (*states, *trainer.states()):
        own = state.name.removeprefix(REPLICA_STATE) == PARAM and isinstance(state, State)
        for slot in state.buffer.slots if own else ():
            low, high = state.holds(slot)
            if low < high and not is_adapter(slot.record.name):
                fill_range(source, slot.record, low, high, state.values(slot, low, high))


@torch.no_grad()
def begin_with_folder(trainer: CheckpointedTrainer, modules: Sequence[nn.Module], fresh: bool) -> None:
    """Read the data that a run takes from the folder named by model.hf: its weights if the run is `fresh` and has no
    base, and in any case the untrained buffers in its files."""
    config = trainer.ctx.config
    model, folder = config.model, Path(config.model.hf)
    fresh = fresh and not config.tune.adapts
    if not has_weights(folder):
        return
    source: Base | PlannedFolder
    if model.kind_facts.is_foreign:
        source = PlannedFolder(folder)
        source.fill_buffers(modules)
    elif not fresh:
        return
    else:
        source = HFFolder(folder, model.seq)
        words = _differences(to_plain(source.model), model)
        if words and trainer.writes:
            notice(f"meshwright: warning: these weights were trained with other settings: {words}")
    if fresh:
        read_weights(trainer, source)


def fill_range(source: Base | PlannedFolder, record: ParamRecord, low: int, high: int, values: Values) -> None:
    """Set `values`, elements low to high of a local tensor, from a base."""
    if record.packs is not None:
        _fill_packed(source, record, low, high, values)
    elif isinstance(source, Reader):
        source.fill_range(f"param/{record.name}", record, low, high, values)
    elif source.shapes.get(record.name) != record.shape:
        lacks = f"{source.folder} has no {record.name} of shape {list(record.shape)}"
        raise UserError(f"{lacks}, so it is of another model: take its sizes, with model.hf={source.folder}")
    else:
        for box, region in regions(record, low, high, values):
            for start, shape in blocks_of(box.shape, 4):
                corner = tuple(a + b for a, b in zip(box.start, start, strict=True))
                region[slices_of(start, shape)] = source.block(record.name, corner, shape).to(values.dtype)


def _fill_packed(source: Base | PlannedFolder, record: ParamRecord, low: int, high: int, values: Values) -> None:
    """Set bytes low to high of a quantised weight. Whole rows of its values are read and packed, a few at a time."""
    plain, width = record.values, record.local_shape[1]
    inputs = plain.local_shape[1]
    step = max(1, ROWS_AT_ONCE // inputs)
    for first in range(low // width, -(-high // width), step):
        rows = min(step, -(-high // width) - first)
        read = torch.zeros((rows, inputs))
        fill_range(source, plain, first * inputs, (first + rows) * inputs, read.view(-1))
        if not read.isfinite().all():
            raise UserError(f"{plain.name} of the base has values that are not finite, which tune.quantise can't store")
        begin = max(low, first * width)
        end = min(high, (first + rows) * width)
        packed = pack(read.to(values.device)).view(-1)
        values[begin - low : end - low] = packed[begin - first * width : end - first * width]


def adapts(config: dict[str, Any]) -> bool:
    """Return True if a checkpoint's config, in the form of its index, belongs to a run with adapters."""
    return str(config.get("tune", {}).get("kind", "full")) != "full"
