"""Executes one rank of a job without the other ranks.

The rank's real model, buffers, optimizer and schedule run a step, with torch's fake process group in place of the other
ranks. It runs on `meta`, where nothing is computed, or on a device.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from meshwright.config.memory import Place
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.meta_mode import MetaMode, SavedBytes
from meshwright.dryrun.stand_ins import RandomSamples, draw_on_device, fake_world, release, stand_in
from meshwright.engine.context import Context, build_context, is_host
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.offload import StateStore
from meshwright.engine.step import Trainer
from meshwright.models.graph_stage import GraphStage
from meshwright.plan.rank import Counts, PlannedRank
from meshwright.run.pretrain import build_modules
from meshwright.spec.model.gpt import vocabulary_rows
from meshwright.spec.schedule.table import action_counts
from meshwright.spec.traffic.counts import COUNTS
from meshwright.spec.traffic.ledger import CallTotals

TIMED = 2  # Steps that are timed on a device, after one warm-up step.


@dataclass(frozen=True)
class RankRun(PlannedRank):
    """The memory, calls and actions of a rank in one step.

    `most` has the measured peaks. `step_s` is the compute time of a step; None on `meta`.
    """

    updated: bool  # The step made an update.
    build_s: float
    run_s: float
    step_s: float | None


def run_rank(config: Config, world: int, rank: int, device: Device) -> RankRun:
    """Build the rank and run one step. On a real device, one step warms up and two more are timed."""
    check(config, world)
    begin = time.perf_counter()
    with ExitStack() as inside:
        inside.enter_context(fake_world(rank, world))
        dry = inside.enter_context(MetaMode(not is_host(config, device))) if device.is_meta else None
        trainer = make_rank(config, world, rank, device)
        built = time.perf_counter()
        most, step_s = _timed_steps(trainer) if dry is None else (_dry_step(trainer, dry), None)
        result = RankRun(
            sum(slot.record.values.numel for buffer in trainer.data_parallel.buffers for slot in buffer.slots),
            state_bytes(trainer), calls_of(trainer), action_counts(trainer.executor.done), most,
            trainer.optimizer.updates > 0, built - begin, time.perf_counter() - built, step_s,
        )  # fmt: skip
        release(trainer)
    device.empty_cache()
    return result


def make_rank(config: Config, world: int, rank: int, device: Device) -> Trainer:
    """Build the trainer of one rank inside its `fake_world`."""
    # The device draws the weights, which are unsharded at first: the host would take hours for a large model.
    ctx = build_context(config, rank, world, device, trains=device.is_meta)
    stand_in(ctx.mesh)
    data = samples_of(ctx)
    trainer = Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, data)
    if device.is_meta and is_host(config, device):
        _keep_host_states(trainer)
    # Normally one tensor-parallel rank reads the samples and broadcasts them. It is missing unless it is this rank.
    trainer.train_batches.reads = trainer.train_batches.sends = True
    # The rank that normally counts the loss's terms may be missing too, so let the rank that computes them count.
    stages = [module for module in trainer.modules if isinstance(module, GraphStage)]
    trainer.train_batches.counts_terms = any(module.stage.last for module in stages)
    # Of the ranks that hold the same gradients, only the first adds them to the norm, and it may be missing. But a step
    # with a norm of zero would be skipped, so every rank counts its gradients.
    trainer.data_parallel.counts = lambda buffer, slot: True  # type: ignore[method-assign]
    return trainer


def _keep_host_states(trainer: Trainer) -> None:
    """Count states that a CPU run offloads to the host as being on the device, since both are the same memory.

    A rank on `meta` does not know that it stands in for a CPU.
    """
    offload, parallel = trainer.ctx.config.zero.offload, trainer.data_parallel
    states = [store for state in trainer.optimizer.states for store in state.stores]
    weights = [buffer.store for buffer in parallel.buffers if buffer.store is not None]
    held = [(offload.optimizer_at, states), (offload.params_at, weights)]
    for store in (store for place, stores in held for store in stores if place is Place.HOST):
        store.on_device = True


def samples_of(ctx: Context) -> RandomSamples:
    """Return random tokens whose embeddings are on this rank.

    The rows of other tokens would come from other ranks and be zeros here, which a norm would blow up.
    """
    vocab = ctx.config.model.vocab
    rows = vocabulary_rows(ctx.config.model.vocab, ctx.at)
    first = min(max(0, ctx.mesh.tp.index) * rows, vocab - 1)
    return RandomSamples(ctx.config, min(rows, vocab - first), first)


def _dry_step(trainer: Trainer, dry: MetaMode) -> Counts:
    """Run one step on `meta` and return its memory peaks: activations, gathered weights and gradients, and all."""
    storages, parallel = dry.storages, trainer.data_parallel
    storages.leave_out(x for store in stores_of(trainer) if not store.on_device for x in store.shares)
    buckets = [bucket for buffer in parallel.buffers for bucket in buffer.buckets]
    storages.name(bucket.grads.tensor for bucket in buckets if bucket.stage >= 2)
    storages.name(bucket.params.tensor for bucket in buckets if bucket.stage == 3)
    if parallel.stage == 3 and trainer.micro_batches == 1:
        # The first micro-batch records the order in which weights are prefetched, so the next step is a typical one.
        trainer.step()
    if trainer.outer is not None:
        # Run the last step of a round, with the synchronisation of all fragments in flight.
        local = trainer.ctx.config.train.local
        trainer.step_number, trainer.outer.under_way = local.steps - 1, set(range(local.fragments))
    storages.forget()
    saved = SavedBytes(lasting(trainer))
    with saved:
        trainer.step()
    peaks = {"activations": saved.bytes.most, "gathered": storages.named.most, "peak": storages.all.most}
    return peaks | _offloaded_bytes(trainer)


def _offloaded_bytes(trainer: Trainer) -> Counts:
    """Return the most bytes of activations in host memory at once; empty if activations stay on the device."""
    memory = trainer.ctx.parallel.offload
    return {} if memory is None else {"offloaded": memory.most_bytes}


def lasting(trainer: Trainer) -> Iterable[Tensor]:
    """Yield tensors that autograd may save for backward without allocating memory: parameters and tables."""
    for module in trainer.modules:
        yield from module.buffers()
    for buffer in trainer.data_parallel.buffers:
        yield buffer.params
        yield buffer.grads
        yield from (memory.tensor for bucket in buffer.buckets for memory in (bucket.params, bucket.grads))


def _timed_steps(trainer: Trainer) -> tuple[Counts, float]:
    """Return the peak memory, if the device reports it, and the seconds of a step after the first one."""
    device = trainer.ctx.device
    trainer.step()
    device.synchronize()
    device.reset_peak()
    seconds = statistics.median(trainer.step().step_time_s for _ in range(TIMED))
    device.synchronize()
    peak = device.peak_bytes()
    return ({} if peak is None else {"peak": peak}) | _offloaded_bytes(trainer), seconds


def state_bytes(trainer: Trainer) -> Counts:
    """Return the bytes by kind of the tensors that persist from step to step. Offloaded tensors are left out."""
    buffers, states = trainer.data_parallel.buffers, trainer.optimizer.states
    weights = [buffer.store for buffer in buffers if buffer.store is not None]
    residuals = (x.nbytes for _, _, tensors in trainer.data_parallel.reducer.states() for x in tensors)
    copies = (x.nbytes for x in trainer.data_parallel.weights.copies.parts.values())
    more = [x for state in trainer.optimizer.owned() for x in state.tensors]
    more += [] if trainer.outer is None else trainer.outer.kept()
    return {
        "parameters": sum(buffer.params.nbytes for buffer in buffers) + _on_device(weights) + sum(copies),
        "gradients": sum(buffer.grad_bytes for buffer in buffers) + sum(residuals),
        "master": _on_device(state.stores[0] for state in states if not state.in_place),
        "optimizer": _on_device(store for state in states for store in state.stores[1:]) + sum(x.nbytes for x in more),
    }


def _on_device(stores: Iterable[StateStore]) -> int:
    return sum(x.nbytes for store in stores if store.on_device for x in store.shares)


def stores_of(trainer: Trainer) -> list[StateStore]:
    """Return the stores of all states and weights of a rank, wherever they are."""
    stores = [store for state in trainer.optimizer.states for store in state.stores]
    return stores + [buffer.store for buffer in trainer.data_parallel.buffers if buffer.store is not None]


def calls_of(trainer: Trainer) -> dict[tuple[str, str, str], Counts]:
    """Return the totals of the last step's ledger by phase, axis and op."""
    sums: dict[tuple[str, str, str], CallTotals] = defaultdict(CallTotals)
    for entry, totals in trainer.ctx.ledger.entries.items():
        sums[entry.phase, entry.axis, entry.op].add(totals)
    return {line: {name: getattr(totals, name) for name in COUNTS} for line, totals in sums.items()}
