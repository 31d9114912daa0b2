"""Attention in tiles over any rows, and the merge of its parts, against plain softmax attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright.nn.context as context
from meshwright.nn.context import ContextRows, attend, attend_backward, merge

DIM = 6
CASES = [  # (queries, keys, query heads, key-value heads, documents, tile)
    (7, 7, 2, 2, False, 64),
    (13, 13, 4, 2, True, 4),
    (9, 17, 6, 1, False, 5),
    (17, 9, 4, 4, True, 3),
    (12, 12, 4, 2, True, 1),
]


def made(queries: int, keys: int, heads: int, kv: int, documents: bool) -> tuple[Any, ...]:
    """Random q, k, v and gradient, and rows: two disjoint parts of a permutation, another one for each sequence, or the
    same rows for both where there are as many queries as keys. Else the first query has no key before it."""
    random = torch.Generator().manual_seed(queries * 100 + keys + heads)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, generator=random)

    every = torch.stack([torch.randperm(queries + keys, generator=random) for _ in range(2)])
    numbers = torch.randint(0, 3, (2, queries + keys), generator=random) if documents else None

    def part(at: slice) -> ContextRows:
        chosen = every[:, at]
        return ContextRows(chosen, None if numbers is None else numbers.gather(1, chosen))

    at, to = part(slice(0, queries)), part(slice(queries, None))
    if queries == keys:
        to = at
    else:
        at.rows[:, 0] = -1
    q, grad = tensor(heads, queries, DIM), tensor(heads, queries, DIM)
    return q, tensor(kv, keys, DIM), tensor(kv, keys, DIM), grad, at, to


def visible(at: ContextRows, to: ContextRows) -> Tensor:
    seen = to.rows[:, None, :] <= at.rows[:, :, None]
    if at.documents is not None and to.documents is not None:
        seen = seen & (to.documents[:, None, :] == at.documents[:, :, None])
    return seen[:, None]


def naive(q: Tensor, k: Tensor, v: Tensor, at: ContextRows, to: ContextRows) -> tuple[Tensor, Tensor]:
    """Plain softmax attention with all scores at once; a row without a key gives 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = visible(at, to)
    scores = (q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    return torch.where(seen, scores.masked_fill(~some, 0.0).softmax(-1), 0.0) @ v, scores.detach().logsumexp(-1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_are_attention(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, log-sums and all gradients; queries that see no key get 0, -inf and no gradient."""
    monkeypatch.setattr(context, "TILE", case[-1])
    q, k, v, grad, at, to = made(*case[:-1])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, sums = naive(*leaves, at, to)
    expected.backward(grad)
    out, log_sum = attend(q, k, v, at, to)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(log_sum, sums, rtol=1e-12, atol=1e-13)
    found = attend_backward(q, k, v, at, to, grad, log_sum, (grad * out).sum(-1))
    for mine, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-11, atol=1e-12)
    blind = ~visible(at, to).any(-1).expand(log_sum.shape)
    assert bool(blind.any()) == (at is not to), "the cases have rows without a key, and rows that all see themselves"
    assert (log_sum[blind] == -torch.inf).all() and not out[blind].any() and not found[0][blind].any()


@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
def test_halves_of_the_keys_merge_to_the_whole(documents: bool) -> None:
    """Forward by log-sums; backward adds the gradients of the halves, given the log-sums of the whole."""
    q, k, v, grad, at, to = made(10, 10, 4, 2, documents)
    halves = [slice(0, 4), slice(4, 10)]
    rows = [ContextRows(to.rows[:, h], None if to.documents is None else to.documents[:, h]) for h in halves]
    parts = [attend(q, k[:, :, h], v[:, :, h], at, r) for h, r in zip(halves, rows, strict=True)]
    assert any((log_sum == -torch.inf).any() for _, log_sum in parts), "some rows see keys of one half alone"
    whole, log_sum = attend(q, k, v, at, to)
    merged = merge(*parts[0], *parts[1])
    torch.testing.assert_close(merged, (whole, log_sum), rtol=1e-12, atol=1e-13)
    delta = (grad * whole).sum(-1)
    dq, dk, dv = attend_backward(q, k, v, at, to, grad, log_sum, delta)
    pieces = [
        attend_backward(q, k[:, :, h], v[:, :, h], at, r, grad, log_sum, delta)
        for h, r in zip(halves, rows, strict=True)
    ]
    torch.testing.assert_close(pieces[0][0] + pieces[1][0], dq, rtol=1e-11, atol=1e-12)
    for index, expected in ((1, dk), (2, dv)):
        torch.testing.assert_close(torch.cat([piece[index] for piece in pieces], 2), expected)


def test_two_results_without_a_key_merge_to_none() -> None:
    nothing, none = torch.zeros(1, 2, 3, DIM), torch.full((1, 2, 3), -torch.inf)
    out, log_sum = merge(nothing, none, nothing, none)
    assert not out.any() and (log_sum == -torch.inf).all()
    full, sums = torch.ones(1, 2, 3, DIM), torch.zeros(1, 2, 3)
    assert torch.equal(merge(nothing, none, full, sums)[0], full)


def test_low_precision_is_computed_in_float32() -> None:
    q, k, v, _, at, to = made(8, 8, 2, 2, False)
    out, log_sum = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), at, to)
    assert out.dtype == log_sum.dtype == torch.float32


class Largest(TorchDispatchMode):
    """Notes the largest storage that any operator returns, in elements."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return found


@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
def test_no_tensor_of_all_scores_is_ever_made(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that forward or backward makes, for a moment or to keep, has more numbers than the larger of an input and
    a tile; plain attention has seq x seq."""
    monkeypatch.setattr(context, "TILE", 32)
    seq, heads = 512, 1
    random = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, heads, seq, DIM, dtype=torch.float64, generator=random) for _ in range(4))
    rows = torch.randperm(seq, generator=random)[None]
    at = ContextRows(rows, rows // 100 if documents else None)
    with Largest() as tiled:
        out, log_sum = attend(q, k, v, at, at)
        attend_backward(q, k, v, at, at, grad, log_sum, (grad * out).sum(-1))
    assert tiled.most <= max(seq * heads * DIM, 32 * 32 * heads) < seq * seq // 8
    with Largest() as plain:
        naive(q, k, v, at, at)
    assert plain.most >= seq * seq, "the watcher sees such a tensor where there is one"
