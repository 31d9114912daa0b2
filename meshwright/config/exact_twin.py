"""The small float64 twin that `meshwright check` trains in place of a config, and the same model on one process. The
twin's layout fits the machine, its features are exact, and every change to the config is listed. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.config.comm import GatherConfig, ReduceConfig
from meshwright.config.memory import OffloadConfig, RecomputeConfig, ZeroConfig
from meshwright.config.replicas import LocalConfig
from meshwright.config.sections import (
    CheckpointConfig,
    Config,
    ContextConfig,
    LayoutConfig,
    LossScaleConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from meshwright.config.twin import PEAK_LR, SEQ, small_batch, small_model, small_tune
from meshwright.errors import UserError, plural

# The number of steps whose gradients are compared. One more step is run to count the bytes.
STEPS = 3
# Adam divides each gradient by its own size. With its usual eps of 1e-8, the rounding errors of nearly vanishing
# gradients become differences in the weights that grow a hundredfold with each step.
EPS = 1e-6
# So small that even a twin's gradients fill several buckets.
BUCKET_MIB = 0.05


@dataclass(frozen=True)
class ExactTwin:
    """A config to check on `world` ranks, the same model for one process, and a sentence for each change to the user's
    config. The gradients of the first `compared` steps are compared."""

    config: Config
    alone: Config
    world: int
    changes: tuple[str, ...]
    compared: int = STEPS


def exact_twin(config: Config, devices: int, most: int, given: bool) -> ExactTwin:
    """Return the twin of a run on `devices` devices, for at most `most` ranks, or with `given` for exactly `most`."""
    exact, changes = with_exact_features(config)
    # A run's replicas have become data-parallel ranks.
    layout, world, words = fitting_layout(exact.layout, devices, most, given)
    small = small_model(exact, layout)
    sized = _sizes(exact.layout, devices), _sizes(layout, world)
    shrunk = [f"{axis} {was} -> {now}" for axis, was in sized[0].items() if (now := sized[1][axis]) != was]
    if shrunk:
        changes.append(f"layout: {', '.join(shrunk)} ({words})")
    pairs = {name: (getattr(config.model, name), getattr(small, name)) for name in ("layers", "hidden", "seq")}
    if resized := [f"{name} {was} -> {now}" for name, (was, now) in pairs.items() if was != now]:
        changes.append(f"model: {', '.join(resized)} (so that it fits this machine; the parts stay)")
    micro, batch = small_batch(exact, layout, world)
    split = replace(
        exact, model=small, layout=layout, pipeline=_pipeline(exact, layout), context=_context(exact, layout),
        train=replace(exact.train, global_batch=batch, micro_batch=micro),
        tune=small_tune(exact.tune), comm=replace(exact.comm, bucket_mib=BUCKET_MIB),
    )  # fmt: skip
    return ExactTwin(split, alone(split), world, tuple(changes))


def alone(config: Config) -> Config:
    """Return the same model and steps for one process, without any layout, sharding or recomputation. A whole step is
    one micro-batch, unless a loss depends on the division into micro-batches."""
    train = config.train
    # Experts are then balanced within each micro-batch, so its size changes the loss.
    by_micro_batch = config.model.experts.count and config.model.experts.aux_level == "batch"
    micro = train.micro_batch if by_micro_batch else train.global_batch
    return replace(
        config, layout=LayoutConfig(), pipeline=PipelineConfig(), context=ContextConfig(), zero=ZeroConfig(),
        recompute=RecomputeConfig(),
        train=replace(train, micro_batch=micro, server=type(train.server)()),
        comm=replace(config.comm, algorithm=type(config.comm.algorithm)(), gather=GatherConfig(), switches=()),
    )  # fmt: skip


def _sizes(layout: LayoutConfig, world: int) -> dict[str, int]:
    """Return the sizes of a layout's axes on `world` ranks."""
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "cp", "ep", "chunks")}
    return {"dp": world // layout.least_world, **sizes}


def with_exact_features(config: Config) -> tuple[Config, list[str]]:
    """Return the config in float64, and a sentence for each feature that was changed. Features that are inexact by
    design or that draw random numbers are replaced by their exact counterparts."""
    c, m, t = config, config.model, config.train
    changes = []

    def change(applies: object, sentence: str) -> None:
        if applies:
            changes.append(sentence)

    change(t.precision != "fp64", f"train.precision: {t.precision} -> fp64 (rounding would hide small errors)")
    change(t.ramp, "train.ramp: left out (every step has the same batch)")
    change(c.drops, "dropout: off (the layouts draw different numbers)")
    change(c.comm.reduce.compresses, f"{c.comm.reduce.words}: plain sums (compression loses some of a gradient)")
    change(c.comm.gather.kind != "plain", f"comm.gather.kind: {c.comm.gather.kind} -> plain (rounded weights differ)")
    change(c.layout.replicas > 1, f"layout.replicas: {c.layout.replicas} -> data-parallel ranks (steps of their own)")
    change(t.server.staleness, "train.server.staleness: 0 (late gradients differ)")
    offloads = (c.zero.offload.optimizer, c.zero.offload.params) != ("none", "none") or c.recompute.offload
    change(offloads, "offloading: off (a copy elsewhere; no number depends on it)")
    change(t.compile == "true", "train.compile: false (a compiler adds in another order)")
    change(c.pipeline.split, "pipeline.split: even (the twin has other layers)")
    model = replace(m, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    train = TrainConfig(
        steps=STEPS + 1, global_batch=t.global_batch, micro_batch=t.micro_batch, seed=t.seed, precision="fp64",
        clip=t.clip, compile="false", local=LocalConfig(), server=replace(t.server, staleness=0),
    )  # fmt: skip
    exact = replace(
        c, model=model, train=train, layout=replace(c.layout, replicas=1), tune=replace(c.tune, dropout=0.0),
        comm=replace(
            c.comm, reduce=ReduceConfig(), gather=replace(c.comm.gather, kind="plain", block=GatherConfig.block),
            emulate=type(c.comm.emulate)(),
        ),
        zero=replace(c.zero, offload=OffloadConfig()), recompute=replace(c.recompute, offload=False),
        optimizer=replace(
            c.optimizer, lr=PEAK_LR, eps=max(c.optimizer.eps, EPS), master_dtype="fp32", state_dtype="fp32"
        ),
        lr=replace(c.lr, warmup=1, decay=0, min=0.0), loss_scale=LossScaleConfig(),
        faults=type(c.faults)(), checkpoint=CheckpointConfig(every=0), run=RunConfig(dir=c.run.dir, device="cpu"),
    )  # fmt: skip
    return exact, changes


def fitting_layout(its: LayoutConfig, devices: int, most: int, given: bool) -> tuple[LayoutConfig, int, str]:
    """Return the layout for at most `most` ranks, its world, and the reason why it was shrunk.

    dp shrinks first, then the largest of the others. An axis larger than 1 keeps a size of at least 2, so that it is
    still tested. With `given` the world is exactly `most`, and if the other axes divide it, only dp changes."""
    sizes = {"tp": its.tp, "pp": its.pp, "cp": its.cp}
    dp = max(1, devices // its.least_world)
    grid = its.tp_grid
    fits = given and most % its.least_world == 0
    while not fits and dp * math.prod(sizes.values()) > most:
        # A grid of 2 ranks along each side can't shrink, even if its tp is too large for `most`.
        fixed = {"tp"} if grid and max(grid) <= 2 else set()
        shrinkable = {axis: size for axis, size in sizes.items() if size > 2 and axis not in fixed}
        if dp > 2:
            dp = _half(dp)
        elif not shrinkable:
            break
        elif (axis := max(shrinkable, key=lambda name: sizes[name])) == "tp" and grid:
            # The ranks of a grid are the product of its sides.
            grid = tuple(min(2, side) for side in grid)
            sizes["tp"] = math.prod(grid)
        else:
            sizes[axis] = _half(sizes[axis])
    least = math.prod(sizes.values())
    if given:
        if most % least:
            axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
            raise UserError(f"--nproc {most} is not a multiple of the {least} ranks of {axes}: try --nproc {least}")
        dp = most // least
    world = dp * least
    etp = min(its.etp, sizes["tp"]) if its.etp else 0
    possible_ep = [ep for ep in range(2, its.ep + 1) if world // sizes["pp"] % ((etp or sizes["tp"]) * ep) == 0]
    node = its.node_size
    # A node size that no longer fits becomes half of the world, so that there still are two nodes.
    if node and (world % node or node >= world):
        node = max(1, world // 2)
    layout = replace(
        its, tp=sizes["tp"], pp=sizes["pp"], cp=sizes["cp"], tp_grid=grid,
        ep=max((ep for ep in possible_ep if ep <= 8), default=its.ep), etp=etp, chunks=min(2, its.chunks),
        node_size=node,
    )  # fmt: skip
    why = f"--nproc {most}" if given else f"this machine runs {plural(most, 'rank')} at once"
    return layout, world, why


def _half(size: int) -> int:
    """Return half of a size above 2, rounded down but at least 2."""
    return size // 2 if size % 2 == 0 else max(2, size // 2)


def _pipeline(config: Config, layout: LayoutConfig) -> PipelineConfig:
    """Return the twin's schedule. Of a t5's stages at least one is left to the decoder."""
    encoder = min(config.pipeline.encoder_stages, layout.pp * layout.chunks - 1)
    return PipelineConfig(config.pipeline.schedule, encoder_stages=max(0, encoder))


def _context(config: Config, layout: LayoutConfig) -> ContextConfig:
    """Return the twin's context section, with an `inner` that divides its cp."""
    if config.context.kind != "hybrid":
        return config.context
    inner = math.gcd(config.context.inner, layout.cp)
    return replace(config.context, inner=inner if inner > 1 else layout.cp)


def _with_short_samples(config: Config, world: int, changes: list[str]) -> Config:
    """Return the config of a model that transformers builds with samples of at most SEQ tokens and a small batch.

    The sizes of its weights stay. A module of the user's own keeps its samples too, because only it knows them."""
    if not config.model.kind_facts.is_foreign or config.model.seq <= SEQ:
        return config
    micro, batch = small_batch(config, config.layout, world)
    changes.append(f"model: seq {config.model.seq} -> {SEQ} (so that it fits this machine)")
    train = replace(config.train, global_batch=batch, micro_batch=micro)
    return replace(config, model=replace(config.model, seq=SEQ), train=train)


def full_size(config: Config, world: int, exact: bool) -> ExactTwin:
    """Return the config at its real sizes for `world` ranks, with few steps. With `exact` it is in float64 and all
    features are exact. Dropout and the batch-size ramp are left out either way."""
    changes: list[str] = []
    if exact:
        config, changes = with_exact_features(config)
        config = _with_short_samples(config, world, changes)
    else:
        if config.drops:
            changes.append("dropout: off (the layouts draw different numbers)")
        if config.layout.replicas > 1:
            raise UserError("--full can't compare replicas that take steps of their own: set layout.replicas=1")
        model = replace(config.model, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
        config = replace(
            config, model=model, tune=replace(config.tune, dropout=0.0),
            train=replace(config.train, steps=STEPS + 1, ramp=()), lr=replace(config.lr, warmup=1, decay=0),
            checkpoint=CheckpointConfig(every=0),
        )  # fmt: skip
    changes.append(f"train.steps: {STEPS + 1}")
    single = alone(config)
    if not exact:
        # A single device has no room for a whole step as one micro-batch.
        micro = config.train.micro_batch
        single = replace(single, train=replace(single.train, micro_batch=micro), recompute=config.recompute)
    # Without `exact` only one step is compared. Adam divides each gradient by its own size, so a rounding error in a
    # small gradient makes a large difference in the update, and later steps differ more and more.
    return ExactTwin(config, single, world, tuple(changes), STEPS if exact else 1)
