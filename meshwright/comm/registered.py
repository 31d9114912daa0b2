"""Python functions as operators of torch: torch.compile can't trace their side effects, but its code can call them.

torch.library.custom_op does the same with Python of its own around every call, which takes the host as long as
launching ten kernels does. An operator that is defined here goes through torch's dispatcher alone. It has no gradient:
it is called inside of autograd functions or without gradients, and anything else is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.effects import EffectType

# The Python of every operator that does more than its result shows, by name: a dry run calls it, since torch would only
# ask for shapes.
BODIES: dict[str, Callable[..., Any]] = {}

Function = Callable[..., Any]


def pure_operator(name: str, mutates: Iterable[str] = ()) -> Callable[[Function], Any]:
    """Registers a function as the operator `namespace::name`. Those of its arguments that it writes to are named in
    `mutates`; a function that returns something needs `shapes_of` too."""

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
    """Registers a function with a side effect, which a dry run calls too."""

    def register(body: Function) -> Any:
        BODIES[name] = body
        return pure_operator(name, mutates)(body)

    return register


def effectful_operator(name: str) -> Callable[[Function], Any]:
    """Registers a function that writes to something that is none of its arguments; a dry run calls it too.

    Torch threads a token through a graph's calls of such operators, so it keeps every call and their order. Marking
    them by `torch.fx.node.has_side_effect` is not enough: of equal calls only one then remains.
    """

    def register(body: Function) -> Any:
        registered = operator(name)(body)
        torch.library._register_effectful_op(registered, EffectType.ORDERED)
        return registered

    return register


def shapes_of(registered: Any) -> Callable[[Function], Function]:
    """Registers a function that returns empty tensors like an operator's results."""
    if not registered._schema.returns:
        # Newer versions of torch let the second registration win; 2.11 refuses it when the package is imported.
        raise TypeError(f"{registered.name()} returns nothing, so that its shapes are known already")

    def register(fake: Function) -> Function:
        torch.library.register_fake(registered.name(), fake)
        return fake

    return register


def _without_gradients(name: str, body: Function) -> Function:
    """torch would only warn, and only when backward comes to it."""

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            raise RuntimeError(f"{name} has no gradient: call it inside of an autograd function")
        return body(*args)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
