"""The twin of a recipe: a small model with the same axes, schedule, sharding and kinds of parts, which a laptop trains
in a minute. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.config.load import config_from, load_config, set_key, to_mapping
from meshwright.config.memory import OffloadConfig
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.config.sections import (
    CheckpointConfig,
    Config,
    LayoutConfig,
    ModelConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from meshwright.config.tune import TuneConfig
from meshwright.data.span_lengths import span_lengths, tokens_for
from meshwright.errors import UserError, nearest
from meshwright.spec.layout.packed import BLOCK
from meshwright.spec.schedule.kinds import KINDS

RANKS = 8
# The vocabulary is that of bytes (256) and the end token, with room for special tokens.
HIDDEN, HEAD_DIM, SEQ, VOCAB = 64, 16, 64, 320
STEPS, MICRO_BATCHES = 30, 4
PEAK_LR = 2e-3
# The files that `train --tiny` makes: tokens for all twins, conversations, and base weights for adapters.
TWIN_DATA, TWIN_TALKS, TWIN_BASES = "runs/tiny-data/stdlib", "runs/tiny-data/talks", "runs/tiny-base/"


def tiny_config(name: str, words: Sequence[str] = ()) -> tuple[Config, int]:
    """Return the twin of a recipe, with `a.b=c` words on top, and the number of its ranks."""
    if name not in recipe_names():
        raise UserError(f"--tiny needs a recipe's name, and '{name}' is none{nearest(name, recipe_names())}: "
                        f"the recipes are {', '.join(recipe_names())}")  # fmt: skip
    small, ranks = twin(load_config(name), read_recipe(name).devices, name)
    raw = to_mapping(small)
    for word in words:
        set_key(raw, word)
    return config_from(raw), ranks


def twin(config: Config, devices: int, name: str) -> tuple[Config, int]:
    """Return the twin of a run on `devices` devices and the number of its ranks, which `_layout` chooses."""
    layout, ranks = _layout(config.layout, devices)
    tune = small_tune(config.tune)
    tune = replace(tune, base=f"{TWIN_BASES}{name}") if tune.adapts else tune
    talks = config.objective_facts.packed
    micro, batch = small_batch(config, layout, ranks)
    unit = ranks // layout.least_world * layout.replicas * micro
    # A ramp stays a ramp: it starts at the smallest batch and grows by it.
    train = TrainConfig(
        steps=STEPS, global_batch=batch, micro_batch=micro, seed=config.train.seed, precision="fp32",
        clip=config.train.clip, ramp=(unit, unit, STEPS * unit // 2) if config.train.ramp and batch > unit else (),
    )  # fmt: skip
    lr = config.lr
    warmup = min(3, lr.warmup_steps(config.train.steps))
    share = lr.min / config.optimizer.lr
    blocks = config.recompute.blocks
    return (
        replace(
            config, model=small_model(config, layout), layout=layout, train=train, tune=tune,
            pipeline=PipelineConfig(config.pipeline.schedule),
            recompute=replace(config.recompute, mode="every:2" if blocks > 1 else config.recompute.mode, offload=False),
            zero=replace(config.zero, offload=OffloadConfig()),
            optimizer=replace(config.optimizer, lr=PEAK_LR, master_dtype="fp32", state_dtype="fp32"),
            lr=replace(lr, warmup=warmup, decay=0, min=share * PEAK_LR),
            data=replace(
                config.data, prefixes=(TWIN_TALKS if talks else TWIN_DATA,), weights=(), split=(0.9, 0.1, 0.0), eod=-1,
                blanks=replace(config.data.blanks, instructions=()),
            ),
            run=RunConfig(dir=f"runs/{name}-tiny", device="cpu"),
            checkpoint=CheckpointConfig(every=0),
        ),
        ranks,
    )  # fmt: skip


def _layout(its: LayoutConfig, devices: int) -> tuple[LayoutConfig, int]:
    """Return the layout with every size above 2 reduced to 2, and the number of its ranks.

    Those are as many as the sizes take. If the run has data parallelism, they are at least RANKS (or `devices`, if that
    is less), and dp takes the rest."""
    tp, pp, cp, replicas = (min(2, size) for size in (its.tp, its.pp, its.cp, its.replicas))
    dp = devices // its.least_world
    least = tp * pp * cp * replicas * min(2, dp)
    ranks = max(min(RANKS, devices), least) if dp > 1 else least
    ep = min(2, its.ep)
    etp = 0 if not its.etp else min(2, its.etp, tp)
    sized = replace(its, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, chunks=min(2, its.chunks), node_size=min(4, ranks))
    return replace(sized, replicas=replicas), ranks


def small_batch(config: Config, layout: LayoutConfig, world: int) -> tuple[int, int]:
    """Return the micro-batch and the global batch of a twin: a few micro-batches for each data-parallel rank."""
    # A micro-batch of several sequences stays one of several.
    micro = 2 if config.train.micro_batch > 1 else 1
    if layout.grid is not None:
        micro = max(micro, layout.grid.rows(layout.grid.inner))
    # An interleaved schedule takes micro-batches in groups of pp.
    rounds = MICRO_BATCHES * (layout.pp if KINDS[config.pipeline.schedule].takes(2) else 1)
    return micro, world // layout.least_world * layout.replicas * micro * rounds


def small_tune(tune: TuneConfig) -> TuneConfig:
    """Return the tune section with adapters of a small rank."""
    return replace(tune, rank=min(4, tune.rank), alpha=0.0) if tune.adapts else tune


def small_model(config: Config, layout: LayoutConfig) -> ModelConfig:
    """Return a small model for `layout`: two blocks per stage (more if the pattern of windows needs them), with few and
    short heads.

    All parts stay: norms, activations, positions, biases, groups of heads, windows, experts, latent attention. Uneven
    sizes are kept too: fewer key-value heads than tp ranks, and a vocabulary that tp does not divide. On a tp rank,
    inner widths are multiples of 8, or of a block of quantised weights."""
    its, tp = config.model, layout.tp
    heads, grouped = _heads(config, layout)
    hidden = heads * HEAD_DIM
    experts, latent, scaling = its.experts, its.latent, its.rope_scaling
    if experts.count:
        groups = min(2, experts.groups)
        experts = replace(
            experts, count=max(8, layout.ep), top_k=min(2, experts.top_k), ffn=hidden // 2,
            shared=min(1, experts.shared), every=min(2, experts.every), first_dense=min(1, experts.first_dense),
            groups=groups, groups_used=1,
        )  # fmt: skip
    if latent.kv_rank:
        latent = replace(latent, kv_rank=16, q_rank=min(32, latent.q_rank), nope_dim=16, rope_dim=8, v_dim=16)
    if scaling.original:
        scaling = replace(scaling, original=SEQ // 2)
    unit = tp * (BLOCK if config.tune.quantise != "none" else 8)
    stages = layout.pp * layout.chunks
    return replace(
        its, preset="", hf="", layers=max(2, math.ceil(len(its.window_pattern) / stages)) * stages, hidden=hidden,
        heads=heads, kv_heads=grouped, head_dim=0, vocab=VOCAB + int(its.vocab % config.layout.tp > 0), seq=SEQ,
        ffn=max(unit, math.ceil(hidden * min(8.0, its.ffn / its.hidden) / unit) * unit), experts=experts, latent=latent,
        rope_scaling=scaling, predictions=0, window=SEQ // 4 if its.has_window else its.window,
        token_types=0 if its.kind == "glm" else its.token_types,
        t5=replace(its.t5, encoder_layers=0, decoder_seq=_target_tokens(config, tp)),
    )  # fmt: skip


def _target_tokens(config: Config, tp: int) -> int:
    """Return the tokens of a T5's targets in samples of SEQ tokens, as a multiple of tp; 0 for other kinds."""
    if not config.model.kind_facts.is_encoder_decoder:
        return 0
    spans = config.data.spans
    target = span_lengths(tokens_for(SEQ, spans.share, spans.mean), spans.share, spans.mean)[1]
    return math.ceil(target / tp) * tp


def _heads(config: Config, layout: LayoutConfig) -> tuple[int, int]:
    """Return the heads and the key-value heads of a small model. tp and cp divide the heads.

    Heads are grouped if the model's are. If the model has fewer key-value heads than tp ranks, so has the small one,
    because such heads are copied."""
    its, tp = config.model, layout.tp
    least = HIDDEN // HEAD_DIM
    heads = math.ceil(least / (tp * layout.cp)) * tp * layout.cp
    if its.kv_heads == 1 or its.kv_heads == its.heads:
        return heads, 1 if its.kv_heads == 1 else heads
    if its.kv_heads < config.layout.tp and tp > 1:
        return heads, max(1, tp // 2)
    grouped = heads // 2
    return (heads, grouped) if grouped and grouped % tp == 0 else (2 * heads, heads)
