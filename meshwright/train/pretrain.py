"""`pretrain`: initialise, build model, optimizer and schedule, build datasets, train. The command only calls it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.checkpoint.format import checkpoint_folder
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.save import Saver
from meshwright.comm.watchdog import Watchdog, open_store, store_keeper
from meshwright.config.load import load_config
from meshwright.config.rules import TRAINED, check
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.layout.params import key
from meshwright.models.stage import stage_of
from meshwright.nn.parallel import initialise, record_of, share_tied
from meshwright.optim.schedules import consumed_after
from meshwright.parts.part import Stage
from meshwright.schedule.kinds import placement_of
from meshwright.sharding.buffers import foreign_record
from meshwright.sharding.reducers import PLAIN, Reducer
from meshwright.train.ahead import Ahead
from meshwright.train.context import Context, build_context, compiles
from meshwright.train.processes import enter, find_place, joined_place, leave
from meshwright.train.run_folder import RunFolder, refuse_finished
from meshwright.train.signals import StopRequests
from meshwright.train.step import ForwardStep, StepResult, Trainer
from meshwright.train.traced import TracedStep

ModelProvider = Callable[[Context, Stage], nn.Module]
DatasetsProvider = Callable[[Context, tuple[int, int, int]], tuple[Any, Any, Any]]

# Steps without a finite gradient, one after the other, after which a run gives up.
MAX_SKIPPED_STEPS = 25
SHARED_S = 10.0  # a network disk may take a while to show a new file


class Watcher(Protocol):
    """Somebody who looks at a run on the rank that writes it: a progress display, a test."""

    def started(self, ctx: Context) -> None: ...
    def stepped(self, result: StepResult) -> None: ...
    def validated(self, line: Mapping[str, Any]) -> None: ...
    def finished(self) -> None: ...


def pretrain(
    config: Config | str,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    *,
    sections: Mapping[str, type] | None = None,
    process_groups: dict[str, Any] | None = None,
    reducer: Reducer = PLAIN,
    source: str | None = None,
    watcher: Watcher | None = None,
) -> Trainer:
    """Trains as one rank of a job and returns the trainer, whose `modules` are this rank's chunks.

    - `model_provider(ctx, stage)` returns the module of one chunk. It needs `receives`, the named tensors it takes from
      the chunk before (name -> (shape, dtype)); `needs`, the batch's fields it reads, is optional. Its parameters are
      taken to be whole on every rank and are named by their stage in a checkpoint, which then loads into the same
      pp x chunks only; one that has a `record` (`layout.params`) is drawn, reduced and saved by that instead.
    - `datasets_provider(ctx, (train, valid, test))` gets the samples that the run will ask for and returns three
      objects with `sample(n) -> dict of arrays` (or None for valid and test).
    - `forward_step(ctx, module, batch, received)` returns the named tensors to send on or, on the last stage, the
      loss's sum, its token count and a dict of values to monitor, in one step of the same names on every rank.
    - `config` may be the path of a YAML file; `sections` adds dataclasses of your own to it (`config.extra`).
    - `process_groups`: torch process groups made elsewhere, by the layout's name of the axis.
    - `reducer` sums the gradients of each bucket over the data-parallel ranks (`sharding/reducers.py`).
    - A run whose folder holds checkpoints goes on from the newest; `source` (PATH[@STEP]) names another one, which in a
      new run gives the weights alone.
    """
    if not isinstance(config, Config):
        config = load_config(config, sections=sections)
    place = joined_place() or find_place()
    check(config, place.world, TRAINED)
    device, own_world = enter(
        place, config.run.device, config.comm.backend, config.comm.timeout, config.train.precision
    )
    ctx = build_context(config, place.rank, place.world, device, place.local_world, process_groups, trains=True)
    store = open_store() if place.world > 1 else None
    keeper = store_keeper() if own_world else None
    with Watchdog(ctx.mesh, config.comm.timeout, store, folder=Path(config.run.dir) / "flight", keeper=keeper):
        modules = build_modules(ctx, model_provider)
        train_data, valid_data, _ = datasets_provider(ctx, sample_counts(config))
        trainer = Trainer(ctx, modules, forward_step, train_data, valid_data, reducer)
        run(trainer, source, watcher)
    if own_world:  # after an error the process ends, and leaving could wait for peers that are gone
        leave()
    return trainer


def build_modules(
    ctx: Context, model_provider: ModelProvider, draw: Callable[[nn.Module, int], None] = initialise
) -> list[nn.Module]:
    """This rank's chunks, drawn from the seed and the global names alone."""
    config, modules = ctx.config, []
    stages = ctx.stages()
    placement = placement_of(config.pipeline.schedule, config.layout.pp, config.layout.chunks)
    for index, (rank, _) in enumerate(placement):
        if rank == ctx.pp_rank:
            torch.manual_seed(key(config.train.seed, "stage", index))  # stages must not begin alike
            module = model_provider(ctx, stages[index]).to(ctx.device.torch)
            for name, parameter in module.named_parameters():
                if record_of(parameter) is None:
                    # Two stages of a foreign module may use one name for different parameters.
                    parameter.record = foreign_record(f"stage{index}.{name}", parameter)  # type: ignore[attr-defined]
            modules.append(module)
            if ctx.mesh.is_first("dp", "cp", "tp"):
                _warn_of_buffers(module, index)
    share_tied(modules)
    for module in modules:
        draw(module, config.train.seed)
        if compiles(config, ctx.device):
            compile_blocks(module)
    return modules


def _warn_of_buffers(module: nn.Module, stage: int) -> None:
    lost = sorted(set(module.state_dict()) - {name for name, _ in module.named_parameters(remove_duplicate=False)})
    if lost:
        text = f"buffers of stage {stage} are not saved in checkpoints: {', '.join(lost[:5])}"
        fix = "register them with persistent=False, or make them parameters"
        print(f"meshwright: warning: {text}; {fix}", file=sys.stderr)


def compile_blocks(module: nn.Module) -> None:
    """Compiles each block as one graph; all blocks of a chunk share it."""
    for block in stage_of(module).compiled_blocks():
        block.compile(fullgraph=True)


def sample_counts(config: Config) -> tuple[int, int, int]:
    """The samples that a run will ask for; every validation looks at the same ones."""
    each = config.run.eval_samples or 4 * config.train.global_batch
    return consumed_after(config, config.train.steps), each, each


def run(trainer: Trainer, source: str | None, watcher: Watcher | None) -> None:
    """The loop. One rank, the first of the last stage, writes the run's folder and drives the display."""
    ctx, config = trainer.ctx, trainer.ctx.config
    agree(ctx, (lambda: refuse_finished(config, source)) if trainer.writes else None)
    check_shared(trainer, checkpoint_folder(config))
    resume(trainer, source)
    validating = trainer.valid_batches is not None
    make = partial(RunFolder, config, ctx.layout.world, trainer.step_number, validating)
    folder: RunFolder | None = agree(ctx, make if trainer.writes else None)
    watcher = watcher if folder else None
    c = config.checkpoint
    offload = config.zero.offload
    in_memory = "disk" not in (offload.optimizer, offload.params)  # or a copy would need the memory that is not there
    saver = Saver(trainer, checkpoint_folder(config), c.asynchronous and in_memory, c.busy, c.keep)
    if watcher:
        watcher.started(ctx)
    skipped = 0
    steps, every = config.train.steps, config.run.eval_every
    validates = lambda n: n == steps or (every and n % every == 0)  # noqa: E731
    saves = lambda n: c.every and n % c.every == 0  # noqa: E731

    def validate() -> None:
        line = trainer.validate()
        if line and folder:
            folder.validation(line)
        if line and watcher:
            watcher.validated(line)

    traced = TracedStep(trainer)
    ahead = Ahead(trainer, lambda n: bool(validates(n) or saves(n) or traced.number in (n, n + 1)))
    with StopRequests() as requests, saver:
        step = trainer.step_number
        if step and validates(step):
            missing = folder is not None and not folder.validated(step)
            if ctx.mesh.world.agreed(float(missing), ctx.device.torch):
                validate()  # the run was ended between saving and validating
        while step < steps:
            if step + 1 == traced.number:
                traced.begin()
            result = ahead.next(requests.seen)
            step = result.step
            if step == traced.number:
                traced.end()
            if folder:
                folder.step(result.line())
            if watcher:
                watcher.stepped(result)
            skipped = skipped + 1 if result.skipped else 0
            if skipped == MAX_SKIPPED_STEPS:
                raise UserError(_why_skipped(skipped, result))
            last = step == steps or result.stop
            if last or saves(step):
                saver.save(last)
            if last:
                saver.committed()  # before anything else can fail
            if validates(step):
                validate()
            if result.stop:
                break
    trainer.data_parallel.weights.settle()
    if folder:
        folder.close()
    if watcher:
        watcher.finished()


def _why_skipped(steps: int, last: StepResult) -> str:
    fix = "lower optimizer.lr, lengthen lr.warmup or use another train.precision"
    if not last.tokens:
        fix = "check data.mask_eod, data.eod and the data's loss masks"
    return f"{last.why_skipped} in {steps} steps in a row, up to step {last.step}: {fix}"


def check_shared(trainer: Trainer, folder: Path) -> None:
    """Every rank must see the folder that one rank made, or a checkpoint would wait for ever for the others' parts."""
    ctx = trainer.ctx
    mark = folder / ".seen-by-all"
    agree(ctx, partial(_make_mark, mark) if trainer.writes else None)
    end = time.monotonic() + SHARED_S
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.1)
    agree(ctx, None if mark.exists() else partial(_refuse_unshared, folder, ctx.rank))
    if trainer.writes:
        mark.unlink()


def _make_mark(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise UserError(f"{mark.parent} can't be written: {error.strerror}") from None


def _refuse_unshared(folder: Path, rank: int) -> None:
    raise UserError(f"rank {rank} does not see {folder}, which another rank made: put run.dir on a disk that all share")


def agree(ctx: Context, action: Callable[[], Any] | None) -> Any:
    """Runs `action` on the ranks that have one; if it fails anywhere, every rank stops instead of waiting."""
    result, error = None, None
    try:
        result = action() if action else None
    except UserError as caught:
        error = caught
    failed = ctx.mesh.world.agreed(float(error is not None), ctx.device.torch)
    if error:
        raise error
    if failed:
        raise SystemExit(2)
    return result
