"""The sizes of compressed messages in bytes, which the planner uses too. Does not import torch.

A sum of N elements over n ranks is cut into n slices. Each rank compresses its n slices and sends each to the rank that
adds it up (all-to-all). If all ranks need the whole sum, each compresses the slice that it has summed, and all gather
the slices. So there are two compressions whatever the number of ranks, and sums are computed in full precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.config.comm import GatherConfig, ReduceConfig
from meshwright.engine.sharding.reducers import CollectiveSums, PlainReducer, ReducerPlan
from meshwright.plugins import load_object
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.traffic.ledger import OPERATIONS

BITS = {"fp8": 8, "int8": 8, "int4": 4, "onebit": 1}
SCALE_BYTES, INDEX_BYTES = 4, 4
RATIOS = (0.1, 0.05, 0.02)  # the top-k ratios that an adaptive run tries in addition to the configured minimum
BYTE_POSITIONS = 256  # the number of positions that one byte can address
WIDE_BYTES = 4  # Numbers are summed and stored in float32 or wider.


class Blocks(NamedTuple):
    """The division of a slice for top-k: `number` blocks of `size` elements, of each of which `sent` are sent.

    The last block may extend beyond the slice.
    """

    number: int
    size: int
    sent: int


def blocks_of(config: ReduceConfig, elements: int) -> Blocks:
    size = min(config.block, elements)
    return Blocks(-(-elements // size), size, math.ceil(config.ratio * size))


def message_bytes(config: ReduceConfig | GatherConfig, elements: int, element_bytes: int) -> int:
    """Return the bytes of one compressed slice of a sum, or of one rank's rounded weights."""
    size = config.facts.message_bytes
    found: int = (load_object(size) if isinstance(size, str) else size)(config, elements, element_bytes)
    return found


def upper_half_bytes(config: ReduceConfig | GatherConfig, elements: int, element_bytes: int) -> int:
    return 2 * elements


def scaled_bytes(config: ReduceConfig | GatherConfig, elements: int, element_bytes: int) -> int:
    return elements * BITS[config.kind] // 8 + -(-elements // config.block) * SCALE_BYTES


def place_bytes(config: ReduceConfig) -> int:
    """Return the bytes of an element's position in its block."""
    return 1 if config.block <= BYTE_POSITIONS else 2


def topk_bytes(config: ReduceConfig, elements: int, element_bytes: int) -> int:
    """Return the bytes of the elements that are sent, each as a position in its block and a value."""
    blocks = blocks_of(config, elements)
    return blocks.number * blocks.sent * (place_bytes(config) + max(WIDE_BYTES, element_bytes))


def chosen_elements(config: ReduceConfig, elements: int) -> int:
    """Return the number of elements of a slice that `threshold` sends."""
    return min(elements, math.ceil(config.ratio * elements))


def threshold_bytes(config: ReduceConfig, elements: int, element_bytes: int) -> int:
    return chosen_elements(config, elements) * (INDEX_BYTES + max(WIDE_BYTES, element_bytes))


def gathered_bytes(config: GatherConfig, elements: int, element_bytes: int, ranks: int) -> int:
    """Return the payload bytes of gathering this many weights, of which each of `ranks` owns a shard."""
    if not config.rounds or ranks == 1:
        return elements * element_bytes
    return ranks * message_bytes(config, elements // ranks, element_bytes)


@dataclass(frozen=True)
class Matrices:
    """A parameter as matrices of one shape (the experts of a block are several), and the form in which it is sent."""

    count: int
    rows: int
    columns: int
    rank: int  # of the product that replaces each matrix; 0: it is sent uncompressed
    transposed: bool  # The factor of the rows is saved for the next step, instead of the factor of the columns.

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def kept(self) -> int:
        """The rows of the factor that is summed second and saved for the next step."""
        return self.rows if self.transposed else self.columns

    @property
    def first(self) -> int:
        """The number of elements in the first sum: of the other factor, or of the parameter itself."""
        return self.count * (self.rows + self.columns - self.kept) * self.rank or self.numel

    @property
    def second(self) -> int:
        return self.count * self.kept * self.rank


def matrices_of(record: ParamRecord, rank: int) -> Matrices:
    """Return the form in which a parameter is sent: as two factors of `rank` columns if these are smaller than it.

    The saved factor belongs to the side along which the matrix is sharded, so it is sharded like the parameter.
    """
    *counts, rows, columns = record.local_shape
    smaller = (rows + columns) * rank < rows * columns
    return Matrices(math.prod(counts), rows, columns, rank if smaller else 0, smaller and columns == record.shape[-1])


@dataclass(frozen=True)
class CompressionPlan(CollectiveSums):
    """The part of a compressing reducer that the planner uses."""

    config: ReduceConfig
    mixes = True

    @property
    def align(self) -> int:
        """The block size, so that a block never spans two parameters or two ranks' slices."""
        return self.config.block

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        """Return the calls of a sum (see `ReducerPlan`).

        Without `records`, when shards are summed over replicas, PowerSGD does not compress.
        """
        if ranks == 1:
            return []
        if self.config.facts.sends_factors:
            return list(_low_rank_calls(self.config.rank, op, elements, element_bytes, records))
        message = ranks * message_bytes(self.config, elements // ranks, element_bytes)
        return [("all_to_all", message), *([("all_gather", message)] if OPERATIONS[op].rounds == 2 else [])]

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        """Return the bytes of residuals (see `ReducerPlan`). PowerSGD has none for sums."""
        gathered = 0 if self.config.facts.sends_factors else gathered
        return (elements + gathered) * max(WIDE_BYTES, element_bytes) if self.config.feeds_back else 0


def _low_rank_calls(
    rank: int, op: str, elements: int, element_bytes: int, records: Sequence[ParamRecord]
) -> Iterator[tuple[str, int]]:
    forms = [matrices_of(record, rank) for record in records]
    wide = max(WIDE_BYTES, element_bytes)
    if not any(form.rank for form in forms):
        yield op, elements * element_bytes
        return
    yield "all_reduce", sum(form.first for form in forms) * wide
    yield "all_reduce", sum(form.second for form in forms) * wide


class WarmUpPlan(PlainReducer):
    """The plan of a run's first steps (`comm.reduce.warmup_steps`): plain sums of buffers laid out for compression."""

    mixes = True

    def __init__(self, config: ReduceConfig | None = None) -> None:
        self.align = (config or ReduceConfig()).block


class UndecidedPlan(WarmUpPlan):
    """The plan of an adaptive run (`comm.reduce.adaptive`) before its choice: plain sums."""

    def __init__(self, config: ReduceConfig) -> None:
        super().__init__(config)
        self._compressed = CompressionPlan(config)

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        return self._compressed.state_bytes(elements, element_bytes, gathered)


@dataclass(frozen=True)
class ChosenPlan(CompressionPlan):
    """The plan of an adaptive run after its choice. Its buffers keep the alignment from before the choice."""

    block: int

    @property
    def align(self) -> int:
        return self.block


def planned_choice(config: ReduceConfig, choice: ReduceConfig) -> ReducerPlan:
    """Return the plan of a run with this adaptive config that has chosen this candidate."""
    return ChosenPlan(choice, config.block) if choice.compresses else UndecidedPlan(config)


def candidates(config: ReduceConfig) -> list[ReduceConfig]:
    """Return the candidates of `comm.reduce.adaptive`, from the mildest to the harshest."""
    fewer = [ReduceConfig(kind="bf16", error_feedback="true")]
    fewer += [replace(fewer[0], kind=kind, block=config.block) for kind in ("int8", "int4")]
    sparse = replace(fewer[-1], kind="topk")
    ratios = [*(ratio for ratio in RATIOS if ratio > config.ratio), config.ratio]
    return [ReduceConfig(), *fewer, *(replace(sparse, ratio=ratio) for ratio in ratios)]
