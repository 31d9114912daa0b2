"""`wrap`: an unmodified module for a loop of one's own, on any number of ranks.

    model = meshwright.wrap(module, {"zero": {"stage": 3}, "train": {"global_batch": 64, "micro_batch": 4}}, loss=loss)
    for batch in batches:
        result = model.step(batch)

Every rank builds the same module and gives each step its own samples. ZeRO divides it by blocks (the entries of its
lists of modules); tp cuts it by a plan, whose styles are those of transformers (`spec/model/wrapped/parts.py`).
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
from meshwright.comm.watchdog import watched
from meshwright.config.load import config_from, merged
from meshwright.config.rules import RULES, TENSOR_PARALLEL_RULES, check, eval_divides
from meshwright.config.sections import Config
from meshwright.config.step_schedules import global_batch
from meshwright.engine.context import Context, build_context
from meshwright.engine.output import LOSS, StageOutput, Term
from meshwright.engine.own_models import in_precision, state_dicts
from meshwright.engine.step import StepResult, Trainer
from meshwright.errors import UserError
from meshwright.faults.corruption import checksum
from meshwright.launch.processes import enter, find_place, joined_place, leave
from meshwright.models.wrapped.foreign import WrappedModule
from meshwright.record.checkpoint_format import find_checkpoint

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Any]]

# What is known of a model's sizes, and how much of it validates, does not matter to a module that is brought.
WRAPPED_RULES = [rule for rule in RULES if rule not in (*TENSOR_PARALLEL_RULES, eval_divides)]

# Sections that a config may leave out here: the module says what the model is, and the loop brings the data.
DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "hidden": 1024, "heads": 1024, "vocab": 1, "seq": 1, "position": "none"},
    "data": {"prefixes": ["given"]},
    "train": {"compile": "false"},
}


class Wrapped:
    """One rank's module, its optimizer and its place among the ranks."""

    def __init__(self, trainer: Trainer, own_world: bool, watch: ExitStack) -> None:
        """`watch`: closed at the end, it ends the watchdog."""
        self.trainer, self._own_world, self._watch = trainer, own_world, watch
        # A loop need not call `close`. Then the interpreter's end calls it: a thread in the store must not outlive it.
        self._end_watch = weakref.finalize(self, _end_watch, watch)
        self._given = _Given()
        trainer.train_batches = self._given  # type: ignore[assignment]

    @property
    def module(self) -> nn.Module:
        """The module itself, with this rank's part of its parameters."""
        stage = self.trainer.modules[0]
        assert isinstance(stage, WrappedModule)
        return stage.net

    @property
    def rank(self) -> int:
        return self.trainer.ctx.rank

    @property
    def samples(self) -> int:
        """How many samples this rank gives to a step: its share of train.global_batch."""
        return global_batch(self.trainer.ctx.config, self.trainer.consumed) // self.trainer.ctx.mesh.samples.size

    def step(self, batch: Batch) -> StepResult:
        """One update with this rank's samples: tensors whose first dimension counts them."""
        config, trainer = self.trainer.ctx.config, self.trainer
        for name, value in batch.items():
            if value.shape[:1] != (self.samples,):
                raise UserError(
                    f"'{name}' has shape {list(value.shape)}, and a step takes {self.samples} samples of each rank "
                    f"(train.global_batch={config.train.global_batch} over {trainer.ctx.mesh.samples.size} ranks)"
                )
        device, size = trainer.ctx.device.torch, config.train.micro_batch
        self._given.parts = [
            {name: value[at : at + size].to(device) for name, value in batch.items()}
            for at in range(0, self.samples, size)
        ]
        return trainer.step()

    def save(self, folder: str | Path) -> Path:
        """Writes a checkpoint of the present step into `folder`, as `step-N`. Every rank calls it."""
        saver = Saver(self.trainer, Path(folder), False, "wait", 0)
        if self.trainer.writes:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.trainer.ctx.mesh.world.agreed(0.0, self.trainer.ctx.device.torch)
        with saver:
            saver.save(last=True)
            saver.wait()
        self.trainer.ctx.mesh.world.agreed(0.0, self.trainer.ctx.device.torch)
        return find_checkpoint(str(folder))

    def load(self, folder: str | Path) -> None:
        """Goes on from a checkpoint, or from the newest of a folder of them, of any layout. Every rank calls it."""
        load_checkpoint(self.trainer, find_checkpoint(str(folder)))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights that this rank computes with, gathered. Every rank calls it together."""
        found = state_dicts(self.trainer)[0]
        return {name.removeprefix("net."): value for name, value in found.items() if name.startswith("net.")}

    def close(self) -> None:
        """Leaves the other ranks, if `wrap` joined them."""
        self.trainer.data_parallel.weights.wait_for_gathers()
        # Not through the finalizer: the last error of an interactive session may be an old one.
        if self._end_watch.detach() is not None:
            self._watch.close()
        if self._own_world:
            leave()


def _end_watch(watch: ExitStack) -> None:
    """End the watchdog when the interpreter ends. It tells the other ranks of the error that ended this program."""
    error = getattr(sys, "last_value", None)
    watch.__exit__(type(error) if error else None, error, None)


class _Given:
    """The micro-batches of a step that a loop brings, in the place of those that are read from data."""

    loss_counts = None
    dataset = None

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []

    def of_step(self, consumed: int, count: int, following: int | None = None) -> Callable[[int], dict[str, Tensor]]:
        return lambda micro_batch: self.parts[micro_batch]


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
    """Divides a module over the ranks of this job and returns it with `step`, `save` and `load`.

    - `config` may leave out what the module and the loop say: model and data.
    - `plan` maps names of modules or parameters, with `*` for a number, to styles (`colwise`, `rowwise`, ...).
    - `loss(module, batch)` returns the sum of the loss over a micro-batch and what it counts: a step's loss is the sum
      over all ranks divided by the count over all. Without it, `module(**batch)` returns (or has as `loss`) a mean.
    """
    if not isinstance(config, Config):
        given = {name: dict(keys) for name, keys in (config or {}).items()}
        config = config_from(merged(DEFAULTS, given))
    place = joined_place() or find_place()
    if config.layout.pp * config.layout.cp > 1:
        raise UserError("wrap takes a whole module on every rank: set layout.pp=1 and layout.cp=1")
    check(config, place.world, WRAPPED_RULES)
    comm = config.comm
    device, own_world = enter(place, config.run.device, comm.backend, comm.timeout, config.train.precision)
    ctx = build_context(config, place.rank, place.world, device, place.local_world, process_groups, trains=True)
    with ExitStack() as watch:
        watch.enter_context(watched(ctx.mesh, comm.timeout, device, own_world))
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
    """Refuses modules that differ between ranks: shares of different weights would be gathered as one."""
    total = torch.zeros((), dtype=torch.int64)
    for name, value in module.named_parameters():
        what = crc32(f"{name} {list(value.shape)} {value.dtype} {value.requires_grad}".encode())
        total += what if value.is_meta else what + checksum(value.clone()).cpu()
    if wrong := ctx.mesh.world.unlike_first(int(total), ctx.device.torch):
        ranks = f"{'rank' if len(wrong) == 1 else 'ranks'} {', '.join(map(str, wrong))}"
        fix = "seed every rank alike before the module is built (torch.manual_seed), or load the same weights"
        raise UserError(f"{ranks} built another {type(module).__name__} than rank 0: {fix}")


def mean_loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss of a module that returns its mean over a batch, counted by samples."""
    found = module(**batch)
    mean = found if isinstance(found, Tensor) else getattr(found, "loss", None)
    if not isinstance(mean, Tensor) or mean.dim():
        name = type(module).__name__
        raise UserError(f"{name} returns no loss: give `wrap` a function loss(module, batch), of sum and count")
    samples = next(iter(batch.values())).shape[0]
    return mean * samples, samples
