"""Write a checkpoint of an untrained model. The exact twins of fine-tuning recipes adapt it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint import tensor_file
from meshwright.checkpoint.tensor_file import TensorEntry
from meshwright.config.sections import ModelConfig
from meshwright.interop.hf import WEIGHTS_FILE, config_of, written_aside
from meshwright.nn.parallel import draw_parameter
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import Index, SavedBlock, blocks_of
from meshwright.spec.layout.params import slices_of
from meshwright.spec.model.description import describe
from meshwright.spec.model.part import SINGLE_RANK


def write_first_weights(model: ModelConfig, to: Path, seed: int) -> None:
    """Write the initial weights of a run with this seed, in float32, as a checkpoint without optimizer states."""
    records = {record.name: record for record in describe(model).records(SINGLE_RANK).values()}
    index = Index(step=0, consumed=0, world=1, config=config_of(model))
    for name, record in records.items():
        index.tensors[f"param/{name}"] = {"shape": list(record.shape), "dtype": "float32"}
        for start, shape in blocks_of(record.shape, 4):
            number = str(len(index.blocks))
            index.blocks.append(SavedBlock(f"param/{name}", start, shape, WEIGHTS_FILE, number, 0))
    entries = [TensorEntry(block.key, "F32", block.shape) for block in index.blocks]

    def values() -> Iterator[Tensor]:
        # Blocks of a tensor follow each other, so one whole tensor is in memory at a time.
        drawn, whole = "", torch.empty(0)
        for block in index.blocks:
            record = records[block.tensor.removeprefix("param/")]
            if record.name != drawn:
                drawn, whole = record.name, torch.empty(record.shape)
                draw_parameter(record, whole, seed)
            yield whole[slices_of(block.start, block.shape)].contiguous()

    with written_aside(to) as aside:
        sums = tensor_file.write_tensors(aside / WEIGHTS_FILE, entries, values())
        index.files[WEIGHTS_FILE] = (aside / WEIGHTS_FILE).stat().st_size
        index.blocks = [block._replace(crc32=crc) for block, crc in zip(index.blocks, sums, strict=True)]
        fmt.write_index(aside, index)
