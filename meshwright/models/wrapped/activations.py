"""Measures the activations that another program's module saves for backward.

Its forward runs on fake tensors, which have shapes but no memory, and the tensors that autograd saves are counted for
each block.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = 64  # The length of the sequence that is measured.
ELEMENT = torch.bfloat16.itemsize


class SavedElements(NamedTuple):
    """Elements saved for backward per token, in the model's precision.

    `whole` counts tensors as wide as the residual stream, which every tp rank holds. `cut` counts all others, which tp
    divides.
    """

    whole: float = 0.0
    cut: float = 0.0


def saved_elements(kind: Any, config: Any, path: str) -> list[SavedElements]:
    """Return the elements that each block saves, or nothing if the model's forward fails on tensors without values."""
    saved: dict[int, tuple[int, Tensor]] = {}
    running_block = [-1]  # -1 stands for everything outside of the blocks.
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            module: nn.Module = kind._from_config(config, dtype=torch.bfloat16)
            blocks = list(module.get_submodule(path).children())
            weights = {p.untyped_storage()._cdata for p in module.parameters()}
            for n, block in enumerate(blocks):
                block.register_forward_pre_hook(lambda *_, n=n: running_block.__setitem__(0, n))
                block.register_forward_hook(lambda *_: running_block.__setitem__(0, -1))

            def note(x: Tensor) -> Tensor:
                # Views of one storage count once. Boolean masks of this length are not made in a run.
                key = x.untyped_storage()._cdata
                if key not in weights and x.dtype != torch.bool:
                    saved.setdefault(key, (running_block[0], x))
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                module(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    except Exception:
        # Another program's code may fail in any way on tensors without values.
        return []
    counted: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for block_number, x in saved.values():
        elements = x.untyped_storage().nbytes() / TOKENS / ELEMENT
        is_cut = x.numel() != TOKENS * config.get_text_config().hidden_size
        counted[block_number][is_cut] += elements
    return [SavedElements(*counted[n]) for n in range(len(blocks))]
