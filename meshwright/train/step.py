"""One training step and one validation pass: what every layout does between two lines of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.ledger import CallTotals, wire_bytes
from meshwright.config.sections import Config
from meshwright.device import PRECISION_DTYPES, Device, Download
from meshwright.models.stage import LossCounts, stage_of
from meshwright.optim.adam import FlatOptimizer
from meshwright.optim.scaling import LossScale, gradient_scaling
from meshwright.optim.schedules import global_batch, learning_rate
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.output import LOSS, Totals
from meshwright.pipeline.trace import REDUCED, UPDATED
from meshwright.schedule.table import Table
from meshwright.schedule.verify import verified
from meshwright.sharding.buffers import SideState, State
from meshwright.sharding.compression.make import make_reducer
from meshwright.sharding.data_parallel import DataParallel
from meshwright.sharding.reducers import Reducer
from meshwright.train.balance import ExpertBalance
from meshwright.train.batches import Dataset, MicroBatches, Picked, by_source
from meshwright.train.context import Context, compiles
from meshwright.train.counts import COUNTS, NEW_NAME, PHASES, SAVE, counts_bytes
from meshwright.train.losses import Normalisation, Sums, counts_over_world, sums_over_world
from meshwright.train.monitor import Monitored, Summing

ForwardStep = Callable[[Context, nn.Module, dict[str, Tensor], dict[str, Tensor]], Any]


@dataclass
class StepResult:
    """What one step did, the same on every rank. `losses` are the terms' own means, where the loss has several."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None
    skipped: bool
    tokens: int
    global_batch: int
    losses: dict[str, float] = field(default_factory=dict)
    monitored: dict[str, float] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    comm: dict[str, dict[str, int]] = field(default_factory=dict)
    step_time_s: float = 0.0
    stop: bool = False
    save: bool = False

    @property
    def why_skipped(self) -> str:
        return "the gradient was not finite" if self.tokens else "no token counted in the loss"

    @property
    def shown(self) -> dict[str, float]:
        """What is shown of a step beside its loss and norm: terms of the loss, the busiest expert and rank over the
        mean, dropped choices, monitored values."""
        found = {name: value for name, value in self.losses.items() if name != LOSS}
        for key, name in (("busiest", "busiest expert"), ("busiest_rank", "busiest rank")):
            if max(self.experts.get(key, [1.0])) > 1.0:
                found[name] = max(self.experts[key])
        if self.experts.get("dropped"):
            found["dropped"] = self.experts["dropped"]
        return found | self.monitored

    def line(self) -> dict[str, Any]:
        """The line of metrics.jsonl, numbers unrounded."""
        out = {
            "step": self.step, "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "loss_scale": self.loss_scale, "skipped": self.skipped, "tokens": self.tokens,
            "global_batch": self.global_batch, "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens / self.step_time_s, "phases": self.phases, "comm": self.comm,
        }  # fmt: skip
        found = {"losses": self.losses, "monitored": self.monitored, "experts": self.experts}
        return out | {name: values for name, values in found.items() if values}


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be working on: its result but for the numbers that are on their way."""

    result: StepResult
    begin: float
    totals: Totals
    normalisation: Normalisation
    sums: Download
    counts: Download
    monitored: Summing | None
    balance: Download | None


class Trainer:
    """Model, optimizer and data of this rank, and the two counters that say where the run is."""

    def __init__(
        self,
        ctx: Context,
        modules: Sequence[nn.Module],
        forward_step: ForwardStep,
        train_data: Dataset,
        valid_data: Dataset | None = None,
        reducer: Reducer | None = None,
        loss_counts: LossCounts | None = None,
    ) -> None:
        config = ctx.config
        self.ctx, self.modules = ctx, list(modules)
        if reducer is None:
            reducer = make_reducer(config.comm, config.train.seed, ctx.layout.node_size or ctx.layout.world)
        grad_dtype, offload = PRECISION_DTYPES[config.train.grad_dtype], config.zero.offload
        parallel = DataParallel(
            self.modules, ctx.mesh, config.comm.bucket_mib, reducer, config.zero, grad_dtype, config.train.seed,
            config.comm.overlap, one_micro_batch=micro_batches(ctx, config.train.global_batch) == 1,
        )  # fmt: skip
        self.data_parallel = parallel
        self.optimizer = FlatOptimizer(parallel.buffers, config.optimizer, parallel.weights.updated, offload)
        self.loss_scale = LossScale(config.loss_scale, config.train.precision == "fp16")
        forward, streams = partial(forward_step, ctx), ctx.parallel.streams
        compiled = compiles(config, ctx.device)
        overlap = config.comm.overlap
        self.executor = Executor(self.modules, ctx.mesh.pp, forward, streams, parallel, compiled, overlap.pipeline)
        # One thread reads for both: they may be one dataset, which need not be made for two.
        fields, reader = fields_of(self.modules), ThreadPoolExecutor(1, "meshwright-reader")
        loss_counts = loss_counts or stage_of(self.modules[0]).loss_counts
        self.train_batches = MicroBatches(ctx, train_data, fields, reader, loss_counts)
        self.valid_batches = MicroBatches(ctx, valid_data, fields, reader) if valid_data is not None else None
        # Validation samples by the file that they come from, where the data say so.
        sources = by_source(valid_data, validation_samples(config)) if valid_data is not None else {}
        self.valid_sources = {
            name: MicroBatches(ctx, Picked(valid_data, numbers), fields, reader)  # type: ignore[arg-type]
            for name, numbers in sources.items() if len(sources) > 1 and loss_counts is None
        }  # fmt: skip
        # The terms of the loss, in one order on every rank; the first one's count is what a run reports as its tokens.
        self.declared_terms = (LOSS,) if loss_counts is None else tuple(loss_counts(train_data.sample(0)))
        self.blocks = {term.name: count for module in modules for term, count in stage_of(module).losses}
        self.terms = (*self.declared_terms, *self.blocks)
        self.balance = ExpertBalance(ctx, self.modules, parallel)
        self.monitored = Monitored(ctx)
        self.step_number, self.consumed, self._read_at = 0, 0, 0.0
        self.before_update: Callable[[], object] = lambda: None

    @property
    def writes(self) -> bool:
        """Whether this is the one rank that owns and writes the run's folder, and speaks: rank 0, on the first node."""
        return self.ctx.rank == 0

    @property
    def micro_batches(self) -> int:
        """The micro-batches that this rank runs in the next step."""
        return micro_batches(self.ctx, global_batch(self.ctx.config, self.consumed))

    def table(self, micro_batches: int) -> Table:
        """What the pipeline's ranks do in a step of so many micro-batches each."""
        c = self.ctx.config
        return verified(c.pipeline.schedule, c.layout.pp, micro_batches, c.layout.chunks, self.data_parallel.stage)

    def gradients(self) -> tuple[Totals, Normalisation]:
        """Forward, backward and reduction for the next global batch; and how the gradients become the true ones."""
        samples, count, consumed = global_batch(self.ctx.config, self.consumed), self.micro_batches, self.consumed
        normalisation = self._normalisation(samples, count)
        for module in self.modules:
            module.train()
        self.data_parallel.begin(count, self.step_number + 1, self.loss_scale.value)
        last = self.step_number + 1 == self.ctx.config.train.steps
        batch = self.train_batches.of_step(consumed, count, None if last else consumed + samples)
        totals = self.executor.run(self.table(count), batch, self.step_number + 1, normalisation.seeds())
        begin = time.perf_counter()
        with self.executor.span("step", REDUCED):
            self.data_parallel.finish()
        totals.seconds["reduce"] += time.perf_counter() - begin
        return totals, normalisation

    def _normalisation(self, samples: int, micro_batches: int) -> Normalisation:
        """One undeclared term is stored with loss scale / nominal tokens: gradients then have about their true size."""
        if self.train_batches.loss_counts is None:
            return Normalisation(self.loss_scale.value / (samples * self.ctx.config.model.seq), None, self.blocks)
        own = self.train_batches.counts(self.consumed, micro_batches)
        counts = counts_over_world(self.ctx, self.declared_terms, own)
        return Normalisation(self.loss_scale.value, counts, self.blocks)

    def step(self, stop_requested: bool = False) -> StepResult:
        """One update (or a skipped one): consumes its batch either way. `stop` of the result says whether any rank was
        asked to stop, so that all stop after the same step; `save` whether the rank that writes wants a checkpoint."""
        return self.read(self.launch(stop_requested))

    def launch(self, stop_requested: bool = False, save_requested: bool = False) -> Launched:
        """Runs all of a step except reading its numbers. If `runs_ahead`, the host never waits for the device here."""
        begin = time.perf_counter()
        config, ledger = self.ctx.config, self.ctx.ledger
        ledger.clear()
        samples = global_batch(config, self.consumed)
        totals, normalisation = self.gradients()
        update = time.perf_counter()
        self.before_update()  # the balance of experts moves their biases, which a save may still be copying
        with ledger.phase("optimizer"), self.executor.span("step", "norm and loss"):
            sums = sums_over_world(self.ctx, totals, self.terms, self.data_parallel.square_sum())
            monitored = self.monitored.begin(totals)
            balance = self.balance.update(sums[2 * len(self.terms)])
        lr = learning_rate(config, self.step_number + 1)
        scale = self.loss_scale.value if self.loss_scale.active else None  # that of this step, before the update
        with self.executor.span("step", UPDATED):
            waited = self._update(lr, sums, normalisation)
        read = self.ctx.device.download(sums)
        totals.seconds["backward"] += waited
        totals.seconds["optimizer"] = time.perf_counter() - update - waited
        self.step_number += 1
        self.consumed += samples
        result = StepResult(self.step_number, 0.0, 0.0, lr, scale, False, 0, samples)
        asks = int(stop_requested) + NEW_NAME * int(self.monitored.is_new(totals))
        counts = self._count(totals.seconds, asks + SAVE * int(save_requested and self.writes))
        return Launched(result, begin, totals, normalisation, read, counts, monitored, balance)

    def _update(self, lr: float, sums: Tensor, normalisation: Normalisation) -> float:
        """One update, or none if the gradient is not finite or nothing was counted. Returns the seconds waited."""
        weight, clip, terms = normalisation.weight, self.ctx.config.train.clip, len(self.terms)
        if self.runs_ahead:
            count = torch.as_tensor(normalisation.count(sums[terms]), dtype=sums.dtype, device=sums.device)
            self.optimizer.step_on_device(lr, gradient_scaling(count, sums[2 * terms], weight, clip))
            return 0.0
        arrived, begun = self.ctx.device.download(sums), time.perf_counter()
        found = Sums.read(arrived.read(), self.terms)
        waited = time.perf_counter() - begun
        scaling = gradient_scaling(float(normalisation.count(found.tokens)), found.squares, weight, clip)
        if scaling.updates:
            self.optimizer.step(lr, scaling.divisor)
        if scaling.counts:
            self.loss_scale.update(bool(scaling.updates))
        return waited

    @property
    def runs_ahead(self) -> bool:
        """Whether the host can go on before it knows this step's numbers. (A dynamic loss scale needs them first.)"""
        return self.optimizer.on_device and not self.loss_scale.active

    def read(self, launched: Launched) -> StepResult:
        """Waits until the device has finished a launched step and returns its result."""
        result, how = launched.result, launched.normalisation
        found = Sums.read(launched.sums.read(), self.terms)
        if how.counts is not None:
            found.check_counts(how.counts)
        scaling = gradient_scaling(float(how.count(found.tokens)), found.squares, how.weight, clip=0.0)
        result.loss, result.tokens = found.loss if scaling.counts else math.nan, math.ceil(found.tokens)
        result.losses = found.losses
        result.grad_norm = scaling.norm if math.isfinite(scaling.norm) else math.inf
        result.skipped = not scaling.updates
        new_names = self._read_counts(result, launched.counts.read())
        if launched.monitored is not None:
            result.monitored = launched.monitored.means()
        if launched.balance is not None:
            result.experts = self.balance.read(launched.balance)
        if new_names:
            result.monitored |= self.monitored.learn(launched.totals, launched.monitored).means()
        end = time.perf_counter()
        result.step_time_s = end - max(launched.begin, self._read_at)
        self._read_at = end
        return result

    def _count(self, seconds: Mapping[str, float], asks: int) -> Download:
        """Sum over all ranks of the ledger of this step, this very call included, the seconds by phase, and what the
        ranks ask for (`train/counts.py`)."""
        mesh = self.ctx.mesh
        axes = mesh.layout.step_groups()
        totals = self.ctx.ledger.totals("axis")
        assert set(totals) <= set(axes), f"a step used the groups {set(totals) - set(axes)}, which no step has"
        payload = counts_bytes(len(axes))
        if not mesh.world.alone:
            totals["world"].add(CallTotals(1, payload, wire_bytes("all_reduce", payload, mesh.world.size)))
        counts = [getattr(totals[axis], count) for axis in axes for count in COUNTS]
        micros = [int(seconds.get(name, 0.0) * 1e6) for name in PHASES]
        vector = torch.tensor([*counts, *micros, asks], dtype=torch.int64)
        if mesh.world.alone:
            return Device("cpu").download(vector)
        vector = self.ctx.device.upload(vector)
        with self.ctx.ledger.phase("metrics"):
            mesh.world.all_reduce(vector)
        return self.ctx.device.download(vector)

    def _read_counts(self, result: StepResult, numbers: list[int]) -> bool:
        """Fills in the result; returns whether some rank has a new name."""
        mesh, axes, width = self.ctx.mesh, self.ctx.layout.step_groups(), len(COUNTS)
        for i, axis in enumerate(axes):
            counts = dict(zip(COUNTS, numbers[width * i : width * (i + 1)], strict=True))
            if counts["calls"]:
                result.comm[axis] = counts
        means = [n / 1e6 / mesh.world.size for n in numbers[width * len(axes) : -1]]
        result.phases = dict(zip(PHASES, means, strict=True))
        saves, rest = divmod(numbers[-1], SAVE)
        new_names, stops = divmod(rest, NEW_NAME)
        result.stop, result.save = stops > 0, saves > 0
        return new_names > 0

    def states(self) -> Iterator[State | SideState]:
        """What a checkpoint holds of this rank, beside `counters`. Adapters' frozen base is stored elsewhere."""
        every = not self.ctx.config.tune.adapts
        yield from (state for state in self.optimizer.tensors() if every or state.buffer.key.trained)
        yield from self.data_parallel.reducer_states()

    def counters(self) -> dict[str, float | None]:
        scale = self.loss_scale
        value = scale.value if scale.active else None
        return {"updates": self.optimizer.updates, "loss_scale": value, "good_steps": scale.good_steps}

    def restore(self, step: int, consumed: int, counters: Mapping[str, Any]) -> None:
        """Continues where a loaded checkpoint left off. The loss scale of another precision starts anew."""
        self.step_number, self.consumed = step, consumed
        self.optimizer.updates = int(counters["updates"])
        if self.loss_scale.active and counters["loss_scale"] is not None:
            self.loss_scale.value = float(counters["loss_scale"])
            self.loss_scale.good_steps = int(counters["good_steps"])

    def publish(self) -> None:
        """Copies the master weights, after they were set from outside, to the model's weights."""
        self.optimizer.publish()

    def validate(self) -> dict[str, Any] | None:
        """The loss over the first samples of the validation data, or None without any."""
        if self.valid_batches is None:
            return None
        samples, stage = validation_samples(self.ctx.config), self.data_parallel.stage
        if self.valid_sources:
            return {"step": self.step_number, "samples": samples} | self._validate_sources(stage)
        found = mean_loss(self.executor, self.valid_batches, samples, stage, self.declared_terms)
        line = {"step": self.step_number, "loss": found.loss, "tokens": math.ceil(found.tokens), "samples": samples}
        return line | ({"losses": found.losses} if found.losses else {})

    def _validate_sources(self, stage: int) -> dict[str, Any]:
        """The same samples source by source, each filled up to whole rounds of the ranks by samples without a loss."""
        unit, found = self.ctx.mesh.samples.size * self.ctx.config.train.micro_batch, {}
        for name, batches in self.valid_sources.items():
            count = len(batches.dataset.numbers)  # type: ignore[attr-defined]
            found[name] = mean_loss(self.executor, batches, -(-count // unit) * unit, stage)
        tokens = sum(sums.tokens for sums in found.values())
        total = sum(sums.loss * sums.tokens for sums in found.values() if sums.tokens)
        by_name = {name: sums.loss for name, sums in found.items()}
        return {"loss": total / tokens if tokens else math.nan, "tokens": math.ceil(tokens), "sources": by_name}


def fields_of(modules: Sequence[nn.Module]) -> set[str] | None:
    """The batch's fields that a rank's chunks read; None (all of them) if one doesn't say."""
    needs = [stage_of(module).needs for module in modules]
    return None if None in needs else {name for fields in needs if fields for name in fields}


def validation_samples(config: Config) -> int:
    """Every validation looks at the same samples, the first ones."""
    return config.run.eval_samples or 4 * config.train.global_batch


def micro_batches(ctx: Context, samples: int) -> int:
    return samples // (ctx.mesh.samples.size * ctx.config.train.micro_batch)


@torch.no_grad()
def mean_loss(
    executor: Executor, batches: MicroBatches, samples: int, zero_stage: int = 0, terms: Sequence[str] = (LOSS,)
) -> Sums:
    """The loss and the number of tokens of the first `samples` samples, without a backward."""
    ctx, c = batches.ctx, batches.ctx.config
    count = micro_batches(ctx, samples)
    table = verified(c.pipeline.schedule, c.layout.pp, count, c.layout.chunks, zero_stage, validation=True)
    for module in executor.modules:
        module.eval()
    with ctx.ledger.phase("validation"):
        seeds = Normalisation(1.0, dict.fromkeys(terms, 1.0)).seeds()
        totals = executor.run(table, batches.of_step(0, count), 0, seeds)
        sums = Sums.read(sums_over_world(ctx, totals, terms).tolist(), terms)
    return sums if sums.tokens else replace(sums, loss=math.nan)
