"""Multi-head latent attention: queries, keys and values are projections of short latent vectors per token. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.layout.params import Init, rows_of, whole
from meshwright.spec.model.context import context_calls, context_saved, context_workspace
from meshwright.spec.model.linear import ONES, column_calls, replicated_axes, row_calls, row_records
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kernels,
    LinearPieces,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)


@dataclass(frozen=True)
class LatentAttentionPart(Part):
    """Causal attention whose heads are cut over tp. Every tp rank computes the short vectors of the tokens it holds.

    In a key, each head has `nope` separate elements, and all heads share `rope` rotated elements.
    """

    hidden: int
    heads: int
    q_rank: int  # 0: queries are projected from the token itself
    kv_rank: int
    nope: int
    rope: int
    value: int
    init: Init
    out_init: Init
    norm_eps: float = 1e-5
    dropout: float = 0.0
    scores_factor: float = 1.0  # a factor of all scores, in addition to 1 / sqrt(the width of keys)

    @property
    def head_dim(self) -> int:
        return self.nope + self.rope

    def own_heads(self, at: Coordinate) -> int:
        return self.heads // at.size("tp")

    def linears(self) -> tuple[LinearPieces, ...]:
        rows = {"kv_a": self.kv_rank + self.rope, "q_a": self.q_rank}
        rows |= {"q_b" if self.q_rank else "q": self.heads * self.head_dim}
        rows |= {"kv_b": self.heads * (self.nope + self.value), "out": self.hidden}
        cuts = {"q_a": "whole", "kv_a": "whole", "out": "row"}
        return tuple(
            LinearPieces(key, cuts.get(key, "column"), ((key, count),)) for key, count in rows.items() if count
        )

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the heights of the matrices. By head, the rows of `kv_b` are the head's keys and then its values."""
        if not by_head:
            return super().matrices()
        queries = (self.head_dim,) * self.heads
        keys_and_values = (self.nope, self.value) * self.heads
        query = "q_b" if self.q_rank else "q"
        return super().matrices() | {f"{query}.weight": queries, "kv_b.weight": keys_and_values}

    def records(self, at: Coordinate, name: str) -> Records:
        def cut(key: str, width: int, columns: int) -> Records:
            rows = self.own_heads(at) * width
            total = self.heads * width
            part = ((at.index("tp") * rows, rows, 0),)
            return {f"{key}.weight": rows_of(f"{name}.{key}.weight", part, total, (columns,), self.init)}

        def short(key: str, rows: int) -> Records:
            shape = (rows, self.hidden)
            return {f"{key}.weight": whole(f"{name}.{key}.weight", shape, self.init, **replicated_axes(at))}

        def norm(key: str, width: int) -> Records:
            return {f"{key}.weight": whole(f"{name}.{key}.weight", (width,), ONES, decay=False, **replicated_axes(at))}

        records = short("q_a", self.q_rank) | norm("q_a_norm", self.q_rank) if self.q_rank else {}
        records |= cut("q_b" if self.q_rank else "q", self.head_dim, self.q_rank or self.hidden)
        records |= short("kv_a", self.kv_rank + self.rope) | norm("kv_a_norm", self.kv_rank)
        records |= cut("kv_b", self.nope + self.value, self.kv_rank)
        return records | row_records(at, name, "out", (self.hidden, self.heads * self.value), self.out_init, False)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        heads, tokens, rows = self.own_heads(at), batch.tokens(at), batch.rows(at)
        products = [Product("kv_a", rows, self.kv_rank + self.rope, self.hidden)]
        products += [Product("q_a", rows, self.q_rank, self.hidden)] if self.q_rank else []
        products += [
            Product("q_b", tokens, heads * self.head_dim, self.q_rank or self.hidden),
            Product("kv_b", tokens, heads * (self.nope + self.value), self.kv_rank),
            Product("out", tokens, self.hidden, heads * self.value, scattered=True),
        ]
        cp = at.size("cp")
        # The two products of the lower triangle. Values are padded to the width of keys.
        causal = 2.0 * batch.sequences * heads * self.head_dim * batch.seq * (batch.seq / cp)
        moved = 8.0 * tokens * heads * self.head_dim * batch.element
        return Work(tuple(products), causal, moved, kernels=24)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        heads = self.own_heads(at)
        yield from column_calls(at, batch, self.q_rank or self.hidden, heads * self.head_dim)
        yield from column_calls(at, batch, self.kv_rank, heads * (self.nope + self.value))
        # The keys' shared elements are gathered once and saved, so backward does not gather them again.
        for call in column_calls(at.at_once, batch, self.rope, 0):
            if not call.repeated:
                yield call
        yield from row_calls(at, batch, self.hidden, heads * self.value)
        yield from context_calls(at, batch, heads, heads, self.head_dim)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the normed token, the short vectors before and after their norms, and the tensors that the core saves:
        queries, keys, values, their result and each row's log-sum."""
        heads = self.own_heads(at)
        tokens = batch.tokens(at)
        rows = batch.rows(at)
        e = batch.element
        wide = batch.wide
        yield SavedTensor("normed token", rows * self.hidden * e)
        yield SavedTensor("short vectors", rows * (2 * self.q_rank + 2 * self.kv_rank + self.rope) * e)
        yield SavedTensor("short norms", rows * (2 if self.q_rank else 1) * wide)
        yield SavedTensor("qkv", 3 * tokens * heads * self.head_dim * e)
        yield SavedTensor("padded output", tokens * heads * self.head_dim * e, core=True)
        yield SavedTensor("attention output", tokens * heads * self.value * e)
        if at.size("cp") > 1:
            yield from context_saved(at, batch, heads, heads, self.head_dim)
            return
        yield SavedTensor("log-sums", tokens * heads * wide, core=True)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the gradients of queries, keys and values."""
        heads = self.own_heads(at)
        merged = context_workspace(at, batch, heads, heads, self.head_dim) if at.size("cp") > 1 else 0.0
        return 3.0 * batch.tokens(at) * heads * self.head_dim * batch.element + merged
