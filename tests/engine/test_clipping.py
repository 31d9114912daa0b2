"""Gradient clipping matches torch's."""

from __future__ import annotations

import pytest
import torch

from tests.support.oracle import gather_global, make_trainer, parameters, small_config, true_gradients


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("clip", [0.0, 0.3, 100.0])
def test_an_update_takes_the_gradients_that_torch_would(clip: float, precision: str) -> None:
    """Plain descent at a learning rate of 1 makes the update equal to the clipped gradient. (torch adds 1e-6 to the
    norm that it divides by.)
    """
    config = small_config(
        model={"layers": 1}, train={"global_batch": 2, "clip": clip, "precision": precision},
        optimizer={"name": "sgd", "lr": 1.0, "weight_decay": 0.0}, lr={"schedule": "constant"},
    )  # fmt: skip
    trainer = make_trainer(config)
    before = gather_global(parameters(trainer))
    grads = {}
    for name, g in gather_global(true_gradients(trainer)).items():
        grads[name] = torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64))
        grads[name].grad = torch.from_numpy(g.copy())
    norm = torch.nn.utils.clip_grad_norm_(grads.values(), clip or torch.inf)
    result = trainer.step()
    close = 1e-10 if precision == "fp64" else 1e-5
    assert result.grad_norm == pytest.approx(float(norm), rel=close)
    assert (float(norm) > clip) == (clip in (0.0, 0.3)), "one clips, the other doesn't"
    after = gather_global(parameters(trainer))
    for name, parameter in grads.items():
        step = before[name] - after[name]
        largest = float(parameter.grad.abs().max())  # type: ignore[union-attr]
        assert abs(step - parameter.grad.numpy()).max() <= 4e-6 * largest + close, name  # type: ignore[union-attr]
