"""Cross entropy over a vocabulary that is cut over tp equals torch's over the whole one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.comm.mesh import Mesh
from meshwright.nn import loss as loss_module
from meshwright.nn.linear import Linear
from meshwright.nn.loss import Vocabulary, loss_and_grad_, output_loss
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import Streams
from meshwright.nn.weight_grad import SinkTable
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Init, whole
from tests.support.ranks import run_ranks

TOKENS = 12
# Name -> (vocabulary, factor of the logits). With tp = 4, ranks hold 3 columns of 9, and the last one holds none.
KINDS = {"even": (16, 3.0), "padded": (13, 3.0), "rank-without-columns": (9, 3.0), "extreme": (13, 1e4)}
PADDING = 7e3  # The values in padding columns must not matter.


def problem(kind: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return whole logits, labels and mask."""
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
    """Return a rank's columns, padded to the same number on every rank."""
    width = -(-logits.shape[1] // tp)
    whole = F.pad(logits, (0, width * tp - logits.shape[1]), value=PADDING)
    return whole[:, index * width : (index + 1) * width].clone()


def on_rank(rank: int, world: int, kinds: list[str], dtype: torch.dtype) -> list[tuple[float, Any]]:
    """Return the loss, and this rank's gradient of 2.5 times the loss."""
    parallel = parallel_of(Mesh(Layout(world=world, tp=world), rank))
    found = []
    for kind in kinds:
        logits, labels, mask = problem(kind, dtype)
        mine = cut(logits, world, rank)
        vocabulary = Vocabulary.of(mine.shape[1], logits.shape[1], parallel.tp, parallel.host)
        loss = loss_and_grad_(mine.clone(), labels, mask, None, vocabulary).sum()
        again = loss_and_grad_(mine, labels, mask, 2.5, vocabulary).sum()
        assert loss == again and mine.dtype == dtype
        found.append((loss.item(), mine.double().numpy()))
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
    vocabulary = Vocabulary.of(13, 13, Mesh(Layout(world=1), 0).tp, host=False)
    losses = loss_and_grad_(logits, labels, torch.zeros_like(mask), 1.0, vocabulary)
    assert not losses.any() and not logits.any()


# The output layer with its loss: chunks, sinks for the weight's gradient, and announced gradients.


def output_layer(
    draw: torch.Generator, tied: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Linear, Parallel]:
    parallel = replace(parallel_of(Mesh(Layout(world=1), 0)), dtype=dtype)
    record = replace(whole("w", (16, 5), Init("normal", 1.0)), tied="w" if tied else "")
    layer = Linear(parallel, record, None, "column")
    with torch.no_grad():
        layer.weight.copy_(torch.randn(16, 5, generator=draw, dtype=torch.float64))
    return layer, parallel


@pytest.mark.parametrize("rows", [12, 5, 1])
@pytest.mark.parametrize("way", ["autograd", "sink", "announced", "tied"])
def test_the_output_layer_in_chunks(way: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches contribute 2.5 times their loss each. The true vocabulary is 13 of 16 columns."""
    monkeypatch.setattr(loss_module, "tile_rows", lambda tokens, columns, parts: rows)
    draw = torch.Generator().manual_seed(rows)
    layer, parallel = output_layer(draw, tied=way == "tied")
    exact = layer.weight.detach().clone().requires_grad_()
    view = torch.full((16, 5), 3.0, dtype=torch.float64)
    notified: list[int] = []
    sink = SinkTable().add(view, lambda s: notified.append(s.contributions))
    if way != "autograd":
        layer.sinks["weight"] = sink.handle
    for _ in range(2):
        _, labels, mask = problem("padded")
        x = torch.randn(TOKENS, 5, generator=draw, dtype=torch.float64).requires_grad_()
        loss = output_loss(x, layer, labels, mask, 13, parallel, 2.5 if way in ("announced", "tied") else None)
        before = len(notified)
        loss.backward(torch.full_like(loss, 2.5))
        # An announced gradient is added in forward. A tied one must wait for backward, because the embedding adds to it
        # in backward's order.
        assert len(notified) - before == (way in ("sink", "tied"))
        plain_x = x.detach().clone().requires_grad_()
        plain = (F.cross_entropy((plain_x @ exact.t())[:, :13], labels, reduction="none") * mask).sum()
        (2.5 * plain).backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-13)
        torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-12, atol=1e-14)
    found = layer.weight.grad if way == "autograd" else view
    torch.testing.assert_close(found, exact.grad, rtol=1e-12, atol=1e-14)
    assert notified == ([] if way == "autograd" else [1, 2]) and sink.fresh == (way == "autograd")


@pytest.mark.parametrize("way", ["sink", "announced", "tied"])
def test_the_loss_s_weight_is_not_rounded(way: str) -> None:
    """A fifteenth is 0.34 % larger in bfloat16, but no gradient may be."""
    draw = torch.Generator().manual_seed(1)
    layer, parallel = output_layer(draw, tied=way == "tied", dtype=torch.bfloat16)
    view = torch.zeros(16, 5)
    sink = SinkTable().add(view, lambda _: None)
    layer.sinks["weight"] = sink.handle
    _, labels, mask = problem("padded")
    x = torch.randn(TOKENS, 5, generator=draw).bfloat16().requires_grad_()
    loss = output_loss(x, layer, labels, mask, 13, parallel, None if way == "sink" else 1 / 15)
    loss.backward(torch.full_like(loss, 1 / 15))
    exact, plain_x = (t.detach().double().requires_grad_() for t in (layer.weight, x))
    (F.cross_entropy((plain_x @ exact.t())[:, :13], labels, reduction="none") * mask).sum().div(15).backward()
    for found, true in ((x.grad, plain_x.grad), (view, exact.grad)):
        assert found is not None and true is not None and sink.contributions == 1
        assert float((found.double() * true).sum() / true.square().sum()) == pytest.approx(1.0, abs=1.5e-3)


def test_an_announced_gradient_that_does_not_come_is_noticed() -> None:
    draw = torch.Generator().manual_seed(1)
    layer, parallel = output_layer(draw)
    view = torch.zeros(16, 5, dtype=torch.float64)
    sink = SinkTable().add(view, lambda _: None)
    layer.sinks["weight"] = sink.handle
    _, labels, mask = problem("padded")
    x = torch.randn(TOKENS, 5, generator=draw, dtype=torch.float64).requires_grad_()
    loss = output_loss(x, layer, labels, mask, 13, parallel, 2.5)
    assert sink.contributions == 1
    with pytest.raises(RuntimeError, match="announced"):
        loss.backward()


def test_without_gradients_only_the_loss_is_made() -> None:
    layer, parallel = output_layer(torch.Generator().manual_seed(1))
    view = torch.full((16, 5), 3.0, dtype=torch.float64)
    sink = SinkTable().add(view, lambda _: None)
    layer.sinks["weight"] = sink.handle
    _, labels, mask = problem("padded")
    with torch.no_grad():
        loss = output_loss(torch.randn(TOKENS, 5, dtype=torch.float64), layer, labels, mask, 13, parallel)
    assert loss > 0 and not loss.requires_grad and (view == 3.0).all() and sink.fresh
