"""The outer optimizer of replicas that train independently and synchronise rarely: local SGD and (streaming) DiLoCo.

In addition to its local masters, every replica holds the *outer* parameters, which are equal in all replicas. When a
fragment of the parameters is due, the replicas average how far each has moved from the outer parameters, weighted by
the tokens that each has learned from. The outer optimizer uses this mean as its gradient:

    d = sum over replicas of tokens / all tokens x (outer - own)        momentum = mu momentum + d
    outer = outer - lr (d + mu momentum)                                own = outer

With a delay, the sum is in flight while the replica continues for some steps, and then own = (own + outer) / 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.replicas import LocalConfig
from meshwright.engine.optim.flat import FlatState
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.sharding.buffers import OUTER, PARAM, REPLICA_STATE, Bucket, BufferKey, Slot, State, StateRows
from meshwright.engine.sharding.compression.make import replica_sums
from meshwright.engine.sharding.compression.residual import CompressingReducer
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, PendingReduction, Reducer
from meshwright.engine.sharding.remainders import PairedTensor, Values, as_tensor
from meshwright.spec.layout.layout import REPLICAS
from meshwright.spec.layout.params import stream_seed
from meshwright.spec.traffic.fragments import FragmentMoment, fragment_bounds, moment_of
from meshwright.spec.traffic.placement import Split

OWN = 0.5  # the weight of a replica's local parameters if it continued to train while the sum was in flight
MOMENTUM, ARRIVING, RESIDUAL = f"{OUTER}momentum", f"{OUTER}arriving", f"{OUTER}residual"
TOKENS, UNDER_WAY = f"{OUTER}tokens", f"{OUTER}under_way"


class PieceBuffer:
    """A stand-in for a flat buffer, for reducers. Its buckets are the fragments of this rank's shards.

    Every replica holds the whole of each fragment.
    """

    def __init__(self, key: BufferKey, replicas: Group) -> None:
        self.key, self.split = key, Split(0, 1, 0, replicas.size, replicas.index)
        self.buckets: list[Bucket] = []
        self.slots: list[Slot] = []


class Piece(NamedTuple):
    """One fragment of a shard.

    `bucket` represents it to a reducer. `low` to `high` is its range in the shard. `width` is the number of elements
    that are summed, some of which may be padding after the end of the shard.
    """

    bucket: Bucket
    low: int
    high: int
    width: int


class OuterState:
    """The outer parameters of one buffer, their momentum, and the sums in flight (`arriving`).

    Each has one tensor for each of this rank's shards.
    """

    def __init__(self, inner: FlatState, config: LocalConfig, replicas: Group) -> None:
        self.inner, self.buffer = inner, inner.buffer
        self.params = [as_tensor(master).to(inner.dtype, copy=True) for master in inner.master]
        self.momentum = [torch.zeros_like(x) for x in self.params] if config.has_momentum else []
        self.pieces: list[list[Piece]] = []
        self.arriving: list[Tensor] = []
        self.residuals: list[Tensor] = []
        stand_in = PieceBuffer(self.buffer.key, replicas)
        self.stand_in = stand_in
        for bucket, params in zip(self.buffer.buckets, self.params, strict=True):
            bounds = fragment_bounds(params.numel(), config.fragments, replicas.size)
            first = bucket.share[0]
            fragments = []
            for low, end in bounds:
                like = params[:0]
                piece = Bucket(
                    stand_in, len(stand_in.buckets), first + low, first + end, (first + low, first + end),  # type: ignore[arg-type]
                    bucket.params, bucket.grads, like, like, bucket.slots,
                )  # fmt: skip
                fragments.append(Piece(piece, low, min(end, params.numel()), end - low))
                stand_in.buckets += [piece] if end > low else []
            self.pieces.append(fragments)
            self.arriving += [params.new_zeros(bounds[-1][1])] if config.delay else []

    def keep_residuals(self, residuals: dict[Bucket, Tensor]) -> None:
        """Replace the residuals that a reducer has allocated per fragment by views of one tensor per shard."""
        for pieces, params in zip(self.pieces, self.params, strict=True):
            self.residuals.append(params.new_zeros(sum(piece.width for piece in pieces)))
            for piece in (piece for piece in pieces if piece.width):
                residuals[piece.bucket] = self.residuals[-1][piece.low :][: piece.width]

    def master(self, bucket: Bucket, piece: Piece) -> Values:
        return self.inner.master[bucket.index][piece.low : piece.high]

    def set_master(self, bucket: Bucket, piece: Piece, values: Tensor) -> None:
        """Set a range of this replica's masters, and of the model's weights."""
        master = self.master(bucket, piece)
        if isinstance(master, PairedTensor):
            master[:] = values
            return
        master.copy_(values)
        if not self.inner.in_place:
            bucket.own_params[piece.low : piece.high].copy_(values)


class OuterOptimizer:
    """Synchronises this rank with the ranks at the same position in the other replicas."""

    def __init__(
        self,
        parallel: DataParallel,
        states: Sequence[FlatState],
        config: LocalConfig,
        seed: int,
        sizes: tuple[Any, ...],
    ) -> None:
        """Allocate the outer states. `sizes` are the settings that, with the layout, determine a rank's shards."""
        self._sizes = sizes
        self.parallel, self.config, self.mesh = parallel, config, parallel.mesh
        self.replicas = parallel.mesh.group(REPLICAS)
        self.states = {state.buffer.key: OuterState(state, config, self.replicas) for state in states}
        self.reducer: Reducer = replica_sums(config, seed).make()
        summed = [state for state in self.states.values() if self._compresses(state)]
        self.reducer.prepare([state.stand_in for state in summed])  # type: ignore[misc]
        if isinstance(self.reducer, CompressingReducer) and self.reducer.residuals:
            for state in summed:
                state.keep_residuals(self.reducer.residuals)
        device = states[0].buffer.device if states else torch.device("cpu")
        # By fragment and replica: the tokens that the replica has learned from since the fragment was last summed.
        self.tokens = torch.zeros(config.fragments, self.replicas.size, dtype=torch.float64, device=device)
        self.under_way: set[int] = set()
        self._works: dict[tuple[Bucket, int], PendingReduction] = {}
        self._moment: FragmentMoment | None = None
        self._weights: dict[int, Tensor] = {}

    @staticmethod
    def _compresses(state: OuterState) -> bool:
        """Return True if a state's sums are compressed.

        Parameters that several ranks hold copies of are not, since all copies need equal sums.
        """
        return state.buffer.key.compressed and not state.buffer.key.partial

    def _shares_residuals(self, state: OuterState) -> bool:
        """Return True if another state has residuals for slices of the same tensors.

        For example, copied key-value rows have no residuals, but the query rows of the same tensor do.
        """
        names = {slot.record.name for each in self.states.values() if each.residuals for slot in each.buffer.slots}
        return any(slot.record.name in names for slot in state.buffer.slots)

    def is_due(self, step: int, last: bool) -> bool:
        moment = moment_of(self.config, step, last)
        return bool(moment.arrive or moment.begin)

    @contextmanager
    def after(self, step: int, last: bool, tokens: Tensor) -> Iterator[None]:
        """Enter this context around the update of a step, so that `updated` synchronises the fragments that are due.

        `tokens` has the number of tokens that each replica has learned from in this step.
        """
        self.tokens += tokens
        moment = moment_of(self.config, step, last)
        # A sum that should arrive may be missing: `restore` drops sums if the fragments have changed.
        self._moment = moment._replace(arrive=tuple(f for f in moment.arrive if f in self.under_way))
        for f in moment.begin:
            total = self.tokens[f].sum()
            # If no replica has learned from any token, all count equally. The device decides, so the host need not
            # wait.
            even = torch.full_like(total, 1.0 / self.replicas.size)
            self._weights[f] = torch.where(total > 0, self.tokens[f, self.replicas.index] / total, even)
            self.tokens[f] = 0.0
        self.reducer.begin_step(step, 1.0)
        try:
            yield
        finally:
            self._moment = None
        self.under_way -= set(moment.arrive)
        self.under_way |= set() if moment.at_once else set(moment.begin)

    @torch.no_grad()
    def updated(self, bucket: Bucket) -> None:
        """Handle new masters of a bucket: synchronise the fragments that are due, then publish the weights."""
        if self._moment is not None and bucket.buffer.key in self.states:
            state, moment, ledger = self.states[bucket.buffer.key], self._moment, self.mesh.ledger
            with ledger.phase("outer"), ledger.layer(None):
                for f in moment.arrive:
                    self._arrived(state, bucket, f, OWN)
                for f in moment.begin:
                    self._begin(state, bucket, f)
                    if moment.at_once:
                        self._arrived(state, bucket, f, 0.0)
        self.parallel.weights.updated(bucket)

    def _begin(self, state: OuterState, bucket: Bucket, f: int) -> None:
        piece = state.pieces[bucket.index][f]
        if not piece.width:
            return
        sums = self._sums(state, bucket, piece)
        moved = sums[: piece.high - piece.low]
        torch.sub(state.params[bucket.index][piece.low : piece.high], as_tensor(state.master(bucket, piece)), out=moved)
        moved.mul_(self._weights[f])
        # The padding takes part in the all-reduce.
        sums[moved.numel() :].zero_()
        reducer = self.reducer if self._compresses(state) else PLAIN_REDUCER
        self._works[bucket, f] = reducer.all_reduce(piece.bucket, sums, self.replicas)
        # A compressed sum takes two calls. The second one begins in the same step, whatever the delay.
        if isinstance(reducer, CompressingReducer):
            reducer.proceed()

    def _sums(self, state: OuterState, bucket: Bucket, piece: Piece) -> Tensor:
        if state.arriving:
            return state.arriving[bucket.index][piece.low :][: piece.width]
        # Without a delay the sum is used at once, so it needs no lasting memory.
        self._scratch = state.params[bucket.index].new_empty(piece.width)
        return self._scratch

    def _arrived(self, state: OuterState, bucket: Bucket, f: int, own: float) -> None:
        piece = state.pieces[bucket.index][f]
        if not piece.width:
            return
        self._wait(bucket, f)
        sums = state.arriving[bucket.index][piece.low :] if state.arriving else self._scratch
        mean = sums[: piece.high - piece.low]
        # The two copies of tied embeddings may get sums that differ in the last bit, so they are averaged.
        for axis in {"embedding"} & set(bucket.buffer.key.partial):
            group = self.mesh.group(axis)
            group.all_reduce(mean)
            mean.div_(group.size)
        outer = state.params[bucket.index][piece.low : piece.high]
        if state.momentum:
            momentum = state.momentum[bucket.index][piece.low : piece.high]
            momentum.mul_(self.config.momentum).add_(mean)
            mean.add_(momentum, alpha=self.config.momentum)
        outer.sub_(mean, alpha=self.config.lr)
        state.set_master(bucket, piece, outer.lerp(as_tensor(state.master(bucket, piece)), own) if own else outer)

    def _wait(self, bucket: Bucket, f: int) -> None:
        if (work := self._works.pop((bucket, f), None)) is not None:
            work.wait()

    def tensors(self, inner: Iterator[State | MatrixState]) -> Iterator[State | MatrixState]:
        """Yield the states that a checkpoint must hold.

        `param` are the outer parameters, the one model that all replicas train. The local states of each replica
        (`inner`, from its optimizer) have one row per replica.
        """
        for bucket, f in list(self._works):
            self._wait(bucket, f)
        rows = StateRows(self.replicas.index, self.replicas.size)
        for own in inner:
            yield own._replace(name=REPLICA_STATE + own.name, replica=rows) if own.buffer.key.trained else own
        for state in self.states.values():
            yield State(PARAM, state.buffer, state.params)
            sizes = [x.numel() for x in state.params]
            if state.momentum:
                yield State(MOMENTUM, state.buffer, state.momentum)
            if state.arriving:
                cut = [x[:size] for x, size in zip(state.arriving, sizes, strict=True)]
                yield State(ARRIVING, state.buffer, cut)
            if state.residuals:
                cut = [x[:size] for x, size in zip(state.residuals, sizes, strict=True)]
                yield State(RESIDUAL, state.buffer, cut, replica=rows, summed=True)
            elif self._shares_residuals(state):
                # A checkpoint only holds whole tensors, so slices that are not compressed get residuals of zero.
                zeros = [torch.zeros_like(x) for x in state.params]
                yield State(RESIDUAL, state.buffer, zeros, replica=rows, summed=True)

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that persist from step to step."""
        for state in self.states.values():
            yield from (*state.params, *state.momentum, *state.arriving, *state.residuals)

    def counters(self) -> dict[str, float | None]:
        """Return the numbers that are saved in addition to the tensors."""
        counters: dict[str, float | None] = {f"{UNDER_WAY}.{f}": self._fingerprint for f in self.under_way}
        for f, row in enumerate(self.tokens.tolist()):
            counters |= {f"{TOKENS}.{f}.{replica}": count for replica, count in enumerate(row)}
        return counters

    @property
    def _fingerprint(self) -> float:
        """A number that changes if fragments are other elements or have another schedule. It is equal on all ranks."""
        c = self.config
        bounds = (self.mesh.layout, *self._sizes) if c.fragments > 1 else ()
        # 48 bits are exact in a float64.
        return float(stream_seed(c.steps, c.fragments, c.delay, *bounds) % 2**48)

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Restore the numbers that `counters` returned.

        Sums in flight are dropped if the fragments have other bounds now. Nothing is lost: the replicas' masters still
        contain the progress. Tokens are counted anew if the numbers of replicas or fragments have changed.
        """
        shape, saved = self.tokens.shape, {key for key in counters if key.startswith(f"{TOKENS}.")}
        keys = [f"{TOKENS}.{f}.{replica}" for f in range(shape[0]) for replica in range(shape[1])]
        known = [float(counters[key] or 0.0) for key in keys] if saved == set(keys) else [0.0] * len(keys)
        self.tokens.copy_(torch.tensor(known, dtype=torch.float64).view(shape))
        fragments = range(self.config.fragments)
        self.under_way = {f for f in fragments if counters.get(f"{UNDER_WAY}.{f}") == self._fingerprint}
