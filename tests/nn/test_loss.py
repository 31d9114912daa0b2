"""Cross entropy over a vocabulary cut over tp, against torch's over the whole one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.nn.loss import cross_entropy_sum
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import Streams
from tests.support.ranks import run_ranks

TOKENS = 12
# name -> (vocabulary, factor of the logits); with tp = 4 ranks hold 3 columns of 9, the last none at all.
KINDS = {"even": (16, 3.0), "padded": (13, 3.0), "rank-without-columns": (9, 3.0), "extreme": (13, 1e4)}
PADDING = 7e3  # what stands in padding columns must not matter


def problem(kind: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole logits, labels and mask."""
    vocab, factor = KINDS[kind]
    draw = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(TOKENS, vocab, generator=draw, dtype=torch.float64) * factor).to(dtype)
    labels = torch.randint(0, vocab, (TOKENS,), generator=draw)
    labels[:2] = torch.tensor([0, vocab - 1])
    mask = (torch.rand(TOKENS, generator=draw) < 0.7).long()
    return logits, labels, mask


def parallel_of(mesh: Mesh) -> Parallel:
    cpu = torch.device("cpu")
    return Parallel(mesh.tp, False, torch.float64, cpu, Streams(1, 0, max(0, mesh.tp.index), cpu))


def cut(logits: torch.Tensor, tp: int, index: int) -> torch.Tensor:
    """A rank's columns, padded to the same number on every rank."""
    width = -(-logits.shape[1] // tp)
    whole = F.pad(logits, (0, width * tp - logits.shape[1]), value=PADDING)
    return whole[:, index * width : (index + 1) * width].clone().requires_grad_()


def on_rank(rank: int, world: int, kinds: list[str], dtype: torch.dtype) -> list[tuple[float, Any]]:
    """The loss and this rank's gradient of 2.5 times it."""
    parallel = parallel_of(Mesh(Layout(world=world, tp=world), rank))
    found = []
    for kind in kinds:
        logits, labels, mask = problem(kind, dtype)
        mine = cut(logits, world, rank)
        loss = cross_entropy_sum(mine, labels, mask, logits.shape[1], parallel)
        (2.5 * loss).backward()
        assert mine.grad is not None and mine.grad.dtype == dtype
        found.append((loss.item(), mine.grad.double().numpy()))
    return found


@cache
def found(tp: int, dtype: torch.dtype = torch.float64) -> list[list[tuple[float, Any]]]:
    kinds = list(KINDS)
    return [on_rank(0, 1, kinds, dtype)] if tp == 1 else run_ranks(tp, on_rank, kinds, dtype)


def expected(kind: str, dtype: torch.dtype = torch.float64) -> tuple[float, torch.Tensor]:
    logits, labels, mask = problem(kind, dtype)
    logits = logits.double().requires_grad_()
    loss = (F.cross_entropy(logits, labels, reduction="none") * mask).sum()
    (2.5 * loss).backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_torch(kind: str, tp: int) -> None:
    loss, grad = expected(kind)
    ranks = [rank[list(KINDS).index(kind)] for rank in found(tp)]
    assert all(value == pytest.approx(loss, rel=1e-13) for value, _ in ranks)
    whole = torch.from_numpy(_joined(ranks))
    torch.testing.assert_close(whole[:, : grad.shape[1]], grad, rtol=1e-12, atol=1e-14)
    assert not whole[:, grad.shape[1] :].any(), "padding columns get no gradient"
    _, _, mask = problem(kind)
    assert not whole[mask == 0].any(), "masked tokens get no gradient"


def _joined(ranks: list[tuple[float, Any]]) -> Any:
    return np.concatenate([grad for _, grad in ranks], axis=1)


@pytest.mark.parametrize("tp", [1, 2])
def test_low_precision_logits_are_summed_in_float32(tp: int) -> None:
    loss, grad = expected("padded", torch.bfloat16)
    ranks = [rank[list(KINDS).index("padded")] for rank in found(tp, torch.bfloat16)]
    assert all(value == pytest.approx(loss, rel=1e-5) for value, _ in ranks)
    whole = torch.from_numpy(_joined(ranks))
    torch.testing.assert_close(whole[:, : grad.shape[1]], grad, rtol=2**-8, atol=1e-6)


def test_all_masked_is_zero_and_so_is_the_gradient() -> None:
    logits, labels, mask = problem("padded")
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, labels, torch.zeros_like(mask), 13, parallel_of(Mesh(Layout(world=1), 0)))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()


def test_agrees_with_finite_differences() -> None:
    logits, labels, mask = problem("padded")
    parallel = parallel_of(Mesh(Layout(world=1), 0))
    logits = F.pad(logits, (0, 3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, labels, mask, 13, parallel), (logits,))
