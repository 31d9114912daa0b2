"""BERT and T5 as a user would write them for one GPU: plain PyTorch, compiled, under autocast, with torch's fused
AdamW.

There is no clipping, so a step does a little less than ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import ModelConfig


class BertBlock(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.heads = m.heads
        self.qkv, self.out = nn.Linear(m.hidden, 3 * m.hidden), nn.Linear(m.hidden, m.hidden)
        self.up, self.down = nn.Linear(m.hidden, m.ffn), nn.Linear(m.ffn, m.hidden)
        self.norm1, self.norm2 = nn.LayerNorm(m.hidden, m.norm_eps), nn.LayerNorm(m.hidden, m.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (y.view(batch, seq, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, -1)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class PlainBert(nn.Module):
    """The loss of masked tokens and of the segments' order. Both heads work on chosen rows."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(m.vocab, m.hidden), nn.Embedding(m.seq, m.hidden)
        self.types, self.norm = nn.Embedding(2, m.hidden), nn.LayerNorm(m.hidden, m.norm_eps)
        self.blocks = nn.ModuleList(BertBlock(m) for _ in range(m.layers))
        self.dense, self.dense_norm = nn.Linear(m.hidden, m.hidden), nn.LayerNorm(m.hidden, m.norm_eps)
        self.bias = nn.Parameter(torch.zeros(m.vocab))
        self.pooler, self.order = nn.Linear(m.hidden, m.hidden), nn.Linear(m.hidden, 2)
        _draw(self, m)

    def forward(self, ids: Tensor, types: Tensor, places: Tensor, labels: Tensor, swapped: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places.weight + self.types(types))
        for block in self.blocks:
            x = block(x)
        rows = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        rows = self.dense_norm(F.gelu(self.dense(rows)))
        logits = F.linear(rows, self.words.weight, self.bias).float()
        order = self.order(torch.tanh(self.pooler(x[:, 0]))).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + F.cross_entropy(order, swapped)


class T5Attention(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.heads, width = m.heads, m.heads * m.head_dim
        self.norm = nn.RMSNorm(m.hidden, m.norm_eps)
        self.q, self.out = nn.Linear(m.hidden, width, bias=False), nn.Linear(width, m.hidden, bias=False)
        self.kv = nn.Linear(m.hidden, 2 * width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> Tensor:
        normed = self.norm(x)
        of = normed if memory is None else memory
        q, k, v = (
            y.view(*y.shape[:2], self.heads, -1).transpose(1, 2) for y in (self.q(normed), *self.kv(of).chunk(2, -1))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x + self.out(y.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, m: ModelConfig, decodes: bool) -> None:
        super().__init__()
        self.own, self.cross = T5Attention(m), T5Attention(m) if decodes else None
        self.norm = nn.RMSNorm(m.hidden, m.norm_eps)
        self.up, self.down = nn.Linear(m.hidden, m.ffn, bias=False), nn.Linear(m.ffn, m.hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor) -> Tensor:
        x = self.own(x, None, bias)
        if self.cross is not None:
            x = self.cross(x, memory, None)
        return x + self.down(F.relu(self.up(self.norm(x))))


class PlainT5(nn.Module):
    def __init__(self, m: ModelConfig, encoder_layers: int, lengths: tuple[int, int]) -> None:
        super().__init__()
        self.words = nn.Embedding(m.vocab, m.hidden)
        self.encoder = nn.ModuleList(T5Block(m, False) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(T5Block(m, True) for _ in range(m.layers - encoder_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(m.hidden, m.norm_eps) for _ in range(2))
        self.tables = nn.ModuleList(nn.Embedding(32, m.heads) for _ in range(2))
        for number, length in enumerate(lengths):
            at = torch.arange(length)
            distance = (at[None] - at[:, None]).clamp(-15, 15) + 15  # as many rows as the real table, with other bounds
            self.register_buffer(f"distances{number}", distance)
            later = torch.zeros(length, length).masked_fill(at[None] > at[:, None], -torch.inf)
            self.register_buffer(f"later{number}", later if number else torch.zeros(length, length))
        _draw(self, m)

    def bias(self, number: int) -> Tensor:
        found = self.tables[number](getattr(self, f"distances{number}")).permute(2, 0, 1)
        # Fused attention takes a bias only if the keys of a row are adjacent in memory.
        return (found + getattr(self, f"later{number}")).to(torch.bfloat16)[None].contiguous()

    def forward(self, ids: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        x, bias = self.words(ids), self.bias(0)
        for block in self.encoder:
            x = block(x, None, bias)
        memory, x, bias = self.norms[0](x), self.words(targets), self.bias(1)
        for block in self.decoder:
            x = block(x, memory, bias)
        x = self.norms[1](x) * x.shape[-1] ** -0.5
        return F.cross_entropy(F.linear(x, self.words.weight).float().flatten(0, 1), labels.flatten())


def _draw(model: nn.Module, m: ModelConfig) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=m.init_std)


def plain_step(m: ModelConfig, micro_batch: int, device: torch.device, update: bool = True) -> Callable[[], Tensor]:
    """Return a step that trains on the same random samples every time, with or without its update.

    Master weights, gradients and moments are in float32.
    """

    def ids(*shape: int, high: int = m.vocab) -> Tensor:
        return torch.randint(0, high, (micro_batch, *shape), device=device)

    with device:
        if m.kind == "t5":
            target = m.t5.decoder_seq
            model: nn.Module = PlainT5(m, m.t5.encoder_layers, (m.seq, target))
            given: tuple[Tensor, ...] = (ids(m.seq), ids(target), ids(target))
        else:
            model = PlainBert(m)
            places = torch.rand(micro_batch, m.seq, device=device).argsort(1)[:, : m.predictions].sort(1)[0]
            given = (ids(m.seq), ids(m.seq, high=2), places, ids(m.predictions), ids(high=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(*given)
        loss.backward()
        if update:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
