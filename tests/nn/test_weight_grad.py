"""Weight gradients, with and without a place in a flat buffer, equal autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.nn.embedding import TokenEmbedding
from meshwright.nn.linear import Linear
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import Streams
from meshwright.nn.weight_grad import VECTORS_PER_CALL, SinkTable, VectorGradients
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Init, whole
from meshwright.spec.model import gpt
from meshwright.spec.model.part import SINGLE_RANK

CPU = torch.device("cpu")


def parallel_of(dtype: torch.dtype) -> Parallel:
    return Parallel(Mesh(Layout(world=1), 0).tp, False, dtype, CPU, Streams(1, 0, 0, CPU))


def filled(layer: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def linear(dtype: torch.dtype) -> nn.Module:
    normal = Init("normal", 1.0)
    return filled(Linear(parallel_of(dtype), whole("w", (5, 4), normal), whole("b", (5,), normal), "column"))


def embedding(dtype: torch.dtype) -> nn.Module:
    part = gpt.TokenEmbeddingPart(6, 3, Init("normal", 1.0))
    return filled(TokenEmbedding(parallel_of(dtype), part, part.records(SINGLE_RANK, "embedding")))


def inputs(kind: str, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    if kind == "embedding":
        return [torch.randint(0, 6, (8,), generator=draw) for _ in range(3)]
    return [torch.randn(7, 4, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3)]


LAYERS = {"linear": linear, "embedding": embedding}


def plain(kind: str, layer: nn.Module, x: Tensor) -> Tensor:
    weight = layer.weight.detach().double().requires_grad_()
    y = weight[x] if kind == "embedding" else F.linear(x.double(), weight, layer.bias.detach().double())
    y.sin().sum().backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1)], ids=["fp64", "bf16"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_sink_adds_up_from_zero_and_tells(kind: str, dtype: torch.dtype, close: float) -> None:
    """Earlier contents of the buffer do not matter, and it may be wider than the weights."""
    layer, notified = LAYERS[kind](dtype), list[int]()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    view = torch.full(layer.weight.shape, 1e6, dtype=wide)
    sink = SinkTable().add(view, lambda s: notified.append(s.contributions))
    layer.sinks["weight"] = sink.handle
    for _ in range(2):
        sink.reset()
        for x in inputs(kind, dtype):
            layer(x).sin().sum().backward()
        expected = sum(plain(kind, layer, x) for x in inputs(kind, dtype))
        torch.testing.assert_close(view.double(), expected, rtol=close, atol=close)
    assert notified == [1, 2, 3, 1, 2, 3] and layer.weight.grad is None


@pytest.mark.parametrize("kind", list(LAYERS))
def test_without_a_sink_the_gradient_is_autograds(kind: str) -> None:
    layer = LAYERS[kind](torch.float64)
    for x in inputs(kind, torch.float64):
        layer(x).sin().sum().backward()
    expected = sum(plain(kind, layer, x) for x in inputs(kind, torch.float64))
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_input_and_bias_gradients_of_a_linear() -> None:
    layer = linear(torch.float64)
    x = inputs("linear", torch.float64)[0].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)),
        (x, layer.weight, layer.bias),
    )


@pytest.mark.parametrize(("count", "left"), [(3, 3), (VECTORS_PER_CALL + 2, 4)])
def test_gradients_of_vectors_wait_for_each_other_and_add_up(count: int, left: int) -> None:
    """The two micro-batches have fewer or more parameters than are added at once. The second one comes while some of
    the first still wait. Notifications are the same as those of single additions, and every sum has the same bits.
    """
    sizes = [(3,)] * count + [(2, 3)]
    draw = torch.Generator().manual_seed(7)
    grads = [[torch.randn(size, generator=draw).bfloat16() for size in sizes] for _ in range(2)]
    views, notified = [[torch.full(size, 1e6) for size in sizes] for _ in range(2)], list[int]()
    table = SinkTable()
    waiting, alone = (
        [table.add(view, lambda sink: notified.append(sink.contributions)) for view in some] for some in views
    )
    vectors = VectorGradients()
    for each in grads:
        for sink, grad in zip(waiting, each, strict=True):
            vectors.add(sink, grad)
    assert len(notified) == 2 * len(sizes) - left
    vectors.add_all()
    assert sorted(notified) == [1] * len(sizes) + [2] * len(sizes)
    for each in grads:
        for sink, grad in zip(alone, each, strict=True):
            sink.add(grad)
    assert all(map(torch.equal, *views))


def test_gradients_of_vectors_of_a_step_that_was_not_finished_are_dropped() -> None:
    sink, vectors = SinkTable().add(torch.ones(3), lambda sink: None), VectorGradients()
    vectors.add(sink, torch.full((3,), 5.0))
    vectors.forget()
    vectors.add_all()
    assert sink.fresh and sink.view.tolist() == [1.0, 1.0, 1.0]
