"""Handles of gradient sinks: the sinks that they lead to, their owners, and their treatment by a compiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from meshwright.nn.weight_grad import (
    Deferred,
    Sink,
    SinkTable,
    add_grad,
    add_product_grad,
    piece_of_contribution,
    sink_of,
)

LAYERS, WIDTH = 12, 4


def made(table: SinkTable, notified: list[int] | None = None) -> Sink:
    view = torch.full((2, 3), 9.0, dtype=torch.float64)
    return table.add(view, lambda sink: None if notified is None else notified.append(sink.contributions))


def factors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(5, n, generator=draw, dtype=torch.float64) for n in (2, 3))  # type: ignore[return-value]


def test_handles_of_several_trainers_never_collide() -> None:
    tables = [SinkTable(), SinkTable()]
    sinks = [made(table) for table in tables for _ in range(3)]
    assert len({int(sink.handle) for sink in sinks}) == 6
    for sink in sinks:
        assert sink_of(sink.handle) is sink and sink_of(sink.handle.clone()) is sink
        assert sink.handle.device.type == "cpu" and sink.handle.dim() == 0


def test_a_handle_outlives_its_trainer_with_an_error() -> None:
    handle = made(SinkTable()).handle
    gc.collect()  # A table and its sinks refer to each other.
    with pytest.raises(RuntimeError, match=f"the gradient sink {int(handle)} is gone: the trainer that owned it"):
        add_grad(handle, torch.ones(2, 3))


def test_one_trainer_defers_and_another_does_not() -> None:
    grad, x = factors()
    early, late = SinkTable(), SinkTable()
    now, later, deferred = made(early), made(late), Deferred()
    with late.defer_to(deferred):
        for sink in (now, later):
            add_product_grad(sink.handle, grad, x)
    assert (now.contributions, later.contributions) == (1, 0) and later.fresh
    deferred.run()
    assert later.contributions == 1 and torch.equal(now.view, later.view)


@pytest.mark.parametrize("split", [False, True], ids=["at-once", "deferred"])
def test_pieces_are_one_contribution_of_their_own_sinks(split: bool) -> None:
    (grad, x), notified, others, table = factors(), list[int](), list[int](), SinkTable()
    sink, other, deferred = made(table, notified), made(table, others), Deferred()
    with table.defer_to(deferred if split else None):
        for rows in (slice(0, 2), slice(2, 5)):
            with piece_of_contribution([sink.handle, None], last=rows.stop == 5):
                for each in (sink, other):
                    add_product_grad(each.handle, grad[rows], x[rows])
    deferred.run()
    assert notified == [1] and others == [1, 2]
    torch.testing.assert_close(sink.view, grad.t() @ x)


class _Product(torch.autograd.Function):
    """A product whose backward makes two equal contributions. A compiler must not merge their calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        found = grad.t() @ x
        for _ in range(2):
            add_grad(ctx.sink, found)
        add_product_grad(ctx.sink, grad.contiguous(), x)
        return grad @ weight, None, None


class Layer(nn.Module):
    def __init__(self, table: SinkTable, notified: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.sink = table.add(torch.zeros_like(self.weight), lambda sink: notified.append(int(sink.handle)))
        self.sinks = {"weight": self.sink.handle}

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(_Product.apply(x, self.weight, self.sinks["weight"]))


def gradients(change: Callable[[Layer], object]) -> tuple[Tensor, list[int]]:
    """Return the gradients of layers that `change` may compile, and the order of their contributions. The backwards of
    three micro-batches come after all of the forwards."""
    torch.manual_seed(2)
    notified, table = list[int](), SinkTable()
    layers = [Layer(table, notified) for _ in range(LAYERS)]
    outputs = []
    for layer in layers:
        change(layer)
    for _ in range(3):
        x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
        for layer in layers:
            x = layer(x)
        outputs.append(x)
    for x in outputs:
        x.square().sum().backward()
    first = int(layers[0].sink.handle)
    return torch.stack([layer.sink.view for layer in layers]), [number - first for number in notified]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.wide)])
def test_layers_share_a_graph_and_every_call_happens(backend: str) -> None:
    torch.compiler.reset()
    counters.clear()
    expected, order = gradients(lambda layer: None)
    found, compiled_order = gradients(lambda layer: layer.compile(fullgraph=True, backend=backend))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert compiled_order == order and len(order) == 3 * 3 * LAYERS
    assert counters["stats"]["unique_graphs"] == 1
