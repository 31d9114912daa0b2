"""Self-attention with grouped key-value heads, sharded over tp by heads."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from meshwright.nn.adapters.adapters import InputFunction, RowAdapter, adapted_product
from meshwright.nn.attention.alibi import widen
from meshwright.nn.attention.context import ContextRows, context_attention
from meshwright.nn.attention.core import attention_core, run_core
from meshwright.nn.attention.documents import Documents
from meshwright.nn.attention.qk_norms import HeadNorms, TokenNorms
from meshwright.nn.attention.rotary import rotate, rotate_qkv
from meshwright.nn.inputs import Inputs
from meshwright.nn.linear import Linear, norm_product
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model import gpt

AnyMask = TypeVar("AnyMask")


class QKV(nn.Module):
    """The fused projection to this rank's queries, keys and values.

    It is one parameter. If tp ranks share key-value heads it is two (queries; keys and values), because the gradient of
    the shared parameter is summed over the ranks that share it.
    """

    def __init__(self, parallel: Parallel, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.linears: list[Linear] = []
        for part in (part for part in ("qkv", "q", "kv") if f"{part}.weight" in records):
            linear = Linear(parallel, records[f"{part}.weight"], records.get(f"{part}.bias"), "column")
            self.add_module(part, linear)
            self.linears.append(linear)

    def forward(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x, for the residual, and the projection of norm(x)."""
        if len(self.linears) == 1:
            return self.linears[0].after_norm(x, norm)
        # Two parameters are joined, so that queries, keys and values still take one product.
        weight = torch.cat(tuple(linear.weight for linear in self.linears))
        biases: list[Tensor] = [linear.bias for linear in self.linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        changes, at = [], 0
        for linear in self.linears:
            changes += [RowAdapter(at + adapter.start, at + adapter.stop, adapter) for adapter in linear.adapters]
            at += linear.weight.shape[0]
        if changes:
            first = self.linears[0]
            settings = (first.sides, first.kind)
            stream = first.stream if self.training else None
            if norm.fuses:
                before = InputFunction(norm.weight, norm.eps)
                return adapted_product(x, weight, bias, changes, settings, stream, before)
            return x, adapted_product(norm(x), weight, bias, changes, settings, stream)[1]
        return norm_product(x, norm, weight, bias, (None, *self.linears[0].settings[1:]))


class KVCache:
    """The keys and values of earlier tokens in one layer, for one or several sequences.

    The first call may add many tokens (the prompts), later calls add one each. Prompts of different lengths are padded
    at their ends; then `lengths` [sequences] holds the position at which each sequence continues.
    """

    def __init__(self, longest: int) -> None:
        self.longest, self.length, self.prompt = longest, 0, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None
        # The keys and values of the encoder's output, which never change.
        self.memory: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them so far, [batch, heads, tokens so far, head_dim]."""
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.longest, keys.shape[3])
            # Zeros, because masked values are multiplied by 0, and uninitialised memory may hold NaN or infinity.
            self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        end = self.length + keys.shape[2]
        assert self.length == 0 or keys.shape[2] == 1, "after the first call, one token at a time"
        if self.lengths is None:
            self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = keys, values
        else:
            rows = torch.arange(len(keys), device=keys.device)
            self.keys[rows, :, self.lengths], self.values[rows, :, self.lengths] = keys[:, :, 0], values[:, :, 0]
        self.prompt = self.prompt or end
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def seen(self, mask: AnyMask, window: int = 0) -> AnyMask | Tensor:
        """Return the mask for the tokens that were appended last.

        If sequences have different lengths, or if a window applies to a token after the prompt, it is a new mask
        [sequences, 1, 1, tokens so far] of the keys that exist and are in the window. Otherwise it is the given one.
        """
        later = self.keys is not None and self.length > self.prompt
        if self.lengths is None and not (later and window):
            return mask
        assert self.keys is not None
        places = torch.arange(self.length, device=self.keys.device)
        last = places[-1:] if self.lengths is None else self.lengths
        visible = places <= last[:, None]
        return (visible & (places > last[:, None] - window) if window else visible)[:, None, None]

    def keep(self, rows: Tensor) -> None:
        """Keep the sequences `rows` and drop the others."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class Attention(nn.Module):
    """Self-attention of this rank's heads, causal or to all tokens of a sample. With `recompute: selective`, nothing of
    the core (the scores and the mix of the values) is saved; backward computes it again."""

    def __init__(self, parallel: Parallel, part: gpt.AttentionPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        tp = parallel.tp.size
        self.heads = part.heads // tp
        self.kv_heads = max(1, part.kv_heads // tp)
        self.head_dim = part.head_dim
        self.dropout, self.fuses, self.context = part.dropout, parallel.fused, parallel.context
        self.projection, out = self.products(parallel, records)
        norms: dict[str, type[nn.Module]] = {"head": HeadNorms, "all": TokenNorms}
        self.norms = norms[part.qk_norm](parallel, part, records) if part.qk_norm else None
        # Assigned here, so that submodules are registered in the order of forward.
        self.out = out
        self.recompute_core = parallel.recompute.core
        self.causal = part.causal
        self.alibi = part.alibi
        self.scale = part.scale or None
        self.window, self.bias = part.window, part.biased

    def products(self, parallel: Parallel, records: dict[str, ParamRecord]) -> tuple[nn.Module, nn.Module]:
        """Return the projection to queries, keys and values, and the output projection."""
        return QKV(parallel, records), Linear(parallel, records["out.weight"], records.get("out.bias"), "row")

    def core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Documents | None) -> Tensor:
        """Return the softmax of the scores times the values, all [batch, heads, seq, head_dim]."""
        dropout = self.dropout if self.training else 0.0
        return attention_core(q, k, v, mask, self.causal, dropout, self.scale, self.window)

    def forward(self, x: Tensor, norm: Norm, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return x [tokens, hidden], for the residual, and attention of norm(x).

        If a stream provides a bias for the scores, the bias also masks them, and `inputs.mask` is not used.
        """
        batch, tables, past = inputs.sequences, inputs.tables, inputs.past
        mask = inputs.streams[self.bias] if self.bias else inputs.mask
        x, qkv = self.projection(x, norm)
        qkv = qkv.view(batch, qkv.shape[0] // batch, self.heads + 2 * self.kv_heads, self.head_dim)
        # The fused rotation reads the joined projection. Norms of queries and keys, and ALiBi, need it split first.
        if self.fuses and tables is not None and self.norms is None and not self.alibi:
            q, k, v = rotate_qkv(qkv, tables, self.heads, self.kv_heads)
        else:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            if self.norms is not None:
                q, k = self.norms(q, k)
            if tables is not None:
                q, k, v = widen(q, k, v, tables) if self.alibi else (rotate(q, tables), rotate(k, tables), v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(mask, ContextRows):
            assert self.context is not None and past is None
            return x, self._out(context_attention(q, k, v, mask, self.context, self.window))
        if past is not None:
            k, v = past.extend(k, v)
            mask = past.seen(mask, self.window)
        return x, self._out(run_core(self.core, self.recompute_core, self.dropout, q, k, v, mask))

    def _out(self, y: Tensor) -> Tensor:
        """Return the output projection of the core's result."""
        # With ALiBi, heads are wider, and the result has zeros in the additional elements.
        y = y[..., : self.head_dim].transpose(1, 2)
        projected: Tensor = self.out(y.reshape(y.shape[0] * y.shape[1], -1))
        return projected
