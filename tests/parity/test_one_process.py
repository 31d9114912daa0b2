"""The oracle itself against a plain model: a GPT in a few lines of torch, with torch's autograd and optimizer. Some
models have a mixture of experts, whose losses are parts of the whole loss, and its balancing bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.config.sections import Config, ModelConfig
from meshwright.spec.model.description import describe
from meshwright.spec.model.experts import ExpertsPart
from tests.nn.plain_experts import plain_losses, plain_mixture
from tests.parity.cases import FAMILIES
from tests.parity.expert_cases import MIXTURES
from tests.support.oracle import (
    EXACT,
    Made,
    gather_global,
    make_trainer,
    parameters,
    relative,
    small_config,
    true_gradients,
    worst,
)

Weights = dict[str, torch.Tensor]
MODELS: dict[str, dict[str, Any]] = FAMILIES | {
    name: {**FAMILIES["llama"], "experts": keys} for name, keys in MIXTURES.items()
}
MODELS |= {f"post-{kind}": {**FAMILIES["gpt"], "norm_place": "post", "mlp": kind} for kind in ("geglu", "quick_gelu")}
MODELS |= {"reglu": {**FAMILIES["llama"], "mlp": "reglu"}}


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


PLAIN: dict[str, Any] = {
    "swiglu": lambda x: x * x.sigmoid(), "geglu": _gelu, "reglu": lambda x: x.clamp(min=0.0), "gelu": _gelu,
    "quick_gelu": lambda x: x / (1.0 + (-1.702 * x).exp()),
}  # fmt: skip


def _norm(x: torch.Tensor, w: Weights, name: str, m: ModelConfig) -> torch.Tensor:
    if m.norm == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + m.norm_eps).sqrt() * w[f"{name}.weight"]
    return F.layer_norm(x, (m.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], m.norm_eps)


def _rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate x [heads, seq, dim] by position, as complex numbers."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def _attention(x: torch.Tensor, w: Weights, name: str, m: ModelConfig, sample: dict[str, Any]) -> torch.Tensor:
    """Compute the attention of one sequence, head by head."""
    d, seq = m.head_dim, x.shape[0]
    qkv = F.linear(x, w[f"{name}.qkv.weight"], w.get(f"{name}.qkv.bias"))
    heads = qkv.view(seq, -1, d).transpose(0, 1)
    q, k, v = heads.split((m.heads, m.kv_heads, m.kv_heads))
    if m.position == "rope":
        q, k = (_rope(t, sample["positions"], m.rope_theta) for t in (q, k))
    at = torch.arange(seq)
    allowed = (at[:, None] >= at[None]) & (sample["segments"][:, None] == sample["segments"][None])
    out = []
    for head in range(m.heads):
        shared = head // (m.heads // m.kv_heads)
        scores = (q[head] @ k[shared].T / d**0.5).masked_fill(~allowed, -torch.inf)
        out.append(scores.softmax(-1) @ v[shared])
    return F.linear(torch.cat(out, -1), w[f"{name}.out.weight"], w.get(f"{name}.out.bias"))


def _mlp(x: torch.Tensor, w: Weights, name: str, m: ModelConfig) -> torch.Tensor:
    gated = f"{name}.gate_up.weight" in w
    first = f"{name}.gate_up" if gated else f"{name}.up"
    gate, *up = F.linear(x, w[f"{first}.weight"], w.get(f"{first}.bias")).chunk(2 if gated else 1, -1)
    inner = PLAIN[m.mlp](gate) * (up[0] if gated else 1.0)
    return F.linear(inner, w[f"{name}.down.weight"], w.get(f"{name}.down.bias"))


def _experts(
    x: torch.Tensor, w: Weights, n: int, m: ModelConfig, sample: dict[str, Any], rows: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixture of one sequence and its part of the loss. `rows` counts the choices of every expert."""
    part = describe(m).blocks[n].parts[-1].part
    assert isinstance(part, ExpertsPart)
    prefix = f"layers.{n}.experts."
    own = {name.removeprefix(prefix).replace("gate_up", "up"): p for name, p in w.items() if name.startswith(prefix)}
    y, routed = plain_mixture(x, own, part.routing, m.mlp)
    for token in routed:
        rows[n][token.chosen] += 1.0
    balance, z = plain_losses(routed, sample["loss_mask"].tolist(), 1, part.routing)
    return y, m.experts.aux_loss * balance + m.experts.z_loss * z


def plain_loss(w: Weights, m: ModelConfig, sample: dict[str, Any], rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of one sequence's unmasked tokens."""
    added = torch.zeros((), dtype=torch.float64)
    x = w["embedding.weight"][sample["tokens"]]
    if m.position == "learned":
        x = x + w["position.weight"][sample["positions"]]
    for n in range(m.layers):
        if m.norm_place == "post":
            x = _norm(x + _attention(x, w, f"layers.{n}.attention", m, sample), w, f"layers.{n}.norm1", m)
            x = _norm(x + _mlp(x, w, f"layers.{n}.mlp", m), w, f"layers.{n}.norm2", m)
            continue
        x = x + _attention(_norm(x, w, f"layers.{n}.norm1", m), w, f"layers.{n}.attention", m, sample)
        normed = _norm(x, w, f"layers.{n}.norm2", m)
        if m.experts.in_block(n):
            y, more = _experts(normed, w, n, m, sample, rows)
            x, added = x + y, added + more
        else:
            x = x + _mlp(normed, w, f"layers.{n}.mlp", m)
    x = _norm(x, w, "final_norm", m) if m.norm_place == "pre" else x
    logits = x @ w["embedding.weight" if m.tied_embeddings else "head.weight"].T
    return (F.cross_entropy(logits, sample["labels"], reduction="none") * sample["loss_mask"]).sum() + added


def plain_step(w: Weights, config: Config, data: Made, first: int) -> float:
    """Compute the gradients of the mean loss over the unmasked tokens of one global batch, then move the balancing
    biases. Return the loss.
    """
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    e = config.model.experts
    rows = {n: torch.zeros(e.count, dtype=torch.float64) for n in range(config.model.layers) if e.in_block(n)}
    for n in range(first, first + config.train.global_batch):
        sample: dict[str, Any] = {key: torch.from_numpy(value) for key, value in data.sample(n).items()}
        sample.setdefault("positions", torch.arange(config.model.seq))
        sample.setdefault("segments", torch.zeros(config.model.seq))
        total = total + plain_loss(w, config.model, sample, rows)
        tokens += int(sample["loss_mask"].sum())
    (total / tokens).backward()
    for n, chosen in rows.items():
        if e.bias_balance:
            w[f"layers.{n}.experts.router.bias"] += e.bias_balance * (chosen.mean() - chosen).sign()
    return float(total.detach()) / tokens


def _start(**model: Any) -> Config:
    return small_config(
        model={"layers": 2, **model}, train={"global_batch": 4, "micro_batch": 2, "clip": 0.7},
        optimizer={"lr": 1e-3}, lr={"warmup": 2},
    )  # fmt: skip


@pytest.mark.parametrize("segments", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", list(MODELS))
def test_gradients_and_updates_equal_a_plain_model(family: str, tied: bool, segments: bool) -> None:
    """Gradients, losses and norms agree, and so do parameters after three clipped AdamW steps, including balancing
    biases.
    """
    config = _start(tied_embeddings=tied, **MODELS[family])
    data = Made(config.model.vocab, config.model.seq, segments=segments)
    trainer = make_trainer(config, data=data)
    start = gather_global(parameters(trainer))
    w = {name: torch.from_numpy(np.array(value)) for name, value in start.items()}
    trained = {name: p.requires_grad_() for name, p in w.items() if not name.endswith("router.bias")}
    matrices, vectors = [p for p in trained.values() if p.dim() > 1], [p for p in trained.values() if p.dim() == 1]
    c = config.optimizer
    groups = [{"params": matrices, "weight_decay": c.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=c.betas, eps=c.eps)
    for step in range(3):
        optimizer.zero_grad()
        loss = plain_step(w, config, data, step * config.train.global_batch)
        if step == 0:
            plain = {name: p.grad.numpy().copy() for name, p in trained.items()}
            assert worst(true_gradients(trainer), plain)[0] <= EXACT
        norm = torch.stack([p.grad.square().sum() for p in trained.values()]).sum().sqrt()
        for p in trained.values():
            p.grad.mul_(min(1.0, config.train.clip / float(norm)))
        result = trainer.step()
        for group in optimizer.param_groups:
            group["lr"] = result.lr
        optimizer.step()
        assert relative([result.loss, result.grad_norm], [loss, float(norm)]) <= EXACT
    assert worst(parameters(trainer), {name: p.detach().numpy() for name, p in w.items()})[0] <= EXACT


def test_global_batch_is_what_counts() -> None:
    """The same samples in micro-batches of any size give the same gradients, masked tokens included."""
    found = []
    for micro_batch in (1, 2, 4):
        config = small_config(model={"layers": 2}, train={"global_batch": 4, "micro_batch": micro_batch})
        found.append(gather_global(true_gradients(make_trainer(config))))
    for name, reference in found[0].items():
        for other in found[1:]:
            assert np.abs(other[name] - reference).max() <= EXACT * np.abs(reference).max()
