"""The router of a mixture of experts: it chooses each token's experts and their weights, and computes its loss terms.

Everything is computed in float32 (float64 in float64 runs), whatever the model's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.device import kind_of
from meshwright.kernels import kernels_take
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import add_product_grad
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.experts import Routing

# For each `model.experts.router`, the function that turns logits [rows, experts] into scores.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid}


class _WideProduct(torch.autograd.Function):
    """y = x W^T with a float32 result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The handle of the sink never changes, so it needs none of save_for_backward's checks.
        ctx.sink = sink
        wide = torch.promote_types(x.dtype, torch.float32)
        # Products of two bf16 numbers are exact in float32, so the factors need not be converted.
        if kind_of(x.device).has_wide_products and x.dtype != wide:
            return torch.mm(x, weight.t(), out_dtype=wide)
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # In bf16 the products run on tensor cores. The gradient of x is rounded to bf16 in any case. A dry run takes
        # the same branch.
        if (kind_of(x.device).has_wide_products or x.is_meta) and x.dtype == torch.bfloat16:
            grad = grad.to(x.dtype)
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        if ctx.sink is None:
            return grad_x, (grad.t() @ x.to(grad.dtype)).to(weight.dtype), None
        add_product_grad(ctx.sink, grad, x.to(grad.dtype))
        return grad_x, None, None


class Router(nn.Module):
    """The router: a weight [experts, hidden] whose product with a token gives its logits, and the balancing bias."""

    bias: nn.Parameter | None

    def __init__(self, parallel: Parallel, routing: Routing, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.bias = parallel.parameter(records["bias"]) if "bias" in records else None
        self.sinks: dict[str, Tensor] = {}
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [rows, experts]."""
        return _WideProduct.apply(x, self.weight, self.sinks.get("weight"))

    def scores(self, logits: Tensor) -> Tensor:
        return SCORES[self.routing.scores](logits)

    @torch.no_grad()
    def choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the chosen experts [rows, k], the best first. Ties go to the lower number."""
        routing = self.routing
        biased = scores if self.bias is None else scores + self.bias
        if routing.groups > 1:
            by_group = biased.view(biased.shape[0], routing.groups, -1)
            # As in DeepSeek, the score of a group is that of its best expert (V2), or the sum of its two best (V3).
            best = by_group.topk(min(2 if routing.scores == "sigmoid" else 1, by_group.shape[2]), dim=2).values.sum(2)
            chosen = _largest(best, routing.groups_used)
            used = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
            biased = by_group.masked_fill(~used[:, :, None], -torch.inf).flatten(1)
        return _largest(biased, routing.top_k)

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights [rows, k] of the chosen experts' results. They do not include the bias."""
        weights = scores.gather(1, chosen)
        if self.routing.normalise:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return weights * self.routing.scale if self.routing.scale != 1.0 else weights


def _largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest columns of each row, the largest first. Ties go to the lower index, on every
    device."""
    if kernels_take(x):
        from meshwright.kernels.experts import choose

        return choose(x, k)
    # torch.topk leaves the order of ties open, so this is a stable sort.
    return x.sort(dim=1, descending=True, stable=True).indices[:, :k]


class RoutedRows(NamedTuple):
    """The rows that a rank routes, as the router's losses need them."""

    # The number of each row's sequence, and the number of sequences.
    sequence: Tensor
    sequences: int
    # A mask of the rows that count in the loss.
    counted: Tensor


class _Reported(torch.autograd.Function):
    """Returns `total`, the value to report, and passes its gradient to `part`, this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def picks_of(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return a tensor [rows, experts] with 1 for the experts that a row chose and 0 for the others."""
    return torch.zeros_like(scores).scatter_(1, chosen, 1.0)


def router_losses(
    router: Router, logits: Tensor, scores: Tensor, picks: Tensor, tokens: RoutedRows, parallel: Parallel
) -> Tensor:
    """Return the sums of the router's terms (`ExpertsPart.losses`) over the tokens that count in the loss.

    For a sequence of S tokens, E experts and k choices, f_i is the share of the S k choices that fell on expert i, and
    P_i is the mean of its score over the sequence (sigmoid scores are first divided by their sum). The balance loss of
    the sequence is E sum_i f_i P_i, which is 1 if all experts are used equally. It counts once for every token of the
    sequence that counts in the loss. The z loss of a token is the square of the log-sum-exp of its logits. With
    `aux_level: batch`, a micro-batch counts as one sequence, so the loss depends on how the batch is divided into
    micro-batches.
    """
    assert parallel.experts is not None
    routing, group = router.routing, parallel.experts.sequence
    if routing.aux_level == "batch":
        tokens = tokens._replace(sequence=torch.zeros_like(tokens.sequence), sequences=1)
    shares = scores if routing.scores == "softmax" else scores / scores.sum(1, keepdim=True)
    member = F.one_hot(tokens.sequence, tokens.sequences).to(shares.dtype)
    counted = tokens.counted.to(shares.dtype)

    # The sums of this rank's rows, [sequences, experts] or [sequences]. Only `mass` and `squares` carry gradients.
    mass = member.t() @ shares
    # Without a z loss no backward would run through this graph and free it, so it is not built.
    heights = logits if routing.z_loss else logits.detach()
    squares = member.t() @ (heights.logsumexp(1).square() * counted)

    # The same sums over all ranks that share the sequences, in one call.
    sums = torch.cat([member.t() @ picks, mass.detach(), (member.t() @ counted)[:, None], squares.detach()[:, None]], 1)
    group.all_reduce(sums)
    choices = sums[:, : routing.count]
    all_mass = sums[:, routing.count : -2]
    count = sums[:, -2]
    total = choices.sum(1, keepdim=True)  # S k
    weight = routing.count * routing.top_k * count[:, None] * choices / total.square()
    local = _weighted_losses(routing, (weight * mass).sum(), squares.sum())

    # The reported losses are summed over cp, but only one rank along tp counts. So each rank along cp reports its share
    # of the total, and all ranks along tp report the same.
    parts = group.size // max(1, parallel.tp.size)
    return _Reported.apply(local, _weighted_losses(routing, (weight * all_mass).sum(), sums[:, -1].sum()) / parts)


def _weighted_losses(routing: Routing, balance: Tensor, z: Tensor) -> Tensor:
    """Return the losses, of these two, that have a weight."""
    # Stacking avoids indexing a tensor by a list, which would wait for the device.
    return torch.stack([loss for loss, weight in ((balance, routing.aux_loss), (z, routing.z_loss)) if weight])
