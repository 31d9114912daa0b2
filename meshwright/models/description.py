"""Models as sequences of units, assembled from parts by config. `nn` modules are built from them and the planner reads
them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.config.sections import Config, ModelConfig
from meshwright.errors import UserError, nearest
from meshwright.layout import Layout, Parts, node_parts
from meshwright.layout.params import Init
from meshwright.parts.experts import ExpertsPart, Routing
from meshwright.parts.gpt import (
    KV_COPIES,
    KV_GROUPS,
    AttentionPart,
    NormPart,
    OutputLayerPart,
    PositionEmbeddingPart,
    TokenEmbeddingPart,
)
from meshwright.parts.latent import LatentAttentionPart
from meshwright.parts.mlp import MLPPart
from meshwright.parts.part import BlockUnit, Model, NamedPart, Part, Stage, Unit
from meshwright.schedule.kinds import ends_of


def gpt(model: ModelConfig) -> Model:
    """Describes a decoder-only transformer of the config's sizes."""
    h, tied, normal = model.hidden, model.tied_embeddings, Init("normal", model.init_std)
    # Projections back into the residual stream start smaller, as in GPT-2.
    small = Init("normal", model.init_std / math.sqrt(2 * model.layers))
    norm = NormPart(model.norm, h, model.norm_eps, model.norm == "layernorm" and model.bias)
    attention = attention_part(model, normal, small)
    mlp = MLPPart(model.mlp, h, model.ffn, normal, small, model.bias)

    def block(*last: tuple[str, Part]) -> BlockUnit:
        # Experts and latent attention state themselves what they keep of their norm.
        first = replace(norm, keeps_output=False) if model.latent.kv_rank else norm
        second = replace(norm, keeps_output=False) if last[0][0] == "experts" else replace(norm, of_mlp=True)
        parts = [("norm1", first), ("attention", attention), ("norm2", second), *last]
        named = tuple(NamedPart(key, key, part) for key, part in parts)
        return BlockUnit(named, h, model.parallel_residual, model.dropout)

    dense, mixed = block(("mlp", mlp)), block(("experts", experts(model, mlp)))
    blocks = tuple(mixed if model.experts.in_block(layer) else dense for layer in range(model.layers))
    first = [NamedPart("tokens", "embedding", TokenEmbeddingPart(model.vocab, h, normal, tied, model.dropout))]
    if model.position == "learned":
        positions = PositionEmbeddingPart(model.seq, h, normal, model.position_offset)
        first.append(NamedPart("positions", "position", positions))
    ended = replace(norm, keeps_output=False)
    if model.embedding_norm:
        first.append(NamedPart("norm", "embedding_norm", ended))
    output = OutputLayerPart(model.vocab, h, normal, tied)
    last = (NamedPart("norm", "final_norm", ended), NamedPart("output", "embedding" if tied else "head", output))
    return Model(Unit(tuple(first)), blocks, Unit(last), h, tied)


def attention_part(model: ModelConfig, normal: Init, output: Init) -> Part:
    """Describes the attention of a block."""
    short = model.latent
    if short.kv_rank:
        return LatentAttentionPart(
            model.hidden, model.heads, short.q_rank, short.kv_rank, short.nope_dim, short.rope_dim, short.v_dim, normal,
            output, model.norm_eps, model.dropout, model.rope_scaling.attention_factors(latent=True)[1],
        )  # fmt: skip
    return AttentionPart(
        model.hidden, model.heads, model.kv_heads, model.head_dim, normal, output, model.position == "rope", model.bias,
        model.qkv_bias, model.qk_norm_over if model.qk_norm else "", model.norm_eps, model.dropout,
        model.masks_documents,
    )  # fmt: skip


def experts(model: ModelConfig, mlp: MLPPart) -> ExpertsPart:
    """Describes the mixture of experts that stands in an MLP's place. Its products have no biases."""
    e = model.experts
    routing = Routing(
        e.count, e.top_k, e.router, e.normalise, e.scale, e.groups, e.groups_used, e.has_bias, e.bias_balance,
        e.aux_loss, e.aux_level, e.z_loss, e.capacity,
    )  # fmt: skip
    shared = replace(mlp, ffn=e.shared * e.ffn, bias=False) if e.shared else None
    return ExpertsPart(routing, replace(mlp, ffn=e.ffn, bias=False), shared)


# Kinds of models, by the config's `model.kind`. A program may add its own.
MODELS: dict[str, Callable[[ModelConfig], Model]] = {"gpt": gpt}


def describe(model: ModelConfig) -> Model:
    """Returns the description of the model that a config asks for."""
    if model.kind not in MODELS:
        known = ", ".join(MODELS)
        raise UserError(f"model.kind={model.kind} is not known{nearest(model.kind, MODELS)}: the kinds are {known}")
    return _described(MODELS[model.kind], model)


@lru_cache(maxsize=256)
def _described(assemble: Callable[[ModelConfig], Model], model: ModelConfig) -> Model:
    return assemble(model)


def split_layers(layers: int, count: int, split: Sequence[int] = ()) -> list[Stage]:
    """Splits the layers into virtual stages: as `split` says, or evenly, where the first stages take the remainder."""
    sizes = list(split) or [layers // count + (i < layers % count) for i in range(count)]
    assert len(sizes) == count and sum(sizes) == layers
    starts = [sum(sizes[:i]) for i in range(count)]
    return [
        Stage(i, count, range(start, start + size)) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def stages_of(config: Config) -> list[Stage]:
    """Returns the virtual stages that a config asks for."""
    return split_layers(config.model.layers, config.layout.pp * config.layout.chunks, config.pipeline.split)


# Fields of a batch where ranks share sequences: the numbers and the documents of the rows of all of them.
CONTEXT_ROWS, CONTEXT_DOCUMENTS = "context_rows", "context_documents"
# Fields that decide who sees whom. Where a rank has read them itself, a batch has them on the host too, under
# `on_host(name)`, so that no one waits for the device to read them back.
WHO_SEES_WHOM = {"segments", CONTEXT_ROWS, CONTEXT_DOCUMENTS}


def on_host(name: str) -> str:
    return f"host.{name}"


CP_INNER, CP_OUTER = "cp.inner", "cp.outer"  # parts of cp: ranks that exchange heads, and the ring between them


def kv_parts(model: ModelConfig, tp: int) -> Parts:
    """Returns tp as a product where key-value heads are replicated: the copies are neighbouring ranks."""
    if tp <= model.kv_heads:
        return ()
    return (("tp", ((KV_COPIES, tp // model.kv_heads), (KV_GROUPS, model.kv_heads))),)


def context_parts(config: Config) -> Parts:
    """Returns cp as a product where heads are exchanged inside groups of neighbouring ranks only."""
    cp, inner = config.layout.cp, config.context.inner
    return (("cp", ((CP_INNER, inner), (CP_OUTER, cp // inner))),) if cp > 1 and inner and cp % inner == 0 else ()


def layout_of(config: Config, world: int, node_size: int = 0) -> Layout:
    """Returns the layout that a config asks for on `world` ranks, with `node_size` ranks per node if the config doesn't
    say."""
    c = config.layout
    layout = Layout(
        world, tp=c.tp, pp=c.pp, cp=c.cp, ep=c.ep, order=c.order, node_size=c.node_size or node_size or None,
        parts=(*kv_parts(config.model, c.tp), *context_parts(config)),
        ends=ends_of(config.pipeline.schedule, c.pp, c.chunks), etp=c.etp,
    )  # fmt: skip
    if config.zero.stage == 0 or config.zero.shard_group == "dp":
        return layout
    return replace(layout, parts=(*layout.parts, *node_parts(layout)))


def fields_read(stage: Stage, model: Model, cp: int = 1) -> set[str]:
    """Returns the fields of a batch that a chunk reads, where the data have them. Blocks that add to the loss count the
    tokens that count in it."""
    ends = ({"tokens"} if stage.first else set()) | ({"labels", "loss_mask"} if stage.last else set())
    documents = {"segments"} if cp == 1 else {CONTEXT_ROWS, CONTEXT_DOCUMENTS}
    return ends | {"positions"} | documents | ({"loss_mask"} if model.losses else set())
