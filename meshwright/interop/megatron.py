"""Read checkpoints of Megatron-LM, without unpickling them.

There are two formats. In the classic one, each tensor- and pipeline-parallel rank has a folder mp_rank_TT[_PPP] with
one file. In that of megatron-core's dist_checkpointing (`torch_dist`), all ranks write blocks of global tensors, whose
places `.metadata` lists. Both hold the arguments of the training script, which describe the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import UserError, plural
from meshwright.interop.shards import Spread, SpreadWeights, joined, unknown_forms
from meshwright.interop.torch_files import TorchFile, TorchTensor, broken, interpret, numbered, plain, tensors_of
from meshwright.spec.model.megatron import FAMILY, current_name, cut_of, model_of

TRACKER = "latest_checkpointed_iteration.txt"
RANK = r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?"
FILES = ("model_optim_rng.pt", "model_rng.pt")
PLACES = ".metadata"
COMMON = "common.pt"
LAYER = r"^decoder\.layers\.(\d+)\."
# Tensors of a distributed checkpoint that are not weights of the model.
OTHER_STATES = r"(optimizer|chained_\d+|rng_state|rerun_state_machine_state|opt_param_scheduler)\b.*"


def is_megatron(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint of Megatron-LM, or is the folder of all of a run's."""
    if (folder / TRACKER).is_file() or (folder / PLACES).is_file():
        return True
    return folder.is_dir() and any((path / file).is_file() for _, path in numbered(folder, RANK) for file in FILES)


def read_megatron(source: Path, vocab: int = 0, seq: int = 0) -> SpreadWeights:
    """Return the weights of a checkpoint. `vocab`, if not 0, is the number of tokens without padding."""
    folder = _newest(source)
    with unknown_forms(folder):
        args, parts, report = _distributed(folder) if (folder / PLACES).is_file() else _classic(folder)
    if not args:
        raise UserError(
            f"{folder} holds no arguments of a training script, which describe the model: name one that does"
        )
    model = model_of(args, vocab, seq)
    padded = args.get("padded_vocab_size") or parts["embedding.word_embeddings.weight"].shape[0]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in parts and parts[name].shape[0] > model.vocab:
            parts[name] = parts[name].rows(model.vocab)
    # Pipeline stages hold a copy of a tied embedding under the name of the output layer.
    if model.tied_embeddings:
        parts.pop("output_layer.weight", None)
    weights = SpreadWeights(folder, dict(args), FAMILY, model, parts, "arguments")
    taken = f"{plural(len(weights.stored), 'tensor')} of {plural(model.layers, 'layer')}"
    cut = f", the first {model.vocab:,} of {padded:,} rows of the vocabulary" if model.vocab < padded else ""
    weights.report = [f"taken: {taken}{cut}", *report]
    return weights


def _newest(folder: Path) -> Path:
    """Return the folder of one iteration: the given one, or the newest of a run's."""
    try:
        if not (folder / TRACKER).is_file():
            return folder
        word = (folder / TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / TRACKER} can't be read ({error}): name the folder of one iteration") from None
    name = f"iter_{int(word):07d}" if word.isdecimal() else "release"
    if not (folder / name).is_dir():
        raise UserError(f"{folder} has no {name}, which its {TRACKER} names: name the folder of one iteration")
    return folder / name


def _classic(folder: Path) -> tuple[dict[str, Any], dict[str, Spread], list[str]]:
    """Return the arguments, the whole tensors, and the omissions, of a checkpoint with a folder for each rank."""
    stages: dict[int, list[dict[str, Any]]] = {}
    for (tp, pp, ep), path in numbered(folder, RANK):
        if ep:
            raise UserError(
                f"{folder} has files of expert-parallel ranks, which can't be imported: only dense models can"
            )
        file = next((path / name for name in FILES if (path / name).is_file()), path / FILES[0])
        if len(stages.setdefault(pp, [])) != tp:
            raise UserError(f"{folder} lacks mp_rank_{len(stages[pp]):02d}, of stage {pp}: copy all of its folders")
        stages[pp].append(plain(TorchFile(file).value))
    if sorted(stages) != list(range(len(stages))) or len({len(ranks) for ranks in stages.values()}) != 1:
        raise UserError(f"{folder} has files of only some of its ranks: copy all of its folders")
    first = stages[0][0]
    args, version = plain(first.get("args")), first.get("checkpoint_version") or 0
    expected = (args.get("tensor_model_parallel_size"), args.get("pipeline_model_parallel_size"))
    if None not in expected and expected != (len(stages[0]), len(stages)):
        raise UserError(
            f"{folder} has files of tp={len(stages[0])} x pp={len(stages)}, and its arguments say tp={expected[0]} x "
            f"pp={expected[1]}: copy all of its folders"
        )
    parts = _whole(folder, [stages[pp] for pp in range(len(stages))], args, float(version))
    others = sorted(set(first) - {"args", "checkpoint_version", "iteration"} - {k for k in first if _is_model(k)})
    return args, parts, [f"not taken: {', '.join(others)}"] if others else []


def _is_model(key: str) -> bool:
    return re.fullmatch(r"model\d*", key) is not None


def _whole(
    folder: Path, stages: list[list[dict[str, Any]]], args: Mapping[str, Any], version: float
) -> dict[str, Spread]:
    """Return the whole tensors of all stages, with the layers numbered through the model."""
    keys = sorted((key for key in stages[0][0] if _is_model(key)), key=lambda key: (len(key), key))
    parts: dict[str, Spread] = {}
    before = 0
    # With interleaved stages, all ranks' first chunks come before their second ones.
    for key in keys:
        for ranks in stages:
            shards = [
                {current_name(name): tensor for name, tensor in tensors_of(rank.get(key)).items()} for rank in ranks
            ]
            layers = {int(found.group(1)) for name in shards[0] if (found := re.match(LAYER, name))}
            for name in shards[0]:
                if any(name not in shard for shard in shards):
                    raise UserError(f"{folder} lacks {name} in the file of one of its ranks: get it again")
                gated = bool(args.get("swiglu")) and ".linear_fc1." in name
                pieces = [_in_groups(name, shard[name], args, version, len(ranks)) for shard in shards]
                here = re.match(LAYER, name)
                layer = int(here.group(1)) + before if here else 0
                to = re.sub(LAYER, f"decoder.layers.{layer}.", name)
                parts[to] = joined(to, folder, pieces, cut_of(name), gated)
            before += len(layers)
    return parts


def _in_groups(
    name: str, tensor: TorchTensor, args: Mapping[str, Any], version: float, tp: int
) -> TorchTensor | Spread:
    """Return queries, keys and values in the order of checkpoints since version 2: by head, then by kind.

    In version 0 the kind came first. In version 1 it came last, after the elements of a head.
    """
    if version >= 2.0 or ".linear_qkv." not in name:
        return tensor
    heads = args["num_attention_heads"] // tp

    def read() -> Tensor:
        values = tensor.read()
        rows, rest = values.shape[0] // heads // 3, values.shape[1:]
        if version < 1.0:
            return values.view(3, heads, rows, *rest).transpose(0, 1).reshape(values.shape)
        return values.view(heads, rows, 3, *rest).transpose(1, 2).reshape(values.shape)

    return Spread(tensor.shape, tensor.dtype, read)


def _distributed(folder: Path) -> tuple[dict[str, Any], dict[str, Spread], list[str]]:
    """Return the arguments, the whole tensors, and the omissions, of a checkpoint of dist_checkpointing."""
    path = folder / PLACES
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror or error}): get it again") from None
    places = plain(interpret(data, path))
    common = plain(TorchFile(folder / COMMON).value) if (folder / COMMON).is_file() else {}
    pieces: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
    try:
        for index, place in places["storage_data"].items():
            at = index.fields
            pieces.setdefault(at["fqn"], {})[tuple(at.get("offset") or ())] = place.fields
        stored = {name: plain(what) for name, what in places["state_dict_metadata"].items()}
    except (KeyError, AttributeError, TypeError):
        raise broken(path, "it does not list the places of tensors") from None
    parts: dict[str, Spread] = {}
    others: set[str] = set()
    for name, what in stored.items():
        other = re.match(OTHER_STATES, name)
        if other or "chunks" not in what or "_extra_state" in name:
            others.add(other.group(1) if other else name.rsplit(".", 1)[-1].split("/")[0])
            continue
        try:
            parts |= _layers(current_name(name), _assembled(folder, name, what, pieces.get(name, {})))
        except (KeyError, AttributeError, TypeError, IndexError):
            raise broken(path, f"it describes {name} in an unknown form") from None
    words = sorted(others | (set(common) - {"args", "checkpoint_version", "iteration"}))
    return plain(common.get("args")), parts, [f"not taken: {', '.join(words)}"] if words else []


def _assembled(folder: Path, name: str, what: Mapping[str, Any], places: Mapping[tuple[int, ...], Any]) -> Spread:
    """Return a tensor of which each place is a box in one of the files."""
    shape = tuple(what["size"])
    chunks = [(tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])) for chunk in what["chunks"]]
    dtype = _dtype(folder, what)
    if sum(int(np.prod(sizes)) for _, sizes in chunks) != int(np.prod(shape)) or any(
        at not in places for at, _ in chunks
    ):
        raise UserError(f"{folder} holds only a part of {name}: copy all of its files")

    def read() -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for at, sizes in chunks:
            values = _stored(folder, places[at])
            if tuple(values.shape) != sizes:
                raise UserError(f"a block of {name} in {folder} has shape {list(values.shape)}, not {list(sizes)}")
            whole[tuple(slice(begin, begin + size) for begin, size in zip(at, sizes, strict=True))] = values
        return whole

    return Spread(shape, dtype, read)


def _dtype(folder: Path, what: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype in the properties of a tensor, whose state is a tuple that begins with it."""
    properties = what["properties"]
    named = properties.fields.get("dtype") or (properties.state or properties.args)[0]
    found = getattr(torch, str(getattr(named, "name", "")), None)
    if not isinstance(found, torch.dtype):
        raise broken(folder / PLACES, "it names an unknown dtype")
    return found


def _stored(folder: Path, place: Mapping[str, Any]) -> Tensor:
    """Return the tensor at a place: a file of torch.save within a file."""
    name = str(place["relative_path"])
    if Path(name).name != name or place.get("transform_descriptors"):
        raise broken(folder / PLACES, f"{name} is outside of the folder or compressed")
    try:
        data = np.memmap(folder / name, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / name} can't be read ({error}): copy all of its files") from None
    value = TorchFile(folder / name, data[place["offset"] : place["offset"] + place["length"]]).value
    if not isinstance(value, TorchTensor):
        raise broken(folder / name, "a block is not a tensor")
    return value.read()


def _layers(name: str, whole: Spread) -> dict[str, Spread]:
    """Return the tensors of single layers, of a tensor that holds those of all layers."""
    if not name.startswith("decoder.layers.") or re.match(LAYER, name):
        return {name: whole}

    def of(layer: int) -> Spread:
        return Spread(whole.shape[1:], whole.dtype, lambda: whole.read()[layer])

    rest = name.removeprefix("decoder.layers.")
    return {f"decoder.layers.{layer}.{rest}": of(layer) for layer in range(whole.shape[0])}
