"""Training steps and validation passes.

Every parallel layout runs this same code between two lines of metrics.jsonl.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.sections import Config
from meshwright.config.step_schedules import global_batch, learning_rate
from meshwright.data.given import iterator_behind
from meshwright.device import PRECISION_DTYPES, Device, Download
from meshwright.engine.balance import ExpertBalance
from meshwright.engine.batches import Dataset, MicroBatches, SampleSubset, by_source
from meshwright.engine.context import Context, compiles, is_host
from meshwright.engine.executor import Executor
from meshwright.engine.losses import (
    Normalisation,
    StepSums,
    Sums,
    UpdateGate,
    declared_counts,
    sums_of_step,
    sums_over_world,
)
from meshwright.engine.marks import Marks
from meshwright.engine.monitor import Monitored, PendingSums
from meshwright.engine.noise import NoiseScale
from meshwright.engine.optim.exchange import MatrixExchange
from meshwright.engine.optim.flat import FlatOptimizer
from meshwright.engine.optim.matrices import cut_axis
from meshwright.engine.optim.outer import OuterOptimizer
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.optim.rule import MatrixRule
from meshwright.engine.optim.scaling import LossScale, gradient_scaling
from meshwright.engine.output import LOSS, Totals
from meshwright.engine.result import StepResult as StepResult
from meshwright.engine.sharding.buffers import EMA, FlatBuffer, SideState, State
from meshwright.engine.sharding.compression.make import gradient_sums, replica_sums
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.sharding.reducers import Reducer
from meshwright.engine.stream_waits import SampledWaits, StepWaits
from meshwright.errors import UserError
from meshwright.models.stage import LossCounts, stage_of
from meshwright.record.rank_figures import RankFigures, check_opened, process_peak_bytes
from meshwright.spec.model.description import model_of
from meshwright.spec.schedule.table import Table
from meshwright.spec.schedule.trace import REDUCED, UPDATED
from meshwright.spec.schedule.verify import verified
from meshwright.spec.traffic.counts import COUNTS, NEW_NAME, PHASES, RANK_COUNTS, SAVE, counted_as, counts_bytes
from meshwright.spec.traffic.ledger import CallTotals, wire_bytes

# The key of a checkpoint's counters that holds the state of the data, for data that a program passes.
DATA = "data"
ForwardStep = Callable[[Context, nn.Module, dict[str, Tensor], dict[str, Tensor]], Any]


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step that the device may still be working on.

    `Trainer.read` fills in the numbers of `result` that the device computes.
    """

    result: StepResult
    begin: float
    totals: Totals
    normalisation: Normalisation
    sums: Download  # over all ranks
    own: Download  # over the ranks of one replica
    held: Download | None  # Positive if the gate held the update back; None if the gate is off.
    counts: Download
    monitored: PendingSums | None
    balance: Download | None
    noise: Download | None


def refuse_unknown_parameters(ctx: Context, parallel: DataParallel) -> None:
    """Raise an error if the optimizer distinguishes parameters, and the run's modules do not say which they are."""
    config = ctx.config.optimizer
    # With a pipeline, a rank without blocks legitimately has no matrices.
    whole = config.whole_matrices and ctx.layout.pp == 1
    if whole and not any(buffer.key.update.matrices for buffer in parallel.buffers):
        raise UserError(
            f"optimizer.name={config.name} updates the matrices that a model's blocks name, and this model names none: "
            "use adamw"
        )
    if not config.groups:
        return
    names = {record.name for record in model_of(ctx.config).records(ctx.at).values()}
    if any(slot.record.name not in names for buffer in parallel.buffers for slot in buffer.slots):
        raise UserError(
            "optimizer.groups names parameters of Meshwright's models, and this run trains a module of its own: leave "
            "it out"
        )


def batches_by_source(
    ctx: Context, data: Dataset, fields: set[str] | None, reader: ThreadPoolExecutor
) -> dict[str, MicroBatches]:
    """Return the validation batches of each source file by name, or nothing if all samples are from one file."""
    sources = by_source(data, validation_samples(ctx.config))
    if len(sources) < 2:
        return {}
    return {name: MicroBatches(ctx, SampleSubset(data, numbers), fields, reader) for name, numbers in sources.items()}


class Trainer:
    """The model, optimizer and data of one rank, with the run's position: `step_number` and `consumed` samples."""

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
        reducer = reducer or gradient_sums(config, ctx.layout.node_size or ctx.layout.world).make()
        grad_dtype, offload = PRECISION_DTYPES[config.train.grad_dtype], config.zero.offload
        own = config.train.local.parts(config.train.global_batch, ctx.layout.replicas)[ctx.mesh.replica]
        parallel = DataParallel(
            self.modules, ctx.mesh, config.comm.bucket_mib, reducer, config.zero, grad_dtype, config.train.seed,
            config.comm.overlap, releases_grads=releases_grads(ctx, len(own)),
            outer=replica_sums(config.train.local, config.train.seed).plan, gather=config.comm.gather,
        )  # fmt: skip
        self.data_parallel = parallel
        kernels, updated = not is_host(config, ctx.device), parallel.weights.updated
        exchange = partial(matrix_exchange, ctx, parallel)
        self.optimizer = FlatOptimizer(parallel.buffers, config.optimizer, updated, offload, kernels, exchange)
        refuse_unknown_parameters(ctx, parallel)
        self.outer: OuterOptimizer | None = None
        if ctx.layout.replicas > 1:
            sizes = (config.zero, config.comm.bucket_mib)
            self.outer = OuterOptimizer(parallel, self.optimizer.states, config.train.local, config.train.seed, sizes)
            # The outer optimizer may change the masters of a bucket before its weights are published.
            self.optimizer.updated = self.outer.updated
        self.loss_scale = LossScale(config.loss_scale, config.train.precision_facts.scales_loss)
        forward, streams = partial(forward_step, ctx), ctx.parallel.streams
        compiled = compiles(config, ctx.device)
        overlap = config.comm.overlap
        self.executor = Executor(
            self.modules, ctx.mesh.pp, forward, streams, parallel, compiled, overlap.pipeline, ctx.mesh.pp_back
        )
        # Training and validation may share a dataset object that is not thread-safe, so one thread reads for both.
        fields, reader = fields_of(self.modules), ThreadPoolExecutor(1, "meshwright-reader")
        loss_counts = loss_counts or stage_of(self.modules[0]).loss_counts
        self.train_batches = MicroBatches(ctx, train_data, fields, reader, loss_counts)
        self.valid_batches = MicroBatches(ctx, valid_data, fields, reader) if valid_data is not None else None
        self.valid_sources: dict[str, MicroBatches] = {}
        if valid_data is not None and loss_counts is None:
            self.valid_sources = batches_by_source(ctx, valid_data, fields, reader)
        # The terms of the loss, in the same order on every rank. The count of the first one is reported as tokens.
        self.declared_terms = (LOSS,) if loss_counts is None else tuple(loss_counts(train_data.sample(0)))
        self.blocks = {term.name: count for module in modules for term, count in stage_of(module).losses}
        self.terms = (*self.declared_terms, *self.blocks)
        self.balance = ExpertBalance(ctx, self.modules, parallel)
        self.monitored = Monitored(ctx, config.monitored_names)
        self.noise = NoiseScale(ctx, parallel) if config.run.noise_scale else None
        self.step_number, self.consumed, self._read_at = 0, 0, 0.0
        self.before_update: Callable[[], object] = lambda: None
        self.before_step: Callable[[], object] = lambda: None
        self.gate = UpdateGate(len(self.terms))
        self.marks: Marks | None = None
        timer = ctx.device.stream_timer()
        self.sampled = None if timer is None else SampledWaits(timer, ctx.ledger)

    @property
    def writes(self) -> bool:
        """True on the only rank that writes the run's folder and prints messages: rank 0, on the first node."""
        return self.ctx.rank == 0

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that this rank runs in the next step."""
        return micro_batches(self.ctx, len(self._samples(self.consumed)))

    def _samples(self, consumed: int) -> range:
        """Return the samples, by number, that this rank's replica trains on in the step that begins at `consumed`."""
        samples = global_batch(self.ctx.config, consumed)
        replicas = self.ctx.layout.replicas
        part = self.ctx.config.train.local.parts(samples, replicas)[self.ctx.mesh.replica]
        return range(consumed + part.start, consumed + part.stop)

    @property
    def is_last(self) -> bool:
        """True if the next step is the run's last."""
        return self.step_number + 1 == self.ctx.config.train.steps

    def table(self, micro_batches: int) -> Table:
        """Return the verified pipeline schedule of a step with this many micro-batches per rank."""
        c = self.ctx.config
        return verified(c.pipeline.schedule, c.layout.pp, micro_batches, c.layout.chunks, self.data_parallel.stage)

    def gradients(self) -> tuple[Totals, Normalisation]:
        """Run forward, backward and gradient reduction for the next global batch.

        Returns the sums of the outputs, and the normalisation that turns the stored gradients into the true ones.
        """
        samples = global_batch(self.ctx.config, self.consumed)
        count = self.micro_batches
        normalisation = self._normalisation(samples, count)
        # `train()` visits every submodule, so it is called only after a validation.
        for module in (module for module in self.modules if not module.training):
            module.train()
        if self.marks is not None:
            self.marks.begin(self.step_number + 1)
        self.data_parallel.begin(count, self.step_number + 1, self.loss_scale.value)
        if self.noise is not None:
            self.noise.begin(count)
        following = None if self.is_last else self._samples(self.consumed + samples).start
        batch = self.train_batches.of_step(self._samples(self.consumed).start, count, following)
        totals = self.executor.run(self.table(count), batch, self.step_number + 1, normalisation.seeds())
        begin = time.perf_counter()
        with self.executor.span("step", REDUCED):
            self.data_parallel.finish()
        totals.seconds["reduce"] += time.perf_counter() - begin
        return totals, normalisation

    def _normalisation(self, samples: int, micro_batches: int) -> Normalisation:
        """Return the normalisation of the next step's gradients.

        The count of an undeclared term is known only after backward. Its gradient is stored with the weight
        loss scale / nominal tokens, so that it has about its true size.
        """
        if self.train_batches.loss_counts is None:
            nominal = samples * self.ctx.config.model.seq / self.ctx.layout.replicas
            return Normalisation(self.loss_scale.value / nominal, None, self.blocks)
        own = self.train_batches.counts(self._samples(self.consumed).start, micro_batches)
        counts = declared_counts(self.ctx, self.declared_terms, own)
        return Normalisation(self.loss_scale.value, counts, self.blocks)

    def step(self, stop_requested: bool = False) -> StepResult:
        """Make one update, or skip it; the batch is consumed either way.

        `stop` of the result is true if any rank was asked to stop, so that all ranks stop after the same step. `save`
        is true if the rank that writes the run wants a checkpoint.
        """
        return self.read(self.launch(stop_requested))

    def launch(self, stop_requested: bool = False, save_requested: bool = False) -> LaunchedStep:
        """Run a whole step except reading its numbers. If `runs_ahead`, the host never waits for the device here."""
        begin = time.perf_counter()
        config, ledger = self.ctx.config, self.ctx.ledger
        ledger.clear()
        if self.sampled is not None:
            self.sampled.begin_step()
        self.before_step()
        samples = global_batch(config, self.consumed)
        totals, normalisation = self.gradients()
        update = time.perf_counter()
        # The expert balance changes the routers' biases, which a checkpoint save may still be copying.
        self.before_update()
        with ledger.phase("optimizer"), self.executor.span("step", "norm and loss"):
            squares = self.data_parallel.square_sum()
            divided = normalisation.counts is not None
            sums = sums_of_step(self.ctx, totals, self.terms, squares, divided)
            monitored = self.monitored.begin(totals)
            passed, held = self.gate.pass_on(sums, normalisation)
            balance = self.balance.update(passed.all[2 * len(self.terms)])
            noise = None if self.noise is None else self.noise.sum()
        lr = learning_rate(config, self.step_number + 1)
        # The update below may change the loss scale, and the result reports the scale that this step used.
        scale = self.loss_scale.value if self.loss_scale.active else None
        with self.executor.span("step", UPDATED):
            if self.outer is None:
                waited = self._update(lr, passed, held, normalisation)
            else:
                assert sums.tokens is not None
                with self.outer.after(self.step_number + 1, self.is_last, sums.tokens):
                    waited = self._update(lr, passed, held, normalisation)
        read = self.ctx.device.download(sums.all)
        own = read if sums.own is sums.all else self.ctx.device.download(sums.own)
        totals.seconds["backward"] += waited
        totals.seconds["optimizer"] = time.perf_counter() - update - waited
        self.step_number += 1
        tokens = samples * config.model.seq
        result = StepResult(self.step_number, 0.0, 0.0, lr, scale, False, tokens, samples, consumed=self.consumed)
        result.counted_as = counted_as(config)
        result.bounds = self.gate.loss_bound, self.gate.norm_bound
        self.consumed += samples
        # Requests are summed over ranks in one number. NEW_NAME and SAVE are so large that the three sums do not mix.
        asks = int(stop_requested) + NEW_NAME * int(self.monitored.is_new(totals))
        asks += SAVE * int(save_requested and self.writes)
        counts = self._count(totals.seconds, asks, time.perf_counter() - begin)
        was_held = None if held is None else self.ctx.device.download(held.view(1))
        return LaunchedStep(
            result, begin, totals, normalisation, read, own, was_held, counts, monitored, balance, noise
        )

    def _update(self, lr: float, sums: StepSums, held: Tensor | None, normalisation: Normalisation) -> float:
        """Make one update and return the seconds that the host waited for the sums.

        There is no update if it is held back, if the gradient is not finite, or if nothing was counted. Either all
        replicas make an update or none does.
        """
        weight = normalisation.weight
        clip = self.ctx.config.train.clip
        terms = len(self.terms)
        # A replica scales by its own sums, but the sums of all replicas decide whether there is an update.
        vectors = sums[:1] if sums.own is sums.all else sums[:2]
        if self.runs_ahead:
            counts = [normalisation.count_on_device(x[terms]) for x in vectors]
            scalings = [
                gradient_scaling(n, x[2 * terms], weight, clip, self.late) for n, x in zip(counts, vectors, strict=True)
            ]
            self.optimizer.step_on_device(lr, scalings[0]._replace(updates=scalings[-1].updates))
            return 0.0
        downloads = [self.ctx.device.download(x) for x in vectors]
        begin = time.perf_counter()
        read = [Sums.read(download.read(), self.terms) for download in downloads]
        waited = time.perf_counter() - begin
        own, scaling = (
            gradient_scaling(normalisation.count(x.tokens), x.squares, weight, clip, self.late)
            for x in (read[0], read[-1])
        )
        if scaling.updates:
            self.optimizer.step(lr, own.divisor)
        elif self.outer is not None and self.outer.is_due(self.step_number + 1, self.is_last):
            self.optimizer.publish()
        if scaling.counts and not (held is not None and bool(held)):
            self.loss_scale.update(bool(scaling.norm < math.inf))
        return waited

    def take_back(self, result: StepResult) -> None:
        """Return to the position before this step, whose update was held back."""
        self.step_number = result.step - 1
        self.consumed = result.consumed

    @property
    def late(self) -> bool:
        """True if gradients may reach a parameter server in later steps."""
        return self.ctx.config.train.server.staleness > 0

    @property
    def runs_ahead(self) -> bool:
        """True if the host can continue before it knows this step's numbers; a dynamic loss scale needs them first."""
        return self.optimizer.on_device and not self.loss_scale.active

    def read(self, launched: LaunchedStep) -> StepResult:
        """Wait until the device has finished a launched step, and return its result."""
        result, normalisation = launched.result, launched.normalisation
        sums = Sums.read(launched.sums.read(), self.terms)
        if normalisation.counts is not None:
            Sums.read(launched.own.read(), self.terms).check_counts(normalisation.counts)
        count = normalisation.count(sums.tokens)
        scaling = gradient_scaling(count, sums.squares, normalisation.weight, clip=0.0, late=self.late)
        result.loss = sums.loss if scaling.counts else math.nan
        result.counted = math.ceil(sums.tokens)
        result.losses = sums.losses
        result.grad_norm = scaling.norm if math.isfinite(scaling.norm) else math.inf
        result.held = launched.held is not None and launched.held.read()[0] > 0
        result.skipped = result.held or not scaling.updates
        new_names = self._read_counts(result, launched.counts.read())
        if launched.monitored is not None:
            result.monitored = launched.monitored.means()
        if self.noise is not None and launched.noise is not None:
            divisor = normalisation.weight * max(normalisation.count(sums.tokens), 1.0)
            result.noise = self.noise.read(launched.noise, divisor, sums.tokens)
        if launched.balance is not None:
            result.experts = self.balance.read(launched.balance)
        if new_names:
            result.monitored |= self.monitored.learn(launched.totals, launched.monitored).means()
        end = time.perf_counter()
        # A step that was launched ahead begins before the previous one is read; only the time after that counts.
        result.step_time_s = end - max(launched.begin, self._read_at)
        self._read_at, result.time = end, time.time()
        return result

    def _count(self, seconds: Mapping[str, float], asks: int, elapsed: float) -> Download:
        """Sum the counts of this step over all ranks, in the format of `spec/traffic/counts.py`.

        They are the ledger's totals (this call included), the waits by axis, the seconds by phase, each rank's figures
        and the requests of the ranks. `elapsed`: the step's seconds so far.
        """
        mesh = self.ctx.mesh
        axes = mesh.layout.step_groups()
        totals = self.ctx.ledger.totals("axis")
        assert set(totals) <= set(axes), f"a step used the groups {set(totals) - set(axes)}, which no step has"
        payload = counts_bytes(len(axes), mesh.world.size)
        if not mesh.world.alone:
            # The ledger records the all-reduce below too late for these totals, so it is added by hand.
            totals["world"].add(CallTotals(1, payload, wire_bytes("all_reduce", payload, mesh.world.size)))
        counts = [getattr(totals[axis], count) for axis in axes for count in COUNTS]
        micros = [int(seconds.get(name, 0.0) * 1e6) for name in PHASES]
        exposure = self._exposure(elapsed, seconds)
        waited = [exposure.waited_us.get(axis, 0) for axis in axes]
        own = [0] * (len(RANK_COUNTS) * mesh.world.size)
        at = len(RANK_COUNTS) * mesh.rank
        own[at : at + len(RANK_COUNTS)] = self._own_counts(exposure)
        vector = torch.tensor([*counts, *waited, *micros, *own, asks], dtype=torch.int64)
        if mesh.world.alone:
            return Device("cpu").download(vector)
        vector = self.ctx.device.upload(vector)
        with self.ctx.ledger.phase("metrics"):
            mesh.world.all_reduce(vector)
        return self.ctx.device.download(vector)

    def _exposure(self, elapsed: float, seconds: Mapping[str, float]) -> StepWaits:
        """Return the times for which this rank computed and waited.

        On an accelerator the stream waits and not the host, so the figures are those of an earlier, timed step; between
        timed steps they are zero.
        """
        ledger = self.ctx.ledger
        read = max(0, int((seconds.get("data", 0.0) - ledger.waited_in["data"]) * 1e6))
        if self.sampled is not None:
            return self.sampled.end_step(read) or StepWaits({}, 0, read)
        waited = {axis: int(s * 1e6) for axis, s in ledger.waited.items()}
        return StepWaits(waited, int(elapsed * 1e6) - sum(waited.values()), read)

    def _own_counts(self, exposure: StepWaits) -> list[int]:
        """Return the figures of this rank that RANK_COUNTS names."""
        on_device = self.ctx.device.peak_bytes()
        peak = process_peak_bytes() if on_device is None else on_device
        waited = sum(exposure.waited_us.values())
        return [exposure.busy_us, waited, exposure.data_us, peak, self.data_parallel.weights.checksum]

    def _read_counts(self, result: StepResult, numbers: list[int]) -> bool:
        """Fill in the result from the summed counts. Return True if any rank monitors a value under a new name."""
        mesh = self.ctx.mesh
        axes = self.ctx.layout.step_groups()
        width = len(COUNTS)
        for i, axis in enumerate(axes):
            counts = dict(zip(COUNTS, numbers[width * i : width * (i + 1)], strict=True))
            if counts["calls"]:
                result.comm[axis] = counts
        rest = numbers[width * len(axes) : -1]
        means = [n / 1e6 / mesh.world.size for n in rest]
        own = len(axes) + len(PHASES)
        result.exposed_s = {axis: mean for axis, mean in zip(axes, means, strict=False) if mean}
        result.phases = dict(zip(PHASES, means[len(axes) : own], strict=True))
        check_opened(rest[own:], mesh.layout, result.step)
        result.ranks = RankFigures.read(rest[own:])
        saves, asked = divmod(numbers[-1], SAVE)
        new_names, stops = divmod(asked, NEW_NAME)
        result.stop, result.save = stops > 0, saves > 0
        return new_names > 0

    def states(self) -> Iterator[State | SideState | MatrixState]:
        """Yield the tensors of this rank that a checkpoint holds. The frozen base of adapters is stored elsewhere."""
        every = not self.ctx.config.tune.adapts
        own = (state for state in self.optimizer.tensors() if every or state.buffer.key.trained)
        yield from own if self.outer is None else self.outer.tensors(own)
        yield from self.data_parallel.reducer_states()

    def counters(self) -> dict[str, float | str | None]:
        scale = self.loss_scale
        value = scale.value if scale.active else None
        counters: dict[str, float | str | None] = {"updates": self.optimizer.updates, "loss_scale": value}
        counters["good_steps"] = scale.good_steps
        if scale.config.hysteresis > 1:
            counters["overflows"] = scale.overflows
        if self.optimizer.config.ema:
            counters[EMA] = self.optimizer.averaged
        counters |= self.data_parallel.reducer.counters()
        if (data := iterator_behind(self.train_batches.dataset)) is not None:
            counters[DATA] = data.state_before(self.consumed)
        return counters if self.outer is None else {**counters, **self.outer.counters()}

    def restore(self, step: int, consumed: int, counters: Mapping[str, Any]) -> None:
        """Continue from a loaded checkpoint. The loss scale starts anew if the precision has changed."""
        self.step_number, self.consumed = step, consumed
        self.optimizer.updates = int(counters["updates"])
        self.optimizer.averaged = int(counters.get(EMA) or 0)
        self.data_parallel.reducer.restore(counters)
        if (data := iterator_behind(self.train_batches.dataset)) is not None:
            # On the thread that reads samples, which may be reading one ahead.
            begin = partial(data.begin_at, consumed, str(counters.get(DATA) or ""), self.writes)
            self.train_batches.reader.submit(begin).result()
        if self.outer is not None:
            self.outer.restore(counters)
        if self.loss_scale.active and counters["loss_scale"] is not None:
            self.loss_scale.value = float(counters["loss_scale"])
            self.loss_scale.good_steps = int(counters["good_steps"])
            self.loss_scale.overflows = int(counters.get("overflows") or 0)

    def publish(self) -> None:
        """Copy the master weights to the model's weights, after other code has set the masters."""
        self.optimizer.publish()

    def validate(self) -> dict[str, Any] | None:
        """Return the line of metrics for the loss over the first validation samples, or None without such data."""
        if self.valid_batches is None:
            return None
        samples = validation_samples(self.ctx.config)
        stage = self.data_parallel.stage
        if self.valid_sources:
            return {"step": self.step_number, "samples": samples} | self._validate_sources(stage)
        sums = mean_loss(self.executor, self.valid_batches, samples, stage, self.declared_terms)
        line = {"step": self.step_number, "loss": sums.loss, "tokens": math.ceil(sums.tokens), "samples": samples}
        return line | ({"losses": sums.losses} if sums.losses else {})

    def _validate_sources(self, stage: int) -> dict[str, Any]:
        """Validate source by source. Samples without a loss pad each source to a multiple of `validation_unit`."""
        unit, sums_by_name = validation_unit(self.ctx), {}
        for name, batches in self.valid_sources.items():
            count = len(batches.dataset.numbers)  # type: ignore[attr-defined]
            sums_by_name[name] = mean_loss(self.executor, batches, -(-count // unit) * unit, stage)
        tokens = sum(sums.tokens for sums in sums_by_name.values())
        total = sum(sums.loss * sums.tokens for sums in sums_by_name.values() if sums.tokens)
        losses = {name: sums.loss for name, sums in sums_by_name.items()}
        return {"loss": total / tokens if tokens else math.nan, "tokens": math.ceil(tokens), "sources": losses}


def matrix_exchange(ctx: Context, parallel: DataParallel, buffer: FlatBuffer, rule: MatrixRule) -> MatrixExchange:
    """Return the exchange that assembles whole matrices from a buffer's shards and from tensor-parallel slices."""
    model = model_of(ctx.config)
    cutting = ctx.mesh.group(cut_axis(buffer.key.data_axes))
    by_rank = [model.records(ctx.at_rank(rank)) for rank in cutting.ranks]
    own = by_rank[cutting.index]
    # A name alone is not unique: two parameters may hold slices of one global tensor (queries, and copied key-value
    # heads).
    peers = {(record.name, record.boxes): [records[key] for records in by_rank] for key, record in own.items()}
    shards = parallel.groups(buffer).shards
    return MatrixExchange(buffer, shards, cutting, lambda record: peers[record.name, record.boxes], rule)


def fields_of(modules: Sequence[nn.Module]) -> set[str] | None:
    """Return the fields of the batch that a rank's chunks read, or None (all of them) if a chunk does not say."""
    needs = [stage_of(module).needs for module in modules]
    return None if None in needs else {name for fields in needs if fields for name in fields}


def validation_samples(config: Config) -> int:
    """Return the number of samples of a validation. Every validation uses the same samples, the first ones."""
    return config.run.eval_samples or 4 * config.train.global_batch


def validation_unit(ctx: Context) -> int:
    """Return the divisor of a validation's sample count: all ranks of all replicas take part in every round."""
    return ctx.mesh.samples.size * ctx.layout.replicas * ctx.config.train.micro_batch


def micro_batches(ctx: Context, samples: int) -> int:
    """Return the number of micro-batches per rank when one replica processes this many samples."""
    return samples // (ctx.mesh.samples.size * ctx.config.train.micro_batch)


def releases_grads(ctx: Context, samples: int) -> bool:
    """Return True if gradients in ZeRO stages 0 and 1 are freed between the update and the next backward."""
    # Later micro-batches add to the gradients of the first. CPUs do not free gradients either: writing to a page that
    # was returned to the system costs ten times as much as writing to one that the process still has.
    return micro_batches(ctx, samples) == 1 and not is_host(ctx.config, ctx.device)


@torch.no_grad()
def mean_loss(
    executor: Executor, batches: MicroBatches, samples: int, zero_stage: int = 0, terms: Sequence[str] = (LOSS,)
) -> Sums:
    """Return the loss and the number of tokens of the first `samples` samples, without a backward."""
    ctx, c = batches.ctx, batches.ctx.config
    part = samples // ctx.layout.replicas  # Each replica validates an equal part with its own weights.
    count = micro_batches(ctx, part)
    table = verified(c.pipeline.schedule, c.layout.pp, count, c.layout.chunks, zero_stage, validation=True)
    for module in executor.modules:
        module.eval()
    with ctx.ledger.phase("validation"):
        seeds = Normalisation(1.0, dict.fromkeys(terms, 1.0)).seeds()
        totals = executor.run(table, batches.of_step(ctx.mesh.replica * part, count), 0, seeds)
        sums = Sums.read(sums_over_world(ctx, totals, terms).tolist(), terms)
    return sums if sums.tokens else replace(sums, loss=math.nan)
