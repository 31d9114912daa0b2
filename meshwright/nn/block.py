"""The block: the unit that is split over stages, recomputed, compiled, gathered and counted."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.layout.params import ParamRecord, records_under
from meshwright.nn.attention import KVCache
from meshwright.nn.build import build_module
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.parts.part import BlockUnit as Description


class Block(nn.Module):
    """Adds to x [tokens, hidden], for each branch, a body of a norm: of the sum so far or, if parallel, of x itself.

    A body takes (x, norm, batch, rotary, mask, past) and returns x and its result. The residual uses the returned x: a
    body that fuses the norm with its first product also adds the residual's gradient in that kernel's backward.
    """

    def __init__(self, parallel: Parallel, block: Description, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.branches = [(norm.key, body.key) for norm, body in block.branches]
        for key, _, part in block.parts:
            self.add_module(key, build_module(part, parallel, records_under(records, key)))
        self.parallel_residual, self.p = block.parallel, block.dropout
        self.stream = parallel.streams.own if parallel.splits_tokens else parallel.streams.same

    def forward(
        self,
        x: Tensor,
        batch: int,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        past: KVCache | None = None,
    ) -> Tensor:
        total: Tensor | None = None
        for norm, body in self.branches:
            given = x if total is None or self.parallel_residual else total
            given, change = getattr(self, body)(given, getattr(self, norm), batch, rotary, mask, past)
            if self.p and self.training:
                change = dropout(change, self.p, self.stream)
            if total is None:
                x, total = given, given + change
            else:
                total = (total if self.parallel_residual else given) + change
        assert total is not None
        return total
