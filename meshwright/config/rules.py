"""Rules across sections: small named checks that yield a sentence for each mistake, with a fix. Only the first sentence
is reported to the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain

from meshwright.config.comm import NODE_COPY
from meshwright.config.features import FEATURES, exclusions
from meshwright.config.grid import grid_divides, grid_fits
from meshwright.config.kinds import foreign_model_fits, kind_fits
from meshwright.config.presets import APPROXIMATE_PRESETS
from meshwright.config.sections import FP8_UNIT, Config
from meshwright.config.t5 import t5_fits
from meshwright.device_kinds import AUTO, DEVICE_KINDS
from meshwright.errors import UserError, divisors, either, plural
from meshwright.spec.layout import Layout, node_parts
from meshwright.spec.layout.packed import BLOCK
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE, KINDS, LARGEST_TABLE, NOT_CHOSEN, training_kinds

# A rule takes a config, which all of them call `c`, and the number of ranks.
Rule = Callable[[Config, int], Iterator[str]]


def preset_is_its_model(c: Config, world: int) -> Iterator[str]:
    """Check that the preset is not just an approximation of the model of that name."""
    reason = APPROXIMATE_PRESETS.get(c.model.preset)
    if reason:
        yield (
            f"model.preset={c.model.preset} can't be trained yet ({reason}): choose another preset, or train the "
            "approximation with model.preset empty and the keys of `meshwright config show`"
        )


def features_fit(c: Config, world: int) -> Iterator[str]:
    """Check that all features of the config work together."""
    yield from exclusions(c)


def features_are_planned(c: Config, world: int) -> Iterator[str]:
    """Check that the planner accepts the combination of features."""
    yield from exclusions(c, planned=True)


def context_is_shared(config: Config, world: int) -> Iterator[str]:
    """Check that a model's heads can be divided among the ranks that exchange them (ulysses and hybrid)."""
    cp, kind, inner = config.layout.cp, config.context_kind, config.context.inner
    if cp == 1:
        return
    if inner and cp % inner:
        yield f"context.inner={inner} does not divide layout.cp={cp}: try {either(divisors(cp))}"
    parts = (inner or cp) if config.context_plan.inner else 1
    q = config.model.heads // config.layout.tp
    kv = max(1, config.model.kv_heads // config.layout.tp)
    if q % parts or (kv % parts and parts % kv):
        fix = "use context.kind=gather or ring, with context.inner=0" if inner else "use context.kind=gather or ring"
        yield (
            f"context.kind={kind} can't divide {q} query and {kv} key-value heads of a tp rank evenly over {parts} "
            f"ranks: {fix}"
        )


def experts_are_cut(config: Config, world: int) -> Iterator[str]:
    """Check that experts can be divided over ep, and that each tp rank routes an equal part of the tokens."""
    o, experts = config.layout, config.model.experts
    if not experts.count:
        if o.ep > 1 or o.etp not in (0, o.tp):
            key = f"layout.ep={o.ep}" if o.ep > 1 else f"layout.etp={o.etp}"
            yield f"{key} divides experts, and the model has none: set model.experts.count, or leave {key} out"
        return
    if not any(experts.in_block(layer) for layer in range(config.model.layers)):
        yield (
            f"none of the {config.model.layers} blocks has experts with "
            f"model.experts.first_dense={experts.first_dense} and "
            f"every={experts.every}: lower them, or set model.experts.count=0"
        )
    if experts.count % o.ep:
        choices = either(divisors(experts.count))
        yield f"layout.ep={o.ep} does not divide model.experts.count={experts.count}: try {choices}"
    tokens = config.train.micro_batch * config.model.seq // config.layout.cp
    if tokens % o.tp:
        yield (
            f"each of tp={o.tp} ranks routes an equal part of the {tokens} tokens of a micro-batch to experts: change "
            "model.seq, train.micro_batch or layout.tp"
        )


def etp_divides_experts(c: Config, world: int) -> Iterator[str]:
    """Check that etp divides each expert. The shared experts are divided over tp, like any other MLP."""
    o, experts = c.layout, c.model.experts
    etp = o.etp or o.tp
    shared = experts.shared * experts.ffn
    if experts.count and experts.ffn % etp:
        whole = "" if o.etp else ", e.g. layout.etp=1, which leaves experts whole"
        key = f"layout.etp={etp}" if o.etp else f"layout.tp={o.tp}, which divides experts too,"
        choices = either(divisors(experts.ffn))
        yield f"{key} does not divide model.experts.ffn={experts.ffn}: try layout.etp={choices}{whole}"
    if experts.count and shared % o.tp:
        yield (
            f"layout.tp={o.tp} does not divide the {shared} features of the shared expert, model.experts.shared x ffn: "
            f"try layout.tp={either(divisors(shared))}, or change model.experts.shared"
        )


def experts_stay_with_their_blocks(c: Config, world: int) -> Iterator[str]:
    """Check that a rank has the same tp and pp position among the experts as in the dense layers."""
    if c.model.experts.count and not axes_layout(c, world).views_agree:
        yield (
            f"layout.order={c.layout.order} would put experts on other ranks than those that hold their blocks: begin "
            "it with tp and end it with pp"
        )


def axes_layout(c: Config, world: int, node_size: int = 0) -> Layout:
    """Return the axes of a config on `world` ranks, regardless of its model. `node_size` is used if the config has
    none."""
    o = c.layout
    node = o.node_size or node_size or None
    return Layout(world, o.tp, o.pp, o.cp, o.ep, o.order, node, etp=o.etp, replicas=o.replicas)


def batch_unit(config: Config, world: int) -> tuple[int, str]:
    """Return the number that divides every global batch on `world` ranks, and the product that it comes from in
    words."""
    dp = max(1, world // config.layout.least_world)
    micro = config.train.micro_batch
    replicas = config.layout.replicas
    parts = sum(config.train.local.shares) or replicas
    if parts == 1:
        return dp * micro, f"dp x micro_batch = {dp} x {micro} = {dp * micro}"
    name = "the sum of train.local.shares" if config.train.local.shares else "replicas"
    return dp * micro * parts, f"dp x micro_batch x {name} = {dp} x {micro} x {parts} = {dp * micro * parts}"


def batch_problem(config: Config, world: int, samples: int) -> str:
    """Return the end of an error sentence about a global batch of `samples` samples, with fixes. Fixes that train the
    same model come first."""
    (unit, product), micro = batch_unit(config, world), config.train.micro_batch
    # dp x replicas, or dp x the sum of the replicas' shares.
    shares = unit // micro
    if samples < shares and not config.train.local.shares:
        single = ", with train.micro_batch=1" if micro > 1 else ""
        most = world // shares * samples
        return (
            f"can't be divided over {shares} data-parallel ranks: use at most {plural(most, 'rank')}, or "
            f"train.global_batch={shares}{single}"
        )
    up = -(-samples // unit) * unit
    if samples % shares == 0:
        # A smaller micro-batch alone fixes it, so the largest that fits is suggested.
        fits = max(n for n in divisors(samples // shares) if n < micro)
        experts = config.model.experts
        by_batch = experts.count and experts.aux_loss and experts.aux_level == "batch"
        same = "the balance loss is of each micro-batch" if by_batch else "the training stays the same"
        fix = f"set train.micro_batch={fits} ({same}), or train.global_batch={up}"
    else:
        fix = f"try {either(sorted({max(unit, samples // unit * unit), up}))}"
    return f"is not a multiple of {product}: {fix}"


def replicas_fit(c: Config, world: int) -> Iterator[str]:
    """Check the keys of `train.local`, which only apply to replicas."""
    replicas, local = c.layout.replicas, c.train.local
    if replicas == 1:
        for key in (f.name for f in fields(local)):
            if getattr(local, key) != getattr(type(local)(), key):
                yield (
                    f"train.local.{key} has no effect with layout.replicas=1: leave it out, or set layout.replicas to "
                    "the number of replicas that take steps of their own"
                )
        return
    if local.shares and len(local.shares) != replicas:
        yield (
            f"train.local.shares={list(local.shares)} must have one number for each of layout.replicas={replicas}: "
            "change one of them"
        )


def server_fits(c: Config, world: int) -> Iterator[str]:
    """Check that the ranks of a parameter server divide the ranks whose gradients they sum."""
    server, o = c.train.server, c.layout
    if not server.ranks:
        return
    # The ranks that sum a gradient: dp x cp.
    group = world // (o.tp * o.pp * o.replicas)
    if group % server.ranks:
        yield (
            f"train.server.ranks={server.ranks} must divide the {group} ranks that sum a gradient (dp x cp): try "
            f"{either(divisors(group))}"
        )


def world_divides(c: Config, world: int) -> Iterator[str]:
    """Check that the world is a multiple of the ranks that one copy of the model takes."""
    o, model = c.layout, c.layout.least_world
    if world < 1:
        yield f"a world of {plural(world, 'rank')} can't train: start at least {model}"
    if world % model:
        lower = world // model * model
        upper = -(-world // model) * model
        sizes = f"{lower} or {upper}" if lower else str(upper)
        more = (" x replicas", f" x {o.replicas}") if o.replicas > 1 else ("", "")
        yield (
            f"a world of {plural(world, 'rank')} is not divisible by tp x cp x pp{more[0]} = "
            f"{o.tp} x {o.cp} x {o.pp}{more[1]} = {model}: start {sizes} ranks (train --nproc {upper}) or change the "
            "layout"
        )


def order_names_axes(c: Config, world: int) -> Iterator[str]:
    """Check that the layout can be built, which refuses a wrong order of axes."""
    try:
        axes_layout(c, world)
    except UserError as error:
        yield str(error)


def tp_divides_heads(c: Config, world: int) -> Iterator[str]:
    """Check that tp divides the heads. For a grid, `grid_divides` does so."""
    heads = c.model.heads
    if heads % c.layout.tp and not c.layout.tp_grid:
        yield f"tp={c.layout.tp} does not divide heads={heads}: try layout.tp={either(divisors(heads))}"


def tp_fits_kv_heads(c: Config, world: int) -> Iterator[str]:
    """Check that tp divides the key-value heads, or that each of them can be copied to the same number of ranks.

    A model that transformers builds has no copies of heads.
    """
    tp, kv = c.layout.tp, c.model.kv_heads
    if kv % tp and c.model.kind_facts.is_foreign:
        yield f"tp={tp} does not divide the {kv} key-value heads of {c.model.hf}: try layout.tp={either(divisors(kv))}"
    elif kv % tp and tp % kv and not c.layout.tp_grid:
        yield f"tp={tp} neither divides kv_heads={kv} nor is a multiple of it: try layout.tp={either(divisors(kv))}"


def tp_divides_ffn(c: Config, world: int) -> Iterator[str]:
    """Check that tp divides the inner width of MLPs."""
    if c.model.ffn % c.layout.tp and not c.layout.tp_grid:
        up = -(-c.model.ffn // c.layout.tp) * c.layout.tp
        yield f"tp={c.layout.tp} does not divide ffn={c.model.ffn}: try model.ffn={up}"


def sequence_parallel_splits(c: Config, world: int) -> Iterator[str]:
    """Check that sequence parallelism divides the tokens of a micro-batch evenly over tp."""
    tokens = c.train.micro_batch * c.model.seq // c.layout.cp
    if c.layout.sequence_parallel and tokens % c.layout.tp:
        yield (
            f"sequence parallelism cuts the {tokens} tokens of a micro-batch into tp={c.layout.tp} equal parts: "
            "change model.seq or train.micro_batch, or set layout.sequence_parallel=false"
        )


def cp_cuts_sequences(config: Config, world: int) -> Iterator[str]:
    """Check that cp divides a sequence into equal parts."""
    # With zigzag order each rank holds an early and a late part of the sequence, so that causal attention is the same
    # work on every rank.
    parts = config.layout.cp * (2 if config.context.order == "zigzag" else 1)
    seq = config.model.seq
    if config.layout.cp > 1 and seq % parts:
        up = -(-seq // parts) * parts
        yield f"layout.cp={config.layout.cp} cuts model.seq={seq} into {parts} equal parts: try model.seq={up}"


def layers_fill_stages(config: Config, world: int) -> Iterator[str]:
    """Check that every pipeline stage has layers. With a given split, the first and the last stage may have none, since
    they hold the embedding and the output layer."""
    stages = config.layout.pp * config.layout.chunks
    if config.pipeline.split:
        if len(config.pipeline.split) != stages or sum(config.pipeline.split) != config.model.layers:
            yield (
                f"pipeline.split={list(config.pipeline.split)} must name pp x chunks = {stages} numbers that add up to "
                f"layers={config.model.layers}"
            )
        if 0 in config.pipeline.split[1:-1]:
            yield (
                f"pipeline.split={list(config.pipeline.split)} leaves a stage in the middle without layers: give it one"
            )
    elif stages > config.model.layers:
        yield (
            f"pp x chunks = {stages} stages need at least as many layers, and model.layers={config.model.layers}: "
            "lower layout.pp or layout.chunks"
        )


def schedule_is_chosen(c: Config, world: int) -> Iterator[str]:
    """Check that a schedule was chosen. Commands that know the devices replace `auto` before they check the rules."""
    if c.pipeline.schedule == AUTO_SCHEDULE:
        yield NOT_CHOSEN


def schedule_takes_chunks(c: Config, world: int) -> Iterator[str]:
    """Check that the pipeline schedule supports the number of chunks per rank."""
    if not KINDS[c.pipeline.schedule].takes(c.layout.chunks):
        yield (
            f"layout.chunks={c.layout.chunks} needs pipeline.schedule={either(training_kinds(c.layout.chunks))}, "
            f"not {c.pipeline.schedule}: change one of them"
        )


def _table_fits(c: Config, key: str, samples: int, unit: int) -> Iterator[str]:
    """Check that the schedule's table for `samples` samples is not too large. `unit` samples, over all ranks, are one
    micro-batch of it."""
    most = LARGEST_TABLE // (c.layout.pp * c.layout.chunks) * unit
    if samples > most:
        yield f"{key}={samples} needs too large a table of the pipeline: use {most} at most"


def batch_divides(config: Config, world: int) -> Iterator[str]:
    """Check that the global batch, and each step of its ramp, can be divided into the ranks' micro-batches."""
    unit, product = batch_unit(config, world)
    yield from _table_fits(config, "train.global_batch", config.train.global_batch, unit)
    if config.train.global_batch % unit:
        yield (
            f"train.global_batch={config.train.global_batch} {batch_problem(config, world, config.train.global_batch)}"
        )
    elif config.train.ramp:
        yield from _ramp_divides(config, unit, product)


def _ramp_divides(config: Config, unit: int, product: str) -> Iterator[str]:
    """Check the first two batches of a ramp. If both are multiples of `unit`, so are all later ones."""
    (start, step, samples), last = config.train.ramp, config.train.global_batch
    sizes = (start, min(start + step, last))
    for size in (size for size in sizes if size % unit):
        first = max(unit, start // unit * unit)
        # The increment must also lead from the first batch to the global batch: of those that do, suggest the nearest.
        steps = [unit * n for n in divisors((last - first) // unit)] or [unit]
        near = min(steps, key=lambda candidate: abs(candidate - step))
        fixes = [f"train.ramp=[{first},{near},{samples}]"]
        shares = unit // config.train.micro_batch
        if not any(batch % shares for batch in sizes):
            fixes.append(f"train.micro_batch={math.gcd(*sizes, unit) // shares}")
        yield (
            f"train.ramp=[{start},{step},{samples}] passes through {size} samples, which is not a multiple of "
            f"{product}: set {either(fixes)}"
        )


def eval_divides(c: Config, world: int) -> Iterator[str]:
    """Check that the samples of a validation can be divided into the ranks' micro-batches."""
    unit = world // c.layout.least_world * c.layout.replicas * c.train.micro_batch
    if c.run.eval_samples % unit:
        up = -(-c.run.eval_samples // unit) * unit
        yield f"run.eval_samples={c.run.eval_samples} is not a multiple of dp x micro_batch = {unit}: try {up}"
    yield from _table_fits(c, "run.eval_samples", c.run.eval_samples, unit)


def shards_fit_nodes(config: Config, world: int) -> Iterator[str]:
    """Check that nodes are shaped for shards within a node, and that parameters are offloaded in stage 3 only."""
    offload = config.zero.offload
    if config.zero.stays_in_node and config.zero.stage and config.layout.node_size > world:
        yield (
            f"zero.shard_group=node with layout.node_size={config.layout.node_size} is larger than the world of "
            f"{world} "
            "ranks: lower layout.node_size or set zero.shard_group=dp"
        )
    if config.zero.stays_in_node and config.zero.stage and config.layout.node_size:
        try:
            node_parts(axes_layout(config, world))
        except UserError as error:
            yield str(error)
    if offload.params != "none" and config.zero.stage != 3:
        yield f"zero.offload.params={offload.params} needs zero.stage=3, not {config.zero.stage}: change one of them"


def dtypes_fit_precision(c: Config, world: int) -> Iterator[str]:
    """Check that the dtypes of gradients and master weights fit the precision."""
    precision = c.train.precision
    if c.train.grad_dtype not in ("fp32", precision):
        yield f"train.grad_dtype={c.train.grad_dtype} is neither fp32 nor the precision {precision}: set one of these"
    if c.optimizer.master_dtype == "bf16" and precision != "bf16":
        yield f"optimizer.master_dtype=bf16 needs train.precision=bf16, not {precision}: change one of them"


def matrices_are_known(config: Config, world: int) -> Iterator[str]:
    """Check that the model can tell an optimizer of whole matrices which parameters are matrices of products."""
    # The shape alone does not tell: embeddings and output layers look like matrices too.
    facts = config.model.kind_facts
    without = {
        f"model.kind={config.model.kind}": facts.is_foreign,
        "tensor parallelism on a grid": config.layout.grid,
    }  # fmt: skip
    name = config.optimizer.name
    for what in (what for what, given in without.items() if given and config.optimizer.whole_matrices):
        yield f"optimizer.name={name} updates whole matrices, which can't be combined with {what} yet: use adamw"


def noise_has_small_batches(c: Config, world: int) -> Iterator[str]:
    """Check that the gradients of several ranks are summed, which the noise scale compares with their sum."""
    # An elastic run may continue with one.
    if c.run.noise_scale and world == c.layout.least_world and not c.faults.elastic:
        yield "run.noise_scale compares the gradients of data-parallel ranks, and this run has one: use dp=2 or more"


def fp8_fits_tokens(c: Config, world: int) -> Iterator[str]:
    """Check that the tokens of a micro-batch are a multiple that fp8 products can take."""
    tokens = c.train.micro_batch * c.model.seq // c.layout.cp
    if c.train.precision == "fp8" and tokens % FP8_UNIT:
        yield (
            f"train.precision=fp8 multiplies multiples of {FP8_UNIT} tokens, and train.micro_batch x model.seq is "
            f"{tokens}: change one of them, or set train.precision=bf16"
        )


def pieces_cut_tokens(config: Config, world: int) -> Iterator[str]:
    """Check that the tokens of a rank's micro-batch can be cut into `recompute.pieces` pieces for its MLPs."""
    pieces, experts = config.recompute.pieces, config.model.experts
    tokens = config.train.micro_batch * config.model.seq // config.layout.cp
    if pieces > 1 and all(experts.in_block(layer) for layer in range(config.model.layers)):
        yield (
            f"recompute.pieces={pieces} cuts the tokens of dense MLPs, and all blocks of this model have experts: "
            "leave it out"
        )
    if pieces > tokens:
        yield f"recompute.pieces={pieces} is more than the {tokens} tokens of a rank's micro-batch: lower it"
    elif config.train.precision == "fp8" and pieces > 1 and (tokens % pieces or tokens // pieces % FP8_UNIT):
        yield (
            f"recompute.pieces={pieces} does not cut the {tokens} tokens of a rank's micro-batch into multiples of "
            f"{FP8_UNIT}, which train.precision=fp8 multiplies: change it, or set train.precision=bf16"
        )


def lr_fits_steps(config: Config, world: int) -> Iterator[str]:
    """Check that the warm-up ends within the run, and that the learning rate does not decay upwards."""
    if config.lr.warmup_steps(config.train.steps) > config.train.steps:
        yield (
            f"lr.warmup={config.lr.warmup} is longer than train.steps={config.train.steps}: lower it, or give a "
            "share such as "
            "lr.warmup=2%"
        )
    if config.lr.min > config.optimizer.lr:
        yield f"lr.min={config.lr.min} is above the peak optimizer.lr={config.optimizer.lr}: lower it"


def backend_fits_device(c: Config, world: int) -> Iterator[str]:
    """Check that the communication back end works on the device."""
    facts = DEVICE_KINDS.get(c.run.device)
    if facts is None:
        return
    own = c.comm.backend in (AUTO, facts.backend)
    if not facts.is_accelerator and not own:
        yield f"comm.backend={c.comm.backend} does not work on run.device={c.run.device}: set comm.backend=auto"
    if facts.is_accelerator and not own and c.comm.backend == DEVICE_KINDS["cpu"].backend and c.layout.pp > 1:
        yield f"comm.backend=gloo can't send between {c.run.device} devices: set comm.backend=auto or layout.pp=1"


def device_has_fp8(c: Config, world: int) -> Iterator[str]:
    """Check that the device has the dtype that gradients are compressed to."""
    facts = DEVICE_KINDS.get(c.run.device)
    if c.comm.reduce.kind == "fp8" and facts is not None and not facts.has_fp8:
        yield f"comm.reduce.kind=fp8 is not available on run.device={c.run.device}: use int8, which sends as much"


def algorithm_fits_ranks(config: Config, world: int) -> Iterator[str]:
    """Check that the algorithm of sums works on the number of ranks, and that every node has a switch if any has."""
    layout = axes_layout(config, world)
    sizes = {axes: layout.size(axes) for axes in ("dp-cp", *(["edp"] if config.model.experts.count else []))}
    if config.comm.algorithm.dp == "halving_doubling" and any(size & (size - 1) for size in sizes.values()):
        yield (
            "comm.algorithm=halving_doubling needs a power of two of data-parallel ranks, and there are "
            f"{either([size for size in sizes.values() if size & (size - 1)])}: use ring or tree"
        )
    nodes = -(-world // (config.layout.node_size or world))
    if config.comm.switches and (not config.layout.node_size or len(config.comm.switches) != nodes):
        yield (
            f"comm.switches names the switches of {len(config.comm.switches)} nodes, and there are {nodes}: "
            "give one for "
            "each, in the order of nodes, and layout.node_size"
        )


def positions_to_reset(c: Config, world: int) -> Iterator[str]:
    """Check that a model whose positions are reset has position numbers."""
    if c.data.reset_positions and c.model.position in ("none", "alibi"):
        yield f"data.reset_positions=true has no effect with model.position={c.model.position}: drop one of them"


def end_token_is_one(c: Config, world: int) -> Iterator[str]:
    """Check that the end token is in the vocabulary."""
    if c.data.eod >= c.model.vocab:
        yield f"data.eod={c.data.eod} is no token of model.vocab={c.model.vocab}: use one below that"


def gathers_fit(config: Config, world: int) -> Iterator[str]:
    """Check that the keys of `comm.gather` fit the ZeRO stage, the nodes and the precision."""
    kind = config.comm.gather.kind
    if kind != "plain" and config.zero.stage != 3:
        yield (
            f"comm.gather.kind={kind} rounds the weights that ZeRO stage 3 gathers for each use, and zero.stage is "
            f"{config.zero.stage}: set zero.stage=3, or leave it out"
        )
    if config.comm.gather.node_copy:
        if config.zero.stage != 3:
            yield f"{NODE_COPY} needs zero.stage=3, not {config.zero.stage}: change one of them"
        if config.layout.node_size and config.zero.stage == 3:
            try:
                node_parts(axes_layout(config, world), NODE_COPY)
            except UserError as error:
                yield str(error)
    if kind == "bf16" and config.train.precision not in ("fp32", "fp64"):
        yield f"comm.gather.kind=bf16 saves nothing with train.precision={config.train.precision}: use fp8 or int8"


def links_are_emulated_on_cpus(c: Config, world: int) -> Iterator[str]:
    """Check that slow links are emulated on CPUs only, and that the size of a node is known if it matters."""
    e = c.comm.emulate
    if e.on and c.run.device not in ("auto", "cpu"):
        yield f"comm.emulate delays calls of CPUs only, and run.device is {c.run.device}: leave one of the two out"
    if e.network_gb_s and not c.layout.node_size:
        yield "comm.emulate.network_gb_s is a rate between nodes: give layout.node_size, the number of ranks on a node"


def packed_weights_fit(config: Config, world: int) -> Iterator[str]:
    """Check that quantised weights, whose rows are stored in blocks, have whole blocks in each row."""
    if config.tune.quantise == "none":
        return
    # On a tp rank the rows of attention's output and of the MLP's second weight are shorter.
    tp, latent = config.layout.tp, config.model.latent
    heads = config.model.heads * (latent.v_dim if latent.kv_rank else config.model.head_dim)
    dense = not config.model.experts.count or config.model.experts.first_dense or config.model.experts.every > 1
    inputs = {"model.hidden": config.model.hidden, "the width of all heads": heads // tp}
    inputs |= {"model.ffn": config.model.ffn // tp} if dense else {}
    inputs |= {"model.latent.kv_rank": latent.kv_rank, "model.latent.q_rank": latent.q_rank}
    for name, size in inputs.items():
        if size % BLOCK:
            cut = name in ("the width of all heads", "model.ffn") and tp > 1
            yield (
                f"tune.quantise={config.tune.quantise} stores rows in blocks of {BLOCK} values, and {name} is {size}"
                f"{' on a tp rank: use a smaller layout.tp, or' if cut else ': set'} tune.quantise=none"
            )


def preferences_fit(c: Config, world: int) -> Iterator[str]:
    """Check that a loss that compares with the frozen weights has frozen weights."""
    if c.compares and (not c.tune.adapts or c.tune.modules_to_save):
        yield (
            f"tune.loss={c.tune.loss} compares with the frozen weights, and the run changes them: set tune.kind=lora "
            "without modules_to_save, or use orpo or simpo"
        )


def blocks_compile_together(c: Config, world: int) -> Iterator[str]:
    """Check that blocks that should be compiled as one graph are compiled at all."""
    if FEATURES["compiled_together"].is_used(c) and not c.compiles:
        yield (
            f"train.compile_together={c.train.compile_together} needs compiled blocks, which train.compile=false and "
            "dropout leave out: set it to 1"
        )


def copies_outlive_ranks(c: Config, world: int) -> Iterator[str]:
    """Check that checkpoints in memory are used in elastic runs only: only there does a process outlive the ranks that
    can restore from it."""
    if c.checkpoint.memory_every and not c.faults.elastic:
        yield "checkpoint.memory_every is of use where ranks start again by themselves: set faults.elastic=true too"


# The order matters, because only the first broken rule is reported: later rules may assume that earlier ones hold.
RULES: list[Rule] = [
    schedule_is_chosen, features_fit, kind_fits, foreign_model_fits, t5_fits, context_is_shared, world_divides,
    replicas_fit, experts_are_cut, etp_divides_experts, order_names_axes, experts_stay_with_their_blocks, grid_fits,
    tp_divides_heads, tp_fits_kv_heads, tp_divides_ffn, sequence_parallel_splits,
    cp_cuts_sequences, layers_fill_stages, schedule_takes_chunks, batch_divides, eval_divides, shards_fit_nodes,
    dtypes_fit_precision, matrices_are_known, noise_has_small_batches, fp8_fits_tokens, pieces_cut_tokens,
    lr_fits_steps, positions_to_reset, end_token_is_one, blocks_compile_together, backend_fits_device,
    device_has_fp8, algorithm_fits_ranks, server_fits, links_are_emulated_on_cpus,
    gathers_fit, packed_weights_fit, preferences_fit, copies_outlive_ranks,
]  # fmt: skip

# The rules by which tp divides a model's sizes.
TENSOR_PARALLEL_RULES: list[Rule] = [tp_divides_heads, tp_fits_kv_heads, tp_divides_ffn, grid_divides]

# The rules by which ranks divide experts.
EXPERT_RULES: list[Rule] = [experts_are_cut, etp_divides_experts, experts_stay_with_their_blocks]

# Training also needs the real model. Planning accepts a preset that only approximates it, and says so.
TRAINING_RULES = [preset_is_its_model, *RULES]

# The planner also accepts published runs, and some of them share sequences in ways that training here does not support.
PLANNING_RULES = [features_are_planned, *(rule for rule in RULES if rule not in (features_fit, context_is_shared))]

# Evaluation and generation are free of two rules. Their numbers of tokens vary, so products fall back from fp8 to bf16
# where they must. And they read adapters and base weights as one model, without any preference loss.
READING_RULES = [rule for rule in RULES if rule not in (fp8_fits_tokens, preferences_fit)]


def first_broken_rule(config: Config, world: int, rules: Sequence[Rule] = RULES) -> str | None:
    """Return the sentence of the first rule that `config` breaks on `world` ranks, or None."""
    return next(chain.from_iterable(rule(config, world) for rule in rules), None)


def check(config: Config, world: int, rules: Sequence[Rule] = RULES) -> None:
    """Raise UserError with the sentence of the first rule that `config` breaks on `world` ranks."""
    message = first_broken_rule(config, world, rules)
    if message:
        raise UserError(message)
