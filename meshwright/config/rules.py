"""Rules across sections: small named checks that yield what is wrong, with the fix. The first sentence is reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from meshwright.config.comm import NODE_COPY
from meshwright.config.compile_rules import blocks_compile_together, compiles_without_dropout
from meshwright.config.glm import glm_fits
from meshwright.config.grid import grid_divides, grid_fits
from meshwright.config.hf_rules import hf_fits
from meshwright.config.presets import APPROXIMATE_PRESETS
from meshwright.config.replica_rules import batch_problem, batch_unit, replicas_fit, server_fits
from meshwright.config.sections import FP8_UNIT, Config
from meshwright.config.t5 import t5_fits
from meshwright.config.tune_rules import packed_weights_fit, preferences_fit
from meshwright.errors import UserError, divisors, either, plural
from meshwright.spec.layout import Layout, node_parts
from meshwright.spec.schedule.kinds import KINDS, LARGEST_TABLE, training_kinds

Rule = Callable[[Config, int], Iterator[str]]


def preset_is_its_model(c: Config, world: int) -> Iterator[str]:
    reason = APPROXIMATE_PRESETS.get(c.model.preset)
    if reason:
        yield (
            f"model.preset={c.model.preset} can't be trained yet ({reason}): choose another preset, or train the "
            "approximation with model.preset empty and the keys of `meshwright config show`"
        )


def context_is_shared(c: Config, world: int) -> Iterator[str]:
    """Which kinds of sharing a model's heads, positions and dropout allow."""
    cp, kind, inner = c.layout.cp, c.context_kind, c.context.inner
    if cp == 1:
        return
    if inner and cp % inner:
        yield f"context.inner={inner} does not divide layout.cp={cp}: try {either(divisors(cp))}"
    if c.model.attention_dropout:
        yield (
            f"layout.cp={cp} can't be combined with dropout inside attention: set model.attention_dropout=0 or "
            "layout.cp=1"
        )
    parts = {"ulysses": cp, "hybrid": inner}.get(kind, 1)
    q, kv = c.model.heads // c.layout.tp, max(1, c.model.kv_heads // c.layout.tp)
    if q % parts or (kv % parts and parts % kv):
        fix = "use context.kind=gather or ring, with context.inner=0" if inner else "use context.kind=gather or ring"
        yield (
            f"context.kind={kind} deals {q} query and {kv} key-value heads of a tp rank to {parts} ranks, and they "
            f"don't come out even: {fix}"
        )


def kind_fits(c: Config, world: int) -> Iterator[str]:
    """What an encoder can't be combined with, and what only an encoder has."""
    m = c.model
    if m.kind != "bert":
        if c.objective == "masked" and m.kind == "gpt":
            yield "data.objective=masked needs an encoder, and model.kind is gpt: set model.kind=bert, or leave it out"
        for key in ("token_types", "pooler", "predictions") if m.kind == "gpt" else ():
            if getattr(m, key):
                yield f"model.{key}={getattr(m, key)} has no effect with model.kind=gpt: leave it out"
        return
    if c.objective != "masked":
        yield f"model.kind=bert learns masked tokens, and data.objective is {c.objective}: set data.objective=masked"
    if c.layout.cp > 1:
        yield f"layout.cp={c.layout.cp} can't share the sequences of model.kind=bert yet: set layout.cp=1"
    if m.position == "alibi":
        yield "model.position=alibi looks back only, and model.kind=bert looks both ways: use learned, rope or none"
    if m.experts.count:
        yield f"model.experts.count={m.experts.count} can't be combined with model.kind=bert yet: set it to 0"
    if m.latent.kv_rank:
        yield "model.latent is causal, and model.kind=bert looks both ways: leave it out"
    if m.pooler and m.token_types == 1:
        yield "model.token_types=1 can't tell two segments apart: set it to 2, or to 0, or model.pooler=false"
    if m.predictions > m.seq:
        yield f"model.predictions={m.predictions} is more than model.seq={m.seq}: lower it"
    for key in ("mask_eod", "reset_positions", "reset_attention"):
        if getattr(c.data, key):
            yield f"data.{key}=true has no effect with data.objective=masked: leave it out"


def experts_are_cut(c: Config, world: int) -> Iterator[str]:
    """Experts are divided over ep; every rank sends its own tokens."""
    o, experts = c.layout, c.model.experts
    if not experts.count:
        if o.ep > 1 or o.etp not in (0, o.tp):
            key = f"layout.ep={o.ep}" if o.ep > 1 else f"layout.etp={o.etp}"
            yield f"{key} divides experts, and the model has none: set model.experts.count, or leave {key} out"
        return
    if not any(experts.in_block(layer) for layer in range(c.model.layers)):
        yield (
            f"none of the {c.model.layers} blocks has experts with model.experts.first_dense={experts.first_dense} and "
            f"every={experts.every}: lower them, or set model.experts.count=0"
        )
    if experts.count % o.ep:
        choices = either(divisors(experts.count))
        yield f"layout.ep={o.ep} does not divide model.experts.count={experts.count}: try {choices}"
    tokens = c.train.micro_batch * c.model.seq // c.layout.cp
    if tokens % o.tp:
        yield (
            f"each of tp={o.tp} ranks routes an equal part of the {tokens} tokens of a micro-batch to experts: change "
            "model.seq, train.micro_batch or layout.tp"
        )


def etp_divides_experts(c: Config, world: int) -> Iterator[str]:
    """Each expert is divided over etp, and the experts that all tokens share over tp, as any MLP."""
    o, experts = c.layout, c.model.experts
    etp, shared = o.etp or o.tp, experts.shared * experts.ffn
    if experts.count and experts.ffn % etp:
        yield f"layout.etp={etp} does not divide model.experts.ffn={experts.ffn}: try {either(divisors(experts.ffn))}"
    if experts.count and shared % o.tp:
        yield (
            f"layout.tp={o.tp} does not divide the {shared} features of the shared expert, model.experts.shared x ffn: "
            f"try layout.tp={either(divisors(shared))}, or change model.experts.shared"
        )


def experts_stay_with_their_blocks(c: Config, world: int) -> Iterator[str]:
    if c.model.experts.count and not axes_layout(c, world).views_agree:
        yield (
            f"layout.order={c.layout.order} would put experts on other ranks than those that hold their blocks: begin "
            "it with tp and end it with pp"
        )


def axes_layout(c: Config, world: int, node_size: int = 0) -> Layout:
    """Returns the axes of a config on `world` ranks, whatever its model is; `node_size`, if the config doesn't say."""
    o = c.layout
    node = o.node_size or node_size or None
    return Layout(world, o.tp, o.pp, o.cp, o.ep, o.order, node, etp=o.etp, replicas=o.replicas)


def world_divides(c: Config, world: int) -> Iterator[str]:
    o, model = c.layout, c.layout.least_world
    if world < 1:
        yield f"a world of {plural(world, 'rank')} can't train: start at least {model}"
    if world % model:
        lower, upper = world // model * model, -(-world // model) * model
        sizes = f"{lower} or {upper}" if lower else str(upper)
        more = (" x replicas", f" x {o.replicas}") if o.replicas > 1 else ("", "")
        yield (
            f"a world of {plural(world, 'rank')} is not divisible by tp x cp x pp{more[0]} = "
            f"{o.tp} x {o.cp} x {o.pp}{more[1]} = {model}: start {sizes} ranks (train --nproc {upper}) or change the "
            "layout"
        )


def order_names_axes(c: Config, world: int) -> Iterator[str]:
    try:
        axes_layout(c, world)
    except UserError as error:
        yield str(error)


def tp_divides_heads(c: Config, world: int) -> Iterator[str]:
    heads = c.model.heads
    if heads % c.layout.tp and not c.layout.tp_grid:
        yield f"tp={c.layout.tp} does not divide heads={heads}: try layout.tp={either(divisors(heads))}"


def tp_fits_kv_heads(c: Config, world: int) -> Iterator[str]:
    tp, kv = c.layout.tp, c.model.kv_heads
    if kv % tp and tp % kv and not c.layout.tp_grid:
        yield f"tp={tp} neither divides kv_heads={kv} nor is a multiple of it: try layout.tp={either(divisors(kv))}"


def tp_divides_ffn(c: Config, world: int) -> Iterator[str]:
    if c.model.ffn % c.layout.tp and not c.layout.tp_grid:
        up = -(-c.model.ffn // c.layout.tp) * c.layout.tp
        yield f"tp={c.layout.tp} does not divide ffn={c.model.ffn}: try model.ffn={up}"


def sequence_parallel_splits(c: Config, world: int) -> Iterator[str]:
    tokens = c.train.micro_batch * c.model.seq // c.layout.cp
    if c.layout.sequence_parallel and tokens % c.layout.tp:
        yield (
            f"sequence parallelism cuts the {tokens} tokens of a micro-batch into tp={c.layout.tp} equal parts: "
            "change model.seq or train.micro_batch, or set layout.sequence_parallel=false"
        )


def cp_cuts_sequences(c: Config, world: int) -> Iterator[str]:
    """Each rank holds an early and a late piece of a sequence, so that causal attention is the same work on every
    rank."""
    parts, seq = c.layout.cp * (2 if c.context.order == "zigzag" else 1), c.model.seq
    if c.layout.cp > 1 and seq % parts:
        up = -(-seq // parts) * parts
        yield f"layout.cp={c.layout.cp} cuts model.seq={seq} into {parts} equal parts: try model.seq={up}"


def layers_fill_stages(c: Config, world: int) -> Iterator[str]:
    stages = c.layout.pp * c.layout.chunks
    if c.pipeline.split:
        if len(c.pipeline.split) != stages or sum(c.pipeline.split) != c.model.layers:
            yield (
                f"pipeline.split={list(c.pipeline.split)} must name pp x chunks = {stages} numbers that add up to "
                f"layers={c.model.layers}"
            )
        if 0 in c.pipeline.split[1:-1]:
            yield f"pipeline.split={list(c.pipeline.split)} leaves a stage in the middle without layers: give it one"
    elif stages > c.model.layers:
        yield (
            f"pp x chunks = {stages} stages need at least as many layers, and model.layers={c.model.layers}: "
            "lower layout.pp or layout.chunks"
        )


def schedule_takes_chunks(c: Config, world: int) -> Iterator[str]:
    if not KINDS[c.pipeline.schedule].takes(c.layout.chunks):
        yield (
            f"layout.chunks={c.layout.chunks} needs pipeline.schedule={either(training_kinds(c.layout.chunks))}, "
            f"not {c.pipeline.schedule}: change one of them"
        )


def _table_fits(c: Config, key: str, samples: int, unit: int) -> Iterator[str]:
    """Checks that the pipeline's table for `samples` samples, `unit` of them per micro-batch, is not too large."""
    most = LARGEST_TABLE // (c.layout.pp * c.layout.chunks) * unit
    if samples > most:
        yield f"{key}={samples} needs too large a table of the pipeline: use {most} at most"


def batch_divides(c: Config, world: int) -> Iterator[str]:
    unit, product = batch_unit(c, world)
    yield from _table_fits(c, "train.global_batch", c.train.global_batch, unit)
    if c.train.global_batch % unit:
        yield f"train.global_batch={c.train.global_batch} {batch_problem(c, world, c.train.global_batch)}"
    elif c.train.ramp:
        yield from _ramp_divides(c, unit, product)


def _ramp_divides(c: Config, unit: int, product: str) -> Iterator[str]:
    """Checks the first two batches of a ramp: if both are multiples of the unit, so are all after them."""
    (start, step, samples), last = c.train.ramp, c.train.global_batch
    sizes = (start, min(start + step, last))
    for size in (size for size in sizes if size % unit):
        first = max(unit, start // unit * unit)
        steps = [unit * n for n in divisors((last - first) // unit)] or [unit]
        near = min(steps, key=lambda each: abs(each - step))
        fixes = [f"train.ramp=[{first},{near},{samples}]"]
        shares = unit // c.train.micro_batch
        if not any(each % shares for each in sizes):
            fixes.append(f"train.micro_batch={math.gcd(*sizes, unit) // shares}")
        yield (
            f"train.ramp=[{start},{step},{samples}] passes through {size} samples, which is not a multiple of "
            f"{product}: set {either(fixes)}"
        )


def eval_divides(c: Config, world: int) -> Iterator[str]:
    unit = world // c.layout.least_world * c.layout.replicas * c.train.micro_batch
    if c.run.eval_samples % unit:
        up = -(-c.run.eval_samples // unit) * unit
        yield f"run.eval_samples={c.run.eval_samples} is not a multiple of dp x micro_batch = {unit}: try {up}"
    yield from _table_fits(c, "run.eval_samples", c.run.eval_samples, unit)


def shards_fit_nodes(c: Config, world: int) -> Iterator[str]:
    """The ranks of a node must divide what `zero` shards evenly, and offloaded parameters need stage 3."""
    offload = c.zero.offload
    if c.zero.shard_group == "node" and c.zero.stage and c.layout.node_size > world:
        yield (
            f"zero.shard_group=node with layout.node_size={c.layout.node_size} is larger than the world of {world} "
            "ranks: lower layout.node_size or set zero.shard_group=dp"
        )
    if c.zero.shard_group == "node" and c.zero.stage and c.layout.node_size:
        try:
            node_parts(axes_layout(c, world))
        except UserError as error:
            yield str(error)
    if offload.params != "none" and c.zero.stage != 3:
        yield f"zero.offload.params={offload.params} needs zero.stage=3, not {c.zero.stage}: change one of them"


def dtypes_fit_precision(c: Config, world: int) -> Iterator[str]:
    precision = c.train.precision
    if c.train.grad_dtype not in ("fp32", precision):
        yield f"train.grad_dtype={c.train.grad_dtype} is neither fp32 nor the precision {precision}: set one of these"
    if c.optimizer.master_dtype == "bf16" and precision != "bf16":
        yield f"optimizer.master_dtype=bf16 needs train.precision=bf16, not {precision}: change one of them"


def matrices_are_known(c: Config, world: int) -> Iterator[str]:
    """Embeddings and heads look like matrices: an optimizer of whole matrices needs parts that name theirs."""
    without = {
        f"model.kind={c.model.kind}": c.model.kind in ("t5", "hf"), "tensor parallelism on a grid": c.layout.grid,
        f"tune.kind={c.tune.kind}": c.tune.adapts,
    }  # fmt: skip
    for what in (what for what, given in without.items() if given and c.optimizer.whole_matrices):
        name = c.optimizer.name
        yield f"optimizer.name={name} updates whole matrices, which can't be combined with {what} yet: use adamw"


def fp8_fits_tokens(c: Config, world: int) -> Iterator[str]:
    tokens = c.train.micro_batch * c.model.seq // c.layout.cp
    if c.train.precision == "fp8" and tokens % FP8_UNIT:
        yield (
            f"train.precision=fp8 multiplies multiples of {FP8_UNIT} tokens, and train.micro_batch x model.seq is "
            f"{tokens}: change one of them, or set train.precision=bf16"
        )


def pieces_cut_tokens(c: Config, world: int) -> Iterator[str]:
    pieces, tokens, experts = c.recompute.pieces, c.train.micro_batch * c.model.seq // c.layout.cp, c.model.experts
    if pieces > 1 and all(experts.in_block(layer) for layer in range(c.model.layers)):
        yield (
            f"recompute.pieces={pieces} cuts the tokens of dense MLPs, and all blocks of this model have experts: "
            "leave it out"
        )
    if pieces > tokens:
        yield f"recompute.pieces={pieces} is more than the {tokens} tokens of a rank's micro-batch: lower it"
    elif c.train.precision == "fp8" and pieces > 1 and (tokens % pieces or tokens // pieces % FP8_UNIT):
        yield (
            f"recompute.pieces={pieces} does not cut the {tokens} tokens of a rank's micro-batch into multiples of "
            f"{FP8_UNIT}, which train.precision=fp8 multiplies: change it, or set train.precision=bf16"
        )


def lr_fits_steps(c: Config, world: int) -> Iterator[str]:
    if c.lr.warmup_steps(c.train.steps) > c.train.steps:
        yield (
            f"lr.warmup={c.lr.warmup} is longer than train.steps={c.train.steps}: lower it, or give a share such as "
            "lr.warmup=2%"
        )
    if c.lr.min > c.optimizer.lr:
        yield f"lr.min={c.lr.min} is above the peak optimizer.lr={c.optimizer.lr}: lower it"


def backend_fits_device(c: Config, world: int) -> Iterator[str]:
    if c.run.device == "cpu" and c.comm.backend not in ("auto", "gloo"):
        yield f"comm.backend={c.comm.backend} does not work on run.device=cpu: set comm.backend=auto"
    if c.run.device in ("cuda", "npu") and c.comm.backend == "gloo" and c.layout.pp > 1:
        yield f"comm.backend=gloo can't send between {c.run.device} devices: set comm.backend=auto or layout.pp=1"


def device_has_fp8(c: Config, world: int) -> Iterator[str]:
    if c.comm.reduce.kind == "fp8" and c.run.device == "npu":
        yield "comm.reduce.kind=fp8 is not there on run.device=npu: use int8, which sends as much"


def algorithm_fits_ranks(c: Config, world: int) -> Iterator[str]:
    layout = axes_layout(c, world)
    sizes = {axes: layout.size(axes) for axes in ("dp-cp", *(["edp"] if c.model.experts.count else []))}
    if c.comm.algorithm.dp == "halving_doubling" and any(size & (size - 1) for size in sizes.values()):
        yield (
            "comm.algorithm=halving_doubling needs a power of two of data-parallel ranks, and there are "
            f"{either([size for size in sizes.values() if size & (size - 1)])}: use ring or tree"
        )
    if c.comm.algorithm.dp != "torch" and c.zero.stage and c.zero.shard_group == "node":
        yield (
            f"comm.algorithm={c.comm.algorithm.dp} can't be combined with zero.shard_group=node, which sums inside the "
            "nodes first: set comm.algorithm=torch or zero.shard_group=dp"
        )
    nodes = -(-world // (c.layout.node_size or world))
    if c.comm.switches and (not c.layout.node_size or len(c.comm.switches) != nodes):
        yield (
            f"comm.switches names the switches of {len(c.comm.switches)} nodes, and there are {nodes}: give one for "
            "each, in the order of nodes, and layout.node_size"
        )


def positions_to_reset(c: Config, world: int) -> Iterator[str]:
    if c.data.reset_positions and c.model.position in ("none", "alibi"):
        yield f"data.reset_positions=true has no effect with model.position={c.model.position}: drop one of them"


def end_token_is_one(c: Config, world: int) -> Iterator[str]:
    if c.data.eod >= c.model.vocab:
        yield f"data.eod={c.data.eod} is no token of model.vocab={c.model.vocab}: use one below that"


def gathers_fit(c: Config, world: int) -> Iterator[str]:
    kind = c.comm.gather.kind
    if kind != "plain" and c.zero.stage != 3:
        yield (
            f"comm.gather.kind={kind} rounds the weights that ZeRO stage 3 gathers for each use, and zero.stage is "
            f"{c.zero.stage}: set zero.stage=3, or leave it out"
        )
    if c.comm.gather.node_copy:
        other = {"zero.stage": (c.zero.stage, 3), "zero.shard_group": (c.zero.shard_group, "dp"),
                 "layout.cp": (c.layout.cp, 1), "zero.offload.params": (c.zero.offload.params, "none")}  # fmt: skip
        for key, (value, needed) in other.items():
            if value != needed:
                yield f"{NODE_COPY} needs {key}={needed}, not {value}: change one of them"
        if c.layout.node_size and c.zero.stage == 3:
            try:
                node_parts(axes_layout(c, world), NODE_COPY)
            except UserError as error:
                yield str(error)
    if kind == "bf16" and c.train.precision not in ("fp32", "fp64"):
        yield f"comm.gather.kind=bf16 saves nothing with train.precision={c.train.precision}: use fp8 or int8"


def links_are_emulated_on_cpus(c: Config, world: int) -> Iterator[str]:
    e = c.comm.emulate
    if e.on and c.run.device not in ("auto", "cpu"):
        yield f"comm.emulate delays calls of CPUs only, and run.device is {c.run.device}: leave one of the two out"
    if e.network_gb_s and not c.layout.node_size:
        yield "comm.emulate.network_gb_s is a rate between nodes: give layout.node_size, the number of ranks on a node"


def adapters_fit(c: Config, world: int) -> Iterator[str]:
    if c.tune.kind == "dora" and c.recompute.pieces > 1:
        yield "tune.kind=dora can't be combined with recompute.pieces: set recompute.pieces=1, or use tune.kind=lora"
    if c.tune.adapts and c.tune.dropout and c.recompute.pieces > 1:  # backward would drop other elements
        yield f"tune.dropout={c.tune.dropout:g} can't be combined with recompute.pieces: set one of the two back"
    if c.tune.adapts and c.comm.overlap.tensor and c.layout.tp > 1:
        yield f"comm.overlap.tensor=true can't be combined with tune.kind={c.tune.kind} yet: set it to false"
    if c.tune.adapts and c.model.experts.bias_balance:
        yield f"model.experts.bias_balance moves weights that tune.kind={c.tune.kind} leaves alone: set it to 0"


def tensor_overlap_fits(c: Config, world: int) -> Iterator[str]:
    if c.comm.overlap.tensor and c.layout.tp > 1:
        found = ["train.precision=fp8"] if c.train.precision == "fp8" else []
        found += [f"recompute.pieces={c.recompute.pieces}"] if c.recompute.pieces > 1 else []
        for key in found:
            yield f"comm.overlap.tensor=true can't be combined with {key} yet: set one of the two back"


def copies_outlive_ranks(c: Config, world: int) -> Iterator[str]:
    if c.checkpoint.memory_every and not c.faults.elastic:
        yield "checkpoint.memory_every is of use where ranks start again by themselves: set faults.elastic=true too"
    if c.faults.elastic and c.layout.replicas > 1:
        yield "faults.elastic=true can't change the number of layout.replicas: set one of the two back"


RULES: list[Rule] = [
    kind_fits, hf_fits, t5_fits, glm_fits, context_is_shared, world_divides, replicas_fit, experts_are_cut,
    etp_divides_experts, order_names_axes, experts_stay_with_their_blocks, grid_fits, tp_divides_heads,
    tp_fits_kv_heads, tp_divides_ffn, sequence_parallel_splits,
    cp_cuts_sequences, layers_fill_stages, schedule_takes_chunks, batch_divides, eval_divides, shards_fit_nodes,
    dtypes_fit_precision, matrices_are_known, fp8_fits_tokens, pieces_cut_tokens, lr_fits_steps, positions_to_reset,
    end_token_is_one,
    compiles_without_dropout, blocks_compile_together, backend_fits_device, device_has_fp8, algorithm_fits_ranks,
    server_fits, tensor_overlap_fits, links_are_emulated_on_cpus, adapters_fit,
    gathers_fit, packed_weights_fit, preferences_fit, copies_outlive_ranks,
]  # fmt: skip

# The rules about how tp cuts a model's sizes.
TENSOR_PARALLEL_RULES: list[Rule] = [tp_divides_heads, tp_fits_kv_heads, tp_divides_ffn, grid_divides]

# The rules about how ranks divide experts.
EXPERT_RULES: list[Rule] = [experts_are_cut, etp_divides_experts, experts_stay_with_their_blocks]

# Training also needs the true model: planning accepts a preset that only approximates it, and says so.
TRAINING_RULES = [preset_is_its_model, *RULES]

# The planner also takes published runs, of which some share sequences in ways that ours can't.
PLANNING_RULES = [rule for rule in RULES if rule is not context_is_shared]

# Evaluation and generation run other numbers of tokens, whose products fall back from fp8 to bf16, and read adapters
# and the weights that they change as one model, which is not trained on preferences any more.
READING_RULES = [rule for rule in RULES if rule not in (fp8_fits_tokens, preferences_fit)]


def first_broken_rule(config: Config, world: int, rules: Sequence[Rule] = RULES) -> str | None:
    """Returns the sentence of the first rule that `config` breaks on `world` ranks, or None."""
    return next(chain.from_iterable(rule(config, world) for rule in rules), None)


def check(config: Config, world: int, rules: Sequence[Rule] = RULES) -> None:
    """Raises for the first rule that `config` breaks on `world` ranks."""
    message = first_broken_rule(config, world, rules)
    if message:
        raise UserError(message)
