"""Descriptions of models, assembled from parts as a config asks. No torch.

`nn` modules are built from them, and the planner reads them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwright.config.comm import NODE_COPY
from meshwright.config.data import OBJECTIVES
from meshwright.config.sections import Config, ModelConfig
from meshwright.config.tune import ALL, TuneConfig
from meshwright.plugins import load_object
from meshwright.spec.layout import Layout, Parts, exchange_parts, node_parts
from meshwright.spec.layout.context import CP_INNER, CP_OUTER
from meshwright.spec.layout.norms import NORMS
from meshwright.spec.layout.params import Init
from meshwright.spec.model.bert import ChosenRowsOf, ChosenRowsPart, DensePart, TokenTypePart
from meshwright.spec.model.experts import ExpertsPart, Routing
from meshwright.spec.model.gpt import (
    EMBEDDING,
    KV_COPIES,
    KV_GROUPS,
    AttentionPart,
    NormPart,
    OutputLayerPart,
    PositionEmbeddingPart,
    TokenEmbeddingPart,
)
from meshwright.spec.model.graph import HIDDEN, Model, Node, Stage, Stream, stack_nodes
from meshwright.spec.model.grid import on_grid
from meshwright.spec.model.latent import LatentAttentionPart
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import (
    BlockUnit,
    Coordinate,
    EmbeddingUnit,
    HeadUnit,
    MaskedHeadUnit,
    MicroBatch,
    NamedPart,
    Part,
    Rows,
    Unit,
)
from meshwright.spec.model.t5 import DECODED, DECODER, ENCODER, MEMORY, CrossAttentionPart, RelativeBiasPart, t5_inits
from meshwright.spec.model.tuning import Tuning, with_tuning
from meshwright.spec.model.updates import with_updates
from meshwright.spec.model.wrapped.parts import PlannedModel
from meshwright.spec.schedule.kinds import ends_of, placement_of


def gpt(model: ModelConfig) -> Model:
    """Describe a decoder-only transformer of the config's sizes."""
    h, tied = model.hidden, model.tied_embeddings
    output = OutputLayerPart(model.vocab, h, Init("normal", model.init_std), tied)
    last = [NamedPart("output", "embedding" if tied else "head", output)]
    if model.norm_first:
        last.insert(0, NamedPart("norm", "final_norm", ended_norm(model)))
    return one_stack(model, HeadUnit(tuple(last)))


# The fields of a batch that the embedding and the head read, if the data have them.
FIRST_FIELDS = ("tokens", "token_types")
LAST_FIELDS = ("labels", "loss_mask", "places", "swapped")


def one_stack(model: ModelConfig, head: HeadUnit, **more: Any) -> Model:
    """Describe a model whose blocks all change one stream, from an embedding to a head."""
    first = Node("embedding", embedding_unit(model), writes=HIDDEN, fields=FIRST_FIELDS)
    last = Node("head", head, (HIDDEN,), fields=LAST_FIELDS)
    nodes = (first, *stack_nodes(block_units(model)), last)
    return Model(nodes, (Stream(HIDDEN, model.hidden),), model.tied_embeddings, **more)


def bert(model: ModelConfig) -> Model:
    """Describe an encoder, in which tokens see all others of their sample.

    Its heads predict masked tokens and, with a pooler, whether two segments were swapped.
    """
    h = model.hidden
    tied = model.tied_embeddings
    normal = Init("normal", model.init_std)
    masked = model.predictions
    pooled = int(model.pooler)
    activation = "gelu" if model.mlp.endswith("glu") else model.mlp
    name = "embedding" if tied else "head"
    output = OutputLayerPart(model.vocab, h, normal, tied, "predict.bias")
    parts: list[tuple[str, str, Part]] = [("rows", "rows", ChosenRowsPart(masked + pooled, h))]
    if model.norm_first:
        parts.append(("norm", "final_norm", ChosenRowsOf(ended_norm(model), masked + pooled)))
    parts += [
        ("dense", "predict.dense", ChosenRowsOf(DensePart(h, h, activation, normal), masked)),
        ("dense_norm", "predict.norm", ChosenRowsOf(ended_norm(model), masked)),
        ("output", name, ChosenRowsOf(output, masked)),
    ]
    if pooled:
        parts.append(("pooler", "pooler", ChosenRowsOf(DensePart(h, h, "tanh", normal), 1)))
        parts.append(("order", "order", ChosenRowsOf(DensePart(h, 2, "", normal), 1)))
    head = MaskedHeadUnit(tuple(NamedPart(*part) for part in parts))
    lengths = (*((name, masked) for name in ("places", "labels", "loss_mask")), ("swapped", 1))
    return one_stack(model, head, causal=False, terms=("loss", "order")[: 1 + pooled], lengths=lengths)


def t5(model: ModelConfig) -> Model:
    """Describe an encoder-decoder: encoder blocks that see all tokens, and causal decoder blocks that also see the
    encoder's output (`memory`).

    Scores are not scaled, but have a learned bias that depends on the distance. The decoder embeds its tokens with the
    encoder's table.
    """
    h, own, heads, tied = model.hidden, model.t5, model.heads, model.tied_embeddings
    first = t5_inits(model.init_std, h, heads, model.head_dim, model.ffn)
    qkv = Init("normal", first["in"].std, heads * model.head_dim, first["q"].std)
    norm = norm_part(model)
    attention = AttentionPart(
        h, heads, heads, model.head_dim, qkv, first["out"], dropout=model.attention_dropout or 0.0, causal=False,
        scale=1.0, biased=f"{ENCODER}_bias",
    )  # fmt: skip
    cross = CrossAttentionPart(
        h, heads, model.head_dim, model.seq, first["q"], first["in"], first["out"], model.attention_dropout or 0.0
    )
    mlp = MLPPart(model.mlp, h, model.ffn, first["in"], first["down"])

    def named(*bodies: tuple[str, Part]) -> tuple[NamedPart, ...]:
        norms = [replace(norm, of_mlp=key == "mlp") for key, _ in bodies]
        named_norms = [(f"norm{number}", part) for number, part in enumerate(norms, start=1)]
        return tuple(NamedPart(key, key, part) for pair in zip(named_norms, bodies, strict=True) for key, part in pair)

    def bias(stack: str, stream: str, rows: Rows) -> Node:
        part = RelativeBiasPart(own.buckets, own.distance, heads, stack == ENCODER, stack, first["in"])
        unit = Unit((NamedPart("bias", f"{stack}.bias", part),), rows)
        return Node(f"{stack}_bias", unit, (stream,), f"{stack}_bias", everywhere=True)

    tokens = TokenEmbeddingPart(model.vocab, h, first["table"], True, model.embedding_dropout or 0.0)
    table = (NamedPart("tokens", "embedding", tokens),)
    output = OutputLayerPart(model.vocab, h, first["table"], tied, scale=h**-0.5 if own.scales_output else 1.0)
    head = (NamedPart("norm", "decoder.final_norm", ended_norm(model)),
            NamedPart("output", "embedding" if tied else "head", output))  # fmt: skip
    rows = Rows(own.decoder_seq)
    count = own.encoder_layers
    encoder = BlockUnit(named(("attention", attention), ("mlp", mlp)), hidden=h, dropout=model.dropout)
    bodies = (("attention", replace(attention, causal=True, biased=f"{DECODER}_bias")), ("cross", cross), ("mlp", mlp))
    decoder = BlockUnit(named(*bodies), rows, h, dropout=model.dropout)
    end = Unit((NamedPart("norm", "encoder.final_norm", ended_norm(model)),))
    nodes = (
        Node("embedding", EmbeddingUnit(table), writes=HIDDEN, fields=("tokens",)),
        bias(ENCODER, HIDDEN, Rows()),
        *stack_nodes((encoder,) * count, key=ENCODER, prefix="encoder.layers"),
        Node("encoder_end", end, (HIDDEN,), MEMORY),
        Node("decoder_embedding", EmbeddingUnit(table, rows), writes=DECODED, fields=("decoder_tokens",)),
        bias(DECODER, DECODED, rows),
        *stack_nodes((decoder,) * (model.layers - count), DECODED, DECODER, "decoder.layers", count),
        Node("head", HeadUnit(head, rows), (DECODED,), fields=("labels", "loss_mask")),
    )
    streams = (Stream(HIDDEN, h), Stream(MEMORY, h), Stream(DECODED, h, rows))
    lengths = tuple((name, own.decoder_seq) for name in ("decoder_tokens", "labels", "loss_mask"))
    return Model(nodes, streams, tied, causal=False, lengths=lengths)


def glm(model: ModelConfig) -> Model:
    """Describe a decoder whose tokens also see the whole first segment (the source) of their sample."""
    return replace(gpt(model), prefix=True)


def norm_part(model: ModelConfig) -> NormPart:
    """Describe the norm of a branch, whose output is saved by the product after it."""
    bias = NORMS.entry(model.norm).bias and model.bias
    return NormPart(model.norm, model.hidden, model.norm_eps, bias, fuses=model.norm_first)


def ended_norm(model: ModelConfig) -> NormPart:
    """Describe a norm that does not count its output as saved: the part after it needs none, or counts it itself."""
    return replace(norm_part(model), keeps_output=False)


def embedding_unit(model: ModelConfig) -> EmbeddingUnit:
    """Describe the embedding of ids: tokens and, if configured, positions, token types and a norm."""
    h = model.hidden
    normal = Init("normal", model.init_std)
    tokens = TokenEmbeddingPart(
        model.vocab, h, normal, model.tied_embeddings, model.embedding_dropout or 0.0, model.embedding_grad
    )
    parts = [NamedPart("tokens", "embedding", tokens)]
    if model.has_position_table:
        positions = PositionEmbeddingPart(model.seq, h, normal, model.position_offset)
        parts.append(NamedPart("positions", "position", positions))
    if model.token_types:
        parts.append(NamedPart("types", "token_type", TokenTypePart(model.token_types, h, normal)))
    if model.embedding_norm:
        parts.append(NamedPart("norm", "embedding_norm", ended_norm(model)))
    return EmbeddingUnit(tuple(parts))


def block_units(model: ModelConfig) -> tuple[BlockUnit, ...]:
    """Describe the blocks.

    The weights of projections back into the residual stream start smaller, as in GPT-2, unless a norm follows each sum.
    With DeepNorm, the weights of values and of the MLP's first product start smaller too.
    """
    normal, starts_small = Init("normal", model.init_std), model.norm_first or model.scales_residual
    small = normal if not starts_small else Init("normal", model.init_std / math.sqrt(2 * model.layers))
    qkv_init = inner = normal
    if model.scales_residual:
        inner = small
        # The rows of queries and keys precede those of values, and only values start smaller.
        qkv_init = replace(small, first=(model.heads + model.kv_heads) * model.head_dim, first_std=normal.std)
    norm = norm_part(model)
    whole = attention_part(model, qkv_init, small)
    mlp = MLPPart(model.mlp, model.hidden, model.ffn, inner, small, model.bias)
    residual = math.sqrt(2 * model.layers) if model.scales_residual else 1.0

    @lru_cache
    def block(mixed: bool, window: int) -> BlockUnit:
        last = ("experts", experts(model, mlp)) if mixed else ("mlp", mlp)
        attention = replace(whole, window=window) if isinstance(whole, AttentionPart) else whole
        # Experts and latent attention list the output of their norm among their own saved tensors.
        first = replace(norm, keeps_output=False) if model.latent.kv_rank else norm
        second = replace(norm, keeps_output=False) if mixed else replace(norm, of_mlp=True)
        parts: list[tuple[str, Part]] = [("norm1", first), ("attention", attention), ("norm2", second), last]
        if model.norms_results:
            parts.insert(2, ("norm1_after", ended_norm(model)))
            parts.append(("norm2_after", ended_norm(model)))
        named = tuple(NamedPart(key, key, part) for key, part in parts)
        post, both = not model.norm_first, model.norms_results
        return BlockUnit(named, Rows(), model.hidden, model.parallel_residual, model.dropout, post, residual, both)

    layers = range(model.layers)
    return tuple(block(model.experts.in_block(layer), model.window_of(layer)) for layer in layers)


def attention_part(model: ModelConfig, normal: Init, output: Init) -> Part:
    """Describe the attention of a block."""
    short = model.latent
    if short.kv_rank:
        return LatentAttentionPart(
            model.hidden, model.heads, short.q_rank, short.kv_rank, short.nope_dim, short.rope_dim, short.v_dim, normal,
            output, model.norm_eps, model.attention_dropout or 0.0,
            model.rope_scaling.attention_factors(latent=True)[1],
        )  # fmt: skip
    return AttentionPart(
        model.hidden, model.heads, model.kv_heads, model.head_dim, normal, output, model.has_rope, model.bias,
        model.qkv_bias, model.qk_norm_over if model.qk_norm else "", model.norm_eps,
        model.attention_dropout or 0.0, model.has_alibi, model.kind_facts.causal,
    )  # fmt: skip


def experts(model: ModelConfig, mlp: MLPPart) -> ExpertsPart:
    """Describe the mixture of experts that replaces an MLP. Its products have no biases."""
    e = model.experts
    routing = Routing(
        e.count, e.top_k, e.router, e.normalise, e.scale, e.groups, e.groups_used, e.has_bias,
        e.aux_loss, e.aux_level, e.z_loss, e.capacity,
    )  # fmt: skip
    shared = replace(mlp, ffn=e.shared * e.ffn, bias=False) if e.shared else None
    return ExpertsPart(routing, replace(mlp, ffn=e.ffn, bias=False), shared)


def hf(model: ModelConfig) -> Model:
    """Describe a model that transformers builds, cut as its tensor-parallel plan says."""
    # This builds the module itself, which needs torch and transformers. Nothing else here does.
    described: Model = importlib.import_module("meshwright.models.wrapped.blueprint").blueprint(model.hf).model
    return described


def describe(model: ModelConfig) -> Model:
    """Return the description of the model that a config asks for."""
    assemble = model.kind_facts.describe
    return _described(load_object(assemble) if isinstance(assemble, str) else assemble, model)


def model_of(config: Config) -> Model:
    """Return the description of the model that a run trains.

    It has adapters if its weights are frozen, and is cut over a grid of tensor-parallel ranks if the layout has one.
    """
    model = describe(config.model)
    grid = config.layout.grid
    if grid is not None:
        model = _on_grid(model, grid)
    elif config.tune.adapts:
        model = _with_tuning(model, config.tune, config.compares)
    return with_updates(model, config.optimizer)


_on_grid = lru_cache(maxsize=256)(on_grid)


@lru_cache(maxsize=256)
def _with_tuning(model: Model, tune: TuneConfig, compared: bool) -> Model:
    tuning = Tuning(
        tune.rank, tune.scale, norms=tune.trains_norms, dropout=tune.dropout,
        targets=tuple(each for each in tune.targets if each != ALL), every=ALL in tune.targets,
        whole=tune.modules_to_save, packs=tune.packs,
    )  # fmt: skip
    return replace(with_tuning(model, tuning), compared=compared)


@lru_cache(maxsize=256)
def _described(assemble: Callable[[ModelConfig], Model], model: ModelConfig) -> Model:
    return assemble(model)


def split_layers(layers: int, count: int, split: Sequence[int] = ()) -> list[Stage]:
    """Split the layers into virtual stages: as `split` says, or evenly with the remainder in the first stages."""
    sizes = list(split) or [layers // count + (i < layers % count) for i in range(count)]
    assert len(sizes) == count and sum(sizes) == layers
    starts = [sum(sizes[:i]) for i in range(count)]
    return [
        Stage(i, count, range(start, start + size)) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def stages_of(config: Config) -> list[Stage]:
    """Return the virtual stages that a config asks for."""
    layers = config.model.layers
    count = config.layout.pp * config.layout.chunks
    split = config.pipeline.split
    # Without this setting, a stage may hold blocks of both the encoder and the decoder.
    if own := config.pipeline.encoder_stages:
        blocks = config.model.t5.encoder_layers
        both = (split_layers(blocks, own), split_layers(layers - blocks, count - own))
        split = tuple(len(stage.layers) for stages in both for stage in stages)
    return split_layers(layers, count, split)


def shared_parameters(config: Config) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the sets of pipeline ranks that hold the same parameters, with the name of their group.

    Returns () if only the ends of the model share a table, because the layout knows its ends.
    """
    model = describe(config.model)
    holders = dict[str, set[int]]()
    places = placement_of(config.pipeline.schedule, config.layout.pp, config.layout.chunks)
    for stage, (rank, _) in zip(stages_of(config), places, strict=True):
        for name in model.groups(stage):
            holders.setdefault(name, set()).add(rank)
    ends = {places[0][0], places[-1][0]}
    if not {*holders} - {EMBEDDING} and holders.get(EMBEDDING, ends) == ends:
        return ()
    return tuple((name, tuple(sorted(ranks))) for name, ranks in sorted(holders.items()))


# Fields of a batch if ranks share sequences: the row numbers and the documents of all these ranks' rows.
CONTEXT_ROWS, CONTEXT_DOCUMENTS = "context_rows", "context_documents"
# Fields that decide which tokens see each other. If a rank has read them itself, a batch also has them on the host
# under `on_host(name)`, so that reading them does not have to wait for the device.
VISIBILITY_FIELDS = {"segments", CONTEXT_ROWS, CONTEXT_DOCUMENTS}


def on_host(name: str) -> str:
    return f"host.{name}"


def check_family(model: Model, tp: int, pp: int) -> None:
    """Raise if the tensor-parallel plan of a model's family has not been verified for this layout."""
    # Only models of other programs need the table of families that this module reads.
    from meshwright.spec.model.wrapped.families import check_plan

    assert isinstance(model, PlannedModel)
    check_plan(model, tp, pp)


def kv_parts(model: ModelConfig, tp: int) -> Parts:
    """Return the parts of tp if key-value heads are replicated, and () otherwise. Copies are on neighbouring ranks."""
    if tp <= model.kv_heads:
        return ()
    return (("tp", ((KV_COPIES, tp // model.kv_heads), (KV_GROUPS, model.kv_heads))),)


def context_parts(config: Config) -> Parts:
    """Return the parts of cp if heads are only exchanged inside groups of neighbouring ranks, and () otherwise."""
    cp, inner = config.layout.cp, config.context.inner
    return (("cp", ((CP_INNER, inner), (CP_OUTER, cp // inner))),) if cp > 1 and inner and cp % inner == 0 else ()


def layout_of(config: Config, world: int, node_size: int = 0) -> Layout:
    """Return the layout that a config asks for on `world` ranks. `node_size` is the number of ranks per node if the
    config does not set it."""
    c = config.layout
    if config.model.kind_facts.is_foreign and c.tp * c.pp > 1:
        check_family(describe(config.model), c.tp, c.pp)
    # Parts of dp and ep depend on the nodes of a layout's groups, so they are added to a first layout.
    layout = Layout(
        world, tp=c.tp, pp=c.pp, cp=c.cp, ep=c.ep, order=c.order, node_size=c.node_size or node_size or None,
        parts=(*(c.grid.parts if c.grid else kv_parts(config.model, c.tp)), *context_parts(config)),
        ends=ends_of(config.pipeline.schedule, c.pp, c.chunks), etp=c.etp, shared=shared_parameters(config),
        replicas=c.replicas,
    )  # fmt: skip
    if config.comm.algorithm.exchanges_by_node and c.ep > 1:
        layout = replace(layout, parts=(*layout.parts, *exchange_parts(layout)))
    if config.zero.stage and config.zero.stays_in_node:
        return replace(layout, parts=(*layout.parts, *node_parts(layout)))
    if config.zero.stage == 3 and config.comm.gather.node_copy:
        return replace(layout, parts=(*layout.parts, *node_parts(layout, NODE_COPY)))
    return layout


def fields_read(stage: Stage, model: Model, cp: int = 1) -> set[str]:
    """Return the fields of a batch that a stage reads, if the data have them.

    Blocks that add terms to the loss need the loss mask, to count the same tokens as the loss.
    """
    documents = {"segments"} if cp == 1 else {CONTEXT_ROWS, CONTEXT_DOCUMENTS}
    return model.fields(stage) | {"positions"} | documents | ({"loss_mask"} if model.losses else set())


def field_elements(name: str, model: Model, at: Coordinate, batch: MicroBatch) -> int:
    """Return the number of elements of a field in one micro-batch on a rank: one per token, per predicted token or per
    sample."""
    lengths = dict(model.lengths)
    return batch.sequences * lengths[name] if name in lengths else batch.tokens(at)


def data_fields(config: Config) -> list[str]:
    """Return the names of the fields that samples of a config's data have."""
    facts = config.objective_facts
    names = list(config.objective_facts.fields)
    names += ["swapped"] if facts is OBJECTIVES["masked"] and config.model.pooler else []
    names += ["token_types"] if facts.fills_blanks and config.model.token_types else []
    if facts.splits_documents:
        positions = config.data.reset_positions or (facts.packed and config.model.numbers_positions)
        names += ["positions"] * positions + ["segments"] * config.has_segments
    return names
