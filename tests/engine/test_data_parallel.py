"""Buckets are launched as soon as they are complete, with the right gradients. One rank suffices, since only the
launches matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.group import DONE
from meshwright.comm.mesh import Mesh
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.spec.layout import Layout


class Net(nn.Module):
    """Three layers; the middle one may be skipped, the last one may run twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle, self.last = (nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, skip: bool = False, twice: bool = False) -> Tensor:
        x = self.first(x)
        x = x if skip else self.middle(x)
        x = self.last(x)
        return (self.last(x) if twice else x).square().sum()


class Run(PlainReducer):
    """A net with one bucket per parameter, which records launches and micro-batches in order."""

    def __init__(self, releases_grads: bool = False) -> None:
        self.net, self.events = Net(), list[str]()
        mesh = Mesh(Layout(world=1), 0)
        self.parallel = DataParallel([self.net], mesh, 1e-5, self, releases_grads=releases_grads)
        (self.buffer,) = self.parallel.buffers

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Any) -> Any:
        self.events += [slot.name for slot in bucket.slots]
        return DONE

    def step(self, inputs: list[Tensor], **how: bool) -> None:
        self.parallel.begin(len(inputs))
        for i, x in enumerate(inputs):
            self.events.append(f"micro {i}")
            self.net(x, **how).backward()
        self.events.append("end")
        self.parallel.finish()

    def gradients(self) -> dict[str, Tensor]:
        return {slot.name[2:].split(".")[0]: slot.grad.clone() for slot in self.buffer.slots}


def expected(inputs: list[Tensor], **how: bool) -> dict[str, Tensor]:
    net = Net()
    for x in inputs:
        net(x, **how).backward()
    zero = torch.zeros(6, 6, dtype=torch.float64)
    return {name: zero if m.weight.grad is None else m.weight.grad for name, m in net.named_children()}


def inputs(count: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(4, 6, dtype=torch.float64) for _ in range(count)]


def agree(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "shared"])
def test_buckets_go_while_the_last_backward_runs(twice: bool) -> None:
    """The first step learns how often each parameter contributes. A shared parameter contributes more than once."""
    run = Run()
    run.step(inputs(2), twice=twice)
    order = ["0.last.weight", "0.middle.weight", "0.first.weight"]
    assert run.events == ["micro 0", "micro 1", "end", *order]
    agree(run.gradients(), expected(inputs(2), twice=twice))
    run.events.clear()
    run.step(inputs(3, seed=1), twice=twice)
    assert run.events == ["micro 0", "micro 1", "micro 2", *order, "end"]
    agree(run.gradients(), expected(inputs(3, seed=1), twice=twice))


def test_each_step_begins_anew() -> None:
    run = Run()
    for seed in range(3):
        run.step(inputs(2, seed))
        agree(run.gradients(), expected(inputs(2, seed)))


def test_a_parameter_without_a_gradient_has_zero_and_holds_up_nothing() -> None:
    """This also holds if it had a gradient in the previous step: nothing stale is left."""
    run = Run()
    run.step(inputs(2))
    run.events.clear()
    run.step(inputs(2, seed=1), skip=True)
    assert run.events == ["micro 0", "micro 1", "0.last.weight", "end", "0.middle.weight", "0.first.weight"]
    agree(run.gradients(), expected(inputs(2, seed=1), skip=True))


def test_a_parameter_that_first_had_no_gradient_is_not_lost() -> None:
    run = Run()
    run.step(inputs(2), skip=True)
    run.step(inputs(2, seed=1))
    agree(run.gradients(), expected(inputs(2, seed=1)))


def test_a_gradient_after_its_bucket_has_gone_is_an_error() -> None:
    run = Run()
    run.step(inputs(1))
    run.parallel.begin(1)
    run.net(inputs(1)[0]).backward()
    with pytest.raises(AssertionError, match="came after its bucket was reduced"):
        run.net(inputs(1)[0]).backward()


def test_square_sum_is_that_of_all_gradients() -> None:
    run = Run()
    run.step(inputs(2))
    total = sum(float(g.square().sum()) for g in expected(inputs(2)).values())
    assert float(run.parallel.square_sum()) == pytest.approx(total, rel=1e-12)


def test_frozen_parameters_have_a_place_but_no_gradient() -> None:
    net = Net()
    net.middle.weight.requires_grad_(False)
    parallel = DataParallel([net], Mesh(Layout(world=1), 0))
    trained, frozen = parallel.buffers
    assert sorted(slot.name for slot in trained.slots) == ["0.first.weight", "0.last.weight"]
    assert [slot.name for slot in frozen.slots] == ["0.middle.weight"] and frozen.grads.numel() == 0
    parallel.begin(1)
    net(inputs(1)[0]).backward()
    parallel.finish()
    assert net.first.weight.grad is None, "gradients live in the flat buffer alone"


def test_gradients_of_one_micro_batch_have_memory_from_the_first_one_on() -> None:
    """Buckets have no memory before backward. During backward the buckets that were reached have it. The results equal
    those of permanent gradients, even if a parameter gets none.
    """
    run, seen = Run(releases_grads=True), []
    buckets = run.buffer.buckets

    def look(grad: Tensor) -> None:
        seen.append([bucket.grads.allocated for bucket in buckets])

    for seed, skip in ((0, False), (1, True), (2, False)):
        (x,), seen[:] = inputs(1, seed), []
        run.parallel.begin(1)
        seen.append([bucket.grads.allocated for bucket in buckets])
        hidden = run.net.first(x)
        hidden.register_hook(look)
        out = run.net.last(hidden if skip else run.net.middle(hidden))
        out.square().sum().backward()
        run.parallel.finish()
        assert seen == [[False, False, False], [True, not skip, False]]
        assert all(bucket.grads.allocated for bucket in buckets)
        agree(run.gradients(), expected([x], skip=skip))
