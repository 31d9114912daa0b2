"""Inputs of recomputed blocks in host memory, on a device whose copies run as late as its events allow.

The streams here are lists of copies. The main stream runs at once. A copy on another stream runs only when an event
behind it is waited for, and until then its target holds NaN. So a missing wait shows in the gradients, as it would only
now and then on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright.engine.context as context
from meshwright.errors import UserError
from meshwright.nn.offload import HostActivations, HostCopy
from tests.support.oracle import make_trainer, small_config, true_gradients


class LateStream:
    """A stream whose work runs when it is waited for. The main stream's work runs at once."""

    def __init__(self, main: bool = False) -> None:
        self.main, self.done = main, 0
        self.work: list[Callable[[], None]] = []

    def record_event(self) -> tuple[LateStream, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[LateStream, int]) -> None:
        self.add(lambda: event[0].run(event[1]))

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(other.record_event())

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if self.main:
            self.run(len(self.work))

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class LateDevice:
    """The parts of torch's accelerator module that `HostActivations` uses."""

    def __init__(self) -> None:
        self.main = LateStream(main=True)

    def Stream(self, device: torch.device) -> LateStream:
        return LateStream()

    def current_stream(self, device: torch.device) -> LateStream:
        return self.main

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        with _Queued(stream):
            yield


class _Queued(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        to, source = args[:2]
        to.fill_(torch.nan)
        self.stream.add(lambda: to.copy_(source))
        return to


class Watched(HostActivations):
    """Host activations that spoil a device tensor as soon as it is released, since nothing may use it again."""

    def __init__(self) -> None:
        self.late = LateDevice()
        super().__init__(torch.device("cpu"), self.late)
        self.log: list[str] = []
        self.numbers: dict[int, int] = {}

    def keep(self, x: Tensor, before: HostCopy | None) -> HostCopy:
        copy = super().keep(x, before)
        self.numbers[id(copy)] = len(self.numbers)
        self.log.append(f"out {self.numbers[id(copy)]}")
        return copy

    def copy_in(self, copy: HostCopy) -> tuple[Tensor, Any]:
        self.log.append(f"in {self.numbers[id(copy)]}")
        return super().copy_in(copy)

    def fetch(self, copy: HostCopy) -> Tensor:
        self.log.append(f"use {self.numbers[id(copy)]}")
        return super().fetch(copy)

    def release(self) -> None:
        leaving = self._leaving
        super().release()
        if leaving is not None:
            leaving[0].fill_(torch.nan)


def trained(monkeypatch: pytest.MonkeyPatch, memory: HostActivations | None, **sections: Any) -> Any:
    """Return the gradients of two steps and the loss of the next one, with the activations kept in that memory."""
    monkeypatch.setattr(context, "is_host", lambda config, device: memory is None)
    monkeypatch.setattr(context, "HostActivations", lambda device: memory)
    model = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "layers": 5}
    trainer = make_trainer(small_config(**sections | {"model": model | sections.get("model", {})}))
    monkeypatch.undo()
    assert trainer.ctx.parallel.offload is memory
    found = [[grad.clone() for _, grad in true_gradients(trainer)] for _ in range(2)]
    return found, trainer.step().loss


CASES: dict[str, dict[str, Any]] = {
    "full": {"recompute": {"mode": "full"}},
    "every": {"recompute": {"mode": "every:2"}},
    "all-forwards-first": {"recompute": {"mode": "full"}, "pipeline": {"schedule": "gpipe"}},
    "chunks": {
        "recompute": {"mode": "full"}, "pipeline": {"schedule": "interleaved"}, "layout": {"chunks": 2},
        "model": {"dropout": 0.1, "layers": 6},
    },
    "zero3": {"recompute": {"mode": "full"}, "zero": {"stage": 3}},
    "experts": {"recompute": {"mode": "full"}, "model": {"experts": {"count": 4, "aux_loss": 0.1}}},
}  # fmt: skip


QUICK = ("every", "chunks")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.wide]) for n in CASES])
def test_gradients_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sections, memory = CASES[name], Watched()
    plain, loss = trained(monkeypatch, None, **sections)
    away = sections | {"recompute": sections["recompute"] | {"offload": True}}
    found, other = trained(monkeypatch, memory, **away)
    assert all(torch.equal(a, b) for step in zip(plain, found, strict=True) for a, b in zip(*step, strict=True))
    assert loss == other and memory.most_bytes > 0 and memory.bytes == 0
    # On a CPU offloading changes nothing.
    on_a_cpu, same = trained(monkeypatch, None, **away)
    assert same == loss and all(torch.equal(a, b) for a, b in zip(plain[0], on_a_cpu[0], strict=True))


def test_the_next_block_s_input_comes_while_a_block_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of four blocks keeps its input on the device. Each block's backward starts to bring the input of the
    block before it.
    """
    memory = Watched()
    sections = {"model": {"layers": 4}, "train": {"global_batch": 1}, "recompute": {"mode": "full", "offload": True}}
    trained(monkeypatch, memory, **sections)
    wanted = ["out 0", "out 1", "out 2", "in 2", "use 2", "in 1", "use 1", "in 0", "use 0"]
    assert memory.log[:9] == wanted
    (free,) = memory._free.values()
    # Later steps use the buffers again.
    assert len(free) == 3 and memory.most_bytes == 3 * 16 * 32 * 8


def test_offloading_needs_recomputed_blocks() -> None:
    with pytest.raises(UserError, match="recompute.offload=true .* recompute.mode=selective recomputes none: set"):
        small_config(recompute={"mode": "selective", "offload": True})
