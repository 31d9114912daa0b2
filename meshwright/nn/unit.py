"""Units: the parts of the model whose weights are gathered and released together (the embedding, a block, the head).

Sharding puts a gate on each unit's module, and a model calls its units with `call_unit`, which opens and closes the
gate. Without a gate this is a plain call. A mark on a unit is a callback that receives the unit's results in training.
Units that are called through `recompute` save only their input for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshwright.nn.inputs import Inputs
from meshwright.nn.offload import HostActivations, HostCopy

# Attributes of modules. They have a prefix because the modules may be a user's and have a part called `gate`. MARK is
# called with a unit's results, and MARK_SENT_BACK with a gradient that a chunk sends back.
GATE, MARK, MARK_SENT_BACK = "_meshwright_gate", "_meshwright_mark", "_meshwright_mark_sent_back"


class WeightGate(Protocol):
    """Gathers and releases a unit's weights.

    `open` returns when the weights are in memory, in forward and in backward. `close` says that they are no longer
    needed. `closes` is false if weights stay in memory once they have been gathered. `done` says that the unit's
    backward is over: its weights may be released, and its gradients are complete.
    """

    closes: bool

    def open(self) -> None: ...
    def close(self) -> None: ...
    def done(self) -> None: ...


class _CallInBackward(torch.autograd.Function):
    """The identity, whose backward first calls a function. Autograd runs backward in reverse order, so a call on a
    unit's output runs just before the unit's backward, and a call on its input just after it."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


def call_in_backward(call: Callable[[], None], *xs: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors unchanged; their backward runs `call` before it passes their gradients on."""
    same: tuple[Tensor, ...] = _CallInBackward.apply(call, *xs)
    return same


def call_unit(unit: nn.Module, x: Tensor, *rest: Any, hold: bool = False) -> Any:
    """Return unit(x, *rest), one tensor or several, with the unit's weights gathered.

    `hold` keeps the weights in memory after forward, for a unit whose backward follows at once.
    """
    y = _call_gated(unit, x, rest, hold)
    show_mark(unit, y, unit.training)
    return y


def open_units(units: Iterable[nn.Module]) -> None:
    """Gather the weights of units that are called together. The weights stay in memory."""
    for unit in units:
        gate: WeightGate | None = getattr(unit, GATE, None)
        if gate is not None:
            assert not gate.closes
            gate.open()


def show_mark(unit: nn.Module, y: Any, training: bool, first: nn.Module | None = None) -> None:
    """Pass a unit's results to its mark, if it has one. `first` is the first of several units that ran as one."""
    mark = getattr(unit, MARK, None)
    if mark is not None and training:
        mark(y, first or unit)


def _call_gated(unit: nn.Module, x: Tensor, rest: tuple[Any, ...], hold: bool) -> Any:
    gate: WeightGate | None = getattr(unit, GATE, None)
    if gate is None:
        return unit(x, *rest)
    gate.open()
    # If weights stay in memory, backward need not open and close the gate either.
    if not gate.closes:
        return unit(x, *rest)
    if torch.is_grad_enabled():
        x, rest = _closed_in_backward(gate, x, rest)
    y = unit(x, *rest)
    if not hold:
        gate.close()

    # The gate opens again just before the unit's backward.
    results = y if isinstance(y, tuple) else (y,)
    if any(result.requires_grad for result in results):
        results = call_in_backward(gate.open, *results)
    return results if isinstance(y, tuple) else results[0]


def _closed_in_backward(gate: WeightGate, x: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the arguments of a unit, passed through a call that closes its gate in backward.

    The weights may be released only when all gradients that leave the unit are complete, so one call takes all tensors
    that need a gradient, including the streams that a block reads.
    """
    with_streams = [value for value in rest if isinstance(value, Inputs) and value.streams]
    given = [x, *rest, *(stream for inputs in with_streams for stream in inputs.streams.values())]
    at = [n for n, value in enumerate(given) if isinstance(value, Tensor) and value.requires_grad]
    for n, tensor in zip(at, call_in_backward(gate.close, *(given[n] for n in at)) if at else (), strict=True):
        given[n] = tensor

    # Put the streams back into the inputs that they were taken from.
    x, *rest_now = given[: 1 + len(rest)]
    streams = iter(given[1 + len(rest) :])
    for n, value in enumerate(rest):
        if isinstance(value, Inputs) and value.streams:
            rest_now[n] = replace(value, streams={name: next(streams) for name in value.streams})
    return x, tuple(rest_now)


# Takes x, whether this is the recomputation, and further tensors.
Run = Callable[..., tuple[Tensor, ...]]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Run, kept: InputStorage, *more: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.copy, ctx.before = run, None, kept.last
        if kept.memory is None:
            ctx.save_for_backward(x, *more)
        else:
            assert not more
            ctx.copy = kept.last = kept.memory.keep(x, kept.last)
        return run(x, False, *more)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.copy is not None:
            saved, ctx.copy = [ctx.copy.fetch()], None
        else:
            saved = list(ctx.saved_tensors)
            if ctx.before is not None:
                ctx.before.prefetch()
        x, *more = (value.detach().requires_grad_() for value in saved)
        with torch.enable_grad():
            # Backward begins at edges of the graph, so the results themselves can be released.
            edges = [get_gradient_edge(y) for y in ctx.run(x, True, *more)]
        torch.autograd.backward(edges, grads)
        return x.grad, None, None, *(value.grad for value in more)


@dataclass
class InputStorage:
    """The storage for the inputs of recomputed blocks: host `memory`, or the device if that is None.

    `last` is the input that went to host memory last. It comes back first.
    """

    memory: HostActivations | None = None
    last: HostCopy | None = None


def recompute(run: Run, x: Tensor, kept: InputStorage | None = None, *more: Tensor) -> tuple[Tensor, ...]:
    """Return run(x, False, *more), of which only x and `more` are saved, and call run(x, True, *more) in backward.

    `run` must repeat its random numbers and collectives. Apart from its weights and these tensors, it must not use any
    tensor that needs a gradient.
    """
    # Autograd skips the backward of a function if none of its inputs needs a gradient, and the weights inside `run` are
    # not inputs. So x is made to need one even where it does not, as after a frozen embedding.
    return _Recompute.apply(x if x.requires_grad else x.detach().requires_grad_(), run, kept or InputStorage(), *more)
