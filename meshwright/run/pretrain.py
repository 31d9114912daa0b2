"""`pretrain`: initialise, build model, optimizer and schedule, build datasets, train. The command only calls it."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.checkpoint.base import begin_with_folder, digest, read_base, with_base
from meshwright.checkpoint.resume import has_checkpoint, resume
from meshwright.checkpoint.save import Saver
from meshwright.comm.watchdog import watched
from meshwright.config.blocks import seconds_of
from meshwright.config.load import load_config
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.config.step_schedules import consumed_after
from meshwright.device import Device
from meshwright.disk import refused
from meshwright.engine.compiling import blocks_together, compile_blocks
from meshwright.engine.context import Context, build_context, compiles
from meshwright.engine.hooks import Hook, Watcher
from meshwright.engine.own_models import check_own, in_precision, is_own
from meshwright.engine.sharding.buffers import foreign_record
from meshwright.engine.sharding.reducers import Reducer
from meshwright.engine.step import ForwardStep, Trainer, validation_samples
from meshwright.errors import UserError, notice, plural
from meshwright.faults.bad_steps import BadSteps
from meshwright.faults.corruption import ReplicaCheck
from meshwright.faults.slow_ranks import SlowRanks
from meshwright.launch.processes import enter, find_place, joined_place, leave
from meshwright.launch.rank_process import end_with_launcher, name_rank
from meshwright.launch.signals import StopRequests
from meshwright.models.stage import LossCounts
from meshwright.nn.parallel import initialise, record_of, share_tied_parameters
from meshwright.record import companions
from meshwright.record.checkpoint_format import checkpoint_folder, find_checkpoint, model_folder
from meshwright.record.run_folder import RunFolder, refuse_finished, what_is_lost
from meshwright.record.run_notes import FaultNotes, provenance, write_event
from meshwright.record.run_owner import owning
from meshwright.record.speed import Speed
from meshwright.run.adapting import Adapting
from meshwright.run.layers import LayerNorms
from meshwright.run.loop import (
    GarbageCollection,
    GivingUp,
    MemorySaving,
    Recording,
    Recovering,
    Saving,
    TimeLimit,
    TooManyFaults,
    TracedStep,
    Validating,
    train,
)
from meshwright.spec.layout.params import stream_seed
from meshwright.spec.model.description import stages_of
from meshwright.spec.model.graph import Stage
from meshwright.spec.schedule.kinds import placement_of
from meshwright.spec.traffic.communicators import communicators

ModelProvider = Callable[[Context, Stage], nn.Module]
DatasetsProvider = Callable[[Context, tuple[int, int, int]], tuple[Any, Any, Any]]

SpeedOf = Callable[[Config, str, float | None], Speed]

SHARED_S = 65.0  # until a network disk shows a new file: NFS may believe for a minute that it is not there


def pretrain(
    config: Config | str,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    *,
    sections: Mapping[str, type] | None = None,
    process_groups: dict[str, Any] | None = None,
    reducer: Reducer | None = None,
    source: str | None = None,
    watcher: Watcher | None = None,
    hooks: Sequence[Hook] = (),
    loss_counts: LossCounts | None = None,
    speed: SpeedOf | None = None,
    command: str | None = None,
) -> Trainer:
    """Trains as one rank of a job and returns the trainer, whose `modules` are this rank's chunks.

    - `model_provider(ctx, stage)` returns the module of one chunk. It needs `receives`, the named tensors it takes from
      the chunk before (name -> (shape, dtype)); `needs`, the batch's fields it reads, is optional, as is the rest of
      `models.stage.StageModule`. Its parameters are taken to be whole on every rank and are named by their stage in a
      checkpoint, which then loads into the same pp x chunks only; one that has a `record` (`layout.params`) is drawn,
      reduced and saved by that instead.
    - `datasets_provider(ctx, (train, valid, test))` gets the samples that the run will ask for and returns three
      objects with `sample(n) -> dict of arrays` (or None for valid and test).
    - `forward_step(ctx, module, batch, received)` returns the named tensors to send on or, on the last stage, the
      loss's sum, its token count and a dict of values to monitor. A `StageOutput` says all of that, from any stage:
      tensors, terms of the loss, values to monitor.
    - `loss_counts(sample)` says what each term of the loss counts in a sample, name -> count. A loss of one term needs
      none. Several terms are each divided by their own count over the global batch, which must be known before the
      first backward.
    - `config` may be the path of a YAML file; `sections` adds dataclasses of your own to it (`config.extra`).
    - `process_groups`: torch process groups made elsewhere, by the layout's name of the axis.
    - `reducer` sums the gradients of each bucket over the data-parallel ranks (`engine/sharding/reducers.py`); without
      one, `comm.reduce` says how.
    - `hooks` are called around every step (`engine.hooks.Hook`); `watcher` on the rank that writes the run alone.
    - `speed(config, device name, its GiB)` gives the model's FLOPs and the device's rate, by which steps report TFLOP/s
      and MFU; `command` is what run.json names as the command of the run (default: this process's own).
    - A run whose folder holds checkpoints goes on from the newest; `source` (PATH[@STEP]) names another one, which in a
      new run gives the weights alone.
    """
    began = time.monotonic()
    if not isinstance(config, Config):
        config = load_config(config, sections=sections)
    ctx, own_world = join(config, process_groups)
    with watched(ctx.mesh, config.comm.timeout, ctx.device, own_world, folder=Path(config.run.dir) / "flight"):
        connect(ctx)
        ctx, source = with_told_base(ctx, source)
        config = ctx.config
        modules = build_modules(ctx, model_provider)
        validated = validation_samples(config)
        samples = (consumed_after(config, config.train.steps), validated, validated)
        train_data, valid_data, _ = datasets_provider(ctx, samples)
        forward_step = in_precision(ctx, modules, forward_step)
        trainer = Trainer(ctx, modules, forward_step, train_data, valid_data, reducer, loss_counts)
        about = About(watcher, hooks, speed_here(config, ctx.device, speed), provenance(ctx.device.name, command))
        run(trainer, source, about, began)
    if own_world:  # after an error the process ends, and leaving could wait for peers that are gone
        leave()
    return trainer


def join(config: Config, process_groups: dict[str, Any] | None) -> tuple[Context, bool]:
    """Join the job's other ranks. Return this rank's context, and True if the process group was made here."""
    place = joined_place() or find_place()
    check(config, place.world, TRAINING_RULES)
    if place.launched:
        end_with_launcher()
        name_rank(place.rank, place.world, Path(config.run.dir).name)
    comm = config.comm
    device, own_world = enter(place, config.run.device, comm.backend, comm.timeout, config.train.precision)
    ctx = build_context(config, place.rank, place.world, device, place.local_world, process_groups, trains=True)
    return ctx, own_world


def connect(ctx: Context) -> None:
    """Connects this rank's communicators before the model takes the device's memory."""
    wanted = communicators(ctx.config, ctx.layout, ctx.rank)
    says = ctx.rank == 0 and ctx.device.module is not None  # a CPU's take milliseconds
    ctx.mesh.warm_up(wanted, ctx.device.torch, notice if says else None)


def with_told_base(ctx: Context, source: str | None) -> tuple[Context, str | None]:
    """Returns the context with the base of a run with adapters, and what is left of `source`. The rank that writes
    looks and tells the others, since a network disk may look different to each rank."""
    config = ctx.config
    if not config.tune.adapts or config.tune.base:
        return ctx, source
    found = agree(ctx, (lambda: with_base(config, source)) if ctx.rank == 0 else None)
    words = json.dumps((found[0].tune.base, found[1])) if found else ""
    base, left = json.loads(ctx.mesh.world.told(words, ctx.device.torch))
    return replace(ctx, config=replace(config, tune=replace(config.tune, base=base))), left


def build_modules(
    ctx: Context, model_provider: ModelProvider, draw: Callable[[nn.Module, int], None] = initialise
) -> list[nn.Module]:
    """This rank's chunks, drawn from the seed and the global names alone."""
    config, modules = ctx.config, []
    placement = placement_of(config.pipeline.schedule, config.layout.pp, config.layout.chunks)
    for index, ((rank, _), stage) in enumerate(zip(placement, stages_of(config), strict=True)):
        if rank == ctx.pp_rank:
            torch.manual_seed(stream_seed(config.train.seed, "stage", index))  # stages must not begin alike
            module = model_provider(ctx, stage).to(ctx.device.torch)
            if is_own(module):
                check_own(ctx, module)
            for name, parameter in module.named_parameters():
                if record_of(parameter) is None:
                    # Two stages of a foreign module may use one name for different parameters.
                    parameter.record = foreign_record(f"stage{index}.{name}", parameter)  # type: ignore[attr-defined]
            modules.append(module)
            if ctx.mesh.is_first("dp", "cp", "tp") and not config.model.kind_facts.is_foreign:  # its folder has them
                _warn_of_buffers(module, index)
    share_tied_parameters(modules)
    for module in modules:
        draw(module, config.train.seed)
        if compiles(config, ctx.device):
            compile_blocks(module, blocks_together(ctx, module))
    return modules


def _warn_of_buffers(module: nn.Module, stage: int) -> None:
    lost = sorted(set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)})
    if lost:
        text = f"buffers of stage {stage} are not saved in checkpoints: {', '.join(lost[:5])}"
        fix = "register them with persistent=False, or make them parameters"
        print(f"meshwright: warning: {text}; {fix}", file=sys.stderr)


class About(NamedTuple):
    """Who looks at a run and what it notes of itself."""

    watcher: Watcher | None
    hooks: Sequence[Hook]
    speed: Speed | None
    notes: Mapping[str, Any]


def speed_here(config: Config, device: Device, speed: SpeedOf | None) -> Speed | None:
    gib = None if device.module is None else device.memory_bytes() / 2**30
    return speed(config, device.name, gib) if speed else None


def run(trainer: Trainer, source: str | None, about: About, began: float) -> None:
    """Owns the run's folder, and trains in it. One rank writes it and drives the display."""
    config = trainer.ctx.config
    # Checkpoints in another folder may be those of another run too.
    folders = [Path(config.run.dir), *([Path(config.checkpoint.dir)] if config.checkpoint.dir else [])]
    with ExitStack() as held:
        agree(trainer.ctx, (lambda: held.enter_context(owning(*folders))) if trainer.writes else None)
        run_owned(trainer, source, about, began)


def run_owned(trainer: Trainer, source: str | None, about: About, began: float) -> None:
    """Resumes, trains and closes the run."""
    ctx, config = trainer.ctx, trainer.ctx.config
    agree(ctx, (lambda: refuse_finished(config, source)) if trainer.writes else None)
    check_shared(trainer, checkpoint_folder(config))
    if config.tune.adapts:
        agree(ctx, lambda: read_base(trainer))
        trainer.publish()
    if config.model.hf:
        fresh = not has_checkpoint(trainer) and source is None
        agree(ctx, lambda: begin_with_folder(trainer, trainer.modules, fresh))
        trainer.publish()
    ready = time.time()
    come_from = resume(trainer, source)
    loaded = time.time()
    validating = trainer.valid_batches is not None
    make = partial(open_folder, trainer, source, validating, about.notes)
    folder: RunFolder | None = agree(ctx, make if trainer.writes else None)
    watcher = about.watcher if folder else None
    if watcher:
        watcher.started(ctx)
    c, offload = config.checkpoint, config.zero.offload
    # A copy of states that live on disk would need the memory that is not there.
    asynchronous = c.asynchronous and "disk" not in (offload.optimizer, offload.params)
    saver = Saver(trainer, checkpoint_folder(config), asynchronous, c.busy, c.keep)
    saver.companions = Path(config.run.dir) / companions.FOLDER
    saving, validation = Saving(saver, c), Validating(trainer, folder, watcher)
    limit = seconds_of("run.time_limit", config.run.time_limit) if config.run.time_limit else 0.0
    launched, loses = find_place().launched, partial(what_is_lost, config)
    closing = folder.closed_after_error() if folder else nullcontext()
    garbage = GarbageCollection(config.train.gc_every)
    with StopRequests(speaks=trainer.writes, launched=launched, loses=loses) as requests, closing, saver, garbage:
        ending = TimeLimit(requests, saver, limit, began)
        recording = Recording(folder, watcher, about.speed, ctx.layout.world)
        # In this order after each step: a step is recorded before it is saved, and saved before anything else can fail.
        notes = FaultNotes(config.run.dir, config.faults.max_faults, trainer.writes)
        all_hooks = [ending, Adapting(trainer, folder.path if folder else None), TracedStep(trainer), recording]
        all_hooks += [GivingUp(config.faults.max_skips), MemorySaving(trainer), saving, validation]
        all_hooks += [TooManyFaults(notes, saver), ReplicaCheck(trainer, notes), LayerNorms(trainer, folder)]
        all_hooks += [SlowRanks(ctx.layout, config.faults, notes), garbage, *about.hooks]
        if folder:
            all_hooks.append(Recovering(config.run.dir, ready, loaded, come_from))
        validation.catch_up()
        train(trainer, all_hooks, requests, BadSteps(trainer, folder, saver, notes).settle)
    trainer.data_parallel.weights.wait_for_gathers()
    if folder:
        done, steps = trainer.step_number, config.train.steps
        stopped = f"stopped on request at step {done} of {steps}"
        words = f"finished {plural(steps, 'step')}" if done == steps else stopped
        write_event(folder.path, "end", words, done)
        folder.close()
    if watcher:
        watcher.finished()


def open_folder(trainer: Trainer, source: str | None, validates: bool, notes: Mapping[str, Any]) -> RunFolder:
    """The run's folder, with what travels with its model."""
    config, step = trainer.ctx.config, trainer.step_number
    begun = find_checkpoint(source) if source is not None and not step else None
    base = config.tune.base
    begun = model_folder(base) if base else begun
    try:
        folder = Path(config.run.dir) / companions.FOLDER
        companions.collect(config.data, begun, folder, source or base or None, digest(base) if base else "")
    except OSError as error:
        raise refused(f"run.dir={config.run.dir} can't be written", error, folder, "another run.dir") from None
    blend = getattr(trainer.train_batches.dataset, "sources", None)  # how many samples of each file, in a period
    more = dict(notes) | ({"sources": blend} if blend else {})
    return RunFolder(config, trainer.ctx.layout.world, step, validates, source, more)


def check_shared(
    trainer: Trainer,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raises on every rank unless each sees the folder that one rank made: a checkpoint would wait for ever for parts
    that are written elsewhere. The file that they look for has a new name each time, since a network disk remembers for
    a while that a name was not there."""
    ctx, number = trainer.ctx, float(secrets.randbits(40)) if trainer.writes else 0.0
    mark = folder / f".seen-by-all-{int(ctx.mesh.world.agreed(number, ctx.device.torch)):x}"

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise refused(f"{folder} can't be written", error, folder, "another checkpoint.dir") from None

    def look() -> None:
        # The other ranks wait in a call, which the watchdog must not take for a hang.
        end, pause = clock() + min(SHARED_S, ctx.config.comm.timeout / 2), 0.1
        while not mark.exists():
            if clock() >= end:
                fix = "put run.dir on a disk that all share"
                raise UserError(f"rank {ctx.rank} does not see {folder}, which another rank made: {fix}")
            sleep(pause)
            pause = min(2 * pause, 2.0)

    agree(ctx, make if trainer.writes else None)
    agree(ctx, look)
    if trainer.writes:
        mark.unlink()


def agree(ctx: Context, action: Callable[[], Any] | None) -> Any:
    """Runs `action` on the ranks that have one; if it fails anywhere, every rank stops instead of waiting."""
    result, error = None, None
    try:
        result = action() if action else None
    except UserError as caught:
        error = caught
    if ctx.mesh.world.agreed(float(error is not None), ctx.device.torch):
        raise error or SystemExit(2)
    return result
