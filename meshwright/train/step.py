"""One training step and one validation pass: what every layout does between two lines of metrics.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.ledger import wire_bytes
from meshwright.device import DTYPES, Device, Download
from meshwright.layout.params import DATA_AXES
from meshwright.optim.adam import FlatOptimizer
from meshwright.optim.loss_scale import LossScale
from meshwright.optim.schedules import global_batch, learning_rate
from meshwright.pipeline.executor import Executor, Totals
from meshwright.pipeline.trace import REDUCED, UPDATED
from meshwright.schedule.table import Table
from meshwright.schedule.verify import verified
from meshwright.sharding.buffers import State
from meshwright.sharding.data_parallel import DataParallel
from meshwright.sharding.reducers import PLAIN, Reducer
from meshwright.train.batches import Dataset, MicroBatches
from meshwright.train.context import Context, compiles
from meshwright.train.counts import COUNTS, PHASES, SUMS, counts_bytes

ForwardStep = Callable[[Context, nn.Module, dict[str, Tensor], dict[str, Tensor]], Any]


@dataclass
class StepResult:
    """What one step did, the same on every rank but for `monitored`, which the last stage's ranks know."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None
    skipped: bool
    tokens: int
    global_batch: int
    monitored: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    comm: dict[str, dict[str, int]] = field(default_factory=dict)
    step_time_s: float = 0.0
    stop: bool = False

    @property
    def why_skipped(self) -> str:
        return "the gradient was not finite" if self.tokens else "no token counted in the loss"

    def line(self) -> dict[str, Any]:
        """The line of metrics.jsonl, numbers unrounded."""
        out = {
            "step": self.step, "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "loss_scale": self.loss_scale, "skipped": self.skipped, "tokens": self.tokens,
            "global_batch": self.global_batch, "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens / self.step_time_s, "phases": self.phases, "comm": self.comm,
        }  # fmt: skip
        return out | ({"monitored": self.monitored} if self.monitored else {})


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be working on: its result but for the numbers that are on their way."""

    result: StepResult
    begin: float
    weight: float
    sums: Download
    counts: Download


class Trainer:
    """Model, optimizer and data of this rank, and the two counters that say where the run is."""

    def __init__(
        self,
        ctx: Context,
        modules: Sequence[nn.Module],
        forward_step: ForwardStep,
        train_data: Dataset,
        valid_data: Dataset | None = None,
        reducer: Reducer = PLAIN,
    ) -> None:
        config = ctx.config
        self.ctx, self.modules = ctx, list(modules)
        grad_dtype, offload = DTYPES[config.train.grad_dtype], config.zero.offload
        parallel = DataParallel(
            self.modules, ctx.mesh, config.comm.bucket_mib, reducer, config.zero, grad_dtype, config.train.seed
        )
        self.data_parallel = parallel
        self.optimizer = FlatOptimizer(parallel.buffers, config.optimizer, parallel.weights.updated, offload)
        self.loss_scale = LossScale(config.loss_scale, config.train.precision == "fp16")
        step = lambda module, batch, received: forward_step(ctx, module, batch, received)  # noqa: E731
        self.executor = Executor(
            self.modules, ctx.mesh.pp, step, ctx.ledger, ctx.parallel.streams, parallel, compiles(config, ctx.device)
        )
        fields = fields_of(self.modules)
        self.train_batches = MicroBatches(ctx, train_data, fields)
        self.valid_batches = MicroBatches(ctx, valid_data, fields) if valid_data is not None else None
        self.step_number = 0
        self.consumed = 0
        self._read_at = 0.0
        self.before_update: Callable[[], object] = lambda: None

    @property
    def writes(self) -> bool:
        """Whether this is the one rank that writes the run's folder and drives its display."""
        return reports_loss(self.ctx) and self.ctx.mesh.is_first("dp", "cp")

    @property
    def micro_batches(self) -> int:
        """Of this rank in the next step."""
        return micro_batches(self.ctx, global_batch(self.ctx.config, self.consumed))

    def table(self, micro_batches: int) -> Table:
        """What the pipeline's ranks do in a step of so many micro-batches each."""
        c = self.ctx.config
        return verified(c.pipeline.schedule, c.layout.pp, micro_batches, c.layout.chunks, self.data_parallel.stage)

    def gradients(self) -> tuple[Totals, float]:
        """Forward and backward of the next global batch and the reduced gradients, which come out as sums weighted by
        loss scale / nominal tokens; that weight is returned."""
        samples = global_batch(self.ctx.config, self.consumed)
        count, weight = self.micro_batches, self.loss_scale.value / (samples * self.ctx.config.model.seq)
        for module in self.modules:
            module.train()
        self.data_parallel.begin(count)
        consumed = self.consumed
        totals = self.executor.run(
            self.table(count), lambda i: self.train_batches.load(consumed, i), self.step_number + 1, weight
        )
        begin = time.perf_counter()
        with self.executor.span("step", REDUCED):
            self.data_parallel.finish()
        totals.seconds["reduce"] += time.perf_counter() - begin
        return totals, weight

    def step(self, stop_requested: bool = False) -> StepResult:
        """One update (or a skipped one): consumes its batch either way. `stop` of the result says whether any rank was
        asked to stop, so that all stop after the same step."""
        return self.read(self.launch(stop_requested))

    def launch(self, stop_requested: bool = False) -> Launched:
        """All of a step but reading its numbers. Where `runs_ahead`, the host waits for nothing in here."""
        begin = time.perf_counter()
        config, ledger = self.ctx.config, self.ctx.ledger
        ledger.clear()
        samples = global_batch(config, self.consumed)
        totals, weight = self.gradients()
        update = time.perf_counter()
        with ledger.phase("optimizer"), self.executor.span("step", "norm and loss"):
            sums = sums_over_world(self.ctx, totals, self.data_parallel.square_sum())
            monitored = self._monitored(totals)
        lr, scale = learning_rate(config, self.step_number + 1), self.loss_scale.value
        self.before_update()
        clip, waited = config.train.clip, 0.0
        with self.executor.span("step", UPDATED):
            if self.runs_ahead:
                self.optimizer.step_on_device(lr, sums, weight, clip)
            else:
                arrived = self.ctx.device.download(sums)
                begun = time.perf_counter()
                _, tokens, squares = arrived.read()
                waited = time.perf_counter() - begun  # for what a device still computed
                norm = gradient_norm(tokens, squares, weight)
                if learns(tokens, squares):
                    if math.isfinite(norm):
                        divisor = weight * divisor_of(tokens)
                        self.optimizer.step(lr, divisor * norm / clip if clip and norm > clip else divisor)
                    self.loss_scale.update(math.isfinite(norm))
        read = self.ctx.device.download(sums)
        totals.seconds["backward"] += waited
        totals.seconds["optimizer"] = time.perf_counter() - update - waited
        self.step_number += 1
        self.consumed += samples
        result = StepResult(
            self.step_number, 0.0, 0.0, lr, scale if self.loss_scale.active else None, False, 0, samples, monitored
        )
        counts = self._count(totals.seconds, stop_requested)
        return Launched(result, begin, weight, read, counts)

    @property
    def runs_ahead(self) -> bool:
        """Whether the host can go on to the next step before it knows this one's numbers. (A dynamic loss scale needs
        them first.)"""
        return self.optimizer.on_device and not self.loss_scale.active

    def read(self, launched: Launched) -> StepResult:
        """The finished result of a launched step, once the device has come that far."""
        result = launched.result
        loss, tokens, squares = launched.sums.read()
        counted = learns(tokens, squares)
        result.loss, result.tokens = loss / divisor_of(tokens) if counted else math.nan, math.ceil(tokens)
        result.grad_norm = gradient_norm(tokens, squares, launched.weight)
        result.skipped = not math.isfinite(result.grad_norm) or not counted
        self._read_counts(result, launched.counts.read())
        end = time.perf_counter()
        result.step_time_s = end - max(launched.begin, self._read_at)
        self._read_at = end
        return result

    def _monitored(self, totals: Totals) -> dict[str, float]:
        """Averages, over the micro-batches that had it, of each value that `forward_step` returned beside the loss. In
        a step, all data-parallel ranks have the same names."""
        if not totals.monitored:
            return {}
        names = sorted(totals.monitored)
        values = [float(totals.monitored[name]) for name in names] + [float(totals.times[name]) for name in names]
        vector = torch.tensor(values, dtype=torch.float64, device=self.ctx.device.torch)
        self.ctx.mesh.group(DATA_AXES).all_reduce(vector)
        sums, times = vector.view(2, -1)
        return dict(zip(names, (sums / times).tolist(), strict=True))

    def _count(self, seconds: Mapping[str, float], stop_requested: bool) -> Download:
        """Sum over all ranks of seconds by phase, the ledger of this step, this very call included, and the ranks that
        were asked to stop."""
        mesh = self.ctx.mesh
        axes = mesh.layout.step_groups()
        totals = self.ctx.ledger.totals("axis")
        assert set(totals) <= set(axes), f"a step used the groups {set(totals) - set(axes)}, which no step has"
        rows = [[t.calls, t.payload_bytes, t.wire_bytes] if (t := totals.get(a)) else [0, 0, 0] for a in axes]
        micros = [int(seconds.get(name, 0.0) * 1e6) for name in PHASES]
        payload = counts_bytes(len(axes))
        if not mesh.world.alone:
            own = rows[axes.index("world")]
            own[0], own[1] = own[0] + 1, own[1] + payload
            own[2] += wire_bytes("all_reduce", payload, mesh.world.size)
        vector = torch.tensor([*(n for row in rows for n in row), *micros, int(stop_requested)], dtype=torch.int64)
        if mesh.world.alone:
            return Device("cpu").download(vector)
        vector = self.ctx.device.upload(vector)
        with self.ctx.ledger.phase("metrics"):
            mesh.world.all_reduce(vector)
        return self.ctx.device.download(vector)

    def _read_counts(self, result: StepResult, numbers: list[int]) -> None:
        mesh, axes, width = self.ctx.mesh, self.ctx.layout.step_groups(), len(COUNTS)
        for i, axis in enumerate(axes):
            counts = dict(zip(COUNTS, numbers[width * i : width * (i + 1)], strict=True))
            if counts["calls"]:
                result.comm[axis] = counts
        means = [n / 1e6 / mesh.world.size for n in numbers[width * len(axes) : -1]]
        result.phases = dict(zip(PHASES, means, strict=True))
        result.stop = numbers[-1] > 0

    def states(self) -> Iterator[State]:
        """What a checkpoint holds of this rank, beside `counters`."""
        yield from self.optimizer.tensors()
        yield from self.data_parallel.reducer_states()

    def counters(self) -> dict[str, float | None]:
        scale = self.loss_scale
        value = scale.value if scale.active else None
        return {"updates": self.optimizer.updates, "loss_scale": value, "good_steps": scale.good_steps}

    def restore(self, step: int, consumed: int, counters: Mapping[str, Any]) -> None:
        """Where a loaded checkpoint left off. The loss scale of another precision starts anew."""
        self.step_number, self.consumed = step, consumed
        self.optimizer.updates = int(counters["updates"])
        if self.loss_scale.active and counters["loss_scale"] is not None:
            self.loss_scale.value = float(counters["loss_scale"])
            self.loss_scale.good_steps = int(counters["good_steps"])

    def publish(self) -> None:
        """After masters were set from outside: the model's weights follow."""
        self.optimizer.publish()

    def validate(self) -> dict[str, Any] | None:
        """The loss over the first samples of the validation data, or None without any."""
        if self.valid_batches is None:
            return None
        samples = self.ctx.config.run.eval_samples or 4 * self.ctx.config.train.global_batch
        loss, tokens = mean_loss(self.ctx, self.executor, self.valid_batches, samples, self.data_parallel.stage)
        return {"step": self.step_number, "loss": loss, "tokens": tokens, "samples": samples}


def fields_of(modules: Sequence[nn.Module]) -> set[str] | None:
    """The batch's fields that a rank's chunks read; None (all of them) if one doesn't say."""
    needs = [getattr(module, "needs", None) for module in modules]
    return None if any(n is None for n in needs) else set().union(*needs)  # type: ignore[arg-type]


def reports_loss(ctx: Context) -> bool:
    """Whether this is the one rank of its pipeline that reports the loss, which all tensor-parallel ranks of the last
    stage know."""
    return ctx.pp_rank == ctx.layout.first_and_last[1] and ctx.mesh.tp.index <= 0


def micro_batches(ctx: Context, samples: int) -> int:
    return samples // (ctx.mesh.samples.size * ctx.config.train.micro_batch)


def sums_over_world(ctx: Context, totals: Totals, squares: Tensor | float = 0.0) -> Tensor:
    """Loss sum, token count and squared gradient norm of the whole job, in one small all-reduce."""
    vector = torch.zeros(len(SUMS), dtype=torch.float64, device=ctx.device.torch)
    if reports_loss(ctx):
        vector[0], vector[1] = totals.loss_sum, totals.tokens
    vector[2] = squares
    ctx.mesh.world.all_reduce(vector)
    return vector


def gradient_norm(tokens: float, squares: float, weight: float) -> float:
    """Of the true gradient: what is stored is weight x its sum over tokens, and the true one is the sum / tokens."""
    return math.sqrt(squares) / (weight * divisor_of(tokens)) if math.isfinite(squares) else math.inf


def learns(tokens: float, squares: float) -> bool:
    """Whether a step has anything to learn from. (One rank of a pipeline that is run alone has a gradient, and no token
    of the last stage.)"""
    return tokens > 0 or squares != 0


def divisor_of(tokens: float) -> float:
    return tokens if tokens > 0 else 1.0


@torch.no_grad()
def mean_loss(
    ctx: Context, executor: Executor, batches: MicroBatches, samples: int, zero_stage: int = 0
) -> tuple[float, int]:
    """Loss by token and number of tokens of the first `samples` samples, without a backward."""
    c = ctx.config
    count = micro_batches(ctx, samples)
    table = verified(c.pipeline.schedule, c.layout.pp, count, c.layout.chunks, zero_stage, validation=True)
    for module in executor.modules:
        module.eval()
    with ctx.ledger.phase("validation"):
        totals = executor.run(table, lambda i: batches.load(0, i), 0)
        loss_sum, tokens, _ = sums_over_world(ctx, totals).tolist()
    return loss_sum / tokens if tokens else math.nan, math.ceil(tokens)
