"""What a compressed sum sends, in bytes: the formulas of the messages, which the planner reads too. No torch.

A sum of N elements over n ranks is cut into n pieces. Each rank compresses its n pieces and sends each to the rank that
adds it up (all_to_all); where all ranks need the whole sum, each compresses the piece it has added up and all gather
them. So there are two compressions whatever the number of ranks, and sums are never made of compressed numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.config.comm import LOW_RANK, SPARSE, CommConfig, GatherConfig, ReduceConfig
from meshwright.engine.sharding.algorithms import AlgorithmReducer
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, PlainReducer, ReducerPlan
from meshwright.spec.layout.params import ParamRecord

BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "onebit": 1}
SCALE_BYTES, INDEX_BYTES = 4, 4
RATIOS = (0.1, 0.05, 0.02)  # of top-k, that an adaptive run tries besides the least that it is given
FEW = 256  # places that one byte can tell apart
WIDE_BYTES = 4  # numbers are added up, and kept, in float32 at least


class Blocks(NamedTuple):
    """How top-k divides a piece: so many blocks of so many elements, of each of which `sent` are sent. The last may
    reach beyond the piece."""

    number: int
    size: int
    sent: int


def blocks_of(config: ReduceConfig, elements: int) -> Blocks:
    size = min(config.block, elements)
    return Blocks(-(-elements // size), size, math.ceil(config.ratio * size))


def place_bytes(config: ReduceConfig) -> int:
    """Returns the bytes of a place among those of which some are chosen: a block, or for `threshold` the piece."""
    return INDEX_BYTES if config.kind == "threshold" else 1 if config.block <= FEW else 2


def sent_elements(config: ReduceConfig, elements: int) -> int:
    """Returns how many elements of a piece are sent by their place and value."""
    if config.kind == "topk":
        blocks = blocks_of(config, elements)
        return blocks.number * blocks.sent
    return min(elements, math.ceil(config.ratio * elements))


def message_bytes(config: ReduceConfig | GatherConfig, elements: int, element_bytes: int) -> int:
    """Returns the bytes of one compressed piece of a sum, or of one rank's rounded weights."""
    if isinstance(config, ReduceConfig) and config.kind in SPARSE:
        return sent_elements(config, elements) * (place_bytes(config) + max(WIDE_BYTES, element_bytes))
    scales = 0 if config.kind == "bf16" else -(-elements // config.block)
    return elements * BITS[config.kind] // 8 + scales * SCALE_BYTES


def gathered_bytes(config: GatherConfig, elements: int, element_bytes: int, ranks: int) -> int:
    """Returns the payload of gathering so many weights, of which each of `ranks` owns a share."""
    if config.kind == "plain" or ranks == 1:
        return elements * element_bytes
    return ranks * message_bytes(config, elements // ranks, element_bytes)


@dataclass(frozen=True)
class Matrices:
    """A parameter as matrices of one shape (the experts of a block are several), and how it is sent."""

    count: int
    rows: int
    columns: int
    rank: int  # of the product that is sent in place of each; 0: it is sent as it is
    transposed: bool  # the factor with a matrix's rows is kept for the next step, and not that with its columns

    @property
    def numel(self) -> int:
        return self.count * self.rows * self.columns

    @property
    def kept(self) -> int:
        """Rows of the factor that is summed second and kept."""
        return self.rows if self.transposed else self.columns

    @property
    def first(self) -> int:
        """Elements of the first sum: of the other factor, or of the parameter itself."""
        return self.count * (self.rows + self.columns - self.kept) * self.rank or self.numel

    @property
    def second(self) -> int:
        return self.count * self.kept * self.rank


def matrices_of(record: ParamRecord, rank: int) -> Matrices:
    """Returns how a parameter is sent: as two factors of `rank` columns, where those are smaller than it is. The kept
    factor has the side along which ranks cut the matrix: it is cut like the parameter itself."""
    *counts, rows, columns = record.local_shape
    smaller = (rows + columns) * rank < rows * columns
    return Matrices(math.prod(counts), rows, columns, rank if smaller else 0, smaller and columns == record.shape[-1])


@dataclass(frozen=True)
class CompressionPlan:
    """What the planner needs to know of a compressed sum."""

    config: ReduceConfig
    mixes = True

    @property
    def align(self) -> int:
        """Blocks are those of one parameter, whatever it lies between, and no rank's piece ends inside of one."""
        return self.config.block

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        """See `ReducerPlan`. Without `records` (shares that are summed over replicas) PowerSGD sends all as it is."""
        if ranks == 1:
            return []
        if self.config.kind in LOW_RANK:
            return list(_low_rank_calls(self.config.rank, op, elements, element_bytes, records))
        message = ranks * message_bytes(self.config, elements // ranks, element_bytes)
        return [("all_to_all", message), *([("all_gather", message)] if op == "all_reduce" else [])]

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        """See `ReducerPlan`. PowerSGD leaves nothing out of a sum."""
        gathered = 0 if self.config.kind in LOW_RANK else gathered
        return (elements + gathered) * max(WIDE_BYTES, element_bytes) if self.config.feeds_back else 0


def _low_rank_calls(
    rank: int, op: str, elements: int, element_bytes: int, records: Sequence[ParamRecord]
) -> Iterator[tuple[str, int]]:
    held, wide = [matrices_of(record, rank) for record in records], max(WIDE_BYTES, element_bytes)
    if not any(each.rank for each in held):
        yield op, elements * element_bytes
        return
    yield "all_reduce", sum(each.first for each in held) * wide
    yield "all_reduce", sum(each.second for each in held) * wide


class WarmUpPlan(PlainReducer):
    """The sums of a run's first steps (`comm.reduce.warmup_steps`): plain ones, of the buffers that are there."""

    mixes = True

    def __init__(self, config: ReduceConfig | None = None) -> None:
        self.align = (config or ReduceConfig()).block


class UndecidedPlan(WarmUpPlan):
    """The sums of a run that will choose how it sends (`comm.reduce.adaptive`): plain ones until then."""

    def __init__(self, config: ReduceConfig) -> None:
        super().__init__(config)
        self._kept = CompressionPlan(config)

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        return self._kept.state_bytes(elements, element_bytes, gathered)


@dataclass(frozen=True)
class ChosenPlan(CompressionPlan):
    """The sums of a run that has chosen; its buffers are those that were there before."""

    block: int

    @property
    def align(self) -> int:
        return self.block


def planned_choice(config: ReduceConfig, choice: ReduceConfig) -> ReducerPlan:
    """Returns what a run with this adaptive config sends when it has chosen this candidate."""
    return UndecidedPlan(config) if choice.kind == "plain" else ChosenPlan(choice, config.block)


def candidates(config: ReduceConfig) -> list[ReduceConfig]:
    """Returns what `comm.reduce.adaptive` chooses from, in the order of what is left out."""
    fewer = [ReduceConfig(kind="bf16", error_feedback="true")]
    fewer += [replace(fewer[0], kind=kind, block=config.block) for kind in ("int8", "int4")]
    sparse = replace(fewer[-1], kind="topk")
    ratios = [*(ratio for ratio in RATIOS if ratio > config.ratio), config.ratio]
    return [ReduceConfig(), *fewer, *(replace(sparse, ratio=ratio) for ratio in ratios)]


def planned_reducer(config: CommConfig, node_size: int) -> ReducerPlan:
    """Returns what the planner needs to know of the reducer that a config asks for; `node_size`: ranks per node."""
    if config.algorithm.dp != "torch":
        return AlgorithmReducer(config.algorithm.dp, node_size, config.known_links, config.switches)
    return planned_compression(config.reduce)


def planned_compression(config: ReduceConfig) -> ReducerPlan:
    if config.adaptive:
        return UndecidedPlan(config)
    return PLAIN_REDUCER if config.kind == "plain" else CompressionPlan(config)
