"""`meshwright.pretrain`: train a model of a program as one rank of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from meshwright.config.load import GivenConfig, load_config, merge_sections, read_sections
from meshwright.config.sections import Config
from meshwright.config.step_schedules import global_batch
from meshwright.data.given import TransformersSamples, number_samples
from meshwright.engine import providers
from meshwright.engine.context import Context
from meshwright.engine.hooks import Hook, Watcher
from meshwright.engine.own_models import OWN_DEFAULTS, PRESET_INIT, config_of_program, own_facts
from meshwright.engine.sharding.reducers import Reducer
from meshwright.engine.step import ForwardStep, Trainer
from meshwright.errors import UserError
from meshwright.launch.processes import find_place, joined_place
from meshwright.launch.this_machine import with_schedule
from meshwright.models.stage import LossCounts
from meshwright.nn.parallel import record_of
from meshwright.plan.measured import speed_of
from meshwright.run import pretrain as run
from meshwright.run.pretrain import SpeedOf
from meshwright.spec.model.graph import Stage
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE
from meshwright.watch.live import Display

ModelProvider = Callable[[Context, Stage], nn.Module]
DatasetsProvider = Callable[[Context, tuple[int, int, int]], tuple[Any, Any, Any]]


def pretrain(
    config: GivenConfig,
    model_provider: ModelProvider | nn.Module | None = None,
    datasets_provider: DatasetsProvider | Any = None,
    forward_step: ForwardStep | None = None,
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
    quiet: bool = False,
) -> Trainer:
    """Train as one rank of a job, and show the progress. Return the trainer, whose `modules` are this rank's chunks.

    >>> net = torch.nn.Linear(8, 1)
    >>> data = [{"x": torch.randn(8), "y": torch.zeros(1)} for _ in range(100)]
    >>> def forward_step(ctx, module, batch, received):
    ...     return (module(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]), {}
    >>> meshwright.pretrain({"train": {"steps": 3}}, net, data, forward_step)

    - `config` is a mapping of sections, the path of a YAML file, or a `Config`. With a model of your own, the sections
      `model` and `data` may be left out. `sections` adds your own dataclasses to it (`config.extra`).
    - `model_provider` is a module, or a function of (ctx, stage) that returns the module of one pipeline chunk. By
      default, the config describes the model.
    - `datasets_provider` is the training data, a pair of training and validation data, or a function of (ctx, numbers
      of samples) that returns three datasets. Data are any dataset with an index, shuffled by `train.seed`, or with an
      iterator, or an object with `sample(n)`. A sample is a mapping of names to arrays, for a model that the config
      describes with `input_ids`, as in transformers. By default, the config names the data.
    - `forward_step(ctx, module, batch, received)` returns the loss's sum, its token count and a dict of values to
      monitor. Stages before the last return the named tensors to send. Any stage may return a `StageOutput`.
    - `quiet` shows no progress, and `watcher` gets to see it instead. All other arguments, and the needs of a
      module of a pipeline chunk, are explained in `meshwright.run.pretrain.pretrain`.
    """
    is_own = model_provider is not None
    resolved = _config_of(config, is_own, datasets_provider is not None, sections)
    if is_own and forward_step is None:
        raise UserError("a model of your own needs a forward_step(ctx, module, batch, received): give one to pretrain")
    if resolved.pipeline.schedule == AUTO_SCHEDULE:
        if is_own:
            why = "predicts the times of a model that the config describes: name a schedule for a model of your own"
            raise UserError(f"pipeline.schedule={AUTO_SCHEDULE} {why}")
        place = joined_place() or find_place()
        resolved = with_schedule(resolved, place.world, place.local_world, says=place.rank == 0)
    built: list[nn.Module] = []
    with ExitStack() as shown:
        if watcher is None and not quiet:
            watcher = shown.enter_context(_OwnDisplay(resolved, built))
        return run.pretrain(
            resolved, _provider_of(model_provider or providers.model_provider, built),
            _datasets_of(datasets_provider, is_own), forward_step or providers.forward_step,
            process_groups=process_groups, reducer=reducer, source=source, watcher=watcher, hooks=hooks,
            loss_counts=loss_counts, speed=speed or (None if is_own else speed_of), command=command,
        )  # fmt: skip


class _OwnDisplay(Display):
    """A display that takes the size of a user's model from its modules."""

    def __init__(self, config: Config, modules: Sequence[nn.Module]) -> None:
        super().__init__(config, world=1)
        self.modules = modules

    def started(self, ctx: Context | None = None) -> None:
        # The program may have joined the world before, so the environment need not know its size.
        if ctx is not None:
            self.world = ctx.layout.world
        self.own_model = own_facts(self.modules)
        super().started(ctx)


def _config_of(config: GivenConfig, own_model: bool, own_data: bool, sections: Mapping[str, type] | None) -> Config:
    if own_model:
        return config_of_program(config, sections)
    if own_data and not isinstance(config, Config):
        config = merge_sections({"data": OWN_DEFAULTS["data"]}, read_sections(config))
    return load_config(config, sections=sections)


def _provider_of(given: ModelProvider | nn.Module, built: list[nn.Module]) -> ModelProvider:
    """Return a function that makes the module of a chunk, and adds it to `built`. A whole module is the only chunk."""

    def provide(ctx: Context, stage: Stage) -> nn.Module:
        if not isinstance(given, nn.Module):
            module = given(ctx, stage)
        elif stage.first and stage.last:
            module = given
        else:
            name, chunks = type(given).__name__, ctx.layout.pp * ctx.config.layout.chunks
            fix = "give a function of (ctx, stage) that returns the module of one, or set layout.pp=1"
            raise UserError(f"{name} is one module, and the pipeline has {chunks} stages: {fix}")
        records = [record_of(parameter) for parameter in module.parameters()]
        if any(record is not None and record.init == PRESET_INIT for record in records):
            name = type(module).__name__
            raise UserError(f"this {name} was trained by an earlier call: build a new one, and the run continues")
        if stage.first and not hasattr(module, "receives"):
            module.receives = {}  # type: ignore[assignment]
        built.append(module)
        return module

    return provide


def _datasets_of(given: DatasetsProvider | Any, own_model: bool) -> DatasetsProvider:
    """Return a function that returns the train, valid and test data as objects with `sample(n)`."""
    if given is None:
        return providers.datasets_provider
    is_function = callable(given) and not hasattr(given, "__getitem__") and not hasattr(given, "__iter__")

    def provide(ctx: Context, samples: tuple[int, int, int]) -> tuple[Any, Any, Any]:
        # An object with `sample` may be callable too, as any instance of a class with `__call__` is.
        made = given(ctx, samples) if is_function and not hasattr(given, "sample") else given
        parts = list(made) if isinstance(made, tuple) else [made]
        config, names = ctx.config, ("the training data", "the validation data", "the test data")
        if not 1 <= len(parts) <= len(names):
            raise UserError(f"pretrain got {len(parts)} parts of data: give those for training, validation and test")
        every = global_batch(config, 0)
        found = [
            number_samples(part, name, config.train.seed, not number, every)
            for number, (part, name) in enumerate(zip(parts, names, strict=False))
        ]
        if not own_model:
            found = [part and TransformersSamples(part, name, config.model.seq, config.objective_facts.fields)
                     for part, name in zip(found, names, strict=False)]  # fmt: skip
        train, valid, test = (*found, None, None)[:3]
        return train, valid, test

    return provide
