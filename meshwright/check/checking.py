"""Train a few steps of a config on one process and on a layout, and compare every gradient of each step.

One process runs first and writes its gradients to a folder, one file per parameter. Each rank of the layout then trains
the same steps. Inside each step it compares its shard of every gradient with these files. Ranks only measure: the
command that started them reads their results and judges them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from meshwright.check.made_samples import WithoutFirstDocument, samples_for
from meshwright.check.oracle import Pairs, divided_gradients, error_of, gather_global, largest_of, parameters
from meshwright.checkpoint.base import begin_with_folder, read_base
from meshwright.comm.watchdog import watchdog_for
from meshwright.config.rules import RULES, check
from meshwright.config.sections import Config
from meshwright.engine.batches import MicroBatches
from meshwright.engine.context import build_context
from meshwright.engine.losses import Normalisation
from meshwright.engine.output import Totals
from meshwright.engine.own_models import in_precision
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import ForwardStep, Trainer, fields_of, mean_loss, validation_unit
from meshwright.errors import UserError
from meshwright.launch.processes import enter, find_place, joined_place, leave
from meshwright.models.stage import stage_of
from meshwright.nn.parallel import record_of
from meshwright.outside import read_json
from meshwright.run.pretrain import DatasetsProvider, ModelProvider, agree, build_modules

AFTER = "after"  # The folder of the parameters after the last compared step.
REFERENCE = "reference.json"


@dataclass(frozen=True)
class Providers:
    """The providers of a user's program. The default is one of our models on random samples."""

    model: ModelProvider = model_provider
    forward: ForwardStep = forward_step
    datasets: DatasetsProvider | None = None


@dataclass
class Steps:
    """The figures of some steps of one rank.

    The reference also records the names of all parameters, in model order. A rank of a layout records its errors by
    parameter instead.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    gradients: list[dict[str, float]] = field(default_factory=list)  # The errors of each compared step.
    parameters: dict[str, float] = field(default_factory=dict)  # The errors after the compared steps.
    comm: dict[str, dict[str, int]] = field(default_factory=dict)  # The last step, summed over all ranks.
    samples: int = 0
    monitored: int = 0
    peak_bytes: int | None = None
    # The relative change of the other documents' loss when the first document changes.
    documents: float | None = None

    @staticmethod
    def read(path: Path) -> Steps:
        return Steps(**read_json(path))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


class GradientRecorder:
    """A hook that passes all gradients of a step, as true means, to `take` before the update uses them."""

    def __init__(self, trainer: Trainer, take: Callable[[Pairs], None]) -> None:
        self.trainer, self.take, self.active = trainer, take, True
        self._real = trainer.gradients
        trainer.gradients = self._gradients  # type: ignore[method-assign]

    def _gradients(self) -> tuple[Totals, Normalisation]:
        totals, normalisation = self._real()
        if self.active:
            self.take(divided_gradients(self.trainer, totals, normalisation))
        return totals, normalisation


class StoredTensors:
    """The whole tensors of one process in a folder, one file each. Ranks map them into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        about = read_json(folder / "names.json")
        self.numbers: dict[str, int] = {name: number for number, name in enumerate(about["names"])}
        self.largest = float(about["largest"])

    @staticmethod
    def write(folder: Path, pairs: Pairs) -> None:
        folder.mkdir(parents=True)
        whole = gather_global(pairs)
        for number, value in enumerate(whole.values()):
            np.save(folder / f"{number}.npy", value)
        about = {"names": list(whole), "largest": largest_of(whole)}
        (folder / "names.json").write_text(json.dumps(about), encoding="utf-8")

    def errors(self, pairs: Pairs) -> dict[str, float]:
        """Return the largest error of a rank's shard of each parameter, by name."""
        errors: dict[str, float] = {}
        for record, local in pairs:
            if record.name not in self.numbers:
                raise UserError(
                    f"one process has no parameter {record.name}: those of a module without records are named by their "
                    "stage, so check it with layout.pp=1 and layout.chunks=1, or give them records"
                )
            whole = np.load(self.folder / f"{self.numbers[record.name]}.npy", mmap_mode="r")
            error = error_of(record, local, whole, self.largest)
            errors[record.name] = max(errors.get(record.name, 0.0), error)
        return errors


@contextmanager
def trainer_of(config: Config, own: Providers) -> Iterator[Trainer]:
    """Build this rank's trainer like a run does, and leave the world afterwards."""
    place = joined_place() or find_place()
    comm = config.comm
    check(config, place.world, RULES)
    device, joined = enter(place, config.run.device, comm.backend, comm.timeout, config.train.precision)
    ctx = build_context(config, place.rank, place.world, device, place.local_world, trains=True)
    with watchdog_for(ctx.mesh, comm.timeout, device, joined):
        modules = build_modules(ctx, own.model)
        data = samples_for(config) if own.datasets is None else own.datasets(ctx, (0, 0, 0))[0]
        trainer = Trainer(ctx, modules, in_precision(ctx, modules, own.forward), data)
        if config.tune.adapts:
            agree(ctx, lambda: read_base(trainer))
            trainer.publish()
        if config.model.hf:
            agree(ctx, lambda: begin_with_folder(trainer, modules, fresh=True))
            trainer.publish()
        yield trainer
        trainer.data_parallel.weights.wait_for_gathers()
        # A barrier: no rank leaves before all are done, since a launcher stops the other ranks when one ends early.
        ctx.mesh.world.max_over_ranks(0.0, device.torch)
    if joined:
        leave()


def run_reference(config: Config, folder: Path, own: Providers, compared: int) -> None:
    """Train on one process, and write the reference gradients and parameters to `folder`."""
    with trainer_of(config, own) as trainer:
        steps = Steps(names=list(_names(trainer)))

        def take(pairs: Pairs) -> None:
            StoredTensors.write(folder / f"step-{trainer.step_number + 1}", pairs)

        _train(trainer, steps, take, compared, lambda: StoredTensors.write(folder / AFTER, parameters(trainer)))
        steps.write(folder / REFERENCE)


def run_rank(config: Config, folder: Path, own: Providers, compared: int) -> None:
    """Train as one rank of a layout, and write its errors relative to the reference to `folder`."""
    with trainer_of(config, own) as trainer:
        steps = Steps()

        def take(pairs: Pairs) -> None:
            steps.gradients.append(StoredTensors(folder / f"step-{trainer.step_number + 1}").errors(pairs))

        def after() -> None:
            steps.parameters = StoredTensors(folder / AFTER).errors(parameters(trainer))

        _train(trainer, steps, take, compared, after)
        steps.documents = document_leakage(trainer)
        steps.write(folder / f"rank-{trainer.ctx.rank}.json")


def _train(
    trainer: Trainer, steps: Steps, take: Callable[[Pairs], None], compared: int, after: Callable[[], None]
) -> None:
    """Train all steps, and record the first `compared` ones. The ledger of later steps holds only the communication of
    a normal step. `after` is called between them."""
    recorder = GradientRecorder(trainer, take)
    device = trainer.ctx.device
    device.reset_peak()
    for step in range(trainer.ctx.config.train.steps):
        recorder.active = step < compared
        if step == compared:
            after()
        result = trainer.step()
        steps.losses.append(result.loss)
        steps.norms.append(result.grad_norm)
    steps.comm = result.comm
    steps.samples = result.global_batch
    steps.monitored = len(result.monitored)
    steps.peak_bytes = device.peak_bytes()


def document_leakage(trainer: Trainer) -> float | None:
    """Return the relative change of the loss of all documents except the first, when the tokens of the first change.
    Return None if samples are not packed.

    If documents do not see each other, the change is zero on any layout and for any module, because the loss depends
    only on the logits of the other documents.
    """
    ctx, config = trainer.ctx, trainer.ctx.config
    if not (config.data.reset_attention or config.objective_facts.packed):
        return None
    paired = config.objective_facts.judges_answers and not config.tune.judges_each
    losses = []
    for changed in (False, True):
        data = WithoutFirstDocument(trainer.train_batches.dataset, config.model.vocab, 2 if paired else 1, changed)
        batches = MicroBatches(ctx, data, fields_of(trainer.modules), trainer.train_batches.reader)
        samples = 4 * validation_unit(ctx)
        mean = mean_loss(trainer.executor, batches, samples, trainer.data_parallel.stage, trainer.declared_terms)
        losses.append(mean.loss)
    moved = abs(losses[1] - losses[0]) / abs(losses[0])
    # NaN differs from itself, and counts as an infinite change.
    return moved if moved == moved else math.inf


def _names(trainer: Trainer) -> Iterator[str]:
    """Yield the names of the parameters in the order in which the forward pass uses their units."""
    seen = set()
    for module in trainer.modules:
        for part in (*(stage_of(module).units() or ()), module):
            for parameter in part.parameters():
                record = record_of(parameter)
                if record is not None and record.name not in seen:
                    seen.add(record.name)
                    yield record.name
