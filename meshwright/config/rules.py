"""Rules across sections: a flat list of small named checks. Each returns a sentence with the fix, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.config.presets import APPROXIMATE_PRESETS
from meshwright.config.sections import FP8_UNIT, Config
from meshwright.errors import UserError, divisors, either
from meshwright.layout import Layout, node_parts
from meshwright.schedule.kinds import KINDS, LARGEST_TABLE, training_kinds

Rule = Callable[[Config, int], str | None]


def preset_is_its_model(c: Config, world: int) -> str | None:
    reason = APPROXIMATE_PRESETS.get(c.model.preset)
    if reason:
        return (
            f"model.preset={c.model.preset} can't be trained yet ({reason}): choose another preset, or train the "
            "approximation with model.preset empty and the keys of `meshwright config show`"
        )
    return None


def context_is_trained(c: Config, world: int) -> str | None:
    if c.layout.cp > 1:
        return f"layout.cp={c.layout.cp}: context parallelism can't be trained yet, set layout.cp=1"
    return None


def experts_are_trained(c: Config, world: int) -> str | None:
    if c.layout.ep > 1:
        return f"layout.ep={c.layout.ep}: expert parallelism can't be trained yet, set layout.ep=1"
    return None


def world_divides(c: Config, world: int) -> str | None:
    model = c.layout.tp * c.layout.pp * c.layout.cp
    if world < 1:
        return f"a world of {world} ranks can't train: start at least {model}"
    if world % model:
        lower, upper = world // model * model, -(-world // model) * model
        sizes = f"{lower} or {upper}" if lower else str(upper)
        return (
            f"a world of {world} ranks is not divisible by tp x cp x pp = {c.layout.tp} x {c.layout.cp} x "
            f"{c.layout.pp} = {model}: start {sizes} ranks or change the layout"
        )
    return None


def order_names_axes(c: Config, world: int) -> str | None:
    o = c.layout
    try:
        Layout(world, tp=o.tp, pp=o.pp, cp=o.cp, ep=o.ep, order=o.order, node_size=o.node_size or None)
    except UserError as error:
        return str(error)
    return None


def tp_divides_heads(c: Config, world: int) -> str | None:
    heads = c.model.heads
    if heads % c.layout.tp:
        return f"tp={c.layout.tp} does not divide heads={heads}: try layout.tp={either(divisors(heads))}"
    return None


def tp_fits_kv_heads(c: Config, world: int) -> str | None:
    tp, kv = c.layout.tp, c.model.kv_heads
    if kv % tp and tp % kv:
        return f"tp={tp} neither divides kv_heads={kv} nor is a multiple of it: try layout.tp={either(divisors(kv))}"
    return None


def tp_divides_ffn(c: Config, world: int) -> str | None:
    if c.model.ffn % c.layout.tp:
        up = -(-c.model.ffn // c.layout.tp) * c.layout.tp
        return f"tp={c.layout.tp} does not divide ffn={c.model.ffn}: try model.ffn={up}"
    return None


def sequence_parallel_splits(c: Config, world: int) -> str | None:
    tokens = c.train.micro_batch * c.model.seq
    if c.layout.sequence_parallel and tokens % c.layout.tp:
        return (
            f"sequence parallelism cuts the {tokens} tokens of a micro-batch into tp={c.layout.tp} equal parts: "
            "change model.seq or train.micro_batch, or set layout.sequence_parallel=false"
        )
    return None


def cp_cuts_sequences(c: Config, world: int) -> str | None:
    """Each rank holds an early and a late piece of a sequence, so that causal attention is the same work on every
    rank."""
    parts, seq = 2 * c.layout.cp, c.model.seq
    if c.layout.cp > 1 and seq % parts:
        up = -(-seq // parts) * parts
        return f"layout.cp={c.layout.cp} cuts model.seq={seq} into {parts} equal parts: try model.seq={up}"
    return None


def layers_fill_stages(c: Config, world: int) -> str | None:
    stages = c.layout.pp * c.layout.chunks
    if c.pipeline.split:
        if len(c.pipeline.split) != stages or sum(c.pipeline.split) != c.model.layers:
            return (
                f"pipeline.split={list(c.pipeline.split)} must name pp x chunks = {stages} numbers that add up to "
                f"layers={c.model.layers}"
            )
        if 0 in c.pipeline.split[1:-1]:
            return f"pipeline.split={list(c.pipeline.split)} leaves a stage in the middle without layers: give it one"
    elif stages > c.model.layers:
        return (
            f"pp x chunks = {stages} stages need at least as many layers, and model.layers={c.model.layers}: "
            "lower layout.pp or layout.chunks"
        )
    return None


def schedule_takes_chunks(c: Config, world: int) -> str | None:
    if not KINDS[c.pipeline.schedule].takes(c.layout.chunks):
        return (
            f"layout.chunks={c.layout.chunks} needs pipeline.schedule={either(training_kinds(c.layout.chunks))}, "
            f"not {c.pipeline.schedule}: change one of them"
        )
    return None


def _beyond_the_table(c: Config, key: str, samples: int, unit: int) -> str | None:
    """Checks that the pipeline's table for `samples` samples, `unit` of them per micro-batch, is not too large."""
    most = LARGEST_TABLE // (c.layout.pp * c.layout.chunks) * unit
    return f"{key}={samples} needs too large a table of the pipeline: use {most} at most" if samples > most else None


def batch_divides(c: Config, world: int) -> str | None:
    dp = world // (c.layout.tp * c.layout.pp * c.layout.cp)
    unit = dp * c.train.micro_batch
    beyond = _beyond_the_table(c, "train.global_batch", c.train.global_batch, unit)
    if beyond:
        return beyond
    sizes = [c.train.global_batch]
    if c.train.ramp:
        sizes = list(range(c.train.ramp[0], c.train.global_batch + 1, c.train.ramp[1]))
    for size in sizes:
        if size % unit:
            where = "train.ramp passes through" if c.train.ramp else "train.global_batch ="
            return (
                f"{where} {size} samples, which is not a multiple of dp x micro_batch = {dp} x "
                f"{c.train.micro_batch} = {unit}: try {max(unit, size // unit * unit)} or {-(-size // unit) * unit}"
            )
    return None


def eval_divides(c: Config, world: int) -> str | None:
    unit = world // (c.layout.tp * c.layout.pp * c.layout.cp) * c.train.micro_batch
    if c.run.eval_samples % unit:
        up = -(-c.run.eval_samples // unit) * unit
        return f"run.eval_samples={c.run.eval_samples} is not a multiple of dp x micro_batch = {unit}: try {up}"
    return _beyond_the_table(c, "run.eval_samples", c.run.eval_samples, unit)


def shards_fit_nodes(c: Config, world: int) -> str | None:
    """The ranks of a node must divide what `zero` shards evenly, and offloaded parameters need stage 3."""
    offload = c.zero.offload
    if c.zero.shard_group == "node" and c.zero.stage and c.layout.node_size > world:
        return (
            f"zero.shard_group=node with layout.node_size={c.layout.node_size} is larger than the world of {world} "
            "ranks: lower layout.node_size or set zero.shard_group=dp"
        )
    if c.zero.shard_group == "node" and c.zero.stage and c.layout.node_size and c.layout.cp == 1:
        o = c.layout
        try:
            node_parts(Layout(world, tp=o.tp, pp=o.pp, cp=o.cp, ep=o.ep, order=o.order, node_size=o.node_size))
        except UserError as error:
            return str(error)
    if offload.params != "none" and c.zero.stage != 3:
        return f"zero.offload.params={offload.params} needs zero.stage=3, not {c.zero.stage}: change one of them"
    return None


def dtypes_fit_precision(c: Config, world: int) -> str | None:
    precision = c.train.precision
    if c.train.grad_dtype not in ("fp32", precision):
        return f"train.grad_dtype={c.train.grad_dtype} is neither fp32 nor the precision {precision}: set one of these"
    if c.optimizer.master_dtype == "bf16" and precision != "bf16":
        return f"optimizer.master_dtype=bf16 needs train.precision=bf16, not {precision}: change one of them"
    return None


def fp8_fits_tokens(c: Config, world: int) -> str | None:
    tokens = c.train.micro_batch * c.model.seq
    if c.train.precision == "fp8" and tokens % FP8_UNIT:
        return (
            f"train.precision=fp8 multiplies multiples of {FP8_UNIT} tokens, and train.micro_batch x model.seq is "
            f"{tokens}: change one of them, or set train.precision=bf16"
        )
    return None


def lr_fits_steps(c: Config, world: int) -> str | None:
    if c.lr.warmup > c.train.steps:
        return f"lr.warmup={c.lr.warmup} is longer than train.steps={c.train.steps}: lower it"
    if c.lr.min > c.optimizer.lr:
        return f"lr.min={c.lr.min} is above the peak optimizer.lr={c.optimizer.lr}: lower it"
    return None


def compiles_without_dropout(c: Config, world: int) -> str | None:
    if c.train.compile == "true" and c.model.dropout:
        return "train.compile=true can't be combined with dropout: set train.compile=auto or model.dropout=0"
    return None


def backend_fits_device(c: Config, world: int) -> str | None:
    if c.run.device == "cpu" and c.comm.backend not in ("auto", "gloo"):
        return f"comm.backend={c.comm.backend} does not work on run.device=cpu: set comm.backend=auto"
    if c.run.device in ("cuda", "npu") and c.comm.backend == "gloo" and c.layout.pp > 1:
        return f"comm.backend=gloo can't send between {c.run.device} devices: set comm.backend=auto or layout.pp=1"
    return None


def positions_to_reset(c: Config, world: int) -> str | None:
    if c.data.reset_positions and c.model.position in ("none", "alibi"):
        return f"data.reset_positions=true has no effect with model.position={c.model.position}: drop one of them"
    return None


def end_token_is_one(c: Config, world: int) -> str | None:
    if c.data.eod >= c.model.vocab:
        return f"data.eod={c.data.eod} is no token of model.vocab={c.model.vocab}: use one below that"
    return None


RULES: list[Rule] = [
    context_is_trained,
    experts_are_trained,
    world_divides,
    order_names_axes,
    tp_divides_heads,
    tp_fits_kv_heads,
    tp_divides_ffn,
    sequence_parallel_splits,
    cp_cuts_sequences,
    layers_fill_stages,
    schedule_takes_chunks,
    batch_divides,
    eval_divides,
    shards_fit_nodes,
    dtypes_fit_precision,
    fp8_fits_tokens,
    lr_fits_steps,
    positions_to_reset,
    end_token_is_one,
    compiles_without_dropout,
    backend_fits_device,
]

# The rules about how tp cuts a model's sizes.
TENSOR_PARALLEL_RULES: list[Rule] = [tp_divides_heads, tp_fits_kv_heads, tp_divides_ffn]

# Training also needs the true model: planning accepts a preset that only approximates it, and says so.
TRAINING_RULES = [preset_is_its_model, *RULES]

# The planner's formulas know context parallelism, which can't be trained yet.
PLANNING_RULES = [rule for rule in RULES if rule is not context_is_trained]

# Evaluation and generation run other numbers of tokens, whose products fall back from fp8 to bf16.
READING_RULES = [rule for rule in RULES if rule is not fp8_fits_tokens]


def first_broken_rule(config: Config, world: int, rules: Sequence[Rule] = RULES) -> str | None:
    """Returns the sentence of the first rule that `config` breaks on `world` ranks, or None."""
    return next(filter(None, (rule(config, world) for rule in rules)), None)


def check(config: Config, world: int, rules: Sequence[Rule] = RULES) -> None:
    """Raises for the first rule that `config` breaks on `world` ranks."""
    message = first_broken_rule(config, world, rules)
    if message:
        raise UserError(message)
