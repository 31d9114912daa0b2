"""A mixture of experts in its plainest form: a loop over tokens and the experts of each, with torch's own autograd.

Nothing is sorted, grouped or fused. The module that is compared with it is here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.nn.build import build_module
from meshwright.nn.experts.experts import Experts, RoutedInputs
from meshwright.nn.inputs import Inputs
from meshwright.spec.layout.params import records_under
from meshwright.spec.model.description import model_of
from meshwright.spec.model.experts import Routing
from tests.support.oracle import small_config

Weights = dict[str, Tensor]


class Routed(NamedTuple):
    """The routing of one token: its logits and scores, the experts that it chose, and those of them that had no room
    for it.
    """

    logits: Tensor
    scores: Tensor
    chosen: list[int]
    dropped: list[int]


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_mlp(x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """Apply the MLP to one token."""
    inner = up @ x
    if kind == "swiglu":
        gate, inner = inner.chunk(2)
        return down @ (gate / (1.0 + (-gate).exp()) * inner)
    return down @ (inner * 0.5 * (1.0 + torch.erf(inner / 2**0.5)))


def plain_choice(values: Sequence[float], r: Routing) -> list[int]:
    """Return the experts with the largest values, from the best groups only. Of equal values the lower number wins."""
    allowed, size = list(range(r.count)), r.count // r.groups
    if r.groups > 1:
        best = [
            sum(sorted(values[g * size : (g + 1) * size], reverse=True)[: 2 if r.scores == "sigmoid" else 1])
            for g in range(r.groups)
        ]
        used = sorted(range(r.groups), key=lambda g: (-best[g], g))[: r.groups_used]
        allowed = [expert for expert in allowed if expert // size in used]
    return sorted(allowed, key=lambda expert: (-values[expert], expert))[: r.top_k]


def plain_mixture(x: Tensor, w: Weights, r: Routing, kind: str, sequences: int = 1) -> tuple[Tensor, list[Routed]]:
    """Return the mixture of normed tokens x [tokens, hidden], and the routing of each token. `w` has the weights by
    their names in `Experts`.
    """
    up, down, bias = w["up.weight"], w["down.weight"], w.get("router.bias", torch.zeros(r.count))
    room = length = x.shape[0] // sequences
    if r.capacity is not None:
        room = min(room, math.ceil(length * r.top_k / r.count * r.capacity))
    rows, found, taken = [], [], [0] * r.count
    for number, token in enumerate(x):
        taken = [0] * r.count if number % length == 0 else taken  # Each sequence has its own places.
        logits = torch.stack([w["router.weight"][expert] @ token for expert in range(r.count)])
        scores = logits.exp() / logits.exp().sum() if r.scores == "softmax" else 1.0 / (1.0 + (-logits).exp())
        routed = Routed(logits, scores, plain_choice((scores.detach() + bias).tolist(), r), [])
        total = torch.stack([scores[expert] for expert in routed.chosen]).sum() if r.normalise else 1.0
        y = torch.zeros_like(token)
        for expert in routed.chosen:
            taken[expert] += 1
            if taken[expert] > room:
                routed.dropped.append(expert)
            else:
                y = y + r.scale * scores[expert] / total * plain_mlp(token, up[expert], down[expert], kind)
        if "shared.up.weight" in w:
            y = y + plain_mlp(token, w["shared.up.weight"], w["shared.down.weight"], kind)
        rows.append(y)
        found.append(routed)
    return torch.stack(rows), found


def plain_losses(routed: Sequence[Routed], counted: Sequence[int], sequences: int, r: Routing) -> tuple[Tensor, Tensor]:
    """Return the balance loss of a token's sequence and the token's z loss, each summed over the tokens that count."""
    if r.aux_level == "batch":
        sequences = 1
    length = len(routed) // sequences
    balance, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for first in range(0, len(routed), length):
        tokens = routed[first : first + length]
        loss = torch.zeros((), dtype=torch.float64)
        for expert in range(r.count):
            f = sum(expert in token.chosen for token in tokens) / (length * r.top_k)
            p = torch.stack([token.scores[expert] / token.scores.sum() for token in tokens]).mean()
            loss = loss + r.count * f * p
        for token, counts in zip(tokens, counted[first : first + length], strict=True):
            balance = balance + counts * loss
            z = z + counts * token.logits.exp().sum().log().square()
    return balance, z


class Mixture(nn.Module):
    """A norm and the mixture of experts behind it, as modules."""

    experts: Experts

    def __init__(self, config: Config, device: Device) -> None:
        super().__init__()
        ctx = build_context(config, 0, 1, device)
        unit = model_of(config).blocks[0]
        records = unit.records(ctx.at, "layers.0")
        parts = {key: build_module(part, ctx.parallel, records_under(records, key)) for key, _, part in unit.parts}
        self.norm, self.experts = parts["norm2"], parts[unit.parts[-1].key]
        self.eps = config.model.norm_eps

    @property
    def routing(self) -> Routing:
        return self.experts.routing

    def forward(self, x: Tensor, batch: int = 1, given: RoutedInputs | None = None) -> tuple[Tensor, Tensor | None]:
        same, y, *losses = self.experts(x, self.norm, Inputs(batch, routed=given or RoutedInputs()))
        assert same is x
        return y, losses[0] if losses else None


def built(
    mlp: str = "swiglu", precision: str = "fp64", device: Device | None = None, sizes: dict[str, int] | None = None,
    tune: dict[str, Any] | None = None, **experts: Any,
) -> Mixture:  # fmt: skip
    """Build a mixture with random weights, which are the same for every precision and device except for rounding."""
    model = {
        "layers": 1, "hidden": 12, "norm": "rmsnorm", "mlp": mlp, "bias": False, "ffn": 10,
        "experts": {"count": 8, "top_k": 3, "ffn": 10} | experts,
    }  # fmt: skip
    config = small_config(model=model | (sizes or {}), train={"precision": precision}, tune=tune or {})
    mixture = Mixture(config, device or Device("cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in mixture.named_parameters():
            std = 0.3 if name.endswith("bias") else 1.0 / math.sqrt(parameter.shape[-1])
            value = std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 3.0 if "router.weight" in name else 1.0
            parameter.copy_(1.0 + value if name == "norm.weight" else value * scale)
    return mixture


def plain_weights(mixture: Mixture) -> Weights:
    """Return float64 copies of the weights, which autograd follows."""
    found = {name: p.detach().double().cpu().clone() for name, p in mixture.named_parameters()}
    return {name: value.requires_grad_("bias" not in name) for name, value in found.items()}


def plain_pass(mixture: Mixture, x: Tensor, w: Weights, kind: str) -> tuple[Tensor, list[Routed]]:
    """Return the result that `Mixture.forward` must give for the weights `w`, in float64."""
    own = {name.removeprefix("experts."): value for name, value in w.items()}
    return plain_mixture(plain_norm(x, w["norm.weight"], mixture.eps), own, mixture.routing, kind)


def gradients(mixture: Mixture) -> Weights:
    """Return the gradient of every trained parameter. None may be missing."""
    found = {}
    for name, parameter in mixture.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = parameter.grad
    return found


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
