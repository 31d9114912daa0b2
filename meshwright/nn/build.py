"""The modules that compute the parts of a model, and the block, which is built from them. A block is the unit that is
split over stages, recomputed, compiled, gathered and counted. A part from outside the package names its module itself
(`Part.module`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.attention.attention import Attention
from meshwright.nn.attention.latent import LatentAttention
from meshwright.nn.attention.relative import CrossAttention, RelativeBias
from meshwright.nn.embedding import PositionEmbedding, TokenEmbedding
from meshwright.nn.experts.experts import Experts
from meshwright.nn.grid.layers import GridAttention, GridMLP, GridPositions, GridTokens
from meshwright.nn.grid.norm import GridNorm
from meshwright.nn.grid.products import GridLinear
from meshwright.nn.inputs import Inputs
from meshwright.nn.linear import Linear
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import BoundNorm, NoNorm, Norm, StreamNorm
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.nn.rows import ChosenRows, Dense
from meshwright.plugins import load_object
from meshwright.spec.layout.params import records_under
from meshwright.spec.model import bert, experts, gpt, grid, latent, mlp, t5, tuning
from meshwright.spec.model.part import BlockUnit, Part, Records


def _output_layer(parallel: Parallel, part: gpt.OutputLayerPart, records: Records) -> nn.Module:
    # The output layer never multiplies in fp8.
    return Linear(replace(parallel, products=""), records["weight"], records.get("bias"), "column")


def _norm(parallel: Parallel, part: gpt.NormPart, records: Records) -> Norm:
    norm: Norm = load_object(part.facts.module)(parallel, part, records)
    return norm


def _on_rows(parallel: Parallel, part: bert.ChosenRowsOf, records: Records) -> nn.Module:
    return build_module(part.part, replace(parallel, sequence_parallel=False), records)


def _build_tuned(parallel: Parallel, part: tuning.TunedPart, records: Records) -> nn.Module:
    # The layers find their adapters in the records of the weights.
    return build_module(part.part, parallel, records)


def _build_grid_output(parallel: Parallel, part: grid.GridOutputPart, records: Records) -> nn.Module:
    return GridLinear(parallel, records["weight"], None, part.grid.first)


MODULES: dict[type[Part], Callable[[Parallel, Any, Records], nn.Module]] = {
    gpt.NormPart: _norm,
    gpt.AttentionPart: Attention,
    latent.LatentAttentionPart: LatentAttention,
    mlp.MLPPart: MLP,
    experts.ExpertsPart: Experts,
    t5.RelativeBiasPart: RelativeBias,
    t5.CrossAttentionPart: CrossAttention,
    gpt.TokenEmbeddingPart: TokenEmbedding,
    gpt.PositionEmbeddingPart: PositionEmbedding,
    gpt.OutputLayerPart: _output_layer,
    bert.TokenTypePart: PositionEmbedding,
    bert.ChosenRowsPart: ChosenRows,
    bert.ChosenRowsOf: _on_rows,
    bert.DensePart: Dense,
    tuning.TunedPart: _build_tuned,
    grid.GridNormPart: GridNorm,
    grid.GridAttentionPart: GridAttention,
    grid.GridMLPPart: GridMLP,
    grid.GridTokensPart: GridTokens,
    grid.GridPositionsPart: GridPositions,
    grid.GridOutputPart: _build_grid_output,
}


def build_module(part: Part, parallel: Parallel, records: Records) -> nn.Module:
    """Build the module of a part, with empty parameters that carry its records."""
    build = MODULES[type(part)] if type(part) in MODULES else load_object(part.module)
    module: nn.Module = build(parallel, part, records)
    return module


def run_blocks(blocks: tuple[Block, ...], x: Tensor, inputs: Inputs) -> Tensor:
    """Return x after some blocks, which share their inputs and add nothing to the loss."""
    for block in blocks:
        x = block.forward(x, inputs)  # type: ignore[assignment]
    return x


class Block(nn.Module):
    """A transformer block on x [tokens, hidden], with a residual connection around each branch.

    Each branch adds body(norm(s)), where s is the sum so far, or x itself if the branches are parallel. With post-norm
    it adds body(s) and takes the norm of the new sum. With norms on both sides it adds norm(body(norm(s))). A body
    takes (x, norm, inputs) and returns a `Result`, whose x the residual uses. A norm that reads a stream is bound to
    the inputs before a body receives it, so that no body can forget to pass them.
    """

    def __init__(self, parallel: Parallel, block: BlockUnit, records: Records) -> None:
        super().__init__()
        self.branches = [(norm.key, body.key) for norm, body in block.branches]
        self.after = [norm.key for norm in block.after]
        for key, _, part in block.parts:
            self.add_module(key, build_module(part, parallel, records_under(records, key)))
        self.parallel_residual, self.p, self.residual = block.parallel, block.dropout, block.residual
        self.no_norm = NoNorm() if block.post_norm else None
        self.shares_sequences = parallel.context is not None
        self.stream = parallel.streams.own if parallel.divides_stream else parallel.streams.same

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        """Return the block's output and, if a body adds to the loss, the sums of its loss terms."""
        total: Tensor | None = None
        losses: Tensor | None = None
        for number, (norm, body) in enumerate(self.branches):
            source = x if total is None or self.parallel_residual else total
            before = self._norm(norm, inputs) if self.no_norm is None else self.no_norm
            source, change, *terms = getattr(self, body)(source, before, inputs)
            losses = terms[0] if terms else losses
            if self.after:
                change = self._norm(self.after[number], inputs)(change)
            if self.p and self.training:
                change = dropout(change, self.p, self.stream)
            if self.residual != 1.0:
                total = torch.add(change, source, alpha=self.residual)
            elif total is None:
                x, total = source, source + change
            else:
                total = (total if self.parallel_residual else source) + change
            if self.no_norm is not None:
                total = self._norm(norm, inputs)(total)
        assert total is not None
        return total if losses is None else (total, losses)

    def _norm(self, key: str, inputs: Inputs) -> Any:
        norm = getattr(self, key)
        return BoundNorm(norm, inputs) if isinstance(norm, StreamNorm) else norm

    @property
    def has_experts(self) -> bool:
        return any(isinstance(getattr(self, body), Experts) for _, body in self.branches)

    def compiled_parts(self) -> list[nn.Module]:
        """Return the modules to compile, each as one graph: the whole block if possible, otherwise some of its bodies.

        Experts are excluded, since a compiler can't know their number of rows. Of an MLP in chunks only the chunk is
        compiled. Attention is excluded if it waits for the tokens of other ranks.
        """
        bodies = [getattr(self, body) for _, body in self.branches]
        if self.shares_sequences:
            bodies = [body for body in bodies if isinstance(body, MLP)]
        elif not self.has_experts and not any(isinstance(body, MLP) and body.chunks > 1 for body in bodies):
            return [self]
        compiled = [body for body in bodies if not isinstance(body, Experts)]
        return [body.compiled_part if isinstance(body, MLP) else body for body in compiled]
