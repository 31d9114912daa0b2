"""A Llama as a user would write it for one GPU: plain PyTorch, compiled, under autocast, with torch's fused AdamW.

There is no clipping, so a step does a little less than ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import ModelConfig


class PlainBlock(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.sizes = [m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim]
        self.head_dim, self.grouped = m.head_dim, m.kv_heads != m.heads
        self.norm1, self.norm2 = (nn.RMSNorm(m.hidden, eps=m.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(m.hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.sizes[0], m.hidden, bias=False)
        self.up, self.down = nn.Linear(m.hidden, 2 * m.ffn, bias=False), nn.Linear(m.ffn, m.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(self.sizes, -1)
        q, k, v = (part.view(batch, seq, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class PlainLlama(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(m.vocab, m.hidden), nn.Linear(m.hidden, m.vocab, bias=False)
        self.blocks = nn.ModuleList(PlainBlock(m) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.hidden, eps=m.norm_eps)
        frequency = m.rope_theta ** (-torch.arange(0, m.head_dim, 2).float() / m.head_dim)
        angle = torch.outer(torch.arange(m.seq).float(), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=m.init_std)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), labels.flatten())


def plain_step(m: ModelConfig, micro_batch: int, micro_batches: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a step that trains on the same random tokens every time.

    Master weights, gradients and moments are in float32.
    """
    with device:
        model = PlainLlama(m)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    ids = torch.randint(0, m.vocab, (micro_batch, m.seq + 1), device=device)

    def step() -> Tensor:
        for _ in range(micro_batches):
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(ids[:, :-1], ids[:, 1:])
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
