"""Products with adapters in compiled blocks, with gradients and without, as in the first pass of a recomputed block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.engine.compiling import compile_blocks
from tests.support.oracle import EXACT, gather_global, make_trainer, small_config, true_gradients, worst

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "layers": 2, "kv_heads": 2}


def config_of(mode: str, **tune: Any) -> Any:
    return small_config(
        model=LLAMA, tune={"kind": "lora", "rank": 3, **tune}, recompute={"mode": mode}, run={"device": "cpu"}
    )


@pytest.mark.parametrize("mode", ["full", pytest.param("none", marks=pytest.mark.wide)])
def test_blocks_with_adapters_are_traced(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile sees a graph of each block, and generates no code for it here."""
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: plain(self, **how, backend="aot_eager"))
    compiled_equals_eager(config_of(mode))


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("tune", [{}, {"kind": "dora"}], ids=["lora", "dora"])
def test_compiled_blocks_with_adapters(mode: str, tune: dict[str, Any]) -> None:
    compiled_equals_eager(config_of(mode, **tune))


def compiled_equals_eager(config: Any) -> None:
    torch._dynamo.reset()
    eager, compiled = make_trainer(config), make_trainer(config)
    for module in compiled.modules:
        compile_blocks(module)
    for _ in range(2):  # the first step trains only one factor, since the other is zero
        for trainer in (eager, compiled):
            trainer.step()
    error, name = worst(true_gradients(compiled), gather_global(true_gradients(eager)))
    assert error <= EXACT, name
