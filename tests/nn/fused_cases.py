"""Comparisons of fused paths with their plain definitions in float64, on any device.

Each function returns the largest relative error of one path, for random inputs, odd sizes and ignored labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.nn import fp8, fused
from meshwright.nn.attention.rotary import rotate, rotate_qkv
from meshwright.nn.loss import Vocabulary, loss_and_grad_
from meshwright.nn.weight_grad import SinkTable, add_rows_grad, write_product


@dataclass(frozen=True)
class Where:
    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    def draw(self, *shape: int, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * factor).to(self.device, self.dtype)


def error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest ||found - expected|| / ||expected|| of some (found, expected). A NaN counts as infinite."""
    worst = 0.0
    for found, expected in pairs:
        found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
        assert found.shape == expected.shape
        share = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
        worst = max(worst, share if share == share else float("inf"))
    return worst


def leaf(x: Tensor) -> Tensor:
    return x.detach().double().cpu().requires_grad_()


def rms_norm(at: Where) -> float:
    rows, width, eps = 37, 100, 1e-5
    x, weight, grad = at.draw(rows, width), at.draw(width), at.draw(width, rows).t().contiguous()
    passed = at.draw(rows, 1, width, factor=0.5)[:, 0]
    value, rstd = fused.rms_norm(x, weight, eps)
    again = fused.rms_norm_in_one_pass(x, weight, eps)
    found = fused.rms_norm_backward(x, rstd, weight, grad, passed)
    wide, scale = leaf(x), leaf(weight)
    plain = F.rms_norm(wide, (width,), scale, eps)
    plain.backward(grad.double().cpu())
    assert wide.grad is not None and scale.grad is not None
    return error([
        (value, plain), (again[0], plain), (again[1], rstd), (found[0], wide.grad + passed.double().cpu()),
        (found[1], plain), (found[2], scale.grad),
    ])  # fmt: skip


def swiglu(at: Where) -> float:
    rows, width = 19, 1037
    x, grad = at.draw(rows, 2 * width), at.draw(rows, width)
    found = fused.swiglu_backward(x, grad)
    wide = leaf(x)
    plain = F.silu(wide[:, :width]) * wide[:, width:]
    plain.backward(grad.double().cpu())
    assert wide.grad is not None
    return error([(fused.swiglu(x), plain), (found[0], wide.grad), (found[1], plain)])


def rotary(at: Where, rotary_dim: int = 24, documents: bool = True) -> float:
    """Compare rotary positions that turn part of each head, with tables of each sequence's own positions."""
    batch, seq, heads, kv, width = 2, 13, 5, 1, 40
    qkv = at.draw(batch, seq, heads + 2 * kv, width)
    angle = at.draw(batch if documents else 1, seq, 1, rotary_dim // 2).float()
    tables = (angle.cos(), angle.sin())
    grads = [at.draw(batch, seq, n, width) for n in (heads, kv, kv)]
    mine = qkv.clone().requires_grad_()
    found = rotate_qkv(mine, tables, heads, kv)
    torch.autograd.backward(found, grads)
    wide = leaf(qkv)
    exact = (tables[0].double().cpu(), tables[1].double().cpu())
    q, k, v = wide.split((heads, kv, kv), dim=2)
    plain = (rotate(q, exact), rotate(k, exact), v)
    torch.autograd.backward(plain, [g.double().cpu() for g in grads])
    assert mine.grad is not None and wide.grad is not None
    return error([*zip(found, plain, strict=True), (mine.grad, wide.grad)])


def loss(at: Where, width: int = 1003, columns: int = 1001, first: int = 0) -> float:
    """Compare the loss and its gradient. Padding columns hold nonsense, and some tokens are ignored."""
    rows, scale = 23, 0.37
    logits = at.draw(rows, width, factor=3.0)
    logits[:, columns:] = 5e3
    generator = torch.Generator().manual_seed(at.seed)
    labels = torch.randint(first, first + columns, (rows,), generator=generator)
    mask = (torch.rand(rows, generator=generator) < 0.7).long()
    wide = leaf(logits)
    plain = F.cross_entropy(wide[:, :columns], labels - first, reduction="none") * mask
    (scale * plain.sum()).backward()
    assert wide.grad is not None
    mine = logits.clone()
    here = (labels.to(at.device), mask.to(at.device))
    losses = loss_and_grad_(mine, *here, scale, Vocabulary(first, columns, "", 1))
    only = loss_and_grad_(logits, *here, None, Vocabulary(first, columns, "", 1))
    assert not mine[:, columns:].any() and not mine[(mask == 0).to(at.device)].any()
    return error([(losses, plain), (only, plain), (mine, wide.grad)])


def weight_gradient(at: Where) -> float:
    grad, x = at.draw(48, 40), at.draw(48, 24)
    wide = torch.float64 if at.dtype == torch.float64 else torch.float32
    out = torch.full((40, 24), 7.0, dtype=wide, device=at.device)
    plain = grad.double().cpu().t() @ x.double().cpu()
    write_product(out, grad, x, add=False)
    first = out.clone()
    write_product(out, grad, x, add=True)
    return error([(first, plain), (out, 2 * plain)])


def embedding(at: Where, vocab: int = 40) -> float:
    """Compare gradients of an embedding. Ids repeat or belong to another rank, and the buffer is first fresh, then in
    use.
    """
    tokens, hidden = 301, 1100
    grad = at.draw(tokens, hidden)
    rows = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(at.seed))
    rows[:20], rows[50:90] = 7 % vocab, -1
    wide = torch.float64 if at.dtype == torch.float64 else torch.float32
    view = torch.full((vocab, hidden), 9.0, dtype=wide, device=at.device)
    sink = SinkTable().add(view, lambda _: None)
    kept = rows >= 0
    plain = torch.zeros(vocab, hidden, dtype=torch.float64).index_add_(0, rows[kept], grad.double().cpu()[kept])
    add_rows_grad(sink.handle, grad, rows.to(at.device))
    first = view.clone()
    add_rows_grad(sink.handle, grad, rows.to(at.device))
    assert sink.contributions == 2
    return error([(first, plain), (view, 2 * plain)])


def fp8_products(at: Where, kind: str = "fp8") -> float:
    """Compare all three products of a layer with their emulation. The factors are rounded alike, so little error is
    left.
    """
    x, weight, grad = at.draw(48, 32), at.draw(64, 32, factor=0.02), at.draw(48, 64, factor=1e-4)

    def products(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        a, b = fp8.quantise(x, kind, fp8.VALUES, across=True), fp8.quantise(weight, kind, fp8.VALUES, across=True)
        g = fp8.quantise(grad, kind, fp8.GRADIENTS, across=True)
        factors = ((a.straight, b.straight), (g.straight, b.across), (g.across, a.across))
        return [fp8.product(*left, *right, dtype=torch.float32, fast=False) for left, right in factors]

    found, emulated = products(x, weight, grad), products(x.cpu(), weight.cpu(), grad.cpu())
    exact = [x.double().cpu() @ weight.double().cpu().t(), grad.double().cpu() @ weight.double().cpu()]
    assert error(zip(found, exact, strict=False)) < 0.08, "far from the true product"
    return error(zip(found, emulated, strict=True))


def fp8_keeps_what_is_not_finite(at: Where, kind: str) -> bool:
    """Return True if fp8 values keep NaN and infinity. Otherwise a broken gradient would pass for a good one, and the
    step would be taken.
    """
    kept = []
    for bad in (float("nan"), float("inf")):
        for dtype in (fp8.VALUES, fp8.GRADIENTS):
            x = at.draw(48, 32)
            x[5, 7] = bad
            found = fp8.quantise(x, kind, dtype, across=True)
            for value, scale in found:
                kept.append(not (value.float() * scale.reshape(-1, 1)).isfinite().all())
    return all(kept)


CASES: dict[str, Callable[[Where], float]] = {
    "rms_norm": rms_norm,
    "swiglu": swiglu,
    "rotary": rotary,
    "rotary whole heads": lambda at: rotary(at, 40, False),
    "loss": loss,
    "loss of a rank": lambda at: loss(at, 512, 400, 512),
    "weight gradient": weight_gradient,
    "embedding": embedding,
    "embedding of two rows": partial(embedding, vocab=2),
}
# Relative errors that rounding explains.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
