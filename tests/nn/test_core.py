"""Attention of one rank to whole sequences: ALiBi by wider heads, dropout in tiles, and no tensor of seq x seq."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright.nn.attention.core as core
from meshwright.comm.mesh import Mesh
from meshwright.config.sections import ModelConfig
from meshwright.nn.attention.alibi import Alibi, alibi_slopes, widen
from meshwright.nn.attention.core import attention_core
from meshwright.nn.attention.documents import Documents
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import Streams
from meshwright.spec.layout import Layout
from tests.nn.test_context import Largest
from tests.support.oracle import made_for, make_trainer, small_config

CPU = torch.device("cpu")
SEGMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 20 + [1] * 4])


def drawn(dtype: torch.dtype = torch.float64, heads: int = 4, kv: int = 2, seq: int = 24) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(2, seq, n, 8, dtype=torch.float64, generator=random).to(dtype) for n in (heads, kv, kv)]


def allowed(seq: int, segments: Tensor | None) -> Tensor:
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()[None, None]
    return causal if segments is None else causal & (segments[:, None, :, None] == segments[:, None, None])


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one text", "documents"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("first", [0, 70_000])
def test_wider_heads_are_alibi(dtype: torch.dtype, close: float, segments: Tensor | None, first: int) -> None:
    """The reference lowers scores by slope x distance. They agree far from the first position too, where numbers are
    large. With six heads the slopes are not powers of two.
    """
    q, k, v = drawn(dtype, 6, 2)
    model = ModelConfig(layers=1, hidden=48, heads=6, vocab=8, seq=128, position="alibi")
    parallel = Parallel(Mesh(Layout(world=1), 0).tp, False, dtype, CPU, Streams(1, 0, 0, CPU))
    tables = Alibi(model, parallel)(torch.arange(first, first + 24)[None], 24)
    documents = None if segments is None else Documents.of(segments.numpy(), CPU)
    heads = (x.transpose(1, 2) for x in widen(q, k, v, tables))
    found = attention_core(*heads, documents, True, 0.0)  # type: ignore[call-arg]
    assert not found[..., 8:].any()
    at = torch.arange(24)
    bias = torch.tensor(alibi_slopes(6), dtype=torch.float64)[:, None, None] * (at[None] - at[:, None])
    mask = torch.where(allowed(24, segments), bias, -math.inf)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    reference = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    # A score is rounded at the size of slope x j, in float32 at least. Values differ by 4 at most.
    rounded = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * alibi_slopes(6)[0] * first
    torch.testing.assert_close(found[..., :8].double(), reference, rtol=0, atol=close + rounded)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one text", "documents"])
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_in_tiles(causal: bool, segments: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's result is the sum of the shares that were not dropped, times 1 / (1 - p), since every value is 1. So its
    mean is 1. Backward drops the same shares: the gradient of the values is that sum over the queries. Without dropout,
    tiles give attention itself.
    """
    monkeypatch.setattr(core, "TILE_ROWS", 7)
    q, k, v = (x.transpose(1, 2) for x in drawn())
    documents = None if segments is None else Documents.of(segments.numpy(), CPU, causal)
    ones = torch.ones_like(v).requires_grad_()
    torch.manual_seed(1)
    found = attention_core(q, k, ones, documents, causal, 0.25)
    assert found.shape == q.shape and 0.9 < float(found.detach().mean()) < 1.1 and float(found.detach().std()) > 0.05
    found.sum().backward()
    assert ones.grad is not None
    torch.testing.assert_close(ones.grad.sum(), found.detach().sum())
    mask = allowed(24, segments)
    if not causal:
        mask = mask | mask.mT if segments is not None else torch.ones_like(mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    others = [x.clone().requires_grad_() for x in (q, k, v)]
    tiles = core._with_dropout(*leaves, documents, causal, 0.0)  # type: ignore[call-arg]
    reference = F.scaled_dot_product_attention(*others, mask, enable_gqa=True)  # type: ignore[call-arg]
    torch.testing.assert_close(tiles, reference)
    weights = torch.randn(tiles.shape, dtype=tiles.dtype)
    for result in (tiles, reference):
        (result * weights).sum().backward()
    for one, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {}, "alibi": {"position": "alibi"}, "dropout": {"attention_dropout": 0.1, "dropout": 0.0},
    "bert": {"kind": "bert", "attention_dropout": 0.1, "dropout": 0.0}, "grouped": {"kv_heads": 1, "position": "rope"},
}  # fmt: skip


@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("name", MODELS)
def test_no_step_makes_a_tensor_of_all_scores(name: str, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "TILE_ROWS", 16)
    seq = 1024
    model = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 64, "seq": seq, **MODELS[name]}
    config = small_config(model=model, train={"global_batch": 1, "micro_batch": 1, "precision": "fp32"})
    made = {} if name == "bert" else {"segments": documents}
    trainer = make_trainer(config, 0, 1, made_for(config, **made))
    with Largest() as seen:
        trainer.step()
    assert seen.most < seq * seq // 4, seen.most


def test_it_compiles_for_lengths_that_change() -> None:
    core_of: Any = lambda *qkv: attention_core(*qkv, None, True, 0.0)  # type: ignore[call-arg]  # noqa: E731
    compiled = torch.compile(core_of, fullgraph=True, backend="aot_eager")
    for seq in (16, 24, 40):
        q, k, v = (x.transpose(1, 2) for x in drawn(seq=seq))
        torch.testing.assert_close(compiled(q, k, v), attention_core(q, k, v, None, True, 0.0))
