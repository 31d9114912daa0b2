"""What a module that is not ours keeps for backward, measured: its forward runs on tensors that have shapes but no
memory, and what autograd saves is counted block by block."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = 64  # of the sequence that is measured
ELEMENT = torch.bfloat16.itemsize


class KeptElements(NamedTuple):
    """Elements kept for each token, in the model's precision: those of the width of the residual stream, which every tp
    rank holds, and the others, which tp divides."""

    whole: float = 0.0
    cut: float = 0.0


def kept_elements(kind: Any, config: Any, path: str) -> list[KeptElements]:
    """Returns what each block keeps; nothing where the forward of such a model can't run without values."""
    saved: dict[int, tuple[int, Tensor]] = {}
    at = [-1]  # the block that runs
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            module: nn.Module = kind._from_config(config, dtype=torch.bfloat16)
            blocks = list(module.get_submodule(path).children())
            weights = {p.untyped_storage()._cdata for p in module.parameters()}
            for n, block in enumerate(blocks):
                block.register_forward_pre_hook(lambda *_, n=n: at.__setitem__(0, n))
                block.register_forward_hook(lambda *_: at.__setitem__(0, -1))

            def note(x: Tensor) -> Tensor:
                key = x.untyped_storage()._cdata
                if key not in weights and x.dtype != torch.bool:  # masks of this length are not made in a run
                    saved.setdefault(key, (at[0], x))
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                module(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    except Exception:  # whatever another program's code can't do without values
        return []
    found: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for block_number, x in saved.values():
        elements = x.untyped_storage().nbytes() / TOKENS / ELEMENT
        found[block_number][x.numel() != TOKENS * config.get_text_config().hidden_size] += elements
    return [KeptElements(*found[n]) for n in range(len(blocks))]
