"""Random streams and dropout."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn.random import Streams, dropout

CPU = torch.device("cpu")
Key = tuple[int, int, int, int, int, int]


def numbers(seed: int, data: int, tp: int, step: int, micro_batch: int, layer: int) -> tuple[float, ...]:
    """Return the first number of `same`, of `own` and of torch's default generator at one place of a run."""
    streams = Streams(seed, data, tp, CPU)
    streams.active = True
    streams.begin(step, micro_batch, 0)
    streams.seed_layer(layer)
    return tuple(float(torch.rand((), generator=g)) for g in (streams.same, streams.own, torch.default_generator))


def test_streams_differ_from_each_other_and_from_place_to_place() -> None:
    base: Key = (1, 0, 0, 1, 0, 0)
    places = [base] + [tuple(v + (i == j) for j, v in enumerate(base)) for i in range(6) if i != 2]
    drawn = [number for place in places for number in numbers(*place)]
    assert len(set(drawn)) == len(drawn)


def test_tp_ranks_share_one_stream_only() -> None:
    a, b = numbers(1, 0, 0, 3, 2, 1), numbers(1, 0, 1, 3, 2, 1)
    assert a[0] == b[0] and a[1] != b[1] and a[2] != b[2]


def test_order_of_execution_does_not_matter() -> None:
    streams = Streams(1, 0, 0, CPU)
    streams.active = True
    streams.begin(5, 1, 0)
    streams.seed_layer(7)
    first = torch.rand(3, generator=streams.same)
    streams.begin(5, 2, 1)
    streams.seed_layer(8)
    torch.rand(11, generator=streams.same)
    streams.begin(5, 1, 0)
    streams.seed_layer(7)
    assert torch.equal(torch.rand(3, generator=streams.same), first)


def test_inactive_streams_leave_the_default_generator_alone() -> None:
    streams = Streams(1, 0, 0, CPU)
    torch.manual_seed(9)
    expected = torch.rand(())
    torch.manual_seed(9)
    streams.begin(1, 1, 1)
    streams.seed_layer(1)
    assert torch.equal(torch.rand(()), expected)


def test_seeding_a_layer_notes_nothing_for_devices_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would save the stack of every call for them, which took a third of the time of a tiny step."""
    monkeypatch.setattr("traceback.format_stack", lambda *args, **named: pytest.fail("a stack was noted"))
    numbers(1, 0, 0, 3, 2, 1)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_mean(p: float) -> None:
    x = torch.ones(200, 200, dtype=torch.float64, requires_grad=True)
    y = dropout(x, p, torch.Generator().manual_seed(1))
    assert float((y == 0).double().mean()) == pytest.approx(p, abs=0.01)
    kept = y[y != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "the gradient passes where the value did"


def test_dropout_of_nothing_is_the_tensor_itself() -> None:
    x = torch.ones(3)
    assert dropout(x, 0.0, torch.Generator()) is x
