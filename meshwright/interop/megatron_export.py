"""Write a model as a checkpoint of Megatron-LM in its classic format: a file for each tensor- and pipeline-parallel
rank."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf_files import PRECISION_CODES
from meshwright.checkpoint.merged import config_in, open_weights
from meshwright.checkpoint.tensor_file import TORCH_DTYPES
from meshwright.errors import UserError, divisors, either
from meshwright.interop.hf import chunks_of, planned_tensors, written_aside
from meshwright.interop.megatron import FILES, LAYER, TRACKER
from meshwright.record import checkpoint_format as fmt
from meshwright.spec.model.megatron import FAMILY, args_of, cut_of

# Megatron-LM pads the vocabulary to a multiple of this times tp, unless --make-vocab-size-divisible-by says otherwise.
VOCAB_MULTIPLE = 128
# The folder of weights without an iteration, from which Megatron-LM takes no optimizer states.
RELEASE = "release"
VERSION = 3.0


def export_megatron(checkpoint: Path, to: Path, dtype: str, tp: int, pp: int) -> dict[str, Any]:
    """Write a checkpoint's weights as `to` and return a summary. All tensors of one stage are in memory at once."""
    reader = open_weights(checkpoint)
    model = config_in(reader.index).model
    args = args_of(model)
    counts = {"heads": tp, "kv_heads": tp, "ffn": tp, "layers": pp}
    for key, count in counts.items():
        wanted = getattr(model, key)
        if count < 1 or wanted % count:
            axis = "--pp" if key == "layers" else "--tp"
            raise UserError(f"{axis} {count} does not divide model.{key}={wanted}: try {either(divisors(wanted))}")
    multiple = VOCAB_MULTIPLE * tp
    padded = -(-model.vocab // multiple) * multiple
    precision = TORCH_DTYPES[PRECISION_CODES[dtype]] if dtype else torch.float32
    args |= {
        "vocab_size": model.vocab, "padded_vocab_size": padded, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "params_dtype": precision, "iteration": 0,
    }  # fmt: skip
    planned = list(planned_tensors(reader, FAMILY, model, {}, dtype))
    per = model.layers // pp
    total = 0
    files = []
    with written_aside(to) as aside:
        for stage in range(pp):
            whole: dict[str, Tensor] = {}
            for each in planned:
                for name in _names(each.entry.name, stage, pp, per, model.tied_embeddings):
                    # Whole tensors come in pieces of rows.
                    whole[name] = _padded(name, torch.cat(list(chunks_of(reader, [each]))), padded)
            for rank in range(tp):
                held = {name: _part(name, tensor, args, tp, rank) for name, tensor in whole.items()}
                total += sum(tensor.nbytes for tensor in held.values())
                at = aside / RELEASE / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
                at.mkdir(parents=True)
                state = {"model": held, "args": Namespace(**args), "checkpoint_version": VERSION, "iteration": 0}
                torch.save(state, at / FILES[0])
                files.append(str((at / FILES[0]).relative_to(aside)))
        fmt.write_whole(aside / TRACKER, RELEASE.encode())
    return {
        "family": "megatron", "step": reader.index.step, "tensors": len(planned), "bytes": total, "files": files,
        "beside": [],
    }  # fmt: skip


def _names(name: str, stage: int, pp: int, per: int, tied: bool) -> list[str]:
    """Return the names that a tensor has on a stage: none if it is on another. Layers are numbered within the stage."""
    if found := re.match(LAYER, name):
        layer = int(found.group(1)) - stage * per
        return [re.sub(LAYER, f"decoder.layers.{layer}.", name)] if 0 <= layer < per else []
    first, last = stage == 0, stage == pp - 1
    is_held = first if name.startswith("embedding.") else last
    names = [name] if is_held else []
    # The last stage has its own copy of a tied embedding.
    if tied and last and not first and name == "embedding.word_embeddings.weight":
        names.append("output_layer.weight")
    return names


def _padded(name: str, tensor: Tensor, rows: int) -> Tensor:
    if not re.fullmatch(r"(embedding\.word_embeddings|output_layer)\.weight", name):
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), tensor.shape[1])])


def _part(name: str, tensor: Tensor, args: Mapping[str, Any], tp: int, rank: int) -> Tensor:
    """Return the part of a tensor that a rank holds, as a tensor that shares no memory."""
    dim = cut_of(name)
    if dim is None:
        return tensor
    gated = args["swiglu"] and ".linear_fc1." in name
    halves = tensor.chunk(2) if gated else [tensor]
    return torch.cat([half.chunk(tp, dim)[rank] for half in halves], dim).clone()
