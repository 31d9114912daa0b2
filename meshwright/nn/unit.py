"""A unit is a part of the model whose weights are gathered and released together: the embedding, a block, the head.

Sharding puts a gate on each unit's module, and a model calls its units with `call_unit`, which opens and closes the
gate. Without a gate that is a plain call. A mark on a unit is shown what the unit returns in training. Units that are
called through `recompute` keep only their input for backward.
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

# Attributes of modules, which may be anybody's: a part of one's own may well be called `gate`. What a unit returns is
# shown to its MARK, and a gradient that a chunk sends back to its MARK_SENT_BACK.
GATE, MARK, MARK_SENT_BACK = "_meshwright_gate", "_meshwright_mark", "_meshwright_mark_sent_back"


class Gate(Protocol):
    """Gathers a unit's weights. `open` returns when they are in memory, in forward and in backward; `close` says that
    they are no longer needed. `closes` is false where weights stay in memory once they were gathered. `done` says that
    the unit's backward is over: its weights may go, and its gradients are complete."""

    closes: bool

    def open(self) -> None: ...
    def close(self) -> None: ...
    def done(self) -> None: ...


class _CallInBackward(torch.autograd.Function):
    """The identity, whose backward makes a call first. Autograd runs backward in reverse order, so a call on a unit's
    output runs just before the unit's backward, and one on its input just after it."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


def call_in_backward(call: Callable[[], None], *xs: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors, in whose backward the call is made before their gradients are passed on."""
    found: tuple[Tensor, ...] = _CallInBackward.apply(call, *xs)
    return found


def call_unit(unit: nn.Module, x: Tensor, *rest: Any, hold: bool = False) -> Any:
    """Returns unit(x, *rest), one tensor or several, with the unit's weights gathered. `hold` keeps them in memory
    after forward, for a unit whose backward follows at once."""
    y = _call_gated(unit, x, rest, hold)
    show_mark(unit, y, unit.training)
    return y


def open_units(units: Iterable[nn.Module]) -> None:
    """Returns when the weights of units that are called together are in memory, where they stay."""
    for unit in units:
        gate: Gate | None = getattr(unit, GATE, None)
        if gate is not None:
            assert not gate.closes
            gate.open()


def show_mark(unit: nn.Module, y: Any, training: bool, first: nn.Module | None = None) -> None:
    """Shows what a unit returned to its mark, if it has one; `first`: the first of the units that ran as one."""
    mark = getattr(unit, MARK, None)
    if mark is not None and training:
        mark(y, first or unit)


def _call_gated(unit: nn.Module, x: Tensor, rest: tuple[Any, ...], hold: bool) -> Any:
    gate: Gate | None = getattr(unit, GATE, None)
    if gate is None:
        return unit(x, *rest)
    gate.open()
    if not gate.closes:
        return unit(x, *rest)
    if torch.is_grad_enabled():
        x, rest = _closed_in_backward(gate, x, rest)
    y = unit(x, *rest)
    if not hold:
        gate.close()
    results = y if isinstance(y, tuple) else (y,)
    if any(result.requires_grad for result in results):
        results = call_in_backward(gate.open, *results)
    return results if isinstance(y, tuple) else results[0]


def _closed_in_backward(gate: Gate, x: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """Returns what a unit is given, through a call that closes its gate: all gradients that leave the unit must be
    there before its weights may go, those of the streams that a block reads too."""
    inside = [each for each in rest if isinstance(each, Inputs) and each.streams]
    given = [x, *rest, *(value for each in inside for value in each.streams.values())]
    at = [n for n, value in enumerate(given) if isinstance(value, Tensor) and value.requires_grad]
    for n, value in zip(at, call_in_backward(gate.close, *(given[n] for n in at)) if at else (), strict=True):
        given[n] = value
    x, *rest_now = given[: 1 + len(rest)]
    streamed = iter(given[1 + len(rest) :])
    for n, each in enumerate(rest):
        if isinstance(each, Inputs) and each.streams:
            rest_now[n] = replace(each, streams={name: next(streamed) for name in each.streams})
    return x, tuple(rest_now)


Run = Callable[..., tuple[Tensor, ...]]  # of x, whether it runs again, and further tensors


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Run, kept: Kept, *more: Tensor) -> tuple[Tensor, ...]:
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
        x, *more = (each.detach().requires_grad_() for each in saved)
        with torch.enable_grad():
            # Backward begins at edges of the graph: the results themselves may go.
            edges = [get_gradient_edge(y) for y in ctx.run(x, True, *more)]
        torch.autograd.backward(edges, grads)
        return x.grad, None, None, *(each.grad for each in more)


@dataclass
class Kept:
    """Where the inputs of recomputed blocks are kept: in host `memory`, or on the device where that is None. `last` is
    the last that went to host memory, and comes back first."""

    memory: HostActivations | None = None
    last: HostCopy | None = None


def recompute(run: Run, x: Tensor, kept: Kept | None = None, *more: Tensor) -> tuple[Tensor, ...]:
    """Returns run(x, again=False, *more), of which only x and `more` are kept, and calls run(x, again=True, *more) in
    backward. `run` itself must repeat its random numbers and collectives. Of what has a gradient, it must use nothing
    but these tensors and weights."""
    # Autograd skips the backward of a function none of whose inputs needs a gradient, and the weights inside `run` are
    # no inputs. So x gets one even where it needs none, as after a frozen embedding.
    return _Recompute.apply(x if x.requires_grad else x.detach().requires_grad_(), run, kept or Kept(), *more)
