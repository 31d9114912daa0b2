"""MLPs in pieces over tokens: no tensor is as large as tokens x ffn, and weights get one contribution per
micro-batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.oracle import make_trainer, small_config, true_gradients

SEQ, FFN = 128, 512
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False},
    "gelu with biases": {"mlp": "gelu"},
}


class Largest(TorchDispatchMode):
    """A mode that records the elements of the largest tensor created while it is active."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


def step(kind: str, **recompute: Any) -> tuple[int, list[Tensor], set[int]]:
    """Return the size of the largest tensor of forward and backward, all gradients, and the numbers of contributions
    that parameters got.
    """
    model = {"layers": 1, "hidden": 16, "heads": 2, "seq": SEQ, "ffn": FFN, "vocab": 20, **KINDS[kind]}
    trainer = make_trainer(small_config(model=model, train={"global_batch": 2}, recompute=recompute))
    with Largest() as watch:
        found = [grad.clone() for _, grad in true_gradients(trainer)]
    counts = {slot.sink.contributions for buffer in trainer.data_parallel.buffers for slot in buffer.slots}
    return watch.most, found, counts


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_is_as_large_as_all_tokens_inner_features(kind: str) -> None:
    whole, plain, counts = step(kind)
    most, found, same = step(kind, pieces=16)
    assert whole >= SEQ * FFN > most
    # There are two micro-batches, and the shared embedding gets two contributions from each.
    assert counts == same == {2, 4}
    for a, b in zip(plain, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-16)
