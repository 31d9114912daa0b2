"""Attention in pieces with the kernels of a GPU: every order, whole texts and documents, against plain attention in
float64. It also covers documents in the sequences of one rank.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import meshwright.nn.attention.pieces as pieces
from meshwright.nn.attention.context import ContextRows, _reorder_rows
from meshwright.nn.attention.documents import Documents, document_attention
from meshwright.nn.attention.pieces import PartialAttention, RowPositions, attend, attend_backward, no_gradient
from meshwright.spec.layout.rows import ORDERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, SEQ, HEADS, KV, RANKS = 2, 768, 8, 2, 4
CUDA = torch.device("cuda")


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    batch, heads, rows, width = shape
    return torch.randn(batch, rows, heads, width, device=CUDA, dtype=dtype).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute attention in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def segments(documents: bool) -> np.ndarray:
    random = np.random.default_rng(3)
    return np.sort(random.integers(0, 6 if documents else 1, (BATCH, SEQ)), 1).astype(np.int64)


def close(mine: Tensor, exact: Tensor, bound: float, what: str) -> None:
    mine, exact = mine.detach().double(), exact.detach().double()
    error = float((mine - exact).norm() / exact.norm())
    assert error < bound, f"{what}: {error:.2e}"


@pytest.mark.parametrize("many", [0, 999], ids=["rounds", "one by one"])
@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_attention(
    order: str, documents: bool, width: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged blocks of a ring and gathered keys both give the right result and gradients. bf16 rounds each by
    3e-3.
    """
    monkeypatch.setattr(pieces, "GROUPED_CALL_PIECES", many)
    numbers = segments(documents)
    lengths = [np.diff(np.flatnonzero(np.diff(row, prepend=-1, append=-1))).tolist() for row in numbers]
    rows = np.stack([ORDERS[order](SEQ, RANKS, each).order for each in lengths])
    given = ContextRows(RowPositions(rows, np.take_along_axis(numbers, rows, 1) if documents else None), CUDA)
    at = torch.from_numpy(rows).cuda()
    q, grad = drawn(BATCH, HEADS, SEQ, width), drawn(BATCH, HEADS, SEQ, width)
    k, v = drawn(BATCH, KV, SEQ, width), drawn(BATCH, KV, SEQ, width)
    owner = torch.from_numpy(np.take_along_axis(numbers, rows, 1)).cuda()
    seen = (at[:, None, None, :] <= at[:, None, :, None]) & (owner[:, None, None, :] == owner[:, None, :, None])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = plain(*leaves, seen)  # type: ignore[call-arg]
    exact.backward(grad.double())
    dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    size = SEQ // RANKS
    for rank in range(RANKS):
        mine = (slice(None), slice(None), slice(rank * size, (rank + 1) * size))
        found = PartialAttention(q[mine], width)
        for step in range(RANKS):
            to = (rank - step) % RANKS
            theirs = (slice(None), slice(None), slice(to * size, (to + 1) * size))
            attend(q[mine], k[theirs], v[theirs], given.sight(rank, to, RANKS), found)
        close(found.out, exact[mine], 5e-3, "result")
        out, dq = found.out.to(q.dtype), no_gradient(q[mine])
        for to in range(RANKS):
            theirs = (slice(None), slice(None), slice(to * size, (to + 1) * size))
            sight = given.sight(rank, to, RANKS)
            more = attend_backward(q[mine], k[theirs], v[theirs], sight, grad[mine], out, found.sums, dq)
            dk[theirs] += more[0]
            dv[theirs] += more[1]
        close(dq, leaves[0].grad[mine], 8e-3, "gradient of queries")
        sight = given.sight_of(rank, RANKS)
        natural = sight.to is not given.rows
        keys, values = (_reorder_rows(x, given.orders[0], 2, 0) if natural else x for x in (k, v))
        gathered = PartialAttention(q[mine], width)
        attend(q[mine], keys, values, sight, gathered)
        close(gathered.out, exact[mine], 5e-3, "gathered result")
    close(dk, leaves[1].grad, 8e-3, "gradient of keys")
    close(dv, leaves[2].grad, 8e-3, "gradient of values")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_documents_in_one_sequence_are_attention(
    compiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "TILE", 128)  # Many of these tiles see nothing of a late document.
    function = torch.compile(document_attention, fullgraph=True) if compiled else document_attention
    numbers = segments(True)
    q, grad = (drawn(BATCH, HEADS, SEQ, 64, dtype=dtype) for _ in range(2))
    k, v = (drawn(BATCH, KV, SEQ, 64, dtype=dtype) for _ in range(2))
    leaves, exact = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    exact = [x.detach().double().requires_grad_() for x in exact]
    owner = torch.from_numpy(numbers).cuda()
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool, device=CUDA).tril() & (
        owner[:, None, :, None] == owner[:, None, None]
    )
    out, expected = function(*leaves, Documents.of(numbers, CUDA)), plain(*exact, seen)  # type: ignore[call-arg]
    out.backward(grad)
    expected.backward(grad.double())
    bound = 8e-3 if dtype == torch.bfloat16 else 1e-5
    close(out, expected, bound, "result")
    for mine, other in zip(leaves, exact, strict=True):
        close(mine.grad, other.grad, bound, "gradient")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_samples_of_one_document_each_are_attention(compiled: bool, causal: bool) -> None:
    function = torch.compile(document_attention, fullgraph=True) if compiled else document_attention
    q, grad = (drawn(BATCH, HEADS, SEQ, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (drawn(BATCH, KV, SEQ, 64, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool, device=CUDA)
    documents = Documents.of(np.zeros((BATCH, SEQ), np.int64), CUDA, causal)
    expected = plain(*exact, seen.tril() if causal else seen)  # type: ignore[call-arg]
    expected.backward(grad.double())
    for lying in (grad, grad.contiguous(), grad.transpose(0, 1).contiguous().transpose(0, 1)):
        out = function(*leaves, documents)  # type: ignore[call-arg]
        close(out, expected, 8e-3, "result")
        for mine, other in zip(torch.autograd.grad(out, leaves, lying), exact, strict=True):
            close(mine, other.grad, 8e-3, "gradient")
