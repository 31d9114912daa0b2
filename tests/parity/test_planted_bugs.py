"""The parity check finds the classic bugs of this field. Each bug alters one call or one reduction rather than all of
them, and is removed before the next case is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.engine.batches as batches
import meshwright.engine.optim.exchange as exchange
import meshwright.nn.attention.context as context
import meshwright.nn.experts.experts as experts
import meshwright.nn.grid.sides as sides
from meshwright.comm.group import DONE, Group, Shift, group_named
from meshwright.engine.optim.exchange import MatrixExchange, Transform
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.engine.step import Trainer
from meshwright.nn.attention.pieces import PartialAttention, Sight
from meshwright.nn.experts.routing import Router
from meshwright.nn.inputs import Inputs
from meshwright.nn.linear import Linear
from meshwright.nn.weight_grad import Sink
from meshwright.spec.layout.redistribute import Redistribution
from meshwright.spec.model.experts import EXPERT_DATA_AXES
from meshwright.spec.schedule.table import Op, Table
from tests.parity.cases import Case
from tests.parity.expert_cases import EXPERTS
from tests.parity.planted import Bug, Plant, altered, assert_found, mean_of_means
from tests.parity.sharded_cases import SHARDED


def _all_reduce_missing(phase: str) -> Plant:
    """Return a bug that skips the third tensor-parallel all-reduce of a linear layer in this phase."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        real, seen = sides.all_reduce_, 0

        def fake(x: torch.Tensor, group: str, op: str) -> None:
            nonlocal seen
            seen += group_named(group).ledger.current_phase == phase
            if seen != 3:
                real(x, group, op)
            else:
                seen += 1

        with mock.patch.object(sides, "all_reduce_", fake):
            yield

    return plant


@contextmanager
def _scatter_without_sum(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: under sequence parallelism a rank keeps its rows of its local product instead of those of the
    sum.
    """

    def fake(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
        return x.view(size, -1, *x.shape[1:])[group_named(group).index].clone()

    with mock.patch.object(sides, "reduce_scatter", fake):
        yield


def _second_bucket(times: int) -> Plant:
    """Return a bug that reduces the second bucket this many times."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        seen = 0

        class Faulty(PlainReducer):
            def all_reduce(self, bucket: Any, grads: torch.Tensor, group: Any) -> Any:
                nonlocal seen
                seen += 1
                for _ in range(times if seen == 2 else 1):
                    super().all_reduce(bucket, grads, group).wait()
                return DONE

        trainer.data_parallel.reducer = Faulty()
        yield

    return plant


def _receives_swapped(op: Op) -> Plant:
    """Return a bug that posts the receives of the first two micro-batches in the wrong order, so that each gets the
    other's tensor.
    """

    def swapped(table: Table) -> Table:
        ranks = []
        for row in table.ranks:
            pair = [action for action in row if action.op is op and action.micro_batch < 2]
            at = row.index(pair[0]) if pair else 0
            rest = [action for action in row if action not in pair]
            ranks.append((*rest[:at], *reversed(pair), *rest[at:]))
        return replace(table, ranks=tuple(ranks))

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        real = trainer.table
        trainer.table = lambda micro_batches: swapped(real(micro_batches))
        yield

    return plant


def _reduction_missing(axis: str) -> Plant:
    """Return a bug that does not sum gradients over `axis`, although they are partial sums over it."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        group = trainer.ctx.mesh.group(axis)
        real = group.all_reduce

        def fake(x: torch.Tensor, *more: Any, **named: Any) -> Any:
            return DONE if group.ledger.current_phase == "reduce" else real(x, *more, **named)

        with mock.patch.object(group, "all_reduce", fake):
            yield

    return plant


@contextmanager
def _copies_counted(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: every rank counts all that it holds in the gradient norm, copies too."""
    with mock.patch.object(DataParallel, "counts", lambda self, buffer, slot: self.mesh.samples.index <= 0):
        yield


@contextmanager
def _same_samples(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: every data-parallel rank reads the samples of the first one."""
    real = batches.sample_ids

    def fake(consumed: int, micro_batch: int, size: int, data_rank: int, data_ranks: int) -> range:
        return real(consumed, micro_batch, size, 0, data_ranks)

    with mock.patch.object(batches, "sample_ids", fake):
        yield


@contextmanager
def _stale_gradients(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: a step adds to the gradients of the previous step."""

    def fake(sink: Sink) -> None:
        sink.contributions = 0

    with mock.patch.object(Sink, "reset", fake):
        yield


@contextmanager
def _written_to_a_copy(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: one layer's weight gradient goes to a copy of the buffer, but its contribution is still reported."""
    real, lost = Sink.add_factors, next(layer for layer in trainer.modules[0].modules() if isinstance(layer, Linear))

    def fake(sink: Sink, add: Any, *factors: torch.Tensor) -> None:
        if sink.handle is not lost.sinks["weight"]:
            real(sink, add, *factors)
            return
        with mock.patch.object(sink, "view", sink.view.clone()):
            real(sink, add, *factors)

    with mock.patch.object(Sink, "add_factors", fake):
        yield


def _gather_missing(number: int) -> Plant:
    """Return a bug: in one gather of weights a rank gets only its own shard."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        shards, seen = trainer.ctx.mesh.samples, 0
        real = shards.all_gather

        def fake(out: torch.Tensor, x: torch.Tensor, wait: bool = True) -> Any:
            nonlocal seen
            seen += shards.ledger.current_phase == "gather"
            if seen != number or shards.ledger.current_phase != "gather":
                return real(out, x, wait)
            out.view(shards.size, -1)[shards.index].copy_(x)
            return DONE

        with mock.patch.object(shards, "all_gather", fake):
            yield

    return plant


@contextmanager
def _scattered_twice(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the second scattered bucket is summed into its shard twice."""
    shards, seen = trainer.ctx.mesh.samples, 0
    real = shards.reduce_scatter

    def fake(out: torch.Tensor, x: torch.Tensor, wait: bool = True) -> Any:
        nonlocal seen
        seen += 1
        pending = real(out, x, wait)
        if seen == 2:
            pending.wait()
            out.mul_(2.0)
        return pending

    with mock.patch.object(shards, "reduce_scatter", fake):
        yield


@contextmanager
def _stale_prefetch(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: a unit's weights are used forever once they are fetched."""
    bucket = trainer.data_parallel.weights.units[1].buckets[0]
    with mock.patch.object(bucket, "release_params", lambda: None):
        yield


@contextmanager
def _expert_gradients_times_ep(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the gradient of every expert's last weight is counted once for each rank that sent it tokens."""
    real, ep = experts.add_grouped_grad, trainer.ctx.layout.ep
    downs = {int(part.down.sinks["weight"]) for part in trainer.balance.held.values()}

    def fake(sink: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
        real(sink, grad * ep if int(sink) in downs else grad, x, ends)

    with mock.patch.object(experts, "add_grouped_grad", fake):
        yield


@contextmanager
def _router_losses_times_tp(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: every tp rank gives the whole gradient of the router's losses, and these are summed. The reported
    losses are right.
    """
    real, tp = experts.router_losses, trainer.ctx.layout.tp

    def fake(*args: Any) -> torch.Tensor:
        losses = real(*args)
        return losses + (tp - 1) * (losses - losses.detach())

    with mock.patch.object(experts, "router_losses", fake):
        yield


@contextmanager
def _norm_without_experts(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: only the first tp rank counts its experts in the gradient norm, as if all ranks held copies of
    them.
    """
    real = DataParallel.counts

    def fake(self: DataParallel, buffer: Any, slot: Any) -> bool:
        return real(self, buffer, slot) and (buffer.key.data_axes != EXPERT_DATA_AXES or self.mesh.tp.index <= 0)

    with mock.patch.object(DataParallel, "counts", fake):
        yield


@contextmanager
def _routing_recomputed(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: a recomputed block chooses experts again, from scores that differ a little from those of the first
    pass.
    """
    real, choose = experts.Experts.forward, Router.choose

    def other(router: Router, scores: torch.Tensor) -> torch.Tensor:
        return choose(router, scores + 0.01 * torch.arange(scores.shape[1]).cos())

    def fake(self: Any, x: torch.Tensor, norm: Any, inputs: Inputs) -> Any:
        assert inputs.routed is not None
        if not inputs.routed.again:
            return real(self, x, norm, inputs)
        afresh = replace(inputs.routed, saved=experts.SavedRouting(), again=False)
        with mock.patch.object(Router, "choose", other):
            return real(self, x, norm, replace(inputs, routed=afresh))

    with mock.patch.object(experts.Experts, "forward", fake):
        yield


@contextmanager
def _counts_of_another_rank(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: arriving rows are taken for those that the previous rank sent. Their total is right, but their
    experts are not.
    """
    real = experts.exchange_counts

    def fake(*args: Any) -> experts.Arrivals:
        found = real(*args)
        return found._replace(counts=found.counts.roll(1, 0))

    with mock.patch.object(experts, "exchange_counts", fake):
        yield


@contextmanager
def _bias_moved_by_own_rows(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: every rank moves the balancing bias by the rows that it routed itself."""
    world = trainer.ctx.mesh.world
    real = world.all_reduce

    def fake(x: torch.Tensor, *more: Any, **named: Any) -> Any:
        return DONE if x.dim() == 2 else real(x, *more, **named)

    with mock.patch.object(world, "all_reduce", fake):
        yield


def _divided_by(cp: int) -> Plant:
    """Return a bug that divides the loss of a rank's tokens by the number of ranks that share a sequence."""
    return altered(lambda term, counts: replace(term, sum=term.sum / cp))


@contextmanager
def _positions_uncut(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: each rank gives its tokens the positions of a sequence's first tokens."""
    real = batches.rows_of_rank

    def fake(sample: Any, *more: Any) -> Any:
        cut = real(sample, *more)
        return cut | {"positions": sample["positions"][: len(cut["tokens"])]}

    with mock.patch.object(batches, "rows_of_rank", fake):
        yield


@contextmanager
def _unseen_block_counts(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: a row that sees no key of a block has the log-sum 0, as if it saw a key with the score 0."""
    real = context.attend

    def fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight, into: PartialAttention) -> None:
        found = PartialAttention(q, v.shape[-1])
        if sight.pieces:
            real(q, k, v, sight, found)
        else:  # Nothing is seen, and nothing was written.
            found.out.zero_()
            found.sums.zero_()
        into.add(slice(None), 0, found.out, found.sums.masked_fill(found.sums == -torch.inf, 0.0))

    with mock.patch.object(context, "attend", fake):
        yield


@contextmanager
def _one_hop_short(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the gradients of keys and values do not take their last hop home, which is the ring's last
    message.
    """
    real, seen = Group.shift, 0

    def fake(self: Group, x: torch.Tensor, by: int) -> Shift:
        nonlocal seen
        seen += by == -1
        return Shift(DONE, x, x) if by == -1 and seen % self.size == 0 else real(self, x, by)

    with mock.patch.object(Group, "shift", fake):
        yield


def _shared(cp: int, kind: str, order: str, segments: bool) -> Case:
    keys = (("layout.cp", cp), ("context.kind", kind), ("context.order", order))
    return Case(1, 1, 1, family="llama", extra=keys, data=(("segments", segments),), cp=cp)


TP, TP_SP, DP = Case(1, 2, 1), Case(1, 2, 1, sp=True), Case(2, 1, 1)
PP = Case(1, 1, 2, schedule="gpipe", tied=False)
TIED = Case(1, 1, 2)
MATRICES = next(case for case in SHARDED if case.label == "muon" and case.tp == 2)
MATRIX_STATES = next(case for case in SHARDED if case.label == "adafactor" and case.dp == 2)
ZERO1, ZERO2, ZERO3 = (Case(2, 1, 1, label=f"zero{n}", extra=(("zero.stage", n),)) for n in (1, 2, 3))
COPIES = Case(1, 4, 1, family="llama")
ALL = Case(1, 2, 2, sp=True)
_MIXED = {case.name: case for case in EXPERTS}
EP_DP = _MIXED["dp2-tp1-pp1-1f1b-llama-tied-deepseek-ep2"]
EP_TP = _MIXED["dp1-tp2-pp1-sp-1f1b-llama-tied-deepseek-ep2-etp1"]
RECOMPUTED = replace(EP_DP, extra=(*EP_DP.extra, ("recompute.mode", "full")))


@contextmanager
def _own_slices_of_matrices(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: each rank orthogonalises its own slices of matrices, as "blockwise" Muon does."""

    def fake(self: MatrixExchange, transform: Transform) -> None:
        for slot in (slot for bucket in self.buffer.buckets for slot in bucket.slots):
            slot.grad.copy_(transform(slot.grad[None], [])[0])

    with mock.patch.object(MatrixExchange, "run", fake):
        yield


@contextmanager
def _matrices_not_gathered(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the second all-to-all, which makes matrices whole, leaves out the slices of other ranks."""
    real, seen = exchange.redistribute, 0

    def fake(before: Any, plan: Redistribution, group: Group, after: Any) -> None:
        nonlocal seen
        seen += 1
        if seen != 2:
            real(before, plan, group, after)
            return
        for tensor in after:
            tensor.zero_()
        for move in plan.kept(group.index):
            after[move.tensor][move.slices(move.target_start)] = before[move.tensor][move.slices(move.source_start)]

    with mock.patch.object(exchange, "redistribute", fake):
        yield


@contextmanager
def _matrices_of_another_owner(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: each rank takes the matrices of another owner for its own, so that no rank updates them."""
    with mock.patch.object(exchange.Gathered, "of", lambda self, plan: []):
        yield


@contextmanager
def _matrix_states_not_kept(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: an owner's states of a matrix begin anew in each step."""
    real = exchange.Gathered.of

    def fake(self: exchange.Gathered, plan: Any) -> Any:
        for state in trainer.optimizer.owned():
            state.clear()
        return real(self, plan)

    with mock.patch.object(exchange.Gathered, "of", fake):
        yield


BUGS = {
    "row-output-not-summed": Bug(TP, _all_reduce_missing("forward")),
    "column-input-gradient-not-summed": Bug(TP, _all_reduce_missing("backward")),
    "scatter-without-sum": Bug(TP_SP, _scatter_without_sum),
    "bucket-reduced-twice": Bug(DP, _second_bucket(2)),
    "bucket-not-reduced": Bug(DP, _second_bucket(0)),
    "forward-receives-swapped": Bug(PP, _receives_swapped(Op.RECV_FORWARD)),
    "backward-receives-swapped": Bug(PP, _receives_swapped(Op.RECV_BACKWARD)),
    "tied-embedding-not-summed": Bug(TIED, _reduction_missing("embedding")),
    "tied-embedding-not-summed-with-tp": Bug(ALL, _reduction_missing("embedding")),
    "norm-counts-tp-copies": Bug(TP, _copies_counted, "norm"),
    "norm-counts-tied-copies": Bug(TIED, _copies_counted, "norm"),
    "sp-norms-not-summed-over-tp": Bug(TP_SP, _reduction_missing("tp")),
    "kv-copies-not-summed": Bug(COPIES, _reduction_missing("tp.kv")),
    "norm-counts-kv-copies": Bug(COPIES, _copies_counted, "norm"),
    "mean-of-means": Bug(DP, mean_of_means(12.0)),
    "same-samples-on-every-rank": Bug(DP, _same_samples),
    "stale-gradients": Bug(DP, _stale_gradients, "overlapped"),
    "zero1-update-not-gathered": Bug(ZERO1, _gather_missing(2), "norm"),
    "zero2-scattered-twice": Bug(ZERO2, _scattered_twice),
    "zero3-shard-not-gathered": Bug(ZERO3, _gather_missing(3)),
    "zero3-scattered-twice": Bug(ZERO3, _scattered_twice),
    "zero3-stale-prefetch": Bug(ZERO3, _stale_prefetch, "norm"),
    "expert-gradients-times-ep": Bug(EP_DP, _expert_gradients_times_ep),
    "router-losses-times-tp": Bug(EP_TP, _router_losses_times_tp),
    "norm-misses-experts": Bug(EP_TP, _norm_without_experts, "norm"),
    "routing-recomputed": Bug(RECOMPUTED, _routing_recomputed),
    "bias-moved-by-own-rows": Bug(EP_DP, _bias_moved_by_own_rows, "parameters"),
    "counts-of-another-rank": Bug(EP_DP, _counts_of_another_rank),
    "loss-divided-by-cp": Bug(_shared(2, "gather", "zigzag", False), _divided_by(2)),
    "positions-not-cut": Bug(_shared(2, "ring", "zigzag", True), _positions_uncut),
    "unseen-block-counts": Bug(_shared(2, "ring", "contiguous", False), _unseen_block_counts),
    "unseen-block-counts-documents": Bug(_shared(4, "ring", "zigzag", True), _unseen_block_counts),
    "key-gradients-one-hop-short": Bug(_shared(2, "ring", "zigzag", False), _one_hop_short),
    "key-gradients-one-hop-short-of-four": Bug(_shared(4, "ring", "striped", True), _one_hop_short),
    "gradient-written-to-a-copy": Bug(DP, _written_to_a_copy),
    "matrices-not-gathered": Bug(MATRICES, _matrices_not_gathered, "parameters"),
    "matrices-updated-by-slices": Bug(MATRICES, _own_slices_of_matrices, "parameters"),
    "matrices-of-another-owner": Bug(MATRICES, _matrices_of_another_owner, "parameters"),
    "matrix-states-not-kept": Bug(MATRIX_STATES, _matrix_states_not_kept, "parameters"),
}

WIDE = set(list(BUGS)[1::2])  # Every other one is left to `make test-all`.


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] if name in WIDE else []) for name in BUGS]
)
def test_the_check_finds(name: str) -> None:
    assert_found(__name__, name, WIDE)
