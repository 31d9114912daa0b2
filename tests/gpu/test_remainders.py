"""Masters in two halves on a GPU: the kernels match masters in full and the plain definition, and checkpoints hold full
masters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.config.optimizer import OptimizerConfig
from meshwright.engine.sharding.remainders import as_tensor, halve, join
from meshwright.record import checkpoint_format as fmt
from tests.engine.test_remainders import patterns
from tests.gpu.test_fast_paths import CUDA, LLAMA, gpu_trainer
from tests.support.oracle import load_into, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_masters_of_weights_and_remainders() -> None:
    """The same pass over masters in two halves gives the same masters and moments bit for bit, and the same weights
    except for ties.
    """
    from meshwright.kernels.adamw import adamw

    c, size = OptimizerConfig(), 2**20 + 48
    torch.manual_seed(2)
    weights = 0.02 * torch.randn(size, device=CUDA, dtype=torch.bfloat16)
    master, other = weights.float(), weights.clone()
    remainders = torch.zeros(size, dtype=torch.int16, device=CUDA)
    (first, second), (first2, second2) = ([torch.zeros_like(master) for _ in range(2)] for _ in range(2))
    for step in range(1, 6):
        grad = torch.randn(size, device=CUDA)
        for update in (1.0, 0.0):
            numbers = torch.tensor([update, 0.25, *(1 - b**step for b in c.betas)], device=CUDA)
            how = {"lr": 1e-3, "betas": (c.betas[0], c.betas[1]), "eps": c.eps, "decay": c.weight_decay}
            adamw(master, grad, first, second, other, numbers, **how)  # type: ignore[arg-type]
            adamw(remainders, grad, first2, second2, weights, numbers, **how)  # type: ignore[arg-type]
            assert torch.equal(first, first2) and torch.equal(second, second2)
            assert torch.equal(join(weights, remainders), master)
        ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(weights[~ties], other[~ties]) and ties.sum() < 100
    assert (remainders != 0).float().mean() > 0.9


def test_halves_are_those_of_the_plain_definition() -> None:
    values = patterns().view(torch.float32)
    weights, remainders = (half.cpu() for half in halve(values.to(CUDA)))
    plain_weights, plain_remainders = halve(values)
    assert torch.equal(weights.view(torch.int16), plain_weights.view(torch.int16))
    assert torch.equal(remainders, plain_remainders)
    joined = join(weights.to(CUDA), remainders.to(CUDA)).cpu()
    assert torch.equal(joined.view(torch.int32), join(weights, remainders).view(torch.int32))


@pytest.mark.parametrize("sections", [{}, {"optimizer": {"state_dtype": "bf16"}}, {"train": {"grad_dtype": "bf16"}}])
def test_a_checkpoint_holds_masters_in_full(sections: dict[str, Any], tmp_path: Path) -> None:
    """It is written from the two halves while the next step runs, and read again bit for bit, even into masters in
    full.
    """
    train = {"precision": "bf16", "compile": "false"} | sections.get("train", {})
    more = {"model": LLAMA, "train": train, "optimizer": sections.get("optimizer", {})}
    trainer, again = gpu_trainer(small_config(**more)), gpu_trainer(small_config(**more))
    full = gpu_trainer(small_config(**more, zero={"offload": {"optimizer": "cpu"}}))
    for _ in range(3):
        trainer.step()
    kept = [as_tensor(share).cpu().clone() for state in trainer.optimizer.states for share in state.master]
    saver = Saver(trainer, tmp_path, asynchronous=True, busy="wait", keep=0)
    saver.save()
    trainer.step()
    saver.wait_for_commit()
    for other in (again, full):
        load_into(other, Reader(fmt.find_checkpoint(str(tmp_path))))
        found = [as_tensor(share).cpu() for state in other.optimizer.states for share in state.master]
        assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
    assert again.step().loss == pytest.approx(full.step().loss, rel=1e-4)
