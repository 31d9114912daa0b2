"""`pretrain` trains a model as one rank of a job. `meshwright train` is a thin command around it."""

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
from meshwright.comm.watchdog import watchdog_for
from meshwright.config.blocks import seconds_of
from meshwright.config.memory import Place
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.config.step_schedules import consumed_after
from meshwright.device import Device
from meshwright.disk import refusal
from meshwright.engine.compiling import blocks_together, compile_blocks
from meshwright.engine.context import Context, build_context, compiles
from meshwright.engine.hooks import Hook, Watcher
from meshwright.engine.own_models import check_own, in_precision, is_own, own_facts
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
from meshwright.record.checkpoint_format import checkpoint_folder, first_weights, model_folder
from meshwright.record.run_folder import RunFolder, describe_loss, refuse_finished, skipped_updates_notice
from meshwright.record.run_notes import FaultNotes, provenance, write_event
from meshwright.record.run_owner import own_folders
from meshwright.record.speed import Speed
from meshwright.run.adapting import ReducerChoice
from meshwright.run.layers import LayerNorms
from meshwright.run.loop import (
    GarbageCollection,
    GivingUp,
    MemorySaving,
    Recording,
    RecoveryTimer,
    SaveHook,
    TimeLimit,
    TooManyFaults,
    TracedStep,
    ValidationHook,
    train,
)
from meshwright.run.machine_notes import MachineNotes
from meshwright.spec.layout.params import stream_seed
from meshwright.spec.model.description import stages_of
from meshwright.spec.model.graph import Stage
from meshwright.spec.schedule.kinds import placement_of
from meshwright.spec.traffic.communicators import communicators

ModelProvider = Callable[[Context, Stage], nn.Module]
DatasetsProvider = Callable[[Context, tuple[int, int, int]], tuple[Any, Any, Any]]

SpeedOf = Callable[[Config, str, float | None], Speed]

# A network disk may take this long to show a new file: NFS may cache for a minute that a name does not exist.
SHARED_S = 65.0


def pretrain(
    config: Config,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    *,
    process_groups: dict[str, Any] | None = None,
    reducer: Reducer | None = None,
    source: str | None = None,
    watcher: Watcher | None = None,
    hooks: Sequence[Hook] = (),
    loss_counts: LossCounts | None = None,
    speed: SpeedOf | None = None,
    command: str | None = None,
) -> Trainer:
    """Train as one rank of a job. Return the trainer, whose `modules` are this rank's chunks.

    - `model_provider(ctx, stage)` returns the module of one chunk. The module must have `receives`, the named tensors
      that it takes from the chunk before (name -> (shape, dtype)). It may have `needs`, the batch's fields that it
      reads, and the rest of `models.stage.StageModule`. By default, a parameter is whole on every rank and is named
      after its stage in a checkpoint, so the checkpoint loads only into the same pp x chunks. A parameter with a
      `record` (`layout.params`) is drawn, reduced and saved as the record says.
    - `datasets_provider(ctx, (train, valid, test))` receives the numbers of samples that the run will use. It returns
      three objects with `sample(n) -> dict of arrays` (or None for valid and test).
    - `forward_step(ctx, module, batch, received)` returns the named tensors to send to the next stage. On the last
      stage it returns the loss's sum, its token count and a dict of values to monitor. Any stage may return a
      `StageOutput` instead, with tensors, terms of the loss and values to monitor.
    - `loss_counts(sample)` returns the count of each term of the loss in a sample, name -> count. Only a loss of
      several terms needs it: each is divided by its count over the global batch, which must be known before backward.
    - `process_groups`: torch process groups made elsewhere, by the layout's name of the axis.
    - `reducer` sums each bucket's gradients over the data-parallel ranks (`engine/sharding/reducers.py`). By default,
      `comm.reduce` chooses one.
    - `source` (PATH[@STEP]) is the checkpoint to resume from. By default, a run resumes from the newest one in its
      folder. In a new run, `source` provides the weights only.
    - `hooks` are called around every step (`engine.hooks.Hook`), on every rank. `watcher` is called only on the rank
      that writes the run.
    - `speed(config, device name, its GiB)` returns the model's FLOPs and the device's rate, from which steps report
      TFLOP/s and MFU. `command` is recorded in run.json as the run's command (default: that of this process).
    """
    began = time.monotonic()
    ctx, own_world = join(config, process_groups)
    with watchdog_for(ctx.mesh, config.comm.timeout, ctx.device, own_world, folder=Path(config.run.dir) / "flight"):
        connect(ctx)
        ctx, source = with_broadcast_base(ctx, source)
        config = ctx.config
        modules = build_modules(ctx, model_provider)
        validated = validation_samples(config)
        samples = (consumed_after(config, config.train.steps), validated, validated)
        train_data, valid_data, _ = datasets_provider(ctx, samples)
        forward_step = in_precision(ctx, modules, forward_step)
        trainer = Trainer(ctx, modules, forward_step, train_data, valid_data, reducer, loss_counts)
        notes = provenance(ctx.device.name, command) | {"own_model": own_facts(modules)}
        about = Observers(watcher, hooks, speed_here(config, ctx.device, speed), notes)
        run(trainer, source, about, began)
    if own_world:  # Not in a `finally`: after an error, leaving could wait for peers that are gone.
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
    """Connect this rank's communicators before the model takes the device's memory."""
    wanted = communicators(ctx.config, ctx.layout, ctx.rank)
    # On a CPU this takes milliseconds, so there is nothing to announce.
    reports = ctx.rank == 0 and ctx.device.module is not None
    ctx.mesh.warm_up(wanted, ctx.device.torch, notice if reports else None)


def with_broadcast_base(ctx: Context, source: str | None) -> tuple[Context, str | None]:
    """Return the context with the folder of a run's weights in its config, and the source to resume from.

    If `source` is that folder itself, there is nothing to resume from. Rank 0 looks for the folder and broadcasts the
    result, since a network disk may look different to each rank.
    """
    config = ctx.config
    if source is None and (not config.tune.adapts or (config.tune.base and not config.compares)):
        return ctx, source
    found = agree(ctx, (lambda: with_base(config, source)) if ctx.rank == 0 else None)
    text = json.dumps((found[0].tune.base, found[0].model.hf, found[1])) if found else ""
    base, folder, remaining = json.loads(ctx.mesh.world.broadcast_text(text, ctx.device.torch))
    config = replace(config, tune=replace(config.tune, base=base), model=replace(config.model, hf=folder))
    return replace(ctx, config=config), remaining


def build_modules(
    ctx: Context, model_provider: ModelProvider, draw: Callable[[nn.Module, int], None] = initialise
) -> list[nn.Module]:
    """Build this rank's chunks. Their weights depend only on the seed and the parameters' global names."""
    config, modules = ctx.config, []
    placement = placement_of(config.pipeline.schedule, config.layout.pp, config.layout.chunks)
    for index, ((rank, _), stage) in enumerate(zip(placement, stages_of(config), strict=True)):
        if rank == ctx.pp_rank:
            # A module may draw its own weights. With one seed for all stages, these would start with equal weights.
            torch.manual_seed(stream_seed(config.train.seed, "stage", index))
            module = model_provider(ctx, stage).to(ctx.device.torch)
            if is_own(module):
                check_own(ctx, module)
            for name, parameter in module.named_parameters():
                if record_of(parameter) is None:
                    # Two stages of a foreign module may use one name for different parameters, so add the stage.
                    parameter.record = foreign_record(f"stage{index}.{name}", parameter)  # type: ignore[attr-defined]
            modules.append(module)
            # The buffers of a foreign model are in the folder that it was loaded from.
            if ctx.mesh.is_first("dp", "cp", "tp") and not config.model.kind_facts.is_foreign:
                _warn_of_buffers(module, index)
    share_tied_parameters(modules)
    for module in modules:
        draw(module, config.train.seed)
        if compiles(config, ctx.device):
            compile_blocks(module, blocks_together(ctx, module))
    return modules


def _warn_of_buffers(module: nn.Module, stage: int) -> None:
    unsaved = sorted(set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)})
    if unsaved:
        text = f"buffers of stage {stage} are not saved in checkpoints: {', '.join(unsaved[:5])}"
        fix = "register them with persistent=False, or make them parameters"
        print(f"meshwright: warning: {text}; {fix}", file=sys.stderr)


class Observers(NamedTuple):
    """The observers of a run, and the facts that it records about itself in run.json (`notes`)."""

    watcher: Watcher | None
    hooks: Sequence[Hook]
    speed: Speed | None
    notes: Mapping[str, Any]


def speed_here(config: Config, device: Device, speed: SpeedOf | None) -> Speed | None:
    gib = None if device.module is None else device.memory_bytes() / 2**30
    return speed(config, device.name, gib) if speed else None


def run(trainer: Trainer, source: str | None, about: Observers, began: float) -> None:
    """Take ownership of the run's folder and train in it. One rank writes it and drives the display."""
    config = trainer.ctx.config
    # A separate folder of checkpoints might also be in use by another run.
    folders = [Path(config.run.dir), *([Path(config.checkpoint.dir)] if config.checkpoint.dir else [])]
    with ExitStack() as held:
        agree(trainer.ctx, (lambda: held.enter_context(own_folders(*folders))) if trainer.writes else None)
        run_in_owned_folder(trainer, source, about, began)


def run_in_owned_folder(trainer: Trainer, source: str | None, about: Observers, began: float) -> None:
    """Resume, train and close the run."""
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
    resumed_from = resume(trainer, source)
    loaded = time.time()
    validating = trainer.valid_batches is not None
    make = partial(open_folder, trainer, source, validating, about.notes)
    folder: RunFolder | None = agree(ctx, make if trainer.writes else None)
    watcher = about.watcher if folder else None
    if watcher:
        watcher.started(ctx)
    c, offload = config.checkpoint, config.zero.offload
    # An asynchronous save copies the states into host memory. States that live on disk do not fit there.
    asynchronous = c.asynchronous and Place.DISK not in offload.places
    saver = Saver(trainer, checkpoint_folder(config), asynchronous, c.busy, c.keep)
    saver.companions = Path(config.run.dir) / companions.FOLDER
    saving = SaveHook(saver, c)
    validation = ValidationHook(trainer, folder, watcher)
    limit = seconds_of("run.time_limit", config.run.time_limit) if config.run.time_limit else 0.0
    stops = StopRequests(speaks=trainer.writes, launched=find_place().launched, loses=partial(describe_loss, config))
    closing = folder.closed_after_error() if folder else nullcontext()
    garbage = GarbageCollection(config.train.gc_every)
    with stops as requests, closing, saver, garbage:
        time_limit = TimeLimit(requests, saver, limit, began)
        recording = Recording(folder, watcher, about.speed, ctx.layout.world)
        # Hooks run in this order after each step: a step is recorded before it is saved, and saved before anything else
        # can fail.
        notes = FaultNotes(config.run.dir, config.faults.max_faults, trainer.writes)
        path = folder.path if folder else None
        all_hooks = [time_limit, ReducerChoice(trainer, path), TracedStep(trainer), recording]
        all_hooks += [GivingUp(config.faults.max_skips), MemorySaving(trainer), saving, validation]
        all_hooks += [TooManyFaults(notes, saver), ReplicaCheck(trainer, notes), LayerNorms(trainer, folder)]
        all_hooks += [SlowRanks(ctx.layout, config.faults, notes), MachineNotes(folder, ctx.device), garbage]
        all_hooks += about.hooks
        if folder:
            all_hooks.append(RecoveryTimer(config.run.dir, ready, loaded, resumed_from))
        validation.catch_up()
        train(trainer, all_hooks, requests, BadSteps(trainer, folder, saver, notes).settle)
    trainer.data_parallel.weights.wait_for_gathers()
    if folder:
        done, steps = trainer.step_number, config.train.steps
        stopped = f"stopped on request at step {done} of {steps}"
        words = f"finished {plural(steps, 'step')}" if done == steps else stopped
        why = skipped_updates_notice(folder.path) if done == steps else ""
        write_event(folder.path, "failure" if why else "end", why or words, done)
        folder.close()
    agree(ctx, partial(refuse_skipped, why) if folder else None)
    if watcher:
        watcher.finished()


def refuse_skipped(why: str) -> None:
    """Raise a UserError if a run has ended without most of its updates. Its files and checkpoints stay."""
    if why:
        raise UserError(why)


def open_folder(trainer: Trainer, source: str | None, validates: bool, notes: Mapping[str, Any]) -> RunFolder:
    """Open the run's folder, and copy into it the companion files of its model, such as the tokenizer."""
    config, step = trainer.ctx.config, trainer.step_number
    base = config.tune.base
    weights = first_weights(config, source)
    origin = model_folder(weights) if weights and (base or not step) else None
    if origin and not step:
        companions.check_tokenizer(origin, config.data)
    try:
        folder = Path(config.run.dir) / companions.FOLDER
        companions.collect(config.data, origin, folder, source or weights or None, digest(base) if base else "")
    except OSError as error:
        raise refusal(f"run.dir={config.run.dir} can't be written", error, folder, "another run.dir") from None
    # For a blend: the number of samples of each file in a period.
    blend = getattr(trainer.train_batches.dataset, "sources", None)
    more = dict(notes) | ({"sources": blend} if blend else {})
    return RunFolder(config, trainer.ctx.layout.world, step, validates, source, more)


def check_shared(
    trainer: Trainer,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raise on every rank unless each one sees the folder that one rank made.

    Otherwise a checkpoint would wait forever for parts that are written to another disk. The file that ranks look for
    has a new name each time, since a network disk may cache for a while that a name does not exist.
    """
    ctx = trainer.ctx
    number = float(secrets.randbits(40)) if trainer.writes else 0.0
    mark = folder / f".seen-by-all-{int(ctx.mesh.world.max_over_ranks(number, ctx.device.torch)):x}"

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise refusal(f"{folder} can't be written", error, folder, "another checkpoint.dir") from None

    def look() -> None:
        # Ranks that see the file already wait in a collective. Stop before the watchdog takes that for a hang.
        end = clock() + min(SHARED_S, ctx.config.comm.timeout / 2)
        pause = 0.1
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
    """Run `action` on the ranks that have one. If it fails on any rank, all ranks stop instead of waiting for it."""
    result, error = None, None
    try:
        result = action() if action else None
    except UserError as caught:
        error = caught
    if ctx.mesh.world.max_over_ranks(float(error is not None), ctx.device.torch):
        raise error or SystemExit(2)
    return result
