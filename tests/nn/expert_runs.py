"""One pass of the mixture of experts in any precision and on any device, and its distance from float64 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshwright.device import Device
from meshwright.nn.experts.experts import RoutedInputs, SavedRouting
from meshwright.nn.weight_grad import SinkTable
from tests.nn.fused_cases import error
from tests.nn.plain_experts import Mixture, Weights, built, drawn


def attach_sinks(mixture: Mixture) -> Weights:
    """Give every layer that adds its own weight gradient a sink, whose buffer holds nonsense. Return the buffers by
    parameter.
    """
    views: Weights = {}
    table = SinkTable()
    for name, layer in mixture.named_modules():
        if isinstance(getattr(layer, "sinks", None), dict):
            wide = torch.promote_types(layer.weight.dtype, torch.float32)
            view = views[f"{name}.weight"] = torch.full_like(layer.weight, 1e6, dtype=wide, requires_grad=False)
            # The layer holds the sink, so that it lives as long as the layer.
            layer.sink = table.add(view, lambda _: None)
            layer.sinks["weight"] = layer.sink.handle
    return views


def one_pass(
    mixture: Mixture, x: Tensor, grad: Tensor, batch: int = 1, given: RoutedInputs | None = None, sinks: bool = False
) -> Weights:
    """Return the output, the losses and every gradient of <output, grad> plus the sum of the losses."""
    views = attach_sinks(mixture) if sinks else {}
    at = mixture.norm.weight
    x = x.detach().clone().to(at.device, at.dtype).requires_grad_()
    y, losses = mixture(x, batch, given)
    total = (y * grad.to(at.device, at.dtype)).sum(dtype=torch.promote_types(at.dtype, torch.float32))
    (total if losses is None else total + losses.sum()).backward()
    found = {"output": y, "input": x.grad} | ({} if losses is None else {"losses": losses})
    for name, parameter in mixture.named_parameters():
        if parameter.requires_grad:
            found[name] = views.get(name, parameter.grad)
    assert all(value is not None for value in found.values())
    return {name: value.detach() for name, value in found.items()}


@dataclass(frozen=True)
class Distance:
    """The distance of a pass from float64. `errors` are by name of the compared tensor. `others` is the share of rows
    for which float64 would have chosen other experts, because scores were nearly equal.
    """

    # A few roundings to bf16, of at most 2^-9 each, lie between the input and any of these. Plain torch has errors of
    # 0.002 to 0.006. One row of a thousand that went astray would be an error of 0.03.
    BOUND: ClassVar[float] = 0.01
    FEW: ClassVar[float] = 0.01

    errors: dict[str, float]
    others: float


def in_bf16(device: Device, mlp: str, keys: dict[str, Any], sinks: bool, favoured: bool = False) -> Distance:
    """Measure how far a bf16 pass of a thousand rows is from a float64 pass with the same weights and choices."""
    rows, sizes = 1000, {"hidden": 256, "ffn": 192}
    low, high = (built(mlp, p, d, sizes, **keys | {"ffn": 96}) for p, d in (("bf16", device), ("fp64", None)))
    with torch.no_grad():
        if favoured:
            assert low.experts.router.bias is not None
            low.experts.router.bias.copy_(100.0 * torch.eye(8)[5])
        for name, parameter in low.named_parameters():
            high.get_parameter(name).copy_(parameter)
    x, grad = (drawn(rows, 256, seed=seed).to(torch.bfloat16) for seed in (1, 2))
    saved = SavedRouting()
    found = one_pass(low, x, grad, 4, RoutedInputs(saved=saved), sinks)
    assert saved.chosen is not None and saved.all_chosen is not None
    chosen = saved.chosen.cpu()
    replayed = SavedRouting()
    replayed.chosen, replayed.all_chosen, replayed.room = chosen, saved.all_chosen.cpu(), saved.room
    expected = one_pass(high, x, grad, 4, RoutedInputs(saved=replayed, again=True))
    assert found.keys() == expected.keys()
    router = high.experts.router
    own = router.choose(router.scores(router(high.norm(x.double()))).detach())
    others = (own.sort(1).values != chosen.sort(1).values).any(1).double().mean()
    return Distance({name: error([(found[name], expected[name])]) for name in found}, float(others))
