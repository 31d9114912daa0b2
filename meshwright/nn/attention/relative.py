"""The layers that only an encoder-decoder has: the bias of relative positions, and attention to the encoder's
output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.attention.attention import KVCache
from meshwright.nn.attention.core import attention_core, run_core
from meshwright.nn.embedding import TableRows
from meshwright.nn.inputs import Inputs, NodeInputs, NodeModule
from meshwright.nn.linear import Linear
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.spec.model import t5
from meshwright.spec.model.graph import Node
from meshwright.spec.model.part import Records


class RelativeBias(NodeModule):
    """The bias that the attention of one stack adds to its scores, from a table [buckets, heads of this rank]. In a
    decoder it is -inf if a key comes after its query."""

    def __init__(self, parallel: Parallel, part: t5.RelativeBiasPart, records: Records) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.part, self.parallel = part, parallel
        self._buckets: dict[tuple[int, int], Tensor] = {}

    def forward_arguments(self, node: Node, inputs: NodeInputs) -> tuple[Tensor, int]:
        """Return the buckets of all distances, and the number of queries: the tokens per sequence of its stack's
        stream."""
        rows = inputs.streams[node.reads[0]].shape[0] * (self.parallel.tp.size if self.parallel.splits_tokens else 1)
        queries = rows // inputs.sequences
        return self.buckets(queries, inputs.cached + queries), queries

    def buckets(self, queries: int, keys: int) -> Tensor:
        """Return the buckets of all distances from a query to a key, in ascending order of the distance.

        The queries are the last `queries` positions of `keys`.
        """
        if (queries, keys) not in self._buckets:
            part = self.part
            distances = range(1 - keys, queries)
            numbers = [t5.relative_bucket(at, part.both_ways, part.buckets, part.farthest) for at in distances]
            # Only the buckets of the latest sizes are cached.
            self._buckets = {(queries, keys): torch.tensor(numbers, device=self.parallel.device)}
        return self._buckets[queries, keys]

    def forward(self, buckets: Tensor, queries: int) -> Tensor:
        """Return the bias, [1, heads, queries, keys]."""
        by_distance = TableRows.apply(self.weight, buckets, False, self.sinks.get("weight"))  # [distances, heads]
        keys = buckets.shape[0] + 1 - queries
        # Each window of the distances belongs to one query; the last query's comes first. A window is longer than the
        # number of keys if the rows of the bias are padded to an aligned width. `contiguous` matters because `flip`
        # keeps the memory layout of its input: fused kernels refuse a bias whose keys are not adjacent, and attention
        # would silently compute the full scores in float32.
        width = t5.padded_keys(keys)
        bias = F.pad(by_distance.t(), (0, width - keys)).unfold(1, width, 1).flip(1).contiguous()
        if not self.part.both_ways:
            later = torch.ones(queries, width, dtype=torch.bool, device=bias.device).triu(1 + keys - queries)
            bias = bias.masked_fill(later, -torch.inf)
        return bias[None, ..., :keys]


class CrossAttention(nn.Module):
    """Attention of this rank's heads to all tokens of the encoder's output. Its scores are not scaled."""

    def __init__(self, parallel: Parallel, part: t5.CrossAttentionPart, records: Records) -> None:
        super().__init__()
        self.heads = part.heads // parallel.tp.size
        self.head_dim = part.head_dim
        self.dropout = part.dropout
        self.source = part.source
        self.q = Linear(parallel, records["q.weight"], None, "column")
        self.kv = Linear(parallel, records["kv.weight"], None, "column")
        self.out = Linear(parallel, records["out.weight"], None, "row")
        self.recompute_core = parallel.recompute.core

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_core(q, k, v, None, False, self.dropout if self.training else 0.0, 1.0)

    def forward(self, x: Tensor, norm: Norm, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return x [tokens, hidden], for the residual, and attention of norm(x) to the encoder's output. With `past`,
        the keys and values of an earlier call are reused."""
        x, queries = self.q.after_norm(x, norm)
        batch = inputs.sequences
        q = queries.view(batch, queries.shape[0] // batch, self.heads, self.head_dim).transpose(1, 2)
        k, v = self._keys(inputs.streams[self.source], batch, inputs.past)
        y = run_core(self.core, self.recompute_core, self.dropout, q, k, v)
        return x, self.out(y.transpose(1, 2).reshape(queries.shape))

    def _keys(self, memory: Tensor, batch: int, past: KVCache | None) -> tuple[Tensor, Tensor]:
        if past is not None and past.memory is not None:
            return past.memory
        kv = self.kv(memory)
        k, v = kv.view(batch, kv.shape[0] // batch, 2, self.heads, self.head_dim).unbind(2)
        keys = k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            past.memory = keys
        return keys
