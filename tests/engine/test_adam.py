"""The flat optimizers match torch's, and the fp32 masters match a loop written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from meshwright.config.optimizer import OptimizerConfig
from meshwright.engine.optim.flat import FlatOptimizer
from meshwright.engine.sharding.buffers import FlatBuffer, State, build_buffers
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.spec.traffic.placement import Split
from tests.support.oracle import make_trainer, small_config

RATES = (1e-2, 3e-2, 2e-2, 5e-3)


class Small(nn.Module):
    """Matrices, which decay, mixed with vectors, which do not, of sizes that leave gaps in the buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        shapes: list[tuple[int, ...]] = [(5, 7), (3,), (4, 4), (2, 3, 5), (17,), (1, 1)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in shapes)


def drawn_gradients(module: nn.Module, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    sized = enumerate(module.parameters(), start=-2)
    return [torch.randn(p.shape, generator=draw, dtype=torch.float64) * 10.0**i for i, p in sized]


def flat(module: nn.Module, config: OptimizerConfig) -> tuple[list[FlatBuffer], FlatOptimizer]:
    buffers, _ = build_buffers([module], lambda axes: Split(), bucket_mib=2e-4)
    assert any(len(buffer.buckets) > 1 for buffer in buffers)
    return buffers, FlatOptimizer(buffers, config)


def fill(buffers: Sequence[FlatBuffer], module: nn.Module, gradients: Sequence[Tensor], scale: float) -> None:
    by_parameter = dict(zip(map(id, module.parameters()), gradients, strict=True))
    for buffer in buffers:
        for slot in buffer.slots:
            slot.grad.copy_(by_parameter[id(slot.parameter)] * scale)


def torch_groups(module: nn.Module, decay: float) -> list[dict[str, object]]:
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
def test_adamw_equals_torch(dtype: torch.dtype, close: float, decay: float) -> None:
    """They agree over several steps with a changing learning rate, whatever factor the gradients are stored with."""
    config = OptimizerConfig(betas=(0.85, 0.97), eps=1e-7, weight_decay=decay)
    ours, theirs = Small(dtype), Small(dtype)
    buffers, optimizer = flat(ours, config)
    reference = torch.optim.AdamW(torch_groups(theirs, decay), betas=config.betas, eps=config.eps)  # type: ignore[arg-type]
    for step, lr in enumerate(RATES):
        gradients = drawn_gradients(ours, step)
        fill(buffers, ours, gradients, scale=37.5)
        optimizer.step(lr, divisor=37.5)
        for p, g in zip(theirs.parameters(), gradients, strict=True):
            p.grad = g.to(dtype)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close)
    assert optimizer.updates == len(RATES)


def test_sgd_equals_its_formula() -> None:
    config = OptimizerConfig(name="sgd", weight_decay=0.25)
    module = Small(torch.float64)
    expected = [p.detach().clone() for p in module.parameters()]
    buffers, optimizer = flat(module, config)
    for step, lr in enumerate(RATES):
        gradients = drawn_gradients(module, step)
        fill(buffers, module, gradients, scale=4.0)
        optimizer.step(lr, divisor=4.0)
        for p, g in zip(expected, gradients, strict=True):
            p.mul_(1.0 - lr * (0.25 if p.dim() > 1 else 0.0)).sub_(lr * g)
    for a, b in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_has_masters(dtype: torch.dtype) -> None:
    """Weights are the rounded masters. Masters follow AdamW in float32 and so retain what rounding would lose."""
    config = OptimizerConfig(weight_decay=0.1)
    module = Small(dtype)
    masters = [p.detach().float() for p in module.parameters()]
    firsts, seconds = ([torch.zeros_like(p) for p in masters] for _ in range(2))
    buffers, optimizer = flat(module, config)
    (b1, b2), lr = config.betas, 1e-5
    for step in range(1, 21):
        gradients = [g.float() for g in drawn_gradients(module, step % 3)]
        fill(buffers, module, gradients, scale=1.0)
        optimizer.step(lr, divisor=1.0)
        for p, g, m, v in zip(masters, gradients, firsts, seconds, strict=True):
            p.mul_(1.0 - lr * (config.weight_decay if p.dim() > 1 else 0.0))
            m.mul_(b1).add_(g, alpha=1.0 - b1)
            v.mul_(b2).add_(g * g, alpha=1.0 - b2)
            p.sub_(lr / (1.0 - b1**step) * m / (v.sqrt() / math.sqrt(1.0 - b2**step) + config.eps))
    kept = {id(slot.parameter): (state, slot) for state in optimizer.states for slot in state.buffer.slots}
    lost = 0
    for parameter, expected in zip(module.parameters(), masters, strict=True):
        state, slot = kept[id(parameter)]
        found = State("param", state.buffer, state.master).values(slot, 0, parameter.numel())
        master = as_tensor(found).view_as(parameter)
        assert state.buffer.grads.dtype == master.dtype == torch.float32
        torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(parameter.detach(), master.to(dtype))
        lost += int((parameter.detach().float() != master).sum())
    assert lost > 0, "the test's steps are too coarse to tell masters from weights"


def test_padding_stays_zero() -> None:
    """Gaps between parameters stay zero after any update, because norms over whole ranges rely on it."""
    module = Small(torch.float32)
    buffers, optimizer = flat(module, OptimizerConfig())
    for step, lr in enumerate(RATES):
        fill(buffers, module, drawn_gradients(module, step), scale=1.0)
        optimizer.step(lr, divisor=2.0)
    for buffer in buffers:
        gaps = torch.ones(buffer.size, dtype=torch.bool)
        for slot in buffer.slots:
            gaps[slot.start : slot.stop] = False
        assert gaps.any() and not buffer.params[gaps].any() and not buffer.grads[gaps].any()


@pytest.mark.parametrize("global_batch", [1, 4])
@pytest.mark.parametrize("stage", [0, 3])
def test_joined_ranges_hold_the_same_weights(stage: int, global_batch: int) -> None:
    """The spans that a device updates in one pass cover every element once, with the same decay as the separate
    ranges.
    """
    sections = {"train": {"global_batch": global_batch}, "zero": {"stage": stage}, "comm": {"bucket_mib": 0.01}}
    for state in make_trainer(small_config(**sections)).optimizer.states:
        expected, found = {}, {}
        for span in state._ranges:
            expected |= dict.fromkeys(range(span.bucket.start + span.low, span.bucket.start + span.high), span.decay)
        for span in state._spans():
            decays = span.decay
            for at in range(span.low, span.high):
                decays ^= at in span.flips
                assert found.setdefault(span.bucket.start + at, decays) == decays
        assert found == expected
        assert len(state._spans()) == (1 if state._adjacent else len(state.buffer.buckets)) < len(state._ranges)
