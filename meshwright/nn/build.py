"""The table of modules that compute the parts, and the block that is made of them: the unit that is split over stages,
recomputed, compiled, gathered and counted. A program that brings a part of its own adds its module to the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshwright.layout.params import records_under
from meshwright.nn.attention import Attention, KVCache
from meshwright.nn.embedding import PositionEmbedding, TokenEmbedding
from meshwright.nn.linear import Linear
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.nn.rotary import Tables
from meshwright.parts import gpt
from meshwright.parts.part import BlockUnit, Part, Records


def _output_layer(parallel: Parallel, part: gpt.OutputLayerPart, records: Records) -> nn.Module:
    return Linear(replace(parallel, products=""), records["weight"], None, "column")  # never in fp8


MODULES: dict[type[Part], Callable[[Parallel, Any, Records], nn.Module]] = {
    gpt.NormPart: Norm,
    gpt.AttentionPart: Attention,
    gpt.MLPPart: MLP,
    gpt.TokenEmbeddingPart: TokenEmbedding,
    gpt.PositionEmbeddingPart: PositionEmbedding,
    gpt.OutputLayerPart: _output_layer,
}


def build_module(part: Part, parallel: Parallel, records: Records) -> nn.Module:
    """Builds the module of a part, with empty parameters that carry its records."""
    return MODULES[type(part)](parallel, part, records)


class Block(nn.Module):
    """Adds to x [tokens, hidden], for each branch, a body of a norm: of the sum so far or, if parallel, of x itself. A
    body takes (x, norm, batch, rotary, mask, past) and returns x and its result. The residual uses the returned x: a
    body that fuses the norm with its first product also adds the residual's gradient in that kernel's backward."""

    def __init__(self, parallel: Parallel, block: BlockUnit, records: Records) -> None:
        super().__init__()
        self.branches = [(norm.key, body.key) for norm, body in block.branches]
        for key, _, part in block.parts:
            self.add_module(key, build_module(part, parallel, records_under(records, key)))
        self.parallel_residual, self.p = block.parallel, block.dropout
        self.stream = parallel.streams.own if parallel.splits_tokens else parallel.streams.same

    def forward(
        self, x: Tensor, batch: int, rotary: Tables | None, mask: Tensor | None, past: KVCache | None = None
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
