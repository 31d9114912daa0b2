"""Causal self-attention with grouped key-value heads, cut over tp by heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import ModelConfig
from meshwright.layout.params import ParamRecord
from meshwright.nn.linear import Linear, product, product_mode
from meshwright.nn.parallel import Parallel


class Rotary(nn.Module):
    """Cosines and sines of rotary positions; each pair is an element of the first half of a head and its second."""

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        exact = torch.float64
        frequency = model.rope_theta ** (-torch.arange(0, model.head_dim, 2, dtype=exact) / model.head_dim)
        angle = torch.outer(torch.arange(model.seq, dtype=exact), frequency)
        dtype = exact if parallel.dtype == exact else torch.float32
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, table.to(parallel.device, dtype), persistent=False)

    def forward(self, positions: Tensor | None, seq: int) -> tuple[Tensor, Tensor]:
        """Tables [1 or batch, seq, 1, head_dim / 2]."""
        if positions is None:
            return self.cos[None, :seq, None], self.sin[None, :seq, None]
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [batch, seq, heads, head_dim], in the tables' precision."""
    cos, sin = tables
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class QKV(nn.Module):
    """The fused projection to this rank's queries, keys and values: one parameter, or two (queries; keys and values)
    where tp ranks share key-value heads, since the shared part's gradient is summed over those that share it."""

    def __init__(self, parallel: Parallel, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.parts = [key.split(".")[0] for key in records if key.endswith(".weight") and key != "out.weight"]
        for part in self.parts:
            self.add_module(part, Linear(parallel, records[f"{part}.weight"], records.get(f"{part}.bias"), "column"))
        self.mode, self.group, self.size = product_mode(parallel, "column"), parallel.tp.name, parallel.tp.size

    def forward(self, x: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return self.get_submodule(self.parts[0])(x)
        linears = [self.get_submodule(part) for part in self.parts]
        weight = torch.cat([linear.weight for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        return product(x, weight, bias, None, self.mode, self.group, self.size)


class Attention(nn.Module):
    def __init__(self, parallel: Parallel, model: ModelConfig, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        tp = parallel.tp.size
        self.heads, self.kv_heads, self.head_dim = model.heads // tp, max(1, model.kv_heads // tp), model.head_dim
        self.dropout = model.dropout
        self.projection = QKV(parallel, records)
        self.out = Linear(parallel, records["out.weight"], records.get("out.bias"), "row")

    def forward(
        self, x: Tensor, batch: int, rotary: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """x [tokens, hidden] of `batch` sequences; mask [batch, 1, seq, seq] true where one may look, or causal."""
        qkv = self.projection(x)
        qkv = qkv.view(batch, qkv.shape[0] // batch, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(qkv.shape[0] * qkv.shape[1], -1))
