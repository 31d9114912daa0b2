"""Adafactor and SOAP match their formulas, and the states of whole matrices lie in checkpoints by matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.engine.optim.matrices import MatrixParameter, matrices_of
from meshwright.engine.optim.owned import own_matrices
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from tests.engine.test_muon import LLAMA, MATRICES
from tests.support.oracle import make_trainer, small_config

LR, DECAY, BETAS, EPS = 0.02, 0.1, (0.9, 0.95), 1e-3
States = dict[str, Any]
Formula = Callable[[States, Tensor, int], Tensor]  # the update from the states, the gradient and the step


def adafactor(s: States, g: Tensor, step: int) -> Tensor:
    beta = 1 - step**-0.8
    squares = g * g + 1e-30
    s["row"] = beta * s.get("row", 0.0) + (1 - beta) * squares.sum(1)
    s["column"] = beta * s.get("column", 0.0) + (1 - beta) * squares.sum(0)
    u = g / (torch.outer(s["row"], s["column"]) / s["row"].sum()).sqrt()
    return u / max(1.0, float((u * u).mean().sqrt()) / 0.7)


def adafactor_elements(s: States, g: Tensor, step: int) -> Tensor:
    beta = 1 - step**-0.8
    s["v"] = beta * s.get("v", 0.0) + (1 - beta) * (g * g + 1e-30)
    return g / s["v"].sqrt()


def adam(s: States, g: Tensor, step: int, seen: Tensor | None = None) -> Tensor:
    """Return Adam's update with the mean of `g` and the mean square of `seen`."""
    (b1, b2), seen = BETAS, g if seen is None else seen
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * seen * seen
    return s["m"] / (1 - b1**step) / ((s["v"] / (1 - b2**step)).sqrt() + EPS)


def soap(s: States, g: Tensor, step: int, max_side: int = 50) -> Tensor:
    (b1, b2), bases = BETAS, []
    for side, square in (("left", g @ g.T), ("right", g.T @ g)):
        s[side] = b2 * s.get(side, 0.0) + (1 - b2) * square
        one = torch.eye(len(square), dtype=g.dtype)
        basis = s.setdefault(f"{side} basis", one)
        if step in (1, 3, 5) and len(square) <= max_side:
            for _ in range(4 if step == 1 else 1):
                basis = torch.linalg.qr((s[side] + 1e-3 * s[side].trace() / len(square) * one) @ basis).Q
        s[f"{side} basis"] = basis
        bases.append(basis)
    p, q = bases
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * (p.T @ g @ q) ** 2
    return p @ ((p.T @ s["m"] @ q) / (1 - b1**step) / ((s["v"] / (1 - b2**step)).sqrt() + EPS)) @ q.T


def trainer_of(**optimizer: Any) -> Trainer:
    return make_trainer(small_config(model=LLAMA, optimizer={"lr": LR, "eps": EPS, **optimizer}))


@pytest.mark.parametrize("settings, of_matrices, of_others", [
    ({"name": "adafactor", "adafactor": {"clip": 0.7}}, adafactor, adafactor_elements),
    ({"name": "soap", "soap": {"every": 2, "max_side": 50}}, soap, adam),
])  # fmt: skip
def test_a_rule_equals_its_formula(settings: dict[str, Any], of_matrices: Formula, of_others: Formula) -> None:
    """Queries, keys, values, gate and up are separate matrices. Five steps, and the gate is too high for a basis."""
    trainer = trainer_of(**settings)
    slots = [slot for buffer in trainer.data_parallel.buffers for slot in buffer.slots]
    wanted = {slot.name: slot.view.detach().clone() for slot in slots}
    states: dict[tuple[str, int], States] = {}
    draw = torch.Generator().manual_seed(5)
    matrices = 0
    for step in range(1, 6):
        for slot in slots:
            g = torch.randn(slot.grad.shape, generator=draw, dtype=torch.float64)
            slot.grad.copy_(g * 7.0)
            p = wanted[slot.name]
            p.mul_(1 - LR * DECAY * slot.record.decay)
            cuts = next((rows for end, rows in MATRICES.items() if slot.record.name.endswith(end)), None)
            if cuts is None:
                p.sub_(LR * of_others(states.setdefault((slot.name, 0), {}), g, step))
                continue
            for low, high in zip(cuts, cuts[1:], strict=False):
                matrices += 1
                p[low:high] -= LR * of_matrices(states.setdefault((slot.name, low), {}), g[low:high], step)
        trainer.optimizer.step(LR, divisor=7.0)
    assert matrices == 5 * 2 * 7
    for slot in slots:
        torch.testing.assert_close(slot.view.detach(), wanted[slot.name], rtol=1e-9, atol=1e-10)


def test_a_gradient_of_zeros_changes_nothing() -> None:
    for name in ("adafactor", "soap"):
        trainer = trainer_of(name=name, weight_decay=0.0)
        before = [buffer.params.clone() for buffer in trainer.data_parallel.buffers]
        for _ in range(3):
            trainer.optimizer.step(LR, divisor=1.0)
        for buffer, old in zip(trainer.data_parallel.buffers, before, strict=True):
            assert torch.equal(buffer.params, old), name


def test_states_of_a_parameter_follow_each_other_in_a_checkpoint() -> None:
    """Four experts have two matrices of 16 rows each. A rank that owns every other matrix holds every other piece."""
    experts = {"count": 4, "ffn": 16}
    trainer = make_trainer(small_config(model=LLAMA | {"bias": False, "experts": experts}, optimizer={"name": "soap"}))
    slots = [slot for buffer in trainer.data_parallel.buffers for slot in buffer.slots]
    slot = next(slot for slot in slots if slot.record.name == "layers.1.experts.gate_up.weight")
    matrices = list(matrices_of(0, MatrixParameter(0, (slot.record,))))
    assert len(matrices) == 8
    mine = [(matrix, number % 4 == 0) for number, matrix in enumerate(matrices) if number % 2 == 0]
    owned, views = own_matrices(slot, mine, lambda rows, columns: (rows, rows), torch.float64)
    assert owned.record.shape == (8 * 256,) and owned.tensor.numel() == 4 * 256
    assert [box.start[0] for box in owned.record.boxes] == [0, 512, 1024, 1536]
    assert [box.local_start[0] for box in owned.record.boxes] == [0, 256, 512, 768]
    assert [box.start[0] for box in owned.written.boxes] == [0, 1024]
    views[1].fill_(3.0)
    assert owned.tensor[256:512].eq(3.0).all() and owned.tensor.sum() == 3.0 * 256


def test_second_moments_of_adafactor_are_small() -> None:
    """The states of the blocks' matrices take less than a tenth of one moment, here of sides of 32 to 64."""
    trainer = trainer_of(name="adafactor")
    elements = sum(slot.record.numel for b in trainer.data_parallel.buffers for slot in b.slots if slot.record.matrices)
    held = sum(tensor.numel() for state in trainer.optimizer.owned() for tensor in state.tensors)
    assert 0 < held < elements / 10


BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "adafactor", "adafactor": {"clip": 0.0}}, "optimizer.adafactor.clip=0.0 must be greater than zero"),
    ({"name": "soap", "soap": {"every": 0}}, "every=0 must be greater than zero"),
]


@pytest.mark.parametrize("optimizer, said", BAD)
def test_mistakes_are_one_sentence(optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        small_config(optimizer=optimizer)
