"""Attention in pieces and in tiles over any rows, and the merge of partial results, against plain softmax attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright.nn.attention.pieces as tiles
from meshwright.nn.attention.documents import Documents, document_attention
from meshwright.nn.attention.pieces import (
    PartialAttention,
    RowPositions,
    Sight,
    attend,
    attend_backward,
    merge,
    no_gradient,
)

DIM = 8
CASES = [  # (queries, keys, query heads, key-value heads, documents, tile)
    (7, 7, 2, 2, False, 64),
    (13, 13, 4, 2, True, 4),
    (9, 17, 6, 1, False, 5),
    (17, 9, 4, 4, True, 3),
    (12, 12, 4, 2, True, 1),
]
CPU = torch.device("cpu")


def made(queries: int, keys: int, heads: int, kv: int, documents: bool, runs: bool = False) -> tuple[Any, ...]:
    """Return random q, k, v and gradient, and the rows of the queries and of the keys.

    The rows are two disjoint parts of a permutation, which differs between sequences. With as many queries as keys both
    have the same rows. Otherwise the first query has no key before it. With `runs` the rows of each part are in order,
    and so are documents.
    """
    random = torch.Generator().manual_seed(queries * 100 + keys + heads)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, generator=random)

    total = queries + keys
    every = torch.stack([torch.randperm(total, generator=random) for _ in range(2)])
    numbers = torch.randint(0, 3, (2, total), generator=random)
    if runs:
        every, numbers = torch.arange(total).roll(-3)[None].repeat(2, 1), numbers.sort(1)[0]

    def part(at: slice) -> RowPositions:
        chosen = every[:, at].clone()
        return RowPositions(chosen.numpy(), numbers.gather(1, chosen).numpy() if documents else None)

    at, to = part(slice(0, queries)), part(slice(queries, None))
    if queries == keys:
        to = at
    else:
        at.numbers[:, 0] = -1
    q, grad = tensor(heads, queries, DIM), tensor(heads, queries, DIM)
    return q, tensor(kv, keys, DIM), tensor(kv, keys, DIM), grad, at, to


def visible(at: RowPositions, to: RowPositions, window: int = 0) -> Tensor:
    seen = to.numbers[:, None, :] <= at.numbers[:, :, None]
    if window:
        seen &= to.numbers[:, None, :] > at.numbers[:, :, None] - window
    if at.documents is not None and to.documents is not None:
        seen = seen & (to.documents[:, None, :] == at.documents[:, :, None])
    return torch.from_numpy(seen)[:, None]


def found_by(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    found = PartialAttention(q, v.shape[-1])
    attend(q, k, v, sight, found)
    return found.out, found.sums


def gradients(q: Tensor, k: Tensor, v: Tensor, sight: Sight, grad: Tensor, out: Tensor, sums: Tensor) -> list[Tensor]:
    dq = no_gradient(q)
    return [dq, *attend_backward(q, k, v, sight, grad, out, sums, dq)]


def naive(
    q: Tensor, k: Tensor, v: Tensor, at: RowPositions, to: RowPositions, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Return plain softmax attention, computed with all scores at once, and its log-sums. A row without a key gives 0
    and -inf.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = visible(at, to, window)
    scores = (q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    return torch.where(seen, scores.masked_fill(~some, 0.0).softmax(-1), 0.0) @ v, scores.detach().logsumexp(-1)


@pytest.mark.parametrize("window", [0, 3, 6])
@pytest.mark.parametrize("runs", [False, True], ids=["tiles", "pieces"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_are_attention(case: tuple[Any, ...], runs: bool, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, log-sums and all gradients agree. Queries that see no key get 0, -inf and no gradient."""
    monkeypatch.setattr(tiles, "TILE", case[-1])
    monkeypatch.setattr("meshwright.spec.layout.pieces.ALWAYS_ACCEPTED_RUNS", 8 if runs else 0)
    q, k, v, grad, at, to = made(*case[:-1], runs)  # type: ignore[call-arg]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, sums = naive(*leaves, at, to, window)  # type: ignore[call-arg]
    expected.backward(grad)
    sight = Sight(at, to, CPU, window)
    assert (sight.pieces is not None) == runs
    out, log_sum = found_by(q, k, v, sight)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(log_sum, sums, rtol=1e-12, atol=1e-13)
    found = gradients(q, k, v, sight, grad, out, log_sum)
    for mine, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-11, atol=1e-12)
    blind = ~visible(at, to, window).any(-1).expand(log_sum.shape)
    assert bool(blind.any()) == (at is not to), "the cases have rows without a key, and rows that all see themselves"
    assert (log_sum[blind] == -torch.inf).all() and not out[blind].any() and not found[0][blind].any()


@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("runs", [False, True], ids=["tiles", "pieces"])
def test_halves_of_the_keys_merge_to_the_whole(documents: bool, runs: bool) -> None:
    """Forward merges by log-sums. Backward adds the gradients of the halves, given the log-sums of the whole."""
    q, k, v, grad, at, to = made(10, 10, 4, 2, documents, runs)
    halves = [slice(0, 4), slice(4, 10)]
    rows = [RowPositions(to.numbers[:, h], None if to.documents is None else to.documents[:, h]) for h in halves]
    sights = [Sight(at, r, CPU) for r in rows]
    parts = [found_by(q, k[:, :, h], v[:, :, h], s) for h, s in zip(halves, sights, strict=True)]
    assert any((log_sum == -torch.inf).any() for _, log_sum in parts), "some rows see keys of one half alone"
    whole, log_sum = found_by(q, k, v, Sight(at, to, CPU))
    torch.testing.assert_close(merge(*parts[0], *parts[1]), (whole, log_sum), rtol=1e-12, atol=1e-13)
    together = PartialAttention(q, DIM)
    for h, sight in zip(halves, sights, strict=True):
        attend(q, k[:, :, h], v[:, :, h], sight, together)
    torch.testing.assert_close((together.out, together.sums), (whole, log_sum), rtol=1e-12, atol=1e-13)
    dq, dk, dv = gradients(q, k, v, Sight(at, to, CPU), grad, whole, log_sum)
    pieces = [
        gradients(q, k[:, :, h], v[:, :, h], s, grad, whole, log_sum) for h, s in zip(halves, sights, strict=True)
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


def test_low_precision_is_merged_in_float32() -> None:
    q, k, v, _, at, to = made(8, 8, 2, 2, False)
    out, log_sum = found_by(q.bfloat16(), k.bfloat16(), v.bfloat16(), Sight(at, to, CPU))
    assert out.dtype == log_sum.dtype == torch.float32


class Largest(TorchDispatchMode):
    """A mode that records the largest storage that any operator returns, in elements."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return found


@pytest.mark.parametrize("runs", [False, True], ids=["tiles", "pieces"])
@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
def test_no_tensor_of_all_scores_is_ever_made(documents: bool, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of forward and backward, temporary or saved, have at most as many elements as the larger of an input
    and a tile. Plain attention has seq x seq. This includes the documents of one rank that holds all rows.
    """
    monkeypatch.setattr(tiles, "TILE", 32)
    seq, heads = 512, 1
    random = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, heads, seq, DIM, dtype=torch.float64, generator=random) for _ in range(4))
    rows = torch.arange(seq)[None] if runs else torch.randperm(seq, generator=random)[None]
    at = RowPositions(rows.numpy(), (rows // 100).numpy() if documents else None)
    sight = Sight(at, at, CPU)
    assert (sight.pieces is not None) == runs
    with Largest() as tiled:
        out, log_sum = found_by(q, k, v, sight)
        gradients(q, k, v, sight, grad, out, log_sum)
        if documents and runs:
            leaf = q.clone().requires_grad_()
            document_attention(leaf, k, v, Documents.of(at.documents, CPU)).backward(grad)
    assert tiled.most <= max(seq * heads * DIM, 32 * 32 * heads) < seq * seq // 8
    with Largest() as plain:
        naive(q, k, v, at, at)
    assert plain.most >= seq * seq, "the watcher sees such a tensor where there is one"


@pytest.mark.parametrize(("compiled", "window"), [(False, 0), (True, 0), (False, 5), (False, 23)])
def test_documents_in_one_sequence_are_attention(compiled: bool, window: int) -> None:
    """Result and gradients equal those of a mask, for any number of documents, also when compiled once for all."""
    function = torch.compile(document_attention, fullgraph=True) if compiled else document_attention
    random = torch.Generator().manual_seed(5)
    for documents in (1, 4, 9):
        q, k, v, grad = (
            torch.randn(2, 24, heads, DIM, dtype=torch.float64, generator=random).transpose(1, 2)
            for heads in (4, 2, 2, 4)
        )
        segments = torch.randint(0, documents, (2, 24), generator=random).sort(1)[0].numpy()
        rows = RowPositions(np.arange(24)[None].repeat(2, 0), segments)
        leaves, plain = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
        out = function(*leaves, Documents.of(segments, CPU), window)  # type: ignore[call-arg]
        expected = naive(*plain, rows, rows, window)[0]  # type: ignore[call-arg]
        out.backward(grad)
        expected.backward(grad)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
        for mine, other in zip(leaves, plain, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-12)
