"""Read checkpoints of DeepSpeed, ZeRO stages 0 to 3, without unpickling them.

The weights are the float32 masters in the ranks' optimizer files. In stages 1 and 2, a rank holds its part of a vector
of all parameters, for each group of parameters. In stage 3, it holds its part of every parameter, one after another.
Parameters that are not trained are in the model files, as is everything if there are no optimizer files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UserError, plural
from meshwright.interop.shards import Spread, SpreadWeights, unknown_forms
from meshwright.interop.torch_files import TorchFile, TorchTensor, numbered, tensors_of
from meshwright.outside import read_json
from meshwright.spec.model.hf import family_of_name

TRACKER = "latest"
MODEL = r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt"
OPTIMIZER = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
PIPELINE = r"layer_(\d+)-model_(\d+)-model_states\.pt"
GROUPS = ("fp32_flat_groups", "single_partition_of_fp32_groups")  # of stage 3; of stages 1 and 2
CONFIG = "config.json"


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint of DeepSpeed, or is the folder of all of a run's."""
    newest = _newest(folder)
    return newest.is_dir() and bool(numbered(newest, MODEL) or numbered(newest, PIPELINE))


def read_deepspeed(source: Path, like: Path | None = None, seq: int = 0) -> SpreadWeights:
    """Return the weights of a checkpoint. `like` names a folder with the config.json that describes the model. Without
    it, the checkpoint's folder or the one above must hold it."""
    folder = _newest(source)
    config = _description(folder, source, like)
    family = family_of_name(config.get("model_type"))
    if numbered(folder, PIPELINE):
        raise UserError(
            f"{folder} was saved by DeepSpeed's pipeline engine, whose files can't be imported: load it there and save "
            "it without the engine"
        )
    with unknown_forms(folder):
        parts, report = _parts(folder)
    names = {name.removeprefix("module.").removeprefix("_orig_mod."): part for name, part in parts.items()}
    weights = SpreadWeights(folder, config, family, family.model_of(config, seq), names)
    weights.report = [f"taken: {plural(len(weights.stored), 'tensor')}, {report[0]}", *report[1:]]
    return weights


def _newest(folder: Path) -> Path:
    """Return the folder of one step: the given one, or the newest of a run's."""
    try:
        name = (folder / TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return folder
    return folder / name if Path(name).name == name and (folder / name).is_dir() else folder


def _description(folder: Path, source: Path, like: Path | None) -> dict[str, Any]:
    """Return the config.json of the model."""
    places = [like] if like else [folder, source, folder.parent]
    found = next((place / CONFIG for place in places if (place / CONFIG).is_file()), None)
    if found is None:
        where = f"{like} has no {CONFIG}" if like else f"neither {folder} nor the folder above has a {CONFIG}"
        raise UserError(f"{where}, which describes the model: name a Hugging Face folder with --like")
    try:
        config = read_json(found)
        if not isinstance(config, dict):
            raise ValueError("it must hold keys and values")
    except (OSError, ValueError) as error:
        raise UserError(f"{found} can't be read ({error}): get it again") from None
    return config


def _parts(folder: Path) -> tuple[dict[str, Spread], list[str]]:
    """Return the whole tensors by name, and a report, line by line."""
    files = numbered(folder, MODEL)
    if any(tp for (_, tp), _ in files):
        raise UserError(f"{folder} has files of several model-parallel ranks: import it where they are one")
    ranks = [path for _, path in numbered(folder, OPTIMIZER)]
    model = TorchFile(files[0][1]).value
    stored = tensors_of(model.get("module", {}))
    whole = {name: Spread(each.shape, each.dtype, each.read) for name, each in stored.items() if math.prod(each.shape)}
    if not ranks:
        if "zero_pp_rank" in files[0][1].name:
            raise UserError(f"{folder} has no *_optim_states.pt, which hold the weights of ZeRO stage 3: copy them too")
        return whole, ["as they were computed with"]
    states = [TorchFile(path).value for path in ranks]
    own = [state["optimizer_state_dict"] for state in states]
    stage3 = GROUPS[0] in own[0]
    counts = own[0].get("partition_count", len(own))
    expected = max(counts) if isinstance(counts, (list, tuple)) else counts
    if expected != len(ranks):
        raise UserError(f"{folder} has the optimizer files of {len(ranks)} of {expected} ranks: copy all of them")
    groups = [[_flat(each) for each in state[GROUPS[0] if stage3 else GROUPS[1]]] for state in own]
    try:
        masters = (
            _of_parts(model["param_shapes"], groups) if stage3 else _of_vectors(model["param_shapes"], groups, own[0])
        )
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{files[0][1]} does not list the shapes of the parameters: get it again") from None
    frozen = _frozen(folder, [path for _, path in files], model) if stage3 else {}
    parts = {**whole, **frozen, **dict(masters)}
    for alias, name in _pairs(model.get("shared_params")):
        if name in parts:
            parts[alias] = parts[name]
    kept = sorted(key for key in ("lr_scheduler", "random_rng_state", "sampler", "data_sampler") if model.get(key))
    stage = 3 if stage3 else "1 or 2"
    left = ", ".join(["the optimizer's moments", "loss scale", *kept])
    return parts, [f"the float32 masters of {plural(len(ranks), 'rank')} of ZeRO stage {stage}", f"not taken: {left}"]


def _pairs(shared: Any) -> Iterator[tuple[str, str]]:
    """Yield (alias, name) of shared parameters, which versions list as pairs or as a mapping."""
    yield from (shared.items() if isinstance(shared, Mapping) else (tuple(pair) for pair in shared or ()))


def _flat(stored: Any) -> TorchTensor:
    """Return a rank's part of a group. In older versions it is a list of one."""
    only = stored[0] if isinstance(stored, list) and stored else stored
    if not isinstance(only, TorchTensor) or len(only.shape) != 1:
        raise UserError("the optimizer files hold their weights in a form that is not known: save them again")
    return only


def _of_vectors(
    shapes: list[dict[str, Any]], groups: list[list[TorchTensor]], state: Mapping[str, Any]
) -> Iterator[tuple[str, Spread]]:
    """Yield the parameters of stages 1 and 2: one after another in each group's vector, which the ranks share. Some
    optimizers leave room after each."""
    rooms = state.get("param_alignment_paddings")
    for number, named in enumerate(shapes):
        vector = [rank[number] for rank in groups]
        at = 0
        for position, (name, shape) in enumerate(named.items()):
            yield name, _span([(part, 0, part.shape[0]) for part in vector], at, tuple(shape))
            at += math.prod(shape) + (rooms[number][position] if rooms else 0)
        if at > sum(part.shape[0] for part in vector):
            raise UserError(
                f"the optimizer files have fewer numbers than the parameters of group {number}: get them again"
            )


def _of_parts(shapes: list[dict[str, Any]], groups: list[list[TorchTensor]]) -> Iterator[tuple[str, Spread]]:
    """Yield the parameters of stage 3: each rank has an equal part of each, one after another in its vectors."""
    at = 0
    room = sum(part.shape[0] for part in groups[0])
    for name, shape in ((name, tuple(shape)) for named in shapes for name, shape in named.items()):
        count = -(-math.prod(shape) // len(groups))
        if at + count > room:
            raise UserError(f"the optimizer files have fewer numbers than the parameters up to {name}: get them again")
        yield name, _span([cut for rank in groups for cut in _cuts(rank, at, count)], 0, shape)
        at += count


def _cuts(parts: list[TorchTensor], at: int, count: int) -> Iterator[tuple[TorchTensor, int, int]]:
    """Yield (vector, start, end) of elements [at, at + count) of vectors that follow one another."""
    for part in parts:
        low, high = max(0, at), min(part.shape[0], at + count)
        if low < high:
            yield part, low, high
        at -= part.shape[0]


def _span(cuts: list[tuple[TorchTensor, int, int]], at: int, shape: tuple[int, ...]) -> Spread:
    """Return the tensor whose elements begin at `at` in a sequence of cuts of vectors."""

    def read() -> Tensor:
        begin, left = at, math.prod(shape)
        pieces = []
        for part, low, high in cuts:
            first, last = low + max(0, begin), min(high, low + begin + left)
            if first < last:
                pieces.append(part.read()[first:last])
            begin -= high - low
        return torch.cat(pieces)[:left].view(shape)

    return Spread(shape, cuts[0][0].dtype, read)


def _frozen(folder: Path, files: list[Path], first: Mapping[str, Any]) -> dict[str, Spread]:
    """Return the parameters of stage 3 that are not trained: each rank's model file has a part of them."""
    shapes = first.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    fragments = [TorchFile(path).value.get("frozen_param_fragments") or {} for path in files]
    found = {}
    for name, shape in shapes.items():
        if any(name not in each for each in fragments):
            raise UserError(f"{folder} lacks a part of {name}: copy the model files of all ranks")
        cuts = [(_flat(each[name]), 0, each[name].shape[0]) for each in fragments]
        found[name] = _span(cuts, 0, tuple(shape))
    return found
