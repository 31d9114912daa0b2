"""What a plan's styles do around a module's forward: the collectives over tp, and the gates of units.

The module itself is not changed: its `forward` is called with this rank's part of its parameters, and with inputs and
outputs that were copied, cut, summed or gathered as `parts.planned.STYLES` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from meshwright.comm.group import Group
from meshwright.comm.ops import copy_to, gather_rows, reduce_from, slice_rows
from meshwright.errors import UserError
from meshwright.nn.unit import GATE, Gate, call_in_backward, show_mark
from meshwright.spec.model.wrapped.parts import STYLES

Forward = Callable[..., Any]
Plan = Mapping[str, str]  # a style by the name of a module or parameter, in which `*` stands for a number


def style_of(name: str, plan: Plan, parameter: bool = True) -> str:
    """Returns the style of a module or, if `parameter`, of a parameter, for which that of its module holds too."""
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    found = plan.get(generic)
    if found is None and parameter:
        found = plan.get(generic.rpartition(".")[0])
    if found is not None and found not in STYLES:
        raise UserError(f"the plan's style '{found}' of {name} is not known here: use a layout with layout.tp=1")
    return found or ""


def last_dim(call: Callable[[Tensor, Group], Tensor], x: Tensor, group: Group) -> Tensor:
    """Applies a call that works on rows to the last dimension."""
    return call(x.movedim(-1, 0).contiguous(), group).movedim(0, -1).contiguous()


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Changes the first argument of a call, however it is passed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def place(module: nn.Module, style: str, tp: Group, rotary: int = 0) -> None:
    """Puts a style's calls around the forward of one module, whose parameters are this rank's part already. `rotary` is
    the number of last elements that the style `mla_kv_a_proj` means."""
    _, before, after, _, _ = STYLES[style]
    if tp.alone or not (before or after):
        return
    if before == "ids":
        module.forward = _looked_up(module, tp)
        return
    bias_after = after == "sum" and STYLES[style].cut == "in"
    original: Forward = module.forward

    def take(x: Any) -> Any:
        if before == "slice":
            return last_dim(slice_rows, x, tp)
        return x / tp.size if before == "share" else copy_to(x, tp) if before == "copy" else x

    def give(y: Tensor) -> Tensor:
        if after == "rotary":
            rest, turned = y.split([y.shape[-1] - rotary, rotary], dim=-1)
            return torch.cat([rest, copy_to(turned, tp)], dim=-1)
        if after == "gather":
            return last_dim(gather_rows, y, tp)
        return reduce_from(y, tp) if after == "sum" else y

    def forward(*args: Any, **kwargs: Any) -> Any:
        if before == "experts":
            args, kwargs = changed((args, kwargs), lambda xs: [copy_to(x, tp) for x in xs])
        elif before:
            args, kwargs = with_first(args, kwargs, take)
        bias = module._parameters.get("bias") if bias_after else None
        if bias is None:
            return give(original(*args, **kwargs))
        module._parameters["bias"] = None  # it is added once, to the sum
        try:
            y = original(*args, **kwargs)
        finally:
            module._parameters["bias"] = bias
        return give(y) + bias

    module.forward = forward


def _looked_up(module: nn.Module, tp: Group) -> Forward:
    """A table of which this rank holds some rows: what others hold is zero here, and the sum has all."""
    assert isinstance(module, nn.Embedding)
    original: Forward = module.forward
    rows = module.weight.shape[0]
    first = tp.index * rows
    if module.padding_idx is not None:  # the row that gets no gradient
        own = module.padding_idx - first
        module.padding_idx = own if 0 <= own < rows else None

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        there = (ids >= first) & (ids < first + rows)
        found = original(torch.where(there, ids - first, 0), *args, **kwargs)
        return reduce_from(found.masked_fill(~there[..., None], 0.0), tp)

    return forward


def tensors_with_gradients(values: list[Any]) -> list[int]:
    return [n for n, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]


def changed(tree: Any, change: Callable[[list[Tensor]], Any]) -> Any:
    """Returns nested values in which all tensors that have gradients were changed, at once."""
    values, spec = tree_flatten(tree)
    at = tensors_with_gradients(values)
    for n, value in zip(at, change([values[n] for n in at]) if at else (), strict=True):
        values[n] = value
    return tree_unflatten(values, spec)


def recomputed(module: nn.Module) -> None:
    """Has a module keep its inputs alone, and compute the rest again in backward."""
    original: Forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    module.forward = forward


def _copies(xs: Sequence[Tensor]) -> list[Tensor]:
    """Copies, into which a program that is not ours may write."""
    return [x.clone() for x in xs]


def gated(unit: nn.Module, members: Sequence[nn.Module]) -> None:
    """Has the gate that sharding may put on a unit opened before the forward and the backward of each of its `members`
    (the unit itself, where it is one module), and closed when all of them have been through. Where one is not called,
    the weights stay until the chunk is through. What each returns is shown to the unit's mark."""
    passed = {"forward": 0, "backward": 0}

    def through(work: str, close: Callable[[], None]) -> None:
        passed[work] = (passed[work] + 1) % len(members)
        if not passed[work]:
            close()

    def wrapped(member: nn.Module) -> Forward:
        original: Forward = member.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            gate: Gate | None = getattr(unit, GATE, None)
            if gate is None:
                return original(*args, **kwargs)
            gate.open()
            learns = torch.is_grad_enabled()
            if learns:
                done = partial(through, "backward", gate.done)
                args, kwargs = changed((args, kwargs), lambda xs: _copies(call_in_backward(done, *xs)))
            result = original(*args, **kwargs)
            through("forward", gate.close)
            return changed(result, lambda xs: _copies(call_in_backward(gate.open, *xs))) if learns else result

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            show_mark(unit, result, member.training)
            return result

        return forward

    for member in members:
        member.forward = wrapped(member)


def outer_modules(root: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Parameter]]]:
    """Returns what a module is made of, in the order of its definition: every entry of its outermost lists of modules,
    and around them the largest modules that hold no such list; and the parameters that are in none of these."""
    lists = {name for name, module in root.named_modules() if isinstance(module, nn.ModuleList)}
    loose: list[tuple[str, nn.Parameter]] = []

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        inside = any(other == name or other.startswith(f"{name}." if name else "") for other in lists)
        if not inside:
            if any(True for _ in module.parameters()):
                yield name, module
            return
        prefix = f"{name}." if name else ""
        loose.extend((prefix + own, value) for own, value in module.named_parameters(recurse=False))
        for key, child in module.named_children():
            if isinstance(module, nn.ModuleList):
                yield prefix + key, child
            else:
                yield from walk(prefix + key, child)

    return list(walk("", root)), loose
