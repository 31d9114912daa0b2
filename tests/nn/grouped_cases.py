"""Comparisons of the parts that move rows to experts and multiply them there with plain definitions in float64.

Each function returns the largest relative error, on any device. Sizes are not multiples of any tile, and some experts
have no rows, or all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.experts.grouped import (
    add_grouped_grad,
    grouped_product,
    grouped_weight_grad,
    sum_rows,
    take_rows,
    weighted_activation,
    weighted_activation_backward,
)
from meshwright.nn.experts.routing import _largest
from meshwright.nn.weight_grad import SinkTable
from tests.nn.fused_cases import Where, error, leaf

# Rows of each expert: around the sizes of tiles, and none for the first, one in the middle and the last expert.
COUNTS = {
    "some": (0, 129, 63, 1, 0, 300, 64, 0),
    "all to one": (0, 0, 0, 257, 0, 0, 0, 0),
    "one each": (1, 1, 1, 1, 1, 1, 1, 1),
    "none": (0, 0, 0, 0, 0, 0, 0, 0),
}


def numbers(at: Where, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(at.seed + sum(shape))
    return torch.randint(low, high, shape, generator=generator).to(at.device)


def wrong(found: Tensor, expected: Tensor) -> float:
    """Return 0 if both are equal, otherwise an infinite error."""
    return 0.0 if torch.equal(found.cpu(), expected.cpu()) else float("inf")


def choice(at: Where) -> float:
    """Compare the choice of experts with many equal scores and with excluded columns, for several numbers of
    columns.
    """
    worst = 0.0
    for rows, count, k in ((1, 1, 1), (7, 8, 8), (9, 60, 4), (5, 128, 8), (130, 200, 3), (3, 256, 8)):
        scores = (at.draw(rows, count).to(torch.promote_types(at.dtype, torch.float32)) * 2).round() / 4
        scores[:, 1::5] = float("-inf")
        if k < count:
            scores[0] = 0.25
        expected = scores.cpu().double().sort(dim=1, descending=True, stable=True).indices[:, :k]
        finite = scores.cpu().gather(1, expected) > float("-inf")  # Any of the excluded columns may follow.
        worst = max(worst, wrong(_largest(scores, k).cpu()[finite], expected[finite]))
    return worst


def rows_taken(at: Where) -> float:
    worst = 0.0
    for width in (1, 5, 768, 2049, 4100):
        x, index = at.draw(37, width), numbers(at, -1, 37, 90)
        expected = x.cpu()[index.cpu()] * (index.cpu() >= 0)[:, None]
        worst = max(worst, wrong(take_rows(x, index), expected))
    assert (index < 0).any() and take_rows(x, index[:0]).shape == (0, width)
    return worst


def rows_summed(at: Where) -> float:
    pairs = []
    for width, k in ((1, 1), (100, 3), (2049, 8), (4100, 2)):
        x, places = at.draw(90, width), numbers(at, -1, 90, 37, k)
        expected = (x.cpu().double()[places.cpu()] * (places.cpu() >= 0)[..., None]).sum(1)
        pairs.append((sum_rows(x, places), expected))
    assert (places < 0).any() and sum_rows(x, places[:0]).shape == (0, width)
    return error(pairs)


def rows_summed_in_order(at: Where) -> float:
    """Compare sums that must be made in the order of the choices and in float32. Another order, or bf16, would lose the
    small terms.
    """
    x = torch.tensor([[2.0**13], [-(2.0**13)], [2.0**-13]], device=at.device).to(at.dtype)
    places = torch.tensor([[0, 1, 2], [2, 1, 0]], device=at.device)
    expected = torch.tensor([[2.0**-13], [2.0**-13 if at.dtype == torch.float64 else 0.0]])
    unit = torch.finfo(at.dtype).eps
    halves = torch.tensor([[1.0], [unit / 2], [unit / 2]], dtype=torch.float64).to(at.device, at.dtype)
    one = torch.tensor([[1.0 + unit if at.dtype.itemsize == 2 else 1.0]], dtype=torch.float64)
    return max(
        wrong(sum_rows(x, places).double(), expected.double()), wrong(sum_rows(halves, places[:1]).double(), one)
    )


def activation(at: Where, kind: str = "swiglu") -> float:
    """Compare forward and backward, with row weights of which some are zero or negative."""
    pairs = []
    for rows, width in ((19, 1037), (130, 16), (33, 1024), (17, 3000)):
        inner = at.draw(rows, 2 * width if kind == "swiglu" else width)
        grad = at.draw(rows, width, factor=0.5)
        weights = at.draw(rows).to(torch.promote_types(at.dtype, torch.float32))
        weights[: rows // 3] = 0.0
        wide, wide_weights = leaf(inner), leaf(weights)
        value = F.silu(wide[:, :width]) * wide[:, width:] if kind == "swiglu" else F.gelu(wide)
        plain = value * wide_weights[:, None]
        plain.backward(grad.double().cpu())
        assert wide.grad is not None and wide_weights.grad is not None
        pairs.append((weighted_activation(inner, weights, kind), plain))
        # The kernel overwrites its inputs.
        found = weighted_activation_backward(inner.clone(), weights, grad.clone(), kind)
        pairs += [(found[0], wide.grad), (found[1], plain), (found[2], wide_weights.grad)]
    empty = torch.empty(0, 2 * width if kind == "swiglu" else width, device=at.device, dtype=at.dtype)
    assert weighted_activation(empty, weights[:0], kind).shape == (0, width)
    return error(pairs)


def grouped(at: Where, counts: tuple[int, ...], out: int = 200, ins: int = 304) -> float:
    """Compare the products of a forward and of a backward, and the gradient of the weights: by itself, and in a buffer
    of nonsense that receives it twice.
    """
    rows, experts = sum(counts), len(counts)
    ends = torch.tensor(counts, device=at.device).cumsum(0, dtype=torch.int32)
    x, grad, weight = at.draw(rows, ins), at.draw(rows, out), at.draw(experts, out, ins)
    wide = torch.promote_types(at.dtype, torch.float32)
    view = torch.full((experts, out, ins), 7.0, dtype=wide, device=at.device)
    sink = SinkTable().add(view, lambda _: None)
    add_grouped_grad(sink.handle, grad, x, ends)
    first = view.clone()
    add_grouped_grad(sink.handle, grad, x, ends)
    assert sink.contributions == 2
    parts = list(zip(x.double().cpu().split(counts), grad.double().cpu().split(counts), strict=True))
    plain = weight.double().cpu()
    forward = torch.cat([part @ plain[e].t() for e, (part, _) in enumerate(parts)])
    backward = torch.cat([part @ plain[e] for e, (_, part) in enumerate(parts)])
    gradient = torch.stack([g.t() @ part for part, g in parts])
    found = grouped_weight_grad(grad, x, ends)
    for expert, count in enumerate(counts):
        assert count or not (first[expert].any() or view[expert].any() or found[expert].any())
    pairs = [(first, gradient), (view, 2 * gradient), (found, gradient)]
    pairs += [(grouped_product(x, weight, ends), forward), (grouped_product(grad, weight, ends, True), backward)]
    return error(pairs)


CASES: dict[str, Callable[[Where], float]] = {
    "choice": choice,
    "rows taken": rows_taken,
    "rows summed": rows_summed,
    "rows summed in order": rows_summed_in_order,
    "weighted swiglu": activation,
    "weighted gelu": lambda at: activation(at, "gelu"),
    **{f"grouped, {name}": lambda at, counts=counts: grouped(at, counts) for name, counts in COUNTS.items()},
    "grouped, odd widths": lambda at: grouped(at, COUNTS["some"], 37, 101),
}
