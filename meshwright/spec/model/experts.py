"""The mixture of experts: a router that sends every token to a few of many MLPs, and these MLPs. No torch.

Every rank routes its own rows; under tp these are its part of the tokens. The rows are gathered over etp, since each
etp rank holds a shard of every expert, and sent over ep to the ranks that hold the experts. The results return the same
way and are summed. Therefore rows travel the same way whatever tp, cp and dp are, and no gradient depends on these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from meshwright.spec.layout.params import EP_ACROSS, EP_NODE, Box, Init, ParamRecord, whole
from meshwright.spec.model.linear import ZEROS
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kernels,
    LinearPieces,
    LossTerm,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)

EXPERT_DATA_AXES = "edp"  # an expert's gradient is a partial sum over these axes
INDEX_BYTES = 8  # bytes of the number of a row or an expert


@dataclass(frozen=True)
class Routing:
    """The keys of `model.experts` that decide how tokens choose experts."""

    count: int
    top_k: int
    scores: str  # softmax or sigmoid
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    bias: bool = False
    aux_loss: float = 0.0
    aux_level: str = "sequence"
    z_loss: float = 0.0
    capacity: float | None = None

    @property
    def has_losses(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0

    def room(self, seq: int) -> int:
        """Return the most tokens that each expert takes from one sequence, if the capacity is limited."""
        assert self.capacity is not None
        return min(seq, math.ceil(seq * self.top_k / self.count * self.capacity))

    def places(self, rows: int, part: int, seq: int) -> int:
        """Return the number of slots that each expert needs for `rows` consecutive rows of a rank.

        The rank holds `part` rows of each sequence of `seq` tokens. In the worst case, an expert's choice from a
        sequence only consists of rows of this rank.
        """
        whole, rest = divmod(rows, part)
        if not rest:
            return whole * min(part, self.room(seq))
        return min(rows, (1 if part % rows == 0 else whole + 2) * self.room(seq))


def exchange_axes(at: Coordinate) -> tuple[str, ...]:
    """Return the axes over which rows travel to their experts, in this order: ep, or its two parts."""
    return (EP_NODE, EP_ACROSS) if at.size(EP_ACROSS) > 1 else ("ep",)


class RowExchange(NamedTuple):
    """One all_to_all over ep, with the bytes of each row. Rows travel to their experts or, with `back`, from there."""

    phase: str
    row_bytes: int
    back: bool = False

    @property
    def forward(self) -> bool:
        return self.phase == "forward"


@dataclass(frozen=True)
class ExpertsPart(Part):
    """The router, this rank's experts, and the shared experts that process all tokens."""

    routing: Routing
    mlp: MLPPart  # one expert; its `ffn` is cut over etp
    shared: MLPPart | None = None

    has_experts = True

    def linears(self) -> tuple[LinearPieces, ...]:
        """Return the linear layers of each expert. The router and the shared experts have no adapters."""
        return tuple(
            LinearPieces(linear.name, linear.cut, tuple((f"expert_{key}", rows) for key, rows in linear.pieces), True)
            for linear in self.mlp.linears()
        )

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        shared = self.shared.matrices() if self.shared is not None else {}
        own = {"router.weight": (self.routing.count,)} | {f"shared.{name}": rows for name, rows in shared.items()}
        return super().matrices() | own

    def experts(self, at: Coordinate) -> int:
        """Return the number of experts of one rank."""
        return self.routing.count // at.size("ep")

    def width(self, at: Coordinate) -> int:
        """Return the number of inner features of an expert on one rank."""
        return self.mlp.ffn // at.size("etp")

    def own_rows(self, at: Coordinate, batch: MicroBatch) -> int:
        """Return the number of rows that a rank routes."""
        return batch.tokens(at) // at.size("tp")

    def gathered_rows(self, at: Coordinate, batch: MicroBatch) -> int:
        """Return the number of rows of all ranks that hold shards of the same experts."""
        return self.own_rows(at, batch) * at.size("etp")

    def sent_rows(self, at: Coordinate, batch: MicroBatch) -> int:
        """Return the number of rows that a rank sends to experts.

        Equally many arrive if the experts are balanced. With a capacity, some of the rows may be empty slots.
        """
        if self.routing.capacity is None:
            return self.gathered_rows(at, batch) * self.routing.top_k
        # The ranks whose rows are gathered count the slots together if etp equals tp, and separately otherwise.
        part = batch.seq // at.size("cp")
        whole = at.cuts_experts_alike
        rows = self.gathered_rows(at, batch) if whole else self.own_rows(at, batch)
        return self.routing.count * self.routing.places(rows, part, batch.seq) * (1 if whole else at.size("etp"))

    def computed_rows(self, at: Coordinate, batch: MicroBatch) -> int:
        """Return the number of rows that the experts of a rank compute: as many as it sends, or more on the busiest
        rank."""
        return round(self.sent_rows(at, batch) * (batch.imbalance if self.uneven(at) else 1.0))

    def uneven(self, at: Coordinate) -> bool:
        """Return whether ranks may receive different numbers of rows."""
        return at.size("ep") > 1 and self.routing.capacity is None

    @property
    def idle(self) -> int:
        weights = (3 if self.mlp.is_gated else 2) * self.mlp.ffn * self.mlp.hidden
        return (self.routing.count - self.routing.top_k) * weights

    def records(self, at: Coordinate, name: str) -> Records:
        count, hidden = self.routing.count, self.mlp.hidden
        # Every tp rank routes different rows, so the router's gradient is a partial sum over tp.
        axes = ("tp",) if at.size("tp") > 1 else ()
        router = f"{name}.router"
        records = {
            "router.weight": whole(f"{router}.weight", (count, hidden), self.mlp.init, copies=axes, partial=axes)
        }
        if self.routing.bias:
            records["router.bias"] = whole(
                f"{router}.bias", (count,), ZEROS, decay=False, copies=axes, trained=False, wide=True
            )
        width, local = self.width(at), self.experts(at)
        first, inside = at.index("ep") * local, at.index("etp") * width
        # A gated first product stacks gate and up, and etp cuts each of them.
        halves = 2 if self.mlp.is_gated else 1
        up = [
            Box((first, half * self.mlp.ffn + inside, 0), (local, width, hidden), (0, half * width, 0))
            for half in range(halves)
        ]
        down = [Box((first, 0, inside), (local, hidden, width), (0, 0, 0))]
        key = self.mlp.first
        shape, local_shape = (count, halves * self.mlp.ffn, hidden), (local, halves * width, hidden)
        records[f"{key}.weight"] = _expert_record(f"{name}.{key}.weight", shape, local_shape, up, self.mlp.init)
        shape, local_shape = (count, hidden, self.mlp.ffn), (local, hidden, width)
        records["down.weight"] = _expert_record(f"{name}.down.weight", shape, local_shape, down, self.mlp.out_init)
        if self.shared is not None:
            shared = self.shared.records(at, f"{name}.shared")
            records |= {f"shared.{own}": record for own, record in shared.items()}
        return records

    def losses(self) -> Iterator[LossTerm]:
        if self.routing.aux_loss:
            yield LossTerm("balance", self.routing.aux_loss)
        if self.routing.z_loss:
            yield LossTerm("router z", self.routing.z_loss)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        rows = self.computed_rows(at, batch)
        width = self.width(at)
        hidden = self.mlp.hidden
        local = self.experts(at)
        up = 2 * width if self.mlp.is_gated else width
        products = (
            Product("router", self.own_rows(at, batch), self.routing.count, hidden, precise=True),
            Product("expert up", rows, up, hidden, precise=kernels.own, groups=local),
            Product("expert down", rows, hidden, width, precise=kernels.own, groups=local),
        )
        # Rows are copied to the experts and summed on their way back. In between, the activation reads and writes.
        moved = float(rows * (up + width + 3 * hidden) * batch.element)
        routed = Work(products, moved=moved, kernels=24)
        return routed + self.shared.work(at, batch, replace(kernels, pieces=1)) if self.shared is not None else routed

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of experts that receive equal numbers of rows.

        Over etp, the rows are gathered and the results summed, as in a column-parallel and a row-parallel product. The
        numbers and the weights of the chosen experts are gathered too. Over ep, ranks exchange the number of rows of
        each expert, then the rows and their weights and back the results, and the same for their gradients. If rows are
        exchanged inside a node first (`comm.algorithm.ep`), each of these is two calls with the same payload.
        """
        yield from self._dispatch_calls(at, batch)
        yield from self._count_calls(at, batch)
        rows = self.sent_rows(at, batch)
        axes = exchange_axes(at)
        for axis in axes if self.count_bytes else ():
            yield Collective("forward", axis, "all_to_all", self.count_bytes, replayed=True)
        for exchange, axis in product(self.exchanges(batch), axes):
            yield Collective(exchange.phase, axis, "all_to_all", rows * exchange.row_bytes, routed=self.uneven(at))
        if self.routing.has_losses:
            sequences = batch.sequences if self.routing.aux_level == "sequence" else 1
            sums = sequences * (2 * self.routing.count + 2) * batch.wide
            yield Collective("forward", "tp-cp", "all_reduce", sums)
        if self.shared is not None:
            yield from self.shared.collectives(at, batch)

    @property
    def count_bytes(self) -> int:
        """The bytes of the counts of a rank's rows for every expert; 0 if the capacity fixes these counts."""
        return self.routing.count * INDEX_BYTES if self.routing.capacity is None else 0

    def exchanges(self, batch: MicroBatch) -> tuple[RowExchange, ...]:
        """Return the exchanges of rows over ep: rows and their weights travel to the experts, results travel back, and
        the gradients of all three travel in the opposite directions."""
        row = self.mlp.hidden * batch.element
        return (
            RowExchange("forward", row), RowExchange("forward", batch.wide), RowExchange("forward", row, True),
            RowExchange("backward", row), RowExchange("backward", batch.wide, True), RowExchange("backward", row, True),
        )  # fmt: skip

    def _dispatch_calls(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls that bring rows to all ranks that hold a shard of an expert, and results back."""
        row = self.mlp.hidden * batch.element
        same = at.cuts_experts_alike
        whole = batch.tokens(at) * row
        rows = self.gathered_rows(at, batch)
        # If every tp rank has all tokens and a shard of every expert, no rows move, and the results are all-reduced.
        if same and not at.splits_tokens:
            yield Collective("forward", "tp", "all_reduce", whole)
            yield Collective("backward", "tp", "all_reduce", whole)
        else:
            yield Collective("forward", "etp", "all_gather", rows * row)
            yield Collective("forward", "etp", "reduce_scatter", rows * row)
            yield Collective("backward", "etp", "all_gather", rows * row)
            yield Collective("backward", "etp", "reduce_scatter", rows * row)
            if not at.splits_tokens:
                yield Collective("forward", "tp", "all_gather", whole)
                yield Collective("backward", "tp", "all_gather", whole)
        yield Collective("forward", "etp", "all_gather", rows * self.routing.top_k * INDEX_BYTES, replayed=True)
        yield Collective("forward", "etp", "all_gather", rows * self.routing.top_k * batch.wide)
        yield Collective("backward", "etp", "reduce_scatter", rows * self.routing.top_k * batch.wide)

    def _count_calls(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls by which ranks that share a sequence learn the experts chosen by its other tokens.

        Only a capacity needs them. They go over tp, unless the rows are gathered there anyway or each rank has whole
        sequences, and over cp.
        """
        if self.routing.capacity is None:
            return
        choice = self.routing.top_k * INDEX_BYTES
        cp = at.size("cp")
        shared = cp > 1 or self.own_rows(at, batch) % batch.seq > 0
        if shared and not at.cuts_experts_alike:
            yield Collective("forward", "tp", "all_gather", batch.tokens(at) * choice, replayed=True)
        yield Collective("forward", "cp", "all_gather", batch.sequences * batch.seq * choice, replayed=True)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the tensors that the router, the exchange of rows and the experts save."""
        e, wide, k, count = batch.element, batch.wide, self.routing.top_k, self.routing.count
        own, gathered, rows = self.own_rows(at, batch), self.gathered_rows(at, batch), self.computed_rows(at, batch)
        up = (2 if self.mlp.is_gated else 1) * self.width(at)
        row = self.mlp.hidden * e
        # Every tp rank then has all tokens, and routes a part of them.
        whole = at.cuts_experts_alike and not at.splits_tokens
        held = batch.tokens(at) if whole else own
        yield SavedTensor("router input", held * row)
        yield SavedTensor("scores", own * (count + 3 * k) * wide + own * k * INDEX_BYTES)
        if at.size("ep") > 1:
            yield SavedTensor("expert inputs", rows * row)
        elif gathered > held:
            yield SavedTensor("expert inputs", gathered * row)
        yield SavedTensor("expert features", rows * (up * e + wide))
        yield SavedTensor("expert rows", 3 * rows * INDEX_BYTES)
        if self.shared is not None:
            yield from self.shared.saved(at, batch, replace(kernels, pieces=1))

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the rows' gradients, both as they arrive and in the experts' order, and of the gradient
        of the last product's input. An activation that is not gated also holds its own gradient."""
        copies = 2 if at.size("ep") > 1 else 1
        features = self.width(at) * (1 if self.mlp.is_gated else 4)
        return float(self.computed_rows(at, batch) * (copies * self.mlp.hidden + features) * batch.element)


def _expert_record(
    name: str, shape: tuple[int, ...], local: tuple[int, ...], boxes: list[Box], init: Init
) -> ParamRecord:
    return ParamRecord(name, shape, local, tuple(boxes), init, data_axes=EXPERT_DATA_AXES)
