"""States and weights that live off the device, and recomputed blocks, train like those that don't. On a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_fast_paths import LLAMA, gpu_trainer
from tests.support.oracle import small_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STEPS = 4


def losses(compiled: str = "false", **sections: Any) -> list[float]:
    torch._dynamo.reset()
    train = {"precision": "bf16", "compile": compiled, "global_batch": 4, "micro_batch": 2}
    trainer = gpu_trainer(small_config(model=LLAMA, train=train, **sections))
    return [trainer.step().loss for _ in range(STEPS)]


@pytest.mark.parametrize("optimizer", ["none", "cpu", "disk"])
@pytest.mark.parametrize("params", ["none", "cpu", "disk"])
def test_offload_changes_no_loss(optimizer: str, params: str, tmp_path: Path) -> None:
    offload = {"optimizer": optimizer, "params": params, "path": str(tmp_path), "buffer_mib": 0.05}
    plain = losses()
    found = losses(zero={"stage": 3, "offload": offload})
    assert found == pytest.approx(plain, rel=1e-5), (found, plain)
    assert found[-1] != found[0]


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("mode", ["selective", "full", "every:2"])
def test_recomputation_changes_no_loss(mode: str, compiled: str) -> None:
    found, plain = losses(compiled, recompute={"mode": mode}), losses(compiled)
    assert found == pytest.approx(plain, rel=2e-3), (found, plain)
