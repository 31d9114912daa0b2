"""A model that fills in blanks computes the same logits and gradients in float64 as a plain model with a mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.engine.step import Trainer
from meshwright.models.graph_stage import GraphStage
from meshwright.nn.attention.documents import Documents, document_attention
from tests.support.oracle import EXACT, made_for, make_trainer, small_config, true_gradients, worst

GLM = {"kind": "glm", "layers": 3, "hidden": 32, "heads": 4, "vocab": 61, "seq": 16, "ffn": 48}
KINDS: dict[str, dict[str, Any]] = {
    "deep": {"embedding_grad": 0.25},
    "learned": {"position": "learned", "norm_place": "pre", "mlp": "gelu"},
    "grouped": {"kv_heads": 2, "norm_place": "post", "bias": False, "norm": "rmsnorm"},
}


def plain_norm(x: Tensor, w: dict[str, Tensor], name: str, kind: str) -> Tensor:
    if kind == "rmsnorm":
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-5)
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions to [batch, heads, seq, width]. The halves of a head are the two sides of each pair."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def plain_loss(w: dict[str, Tensor], m: Any, sample: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of one sample and the sum of its losses, computed with an explicit mask [seq, seq]."""
    segments, positions = sample["segments"], sample["positions"]
    at = torch.arange(m.seq)
    source, later = int((segments == 0).sum()), int((segments < 2).sum())
    allowed = (at[None] <= at[:, None]) | (at[None] < source)
    allowed &= (at[:, None] < later) == (at[None] < later)
    x = F.embedding(sample["tokens"], w["embedding.weight"])
    x = m.embedding_grad * x + (1 - m.embedding_grad) * x.detach()
    if m.position == "learned":
        x = x + w["position.weight"][positions] + w["token_type.weight"][sample["token_types"]]
    deep = math.sqrt(2 * m.layers) if m.norm_place == "deep" else 1.0

    def add(x: Tensor, body: Any, layer: str, norm: str) -> Tensor:
        if m.norm_place == "pre":
            return x + body(plain_norm(x, w, f"{layer}.{norm}", m.norm))
        return plain_norm(deep * x + body(x), w, f"{layer}.{norm}", m.norm)

    for number in range(m.layers):
        layer = f"layers.{number}"

        def attention(x: Tensor, layer: str = layer) -> Tensor:
            qkv = F.linear(x, w[f"{layer}.attention.qkv.weight"], w.get(f"{layer}.attention.qkv.bias"))
            parts = qkv.split([m.heads * m.head_dim, *[m.kv_heads * m.head_dim] * 2], -1)
            q, k, v = (part.unflatten(-1, (-1, m.head_dim)).transpose(1, 2) for part in parts)
            if m.position == "rope":
                q, k = turned(q, positions), turned(k, positions)
            k, v = (part.repeat_interleave(m.heads // m.kv_heads, 1) for part in (k, v))
            scores = (q @ k.mT / math.sqrt(m.head_dim)).masked_fill(~allowed, -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            return F.linear(y, w[f"{layer}.attention.out.weight"], w.get(f"{layer}.attention.out.bias"))

        def mlp(x: Tensor, layer: str = layer) -> Tensor:
            name = f"{layer}.mlp.gate_up" if m.mlp == "geglu" else f"{layer}.mlp.up"
            y = F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))
            y = F.gelu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if m.mlp == "geglu" else F.gelu(y)
            return F.linear(y, w[f"{layer}.mlp.down.weight"], w.get(f"{layer}.mlp.down.bias"))

        x = add(x, attention, layer, "norm1")
        x = add(x, mlp, layer, "norm2")
    if m.norm_place == "pre":
        x = plain_norm(x, w, "final_norm", m.norm)
    logits = F.linear(x, w["embedding.weight"])
    each = F.cross_entropy(logits[0], sample["labels"][0], reduction="none")
    return logits, (each * sample["loss_mask"][0]).sum()


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for buffer in trainer.data_parallel.trained:
        for slot in buffer.slots:
            found[slot.record.name] = slot.parameter.detach().clone().requires_grad_()
    return found


@pytest.mark.parametrize("name", list(KINDS))
def test_logits_and_gradients_equal_a_plain_model(name: str) -> None:
    config = small_config(model=GLM | KINDS[name], train={"global_batch": 6})
    trainer = make_trainer(config)
    with torch.no_grad():
        for parameter in trainer.modules[0].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    w, data = weights_of(trainer), made_for(config)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for n in range(6):
        sample = {key: torch.as_tensor(value)[None] for key, value in data.sample(n).items()}
        logits, loss = plain_loss(w, config.model, sample)
        total, count = total + loss, count + int(sample["loss_mask"].sum())
        stage = trainer.modules[0]
        assert isinstance(stage, GraphStage) and stage.head is not None
        with torch.no_grad():
            found = stage.head.logits(stage.trunk(sample)[0])
        inside = sample["segments"][0] < 2
        torch.testing.assert_close(found[inside], logits[0][inside], rtol=1e-9, atol=1e-10)
    grads = dict(zip(w, torch.autograd.grad(total / count, list(w.values())), strict=True))
    assert worst(true_gradients(trainer), {each: np.asarray(value) for each, value in grads.items()})[0] <= EXACT


def test_deep_norm_begins_small() -> None:
    """Values, output projections and MLPs start with 1 / sqrt(2 layers) of the scale of queries and keys."""
    trainer = make_trainer(small_config(model={"kind": "glm", "layers": 8, "hidden": 128, "heads": 4, "vocab": 31}))
    w = weights_of(trainer)
    qkv = w["layers.3.attention.qkv.weight"]
    for rows, share in ((qkv[:256], 1.0), (qkv[256:], 0.25), (w["layers.3.attention.out.weight"], 0.25),
                        (w["layers.3.mlp.gate_up.weight"], 0.25), (w["layers.3.mlp.down.weight"], 0.25)):  # fmt: skip
        assert float(rows.std()) == pytest.approx(0.02 * share, rel=0.05)


def test_no_mask_is_made_where_pieces_do() -> None:
    """A prefix is a rectangle and the rest a causal piece. Result and gradients are the same as with a mask."""
    torch.manual_seed(0)
    segments = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 1 + [1] * 15, [1] * 8 + [2] * 8])
    q, k, v = (torch.randn(3, heads, 16, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    at, known = torch.arange(16), segments.clamp(min=1)
    source = (segments == 0)[:, None, :]
    mask = ((known[:, :, None] == known[:, None, :]) & ((at[None] <= at[:, None]) | source))[:, None]
    ways = [
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        document_attention(q, k, v, Documents.of(segments.numpy(), torch.device("cpu"), prefix=True)),
    ]
    grad = torch.randn_like(ways[0])
    found = [(way, *torch.autograd.grad(way, (q, k, v), grad)) for way in ways]
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
