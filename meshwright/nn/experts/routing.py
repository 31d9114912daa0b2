"""The router of a mixture of experts: which experts each token goes to, with which weights, and what that adds to the
loss. Everything is computed in float32 (in float64 runs: float64), whatever the model's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import kernels_take
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import add_product_grad
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.experts import Routing

# By `model.experts.router`: how logits [rows, experts] become scores.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid}


class _WideProduct(torch.autograd.Function):
    """y = x W^T with a result in float32, and both gradients computed from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sink: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink  # an attribute, as in nn/linear.py
        wide = torch.promote_types(x.dtype, torch.float32)
        if x.is_cuda and x.dtype != wide:  # products of bf16 numbers are exact in float32
            return torch.mm(x, weight.t(), out_dtype=wide)
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # Tensor cores, as in a dry run; the gradient of x is rounded to bf16 in any case.
        if (x.is_cuda or x.is_meta) and x.dtype == torch.bfloat16:
            grad = grad.to(x.dtype)
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        if ctx.sink is None:
            return grad_x, (grad.t() @ x.to(grad.dtype)).to(weight.dtype), None
        add_product_grad(ctx.sink, grad, x.to(grad.dtype))
        return grad_x, None, None


class Router(nn.Module):
    """The weight [experts, hidden] whose product with a token gives its logits, and the balancing bias."""

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
        """Return the numbers of the chosen experts [rows, k], the best first; of equal ones the lower number wins."""
        r = self.routing
        found = scores if self.bias is None else scores + self.bias
        if r.groups > 1:
            by_group = found.view(found.shape[0], r.groups, -1)
            # As DeepSeek has it: a group is as good as its best expert (V2) or its two best together (V3).
            best = by_group.topk(min(2 if r.scores == "sigmoid" else 1, by_group.shape[2]), dim=2).values.sum(2)
            chosen = _largest(best, r.groups_used)
            used = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
            found = by_group.masked_fill(~used[:, :, None], -torch.inf).flatten(1)
        return _largest(found, r.top_k)

    def weights(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights [rows, k] of the chosen experts' results. The bias only helps to choose."""
        found = scores.gather(1, chosen)
        if self.routing.normalise:
            found = found / (found.sum(1, keepdim=True) + 1e-20)
        return found * self.routing.scale if self.routing.scale != 1.0 else found


def _largest(x: Tensor, k: int) -> Tensor:
    """Return the numbers of the k largest columns of each row, the largest first; ties are broken by the lower
    number, on every device."""
    if kernels_take(x):
        from meshwright.kernels.experts import choose

        return choose(x, k)
    return x.sort(dim=1, descending=True, stable=True).indices[:, :k]


class Tokens(NamedTuple):
    """What a router has to know of the rows that a rank routes: the sequence that each belongs to, how many sequences
    there are, and which rows count in the loss."""

    sequence: Tensor
    sequences: int
    counted: Tensor


class _Reported(torch.autograd.Function):
    """Returns `total`, which is reported; its gradient goes to this rank's part of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def picks_of(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return 1 for the experts that a row chose and 0 for the others, [rows, experts]."""
    return torch.zeros_like(scores).scatter_(1, chosen, 1.0)


def router_losses(
    router: Router, logits: Tensor, scores: Tensor, picks: Tensor, tokens: Tokens, parallel: Parallel
) -> Tensor:
    """Return the sums of the router's terms (`ExpertsPart.losses`) over the tokens that count in the loss.

    For a sequence of S tokens, E experts and k choices, f_i is the share of the S k choices that fell on expert i and
    P_i the mean of its score over the sequence (of sigmoid scores: as a share of their sum). The balance loss of the
    sequence is E sum_i f_i P_i, which is 1 where all are alike; every token of the sequence that counts has it as its
    own. The z loss of a token is the square of the log-sum of its logits. With `aux_level: batch`, a micro-batch counts
    as one sequence, so that the loss depends on how the batch is divided into micro-batches.
    """
    assert parallel.experts is not None
    r, group = router.routing, parallel.experts.sequence
    if r.aux_level == "batch":
        tokens = tokens._replace(sequence=torch.zeros_like(tokens.sequence), sequences=1)
    shares = scores if r.scores == "softmax" else scores / scores.sum(1, keepdim=True)
    member = F.one_hot(tokens.sequence, tokens.sequences).to(shares.dtype)
    counted = tokens.counted.to(shares.dtype)
    mass = member.t() @ shares  # [sequences, experts], which has the gradient
    heights = logits if r.z_loss else logits.detach()  # a graph that no backward runs through would be kept
    squares = member.t() @ (heights.logsumexp(1).square() * counted)
    sums = torch.cat([member.t() @ picks, mass.detach(), (member.t() @ counted)[:, None], squares.detach()[:, None]], 1)
    group.all_reduce(sums)
    choices, all_mass, count = sums[:, : r.count], sums[:, r.count : -2], sums[:, -2]
    total = choices.sum(1, keepdim=True)  # S k
    weight = r.count * r.top_k * count[:, None] * choices / total.square()
    local = _used(r, (weight * mass).sum(), squares.sum())
    # Ranks along cp each report their part, ranks along tp the whole: of those only one is counted.
    parts = group.size // max(1, parallel.tp.size)
    return _Reported.apply(local, _used(r, (weight * all_mass).sum(), sums[:, -1].sum()) / parts)


def _used(r: Routing, balance: Tensor, z: Tensor) -> Tensor:
    """Return those of the two losses that have a weight. (Indexing by a list would wait for the device.)"""
    return torch.stack([loss for loss, weight in ((balance, r.aux_loss), (z, r.z_loss)) if weight])
