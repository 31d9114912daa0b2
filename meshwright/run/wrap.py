"""`wrap` distributes an unmodified module over any number of ranks, for use in your own training loop.

    model = meshwright.wrap(module, {"zero": {"stage": 3}, "train": {"global_batch": 64, "micro_batch": 4}}, loss=loss)
    for batch in batches:
        result = model.step(batch)

Every rank builds the same module and passes its own samples to each step. ZeRO shards the module by blocks, which are
the entries of its lists of modules. Tensor parallelism needs a plan with the styles of transformers
(`spec/model/wrapped/parts.py`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from meshwright.checkpoint.resume import load_checkpoint
from meshwright.checkpoint.save import Saver
from meshwright.comm.watchdog import watchdog_for
from meshwright.config.load import config_from, merge_sections
from meshwright.config.rules import RULES, TENSOR_PARALLEL_RULES, check, eval_divides
from meshwright.config.sections import Config
from meshwright.config.step_schedules import global_batch
from meshwright.engine.context import Context, build_context
from meshwright.engine.output import LOSS, StageOutput, Term
from meshwright.engine.own_models import OWN_DEFAULTS, in_precision, state_dicts
from meshwright.engine.step import StepResult, Trainer
from meshwright.errors import UserError
from meshwright.faults.corruption import checksum
from meshwright.launch.processes import enter, find_place, joined_place, leave
from meshwright.models.wrapped.foreign import WrappedModule
from meshwright.record.checkpoint_format import find_checkpoint

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Any]]

# Rules on the sizes of a model and on validation are left out: the caller's module and loop decide these.
WRAPPED_RULES = [rule for rule in RULES if rule not in (*TENSOR_PARALLEL_RULES, eval_divides)]

DEFAULTS = OWN_DEFAULTS | {"train": {"compile": "false"}}


class Wrapped:
    """A module on one rank, with its optimizer and its connection to the other ranks."""

    def __init__(self, trainer: Trainer, own_world: bool, watch: ExitStack) -> None:
        """Take over a trainer. `own_world`: `wrap` joined the ranks, so `close` leaves them. Closing `watch` ends the
        watchdog.
        """
        self.trainer, self._own_world, self._watch = trainer, own_world, watch
        # A loop need not call `close`. Then the watchdog is ended when the interpreter exits, since its thread, which
        # uses the store, must not outlive it.
        self._end_watch = weakref.finalize(self, _end_watch, watch)
        self._given = _Given()
        trainer.train_batches = self._given  # type: ignore[assignment]

    @property
    def module(self) -> nn.Module:
        """The wrapped module, with this rank's shards of its parameters."""
        stage = self.trainer.modules[0]
        assert isinstance(stage, WrappedModule)
        return stage.net

    @property
    def rank(self) -> int:
        return self.trainer.ctx.rank

    @property
    def samples(self) -> int:
        """The number of samples that this rank passes to a step: its share of train.global_batch."""
        return global_batch(self.trainer.ctx.config, self.trainer.consumed) // self.trainer.ctx.mesh.samples.size

    def step(self, batch: Batch) -> StepResult:
        """Make one update with this rank's samples: tensors whose first dimension is the number of samples."""
        config, trainer = self.trainer.ctx.config, self.trainer
        for name, value in batch.items():
            if value.shape[:1] != (self.samples,):
                raise UserError(
                    f"'{name}' has shape {list(value.shape)}, and a step takes {self.samples} samples of each rank "
                    f"(train.global_batch={config.train.global_batch} over {trainer.ctx.mesh.samples.size} ranks)"
                )
        device, size = trainer.ctx.device.torch, config.train.micro_batch
        self._given.micro_batches = [
            {name: value[start : start + size].to(device) for name, value in batch.items()}
            for start in range(0, self.samples, size)
        ]
        return trainer.step()

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of the present step into `folder`, as `step-N`. Every rank must call this."""
        saver = Saver(self.trainer, Path(folder), False, "wait", 0)
        if self.trainer.writes:
            Path(folder).mkdir(parents=True, exist_ok=True)
        # A barrier: no rank writes before the folder exists.
        self.trainer.ctx.mesh.world.max_over_ranks(0.0, self.trainer.ctx.device.torch)
        with saver:
            saver.save(last=True)
            saver.wait()
        # A barrier: no rank looks for the checkpoint before it is complete.
        self.trainer.ctx.mesh.world.max_over_ranks(0.0, self.trainer.ctx.device.torch)
        return find_checkpoint(str(folder))

    def load(self, folder: str | Path) -> None:
        """Resume from a checkpoint of any layout, or from the newest one in a folder. Every rank must call this."""
        load_checkpoint(self.trainer, find_checkpoint(str(folder)))

    def state_dict(self) -> dict[str, Tensor]:
        """Gather and return the weights that this rank computes with. All ranks must call this together."""
        state = state_dicts(self.trainer)[0]
        return {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}

    def close(self) -> None:
        """End the watchdog and, if `wrap` joined the ranks, leave them."""
        self.trainer.data_parallel.weights.wait_for_gathers()
        # Close it here rather than in the finalizer, which reports the interpreter's last error to the other ranks: in
        # an interactive session that may be an old one.
        if self._end_watch.detach() is not None:
            self._watch.close()
        if self._own_world:
            leave()


def _end_watch(watch: ExitStack) -> None:
    """End the watchdog when the interpreter exits. It reports the error that ended this program to the other ranks."""
    error = getattr(sys, "last_value", None)
    watch.__exit__(type(error) if error else None, error, None)


class _Given:
    """The micro-batches that a loop passes to a step. It replaces the trainer's batches, which are read from data."""

    loss_counts = None
    dataset = None

    def __init__(self) -> None:
        self.micro_batches: list[dict[str, Tensor]] = []

    def of_step(self, consumed: int, count: int, following: int | None = None) -> Callable[[int], dict[str, Tensor]]:
        return lambda number: self.micro_batches[number]


class _NoData:
    def sample(self, n: int) -> dict[str, Any]:
        return {}


def wrap(
    module: nn.Module,
    config: Config | Mapping[str, Any] | None = None,
    plan: Mapping[str, str] | None = None,
    loss: Loss | None = None,
    process_groups: dict[str, Any] | None = None,
) -> Wrapped:
    """Distribute a module over the ranks of this job. Return it with methods such as `step`, `save` and `load`.

    - `config` may leave out the model and the data, which the module and the loop define.
    - `plan` maps names of modules or parameters, with `*` for a number, to tensor-parallel styles (`colwise`,
      `rowwise`, ...).
    - `loss(module, batch)` returns the loss summed over a micro-batch, and the count to divide it by. The loss of a
      step is the sum over all ranks divided by the count over all ranks. Without `loss`, `module(**batch)` must return
      a mean loss, or an object with a mean `loss`.
    """
    if not isinstance(config, Config):
        given = {name: dict(keys) for name, keys in (config or {}).items()}
        config = config_from(merge_sections(DEFAULTS, given))
    place = joined_place() or find_place()
    if config.layout.pp * config.layout.cp > 1:
        raise UserError("wrap takes a whole module on every rank: set layout.pp=1 and layout.cp=1")
    check(config, place.world, WRAPPED_RULES)
    comm = config.comm
    device, own_world = enter(place, config.run.device, comm.backend, comm.timeout, config.train.precision)
    ctx = build_context(config, place.rank, place.world, device, place.local_world, process_groups, trains=True)
    with ExitStack() as watch:
        watch.enter_context(watchdog_for(ctx.mesh, comm.timeout, device, own_world))
        check_alike(ctx, module)
        trainer = _trainer_of(ctx, WrappedModule(module, ctx.parallel, ctx.at, plan or {}), loss or mean_loss)
        return Wrapped(trainer, own_world, watch.pop_all())


def _trainer_of(ctx: Context, stage: WrappedModule, loss: Loss) -> Trainer:
    def forward_step(ctx: Context, stage: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]) -> Any:
        assert isinstance(stage, WrappedModule)
        total, count = stage.with_loose(lambda: loss(stage.net, batch))
        return StageOutput({}, [Term(LOSS, total, count)])

    step = in_precision(ctx, [stage], forward_step)
    return Trainer(ctx, [stage], step, _NoData())


def check_alike(ctx: Context, module: nn.Module) -> None:
    """Refuse a module that differs between ranks: shards of different weights would be gathered into one parameter."""
    total = torch.zeros((), dtype=torch.int64)
    for name, value in module.named_parameters():
        description = crc32(f"{name} {list(value.shape)} {value.dtype} {value.requires_grad}".encode())
        total += description if value.is_meta else description + checksum(value.clone()).cpu()
    if wrong := ctx.mesh.world.unlike_first(int(total), ctx.device.torch):
        ranks = f"{'rank' if len(wrong) == 1 else 'ranks'} {', '.join(map(str, wrong))}"
        fix = "seed every rank alike before the module is built (torch.manual_seed), or load the same weights"
        raise UserError(f"{ranks} built another {type(module).__name__} than rank 0: {fix}")


def mean_loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Compute the loss with a module that returns the mean over its samples. Return its sum and their number."""
    output = module(**batch)
    mean = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(mean, Tensor) or mean.dim():
        name = type(module).__name__
        raise UserError(f"{name} returns no loss: give `wrap` a function loss(module, batch), of sum and count")
    samples = next(iter(batch.values())).shape[0]
    return mean * samples, samples
