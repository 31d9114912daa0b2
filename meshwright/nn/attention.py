"""Self-attention with grouped key-value heads, cut over tp by heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.config.sections import ModelConfig
from meshwright.layout.params import ParamRecord
from meshwright.nn.context import ContextRows, context_attention
from meshwright.nn.documents import Documents, document_attention
from meshwright.nn.linear import Linear, norm_product
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.qk_norms import HeadNorms, TokenNorms
from meshwright.nn.rotary import Tables, rotate, rotate_qkv
from meshwright.parts import gpt


class Alibi(nn.Module):
    """ALiBi lowers a score in proportion to the distance to the key. A rank has its own heads' slopes."""

    slopes: Tensor

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        heads = model.heads // parallel.tp.size
        first = heads * max(0, parallel.tp.index)
        slopes = torch.tensor(alibi_slopes(model.heads)[first : first + heads], dtype=torch.float64)
        self.register_buffer("slopes", slopes.to(parallel.device), persistent=False)
        self.dtype = parallel.dtype
        self._causal: Tensor | None = None

    def causal(self, seq: int, device: torch.device) -> Tensor:
        """Returns the bias for whole sequences under causal attention. It is cached: it is as large as all heads'
        scores of one sequence, and the backward of every micro-batch in flight needs it."""
        found = self._causal
        if found is None or found.shape[-1] != seq or found.is_inference():
            found = self._causal = self(causal_mask(seq, device))
        return found

    def forward(self, allowed: Tensor) -> Tensor:
        """Returns the bias [batch, heads, queries, keys] to add to the scores, from `allowed` [batch, 1, queries,
        keys], which is true where a query may attend to a key. The queries are the last of the keys' positions."""
        queries, keys = allowed.shape[-2:]
        at = torch.arange(keys, device=allowed.device)
        distance = at[None] - at[keys - queries :, None]
        bias = torch.stack([(slope * distance).to(self.dtype) for slope in self.slopes])  # wide for one head at a time
        return torch.where(allowed, bias, -torch.inf)


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slopes 2^(-8/n), 2^(-16/n), ... for the largest power of two n in `heads`; the heads beyond n take
    every other slope of 2n heads."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * n + 1) / power) for n in range(heads - power)]


def causal_mask(seq: int, device: torch.device, queries: int | None = None) -> Tensor:
    """Returns a mask [1, 1, queries, seq] that is true where a query may attend. The queries are the last `queries`
    positions, or all of them by default."""
    rows = seq if queries is None else queries
    return torch.ones(rows, seq, dtype=torch.bool, device=device).tril(seq - rows)[None, None]


class QKV(nn.Module):
    """The fused projection to this rank's queries, keys and values: one parameter, or two (queries; keys and values)
    where tp ranks share key-value heads, since the shared part's gradient is summed over those that share it."""

    def __init__(self, parallel: Parallel, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.linears: list[Linear] = []
        for part in (part for part in ("qkv", "q", "kv") if f"{part}.weight" in records):
            linear = Linear(parallel, records[f"{part}.weight"], records.get(f"{part}.bias"), "column")
            self.add_module(part, linear)
            self.linears.append(linear)

    def forward(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns x, for the residual, and the projection of its norm."""
        if len(self.linears) == 1:
            return self.linears[0].after_norm(x, norm)
        weight = torch.cat(tuple(linear.weight for linear in self.linears))
        biases: list[Tensor] = [linear.bias for linear in self.linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        return norm_product(x, norm, weight, bias, (None, *self.linears[0].settings[1:]))


class KVCache:
    """The keys and values of one layer's earlier tokens. The first call may add many (the prompt), later ones one."""

    def __init__(self, longest: int) -> None:
        self.longest, self.length = longest, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.memory: tuple[Tensor, Tensor] | None = None  # keys and values of an encoder's output, which stay

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends these and returns all keys and values so far, [batch, heads, tokens so far, head_dim]."""
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.longest, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        assert self.length == 0 or keys.shape[2] == 1, "after the first call, one token at a time"
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = keys, values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Attention(nn.Module):
    """Self-attention of this rank's heads, causal or to all tokens of a sample. With `recompute: selective`, the core
    (the scores and the mix of the values) is not kept but computed again in backward."""

    def __init__(self, parallel: Parallel, part: gpt.AttentionPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        tp = parallel.tp.size
        self.heads, self.kv_heads, self.head_dim = part.heads // tp, max(1, part.kv_heads // tp), part.head_dim
        self.dropout, self.fuses, self.context = part.dropout, parallel.fused, parallel.context
        self.projection = QKV(parallel, records)
        norms: dict[str, type[nn.Module]] = {"head": HeadNorms, "all": TokenNorms}
        self.norms = norms[part.qk_norm](parallel, part, records) if part.qk_norm else None
        self.out = Linear(parallel, records["out.weight"], records.get("out.bias"), "row")
        self.recompute_core = parallel.recompute.mode == "selective"
        self.causal, self.scale = part.causal, part.scale or None

    def core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Documents | None) -> Tensor:
        """Softmax of the scores times the values, all [batch, heads, seq, head_dim]."""
        if isinstance(mask, Documents):
            return document_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=bool(self.causal and mask is None and q.shape[2] == k.shape[2]),
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=self.heads != self.kv_heads, scale=self.scale,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        norm: Norm,
        batch: int,
        rotary: Tables | None,
        mask: Tensor | Documents | ContextRows | None,
        past: KVCache | None,
        *unused: object,
    ) -> tuple[Tensor, Tensor]:
        """Returns x [tokens, hidden] of `batch` sequences, for the residual, and attention of its norm. `mask` says
        where documents begin or, [batch, 1 or heads, seq, seq], is true where a query may attend, or is added to the
        scores; without it, a query sees all tokens or, if attention is causal, those before it. With `past`, x
        continues after its tokens."""
        x, qkv = self.projection(x, norm)
        qkv = qkv.view(batch, qkv.shape[0] // batch, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.fuses and rotary is not None and self.norms is None:
            q, k, v = rotate_qkv(qkv, rotary, self.heads, self.kv_heads)
        else:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            if self.norms is not None:
                q, k = self.norms(q, k)
            if rotary is not None:
                q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(mask, ContextRows):
            assert self.context is not None and past is None
            y = context_attention(q, k, v, mask, self.context)
            return x, self.out(y.transpose(1, 2).reshape(qkv.shape[0] * qkv.shape[1], -1))
        if past is not None:
            k, v = past.extend(k, v)
        if self.recompute_core and torch.is_grad_enabled():
            y = checkpoint(self.core, q, k, v, mask, use_reentrant=False, preserve_rng_state=self.dropout > 0)
        else:
            y = self.core(q, k, v, mask)
        return x, self.out(y.transpose(1, 2).reshape(qkv.shape[0] * qkv.shape[1], -1))
