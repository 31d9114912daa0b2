"""States and weights that live off the device, and recomputed blocks, train like those that do not, on a GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.plan.job import checked_job
from meshwright.plan.memory import rank_memory
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
@pytest.mark.parametrize(
    "recompute", [{"mode": "selective"}, {"mode": "full"}, {"mode": "every:2"}, {"pieces": 4},
                  {"mode": "full", "pieces": 3, "offload": True}], ids=str,
)  # fmt: skip
def test_recomputation_changes_no_loss(recompute: dict[str, Any], compiled: str) -> None:
    found, plain = losses(compiled, recompute=recompute), losses(compiled)
    assert found == pytest.approx(plain, rel=2e-3), (found, plain)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize(
    "more",
    [
        {"recompute": {"mode": "full"}},
        {"recompute": {"mode": "every:2"}, "pipeline": {"schedule": "gpipe"}},
        {"recompute": {"mode": "full"}, "pipeline": {"schedule": "interleaved"}, "layout": {"chunks": 2}},
    ],
    ids=str,
)
def test_activations_in_host_memory_change_no_bit(more: dict[str, Any], compiled: str) -> None:
    away = {**more, "recompute": {**more["recompute"], "offload": True}}
    assert losses(compiled, **away) == losses(compiled, **more)


def test_activations_in_host_memory_leave_the_device() -> None:
    """The peak falls by the inputs that left, less the one that is brought back ahead, as planned."""
    model = LLAMA | {"layers": 12, "hidden": 512, "heads": 8, "kv_heads": 4, "seq": 4096}
    train = {"precision": "bf16", "compile": "false", "global_batch": 2, "micro_batch": 1}
    peaks, planned = [], []
    for offload in (False, True):
        config = small_config(model=model, train=train, recompute={"mode": "full", "offload": offload})
        # The caches of an earlier trainer may still hold memory.
        before = torch.cuda.memory_allocated()
        trainer = gpu_trainer(config)
        trainer.step()
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        memory = rank_memory(checked_job(config, 1), 0)
        planned.append(memory.peak)
        if offload:
            host = trainer.ctx.parallel.offload
            assert host is not None and host.bytes == 0 and host.most_bytes == memory.offloaded > 0
            assert all(buffer.is_pinned() for free in host._free.values() for buffer in free)
        del trainer
        gc.collect()
    stream = 4096 * 512 * 2
    assert peaks[0] - peaks[1] == pytest.approx(planned[0] - planned[1], abs=stream)
    assert planned[0] - planned[1] > 8 * stream
