"""The table of modules that compute the parts. A program that brings a part of its own adds its module here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.nn.attention import Attention
from meshwright.nn.embedding import PositionEmbedding, TokenEmbedding
from meshwright.nn.experts import Experts
from meshwright.nn.latent import LatentAttention
from meshwright.nn.linear import Linear
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.parts import experts, gpt, latent
from meshwright.parts.part import Part, Records


def _output_layer(parallel: Parallel, part: gpt.OutputLayerPart, records: Records) -> nn.Module:
    return Linear(replace(parallel, products=""), records["weight"], None, "column")  # never in fp8


MODULES: dict[type[Part], Callable[[Parallel, Any, Records], nn.Module]] = {
    gpt.NormPart: Norm,
    gpt.AttentionPart: Attention,
    latent.LatentAttentionPart: LatentAttention,
    gpt.MLPPart: MLP,
    experts.ExpertsPart: Experts,
    gpt.TokenEmbeddingPart: TokenEmbedding,
    gpt.PositionEmbeddingPart: PositionEmbedding,
    gpt.OutputLayerPart: _output_layer,
}


def build_module(part: Part, parallel: Parallel, records: Records) -> nn.Module:
    """Builds the module of a part, with empty parameters that carry its records."""
    return MODULES[type(part)](parallel, part, records)
