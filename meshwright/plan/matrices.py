"""Predicts the bytes and seconds of updating whole matrices: ranks exchange shards to make matrices whole. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshwright.engine.optim.matrices import (
    FILL,
    TOGETHER,
    BucketPlan,
    MatrixParameter,
    cut_axis,
    plan_rounds,
    record_is_cut,
)
from meshwright.engine.optim.rule import MatrixRule, rules_of
from meshwright.plan.cluster import Cluster
from meshwright.plan.efficiency import collective_seconds
from meshwright.plan.held import Buffer, Packing, packing_of, records_once
from meshwright.plan.job import Job, ranks_per_node, remember
from meshwright.plan.switches import adapter_rate_left
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.part import SINGLE_RANK
from meshwright.spec.traffic.placement import shard_axes


def matrix_calls(job: Job, pp_rank: int) -> Iterator[tuple[str, int]]:
    """Yield (axis, bytes sent) for each all_to_all of a rank around an update."""
    for buffer, _, axes, plan in _plans(job, pp_rank):
        yield from ((axes[hop], sent * buffer.gradient) for hop, sent in plan.calls())


@remember("zero")
def owned_state_bytes(job: Job, pp_rank: int) -> int:
    """Return the bytes of the states that a rank keeps for the matrices that it owns. They are never offloaded."""
    if not any(rule.matrix_states(1, 1) for rule in _matrix_rules(job).values()):
        return 0
    return sum(
        state_elements(rule, *plan.matrices[number].shape[-2:]) * max(4, buffer.gradient)
        for buffer, rule, _, plan in _plans(job, pp_rank)
        for number in plan.mine
    )


def whole_state_bytes(job: Job) -> int:
    """Return the bytes of the same states of all matrices of the model, each once."""
    rules = _matrix_rules(job)
    return sum(
        math.prod(record.shape[:-2]) * state_elements(rules[record.update_group], rows, record.shape[-1])
        for record in job.model.records(SINGLE_RANK).values()
        for rows in (record.matrices if record.trained else ())
    ) * max(4, job.states.grad)  # fmt: skip


def state_elements(rule: MatrixRule, rows: int, columns: int) -> int:
    """Return the number of elements of the states that the owner of a matrix keeps."""
    return sum(math.prod(shape) for shape in rule.matrix_states(rows, columns).values())


def _plans(job: Job, pp_rank: int) -> Iterator[tuple[Buffer, MatrixRule, tuple[str, str], BucketPlan]]:
    """Yield each bucket of matrices of a rank: its buffer, its rule, the axes that cut it, and the rank's plan.

    The rank is `job.rank` or the first rank of the pipeline stage, since the plan depends on the matrices that a rank
    owns.
    """
    layout, config = job.layout, job.config
    if not config.optimizer.whole_matrices:
        return
    rules = rules_of(config.optimizer)
    rank = layout.rank_at(pp=pp_rank) if job.rank is None else job.rank
    # Ranks along the axis that cuts matrices hold the other parts of each matrix and have different records for them.
    peers = {
        axis: [_packing_at(job, pp_rank, other).params for other in layout.group(axis, rank) or (rank,)]
        for axis in ("tp", "etp")
    }
    for buffer in _packing_at(job, pp_rank, rank).buffers:
        rule = rules[buffer.update.group].matrices
        if not buffer.update.matrices or rule is None:
            continue
        axes = (buffer.division(layout, config.zero).shards or "", cut_axis(buffer.data_axes))
        buckets: list[tuple[int, list[MatrixParameter]]] = [(size, []) for size in buffer.buckets]
        for number, bucket, start in zip(buffer.params, buffer.places, buffer.starts, strict=True):
            records = tuple(params[number].record for params in peers[axes[1]])
            buckets[bucket][1].append(MatrixParameter(start, records))
        size, index = zip(*(_place(job, axis, rank) for axis in axes), strict=True)
        rounds = plan_rounds(buckets, (size[0], index[0]), (size[1], index[1]), rule.matrix_flops)
        yield from ((buffer, rule, axes, plan) for plans in rounds for plan in plans)


def _packing_at(job: Job, pp_rank: int, rank: int) -> Packing:
    """Return the buffers of one particular rank of a pipeline stage."""
    return packing_of(replace(job, rank=rank), pp_rank)


def _place(job: Job, axis: str, rank: int) -> tuple[int, int]:
    """Return (size of a rank's group along an axis, the rank's index in it)."""
    ranks = job.layout.group(axis, rank) if axis and job.layout.size(axis) > 1 else (rank,)
    return len(ranks), ranks.index(rank)


def matrix_bytes(job: Job, pp_rank: int) -> float:
    """Return an estimate of the workspace of an update, in bytes.

    A rank holds the parameters and the whole matrices of a round, and the temporaries of the matrices that it
    transforms at once.
    """
    return max((_rule_bytes(job, pp_rank, number) for number in _matrix_rules(job)), default=0.0)


def _matrix_rules(job: Job) -> dict[int, MatrixRule]:
    """Return the rules of whole matrices by the number of their group."""
    numbered = enumerate(rules_of(job.config.optimizer))
    return {number: group.matrices for number, group in numbered if group.matrices is not None}


def _rule_bytes(job: Job, pp_rank: int, group: int) -> float:
    """Return the bytes of `matrix_bytes` for the matrices of one group."""
    rule = _matrix_rules(job)[group]
    element = job.states.grad
    share, shapes = 0.0, set[tuple[int, int]]()
    for record, count, ranks in _shared_records(job, pp_rank, group):
        share += count * math.prod(record.shape[-2:]) * math.prod(record.local_shape[:-2]) / ranks
        shapes |= {(rows, record.shape[-1]) for rows in record.matrices}
    largest = max((rows * columns for rows, columns in shapes), default=0)
    # A round ends once each rank has the work of FILL of its largest matrices, so a rank holds at most one more.
    held = max(largest, min(share, (FILL + 1) * largest))

    def worked(rows: int, columns: int) -> float:
        together = max(1, int(min(TOGETHER, held)) // (rows * columns))
        return together * (rows * columns * element + rule.matrix_bytes(rows, columns, element))

    return 2 * held * element + max((worked(*shape) for shape in shapes), default=0.0)


def _shared_records(job: Job, pp_rank: int, group: int) -> Iterator[tuple[ParamRecord, int, int]]:
    """Yield (record, number of such parameters, ranks that share the work) for a group's parameters with matrices."""
    for record, count in records_once(job.rank_units(pp_rank), job.at):
        if record.matrices and record.update_group == group:
            shards = shard_axes(job.layout, job.config.zero, record.data_axes).shards
            axes = [axis for axis in (shards, cut_axis(record.data_axes)) if axis]
            yield record, count, math.prod(job.layout.size(axis) for axis in axes)


def matrix_seconds(job: Job, cluster: Cluster) -> float:
    """Return the seconds of making matrices whole and transforming them, for the pipeline rank with the most work.

    Matrices are shared evenly if there are enough of them. The passes over elements cost the same as AdamW's and are
    not included.
    """
    if not job.config.optimizer.whole_matrices:
        return 0.0
    return max(
        sum(_stage_seconds(job, cluster, rule, rank, group) for group, rule in _matrix_rules(job).items())
        for rank in set(job.representative_ranks)
    )


def _stage_seconds(job: Job, cluster: Cluster, rule: MatrixRule, pp_rank: int, group: int) -> float:
    """Return the seconds of `matrix_seconds` for one pipeline rank."""
    layout = job.layout
    precision = "fp64" if job.config.train.precision_facts.is_double else rule.precision
    rate = cluster.device.rate(precision) * cluster.efficiency.product
    mean = largest = 0.0
    sent = dict[str, float]()
    for record, count, ranks in _shared_records(job, pp_rank, group):
        each = [rule.matrix_flops(rows, record.shape[-1]) for rows in record.matrices]
        mean += count * math.prod(record.local_shape[:-2]) * sum(each) / ranks
        largest = max(largest, *each)
        shards = shard_axes(layout, job.config.zero, record.data_axes).shards
        cut = cut_axis(record.data_axes) if record_is_cut(record) else ""
        share = record.numel / (layout.size(shards) if shards else 1)
        for axis in (axis for axis in (shards, cut) if axis and layout.size(axis) > 1):
            sent[axis] = sent.get(axis, 0.0) + 2 * count * share * job.states.grad
    exchanged = (
        collective_seconds(
            cluster, "all_to_all", payload, layout.size(axis), ranks_per_node(layout, axis),
            adapter_rate_left(cluster, job, axis, "all_to_all"),
        )
        for axis, payload in sent.items()
    )  # fmt: skip
    # A matrix is transformed by one rank, so the update takes at least as long as the largest matrix.
    return max(mean, largest) / rate + sum(exchanged)
