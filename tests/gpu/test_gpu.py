"""A GPU gives the CPU's gradients, eager and compiled, and trains in half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwright.cli.dryrun import compare
from meshwright.config.rules import check
from meshwright.device import Device, upload
from meshwright.dryrun.run_rank import run_rank
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.plan.job import job_of
from meshwright.plan.rank import planned_rank
from meshwright.run.pretrain import build_modules
from tests.support.oracle import Made, gather_global, make_trainer, small_config, true_gradients, worst
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "kv_heads": 2, "bias": False, "ffn": 48}


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Reset the compiler. Every test compiles other blocks, and torch gives up on a function that it compiles too
    often.
    """
    torch._dynamo.reset()


def gpu_trainer(config: Any, rank: int = 0, world: int = 1) -> Trainer:
    check(config, world)
    ctx = build_context(config, rank, world, Device.choose("cuda", rank))
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, Made(config.model.vocab, config.model.seq))


def on_cpu(pairs: list[tuple[Any, torch.Tensor]]) -> list[tuple[Any, torch.Tensor]]:
    return [(record, grad.cpu()) for record, grad in pairs]


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_the_cpus(model: dict[str, Any], compiled: bool) -> None:
    whole = gather_global(true_gradients(make_trainer(small_config(model=model))))
    trainer = gpu_trainer(small_config(model=model, train={"compile": compiled}))
    error, name = worst(on_cpu(true_gradients(trainer)), whole)
    assert error <= 1e-10, name


def shared_gpu(rank: int, world: int, layout: dict[str, Any], whole: Any) -> tuple[float, str]:
    config = small_config(model=LLAMA, layout=layout, train={"compile": "false"}, comm={"backend": "gloo"})
    return worst(on_cpu(true_gradients(gpu_trainer(config, rank, world))), whole)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=["dp2", "tp2"])
def test_ranks_that_share_a_gpu(layout: dict[str, Any]) -> None:
    """The ranks use Gloo, which sends no CUDA tensors from rank to rank, so there is no pipeline here."""
    whole = gather_global(true_gradients(make_trainer(small_config(model=LLAMA))))
    assert max(error for error, _ in run_ranks(2, shared_gpu, layout, whole)) <= 1e-10


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_training_lowers_the_loss(precision: str) -> None:
    model = LLAMA | {"hidden": 128, "ffn": 256, "seq": 64}
    config = small_config(
        model=model, train={"precision": precision, "compile": "true", "steps": 30, "micro_batch": 4},
        optimizer={"lr": 3e-3}, lr={"warmup": 5},
    )  # fmt: skip

    class Repeated(Made):
        def sample(self, n: int) -> dict[str, Any]:
            return super().sample(n % 8)

    ctx = build_context(config, 0, 1, Device.choose("cuda"))
    data = Repeated(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, data)
    losses = [trainer.step().loss for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_of_a_world_that_is_not_there(stage: int) -> None:
    """`meshwright dryrun --device cuda` counts the planned calls and bytes, and times the step."""
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 4000, "seq": 512}
    train = {"precision": "bf16", "global_batch": 16, "micro_batch": 2, "compile": False}
    config = small_config(
        model=model, train=train, layout={"tp": 2, "pp": 2}, zero={"stage": stage}, comm={"bucket_mib": 4}
    )
    for rank in (0, 7):
        one = compare(rank, run_rank(config, 8, rank, Device.choose("cuda")), planned_rank(job_of(config, 8), rank))
        assert one["equal"] and one["step_s"] > 0, one
        assert one["most"]["peak"]["ran"] > sum(pair["ran"] for pair in one["bytes"].values())


def test_uploads_of_views_survive_their_memory() -> None:
    """A view into a pinned tensor is uploaded while the device is busy, and its memory is reused at once."""
    device = Device.choose("cuda")
    wanted, junk = np.arange(32), torch.full((64,), -1)
    arrived = []
    for _ in range(8):
        pack = device.pin(torch.from_numpy(np.concatenate([np.zeros(32, np.int64), wanted])))
        torch.cuda._sleep(50_000_000)  # Cycles. The copies below wait behind this.
        arrived.append(upload(torch.from_numpy(pack.numpy()[32:]), device.torch))
        del pack
        device.pin(junk)
    for x in arrived:
        assert x.tolist() == wanted.tolist()
