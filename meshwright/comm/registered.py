"""Register Python functions as torch operators. torch.compile can't trace their side effects, but it can call them.

torch.library.custom_op does the same, but adds a Python layer to every call that costs the host as much as launching
ten kernels. An operator that is registered here only goes through torch's dispatcher. It has no gradient: it must be
called inside of an autograd function or without gradients, and anything else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.effects import EffectType

# The Python function of every operator with a side effect, by operator name. A dry run calls these functions itself,
# because torch would only ask for shapes.
BODIES: dict[str, Callable[..., Any]] = {}

Function = Callable[..., Any]


def pure_operator(name: str, mutates: Iterable[str] = ()) -> Callable[[Function], Any]:
    """Register a function as the operator `namespace::name`. `mutates` names the arguments that it writes to. A
    function that returns something also needs `shapes_of`."""

    def register(body: Function) -> Any:
        schema = torch.library.infer_schema(body, mutates_args=tuple(mutates))
        torch.library.define(name, schema)
        torch.library.impl(name, "default", _without_gradients(name, body))
        if schema.endswith("-> ()"):
            torch.library.register_fake(name, _nothing)
        space, word = name.split("::")
        return getattr(getattr(torch.ops, space), word).default

    return register


def operator(name: str, mutates: Iterable[str] = ()) -> Callable[[Function], Any]:
    """Register a function with a side effect. A dry run calls it too."""

    def register(body: Function) -> Any:
        BODIES[name] = body
        return pure_operator(name, mutates)(body)

    return register


def effectful_operator(name: str) -> Callable[[Function], Any]:
    """Register a function that writes to something other than its arguments. A dry run calls it too.

    Torch threads a token through a graph's calls of such operators, so it keeps every call and their order. Marking
    them by `torch.fx.node.has_side_effect` is not enough: equal calls are then merged into one.
    """

    def register(body: Function) -> Any:
        registered = operator(name)(body)
        torch.library._register_effectful_op(registered, EffectType.ORDERED)
        return registered

    return register


def shapes_of(registered: Any) -> Callable[[Function], Function]:
    """Register a function that returns empty tensors with the shapes of an operator's results."""
    if not registered._schema.returns:
        # `pure_operator` has registered one already. torch 2.11 refuses a second registration when the package is
        # imported; newer versions let it win.
        raise TypeError(f"{registered.name()} returns nothing, so that its shapes are known already")

    def register(fake: Function) -> Function:
        torch.library.register_fake(registered.name(), fake)
        return fake

    return register


def _without_gradients(name: str, body: Function) -> Function:
    """Wrap `body` so that it refuses inputs that need a gradient. torch would only warn, and only once backward gets
    there."""

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            raise RuntimeError(f"{name} has no gradient: call it inside of an autograd function")
        return body(*args)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
