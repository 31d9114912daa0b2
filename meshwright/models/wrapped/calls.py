"""The calls that a plan's styles put around a module's forward: tp collectives, and the gates of units.

The module's code is not changed. Its `forward` runs with this rank's shards of the parameters, and its inputs and
outputs are copied, sliced, summed or gathered as `STYLES` of `spec/model/wrapped/parts.py` says.
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
from meshwright.comm.ops import copy_to, gather_rows, last_dim, reduce_from, slice_rows
from meshwright.errors import UserError
from meshwright.nn.unit import GATE, WeightGate, call_in_backward, show_mark
from meshwright.spec.model.wrapped.parts import STYLES

Forward = Callable[..., Any]
# A style for each name of a module or parameter. In these names, `*` stands for a number.
Plan = Mapping[str, str]


def style_of(name: str, plan: Plan, parameter: bool = True) -> str:
    """Return the style that a plan gives to a module or, with `parameter`, to a parameter.

    A parameter that the plan does not name takes the style of its module. The style is empty if the plan has none.
    """
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    style = plan.get(generic)
    if style is None and parameter:
        style = plan.get(generic.rpartition(".")[0])
    if style is not None and style not in STYLES:
        raise UserError(f"the plan's style '{style}' of {name} is not known here: use a layout with layout.tp=1")
    return style or ""


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the arguments of a call with the first one changed, whether it is passed by position or by name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


# The operation on the input by `Style.before`. The others act on several tensors, or in place of the module's forward.
BEFORE: dict[str, Callable[[Any, Group], Any]] = {
    "copy": copy_to,
    "slice": lambda x, tp: last_dim(slice_rows, x, tp),
    "share": lambda x, tp: x / tp.size,
}


def _copy_rotary(y: Tensor, tp: Group, rotary: int) -> Tensor:
    rest, turned = y.split([y.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([rest, copy_to(turned, tp)], dim=-1)


# The operation on the output by `Style.after`; the last argument is `rotary` of `place`.
AFTER: dict[str, Callable[[Tensor, Group, int], Tensor]] = {
    "sum": lambda y, tp, rotary: reduce_from(y, tp),
    "gather": lambda y, tp, rotary: last_dim(gather_rows, y, tp),
    "rotary": _copy_rotary,
}


def place(module: nn.Module, style: str, tp: Group, rotary: int = 0) -> None:
    """Put a style's collectives around the forward of one module, whose parameters are this rank's shards already.

    `rotary` is the number of trailing output elements that the style `mla_kv_a_proj` refers to.
    """
    _, before, after, _, _ = STYLES[style]
    if tp.alone or not (before or after):
        return
    if STYLES[style].looks_up:
        module.forward = _sharded_lookup(module, tp)
        return
    bias_after = STYLES[style].sums_products
    prepare, finish = BEFORE.get(before), AFTER.get(after)
    original: Forward = module.forward

    def finish_output(y: Tensor) -> Tensor:
        return y if finish is None else finish(y, tp, rotary)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if prepare is not None:
            args, kwargs = with_first(args, kwargs, lambda x: prepare(x, tp))
        elif before:
            args, kwargs = map_tensors((args, kwargs), lambda xs: [copy_to(x, tp) for x in xs])
        bias = module._parameters.get("bias") if bias_after else None
        if bias is None:
            return finish_output(original(*args, **kwargs))
        # Every rank holds the whole bias. It must be added once, to the sum, and not to each rank's partial sum.
        module._parameters["bias"] = None
        try:
            y = original(*args, **kwargs)
        finally:
            module._parameters["bias"] = bias
        return finish_output(y) + bias

    module.forward = forward


def _sharded_lookup(module: nn.Module, tp: Group) -> Forward:
    """Return the forward of an embedding table of which this rank holds some rows.

    Each rank yields zeros for the ids whose rows other ranks hold, and the sum over tp completes the result.
    """
    assert isinstance(module, nn.Embedding)
    original: Forward = module.forward
    rows = module.weight.shape[0]
    first = tp.index * rows
    # The padding row gets no gradient. Its number must become that of a local row.
    if module.padding_idx is not None:
        local_index = module.padding_idx - first
        module.padding_idx = local_index if 0 <= local_index < rows else None

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_local = (ids >= first) & (ids < first + rows)
        embedded = original(torch.where(is_local, ids - first, 0), *args, **kwargs)
        return reduce_from(embedded.masked_fill(~is_local[..., None], 0.0), tp)

    return forward


def tensors_with_gradients(values: list[Any]) -> list[int]:
    """Return the indices of the tensors that require a gradient."""
    return [n for n, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]


def map_tensors(tree: Any, change: Callable[[list[Tensor]], Any]) -> Any:
    """Return nested values in which one call of `change` has replaced all tensors that require a gradient."""
    values, spec = tree_flatten(tree)
    indices = tensors_with_gradients(values)
    for n, value in zip(indices, change([values[n] for n in indices]) if indices else (), strict=True):
        values[n] = value
    return tree_unflatten(values, spec)


def recompute_in_backward(module: nn.Module) -> None:
    """Make a module save only its inputs for backward, and recompute the rest."""
    original: Forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    module.forward = forward


def _copies(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors.

    Another program may write into its tensors in place, which autograd forbids for the views that a custom autograd
    function returns.
    """
    return [x.clone() for x in xs]


def gate_members(unit: nn.Module, members: Sequence[nn.Module]) -> None:
    """Make the members of a unit open and close the gate that sharding may put on the unit.

    The gate opens before the forward and the backward of each member and closes when all members have finished. If one
    of them is not called, the weights stay in memory until the chunk has finished. The unit's mark is shown what each
    member returns. A unit of one module is its own only member.
    """
    finished = {"forward": 0, "backward": 0}

    def count_finished(work: str, close: Callable[[], None]) -> None:
        finished[work] = (finished[work] + 1) % len(members)
        if not finished[work]:
            close()

    def wrapped(member: nn.Module) -> Forward:
        original: Forward = member.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            gate: WeightGate | None = getattr(unit, GATE, None)
            if gate is None:
                return original(*args, **kwargs)
            gate.open()
            has_backward = torch.is_grad_enabled()
            # Backward runs in reverse order: a call on the inputs runs after the member's backward, one on the outputs
            # before it.
            if has_backward:
                done = partial(count_finished, "backward", gate.done)
                args, kwargs = map_tensors((args, kwargs), lambda xs: _copies(call_in_backward(done, *xs)))
            result = original(*args, **kwargs)
            count_finished("forward", gate.close)
            if not has_backward:
                return result
            return map_tensors(result, lambda xs: _copies(call_in_backward(gate.open, *xs)))

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            show_mark(unit, result, member.training)
            return result

        return forward

    for member in members:
        member.forward = wrapped(member)


def outer_modules(root: nn.Module) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Parameter]]]:
    """Return the modules into which a module is divided, in the order of definition, and the remaining parameters.

    The modules are all entries of the outermost module lists and, around the lists, the largest modules that contain no
    list. The remaining parameters, with their names, are in none of these modules.
    """
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
