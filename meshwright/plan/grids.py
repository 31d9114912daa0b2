"""Compares the cost of a block under 1D, 2D, 2.5D and 3D tensor parallelism of the same ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.config.memory import Recomputed
from meshwright.config.rules import PLANNING_RULES, first_broken_rule
from meshwright.errors import UserError, divisors
from meshwright.plan.activations import saved_by_unit
from meshwright.plan.cluster import Cluster
from meshwright.plan.compute import setting_of, unit_time
from meshwright.plan.held import unit_records
from meshwright.plan.job import Job
from meshwright.plan.stack import own_stack
from meshwright.show.chart import Chart
from meshwright.show.terminal import table
from meshwright.show.units import seconds, size
from meshwright.spec.layout.grid import GRID_AXES, Grid
from meshwright.spec.model.part import BlockUnit
from meshwright.spec.traffic.ledger import wire_bytes

PLAIN: dict[str, Any] = {"tp_grid": (), "tp_kind": "", "tp_keep_gathered": False}


@dataclass(frozen=True)
class BlockCost:
    """The cost of a block for one rank under one way to shard it. All numbers but `seconds` are in bytes."""

    name: str
    job: Job
    products: int  # Sent per micro-batch for products.
    norms: int  # Sent per micro-batch for norms.
    gradients: int  # Sent once per step for the gradients of copied weights.
    weights: int
    activations: float  # Saved for backward.
    seconds: float = 0.0

    @property
    def wire(self) -> int:
        """All bytes that the rank sends."""
        return self.products + self.norms + self.gradients

    def as_json(self) -> dict[str, Any]:
        layout = self.job.config.layout
        return {
            "name": self.name, "tp": layout.tp, "tp_grid": list(layout.tp_grid), "tp_kind": layout.tp_kind,
            "sequence_parallel": layout.sequence_parallel, "keeps_gathered": layout.tp_keep_gathered,
            "products_bytes": self.products, "norms_bytes": self.norms, "gradients_bytes": self.gradients,
            "weights_bytes": self.weights, "activations_bytes": self.activations, "seconds": self.seconds,
        }  # fmt: skip


def grids_of(tp: int) -> Iterator[Grid]:
    """Yield every grid of `tp` ranks with more than one rank along each of its axes."""
    for row in divisors(tp):
        for col in divisors(tp // row):
            depth = tp // row // col
            if min(row, col) > 1 and depth == 1:
                yield Grid("2d", row, col)
            elif min(row, col, depth) > 1:
                yield Grid("2.5d", row, col, depth)
                yield Grid("3d", row, col, depth)


def ways_of(tp: int, keeps: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the layout keys of every way to shard a block over `tp` ranks.

    `keeps` adds grids that save gathered factors for backward instead of gathering them again.
    """
    yield "1D", {**PLAIN, "sequence_parallel": False}
    yield "1D, sequence parallel", {**PLAIN, "sequence_parallel": True}
    for grid in grids_of(tp):
        keys = {**grid.keys, "sequence_parallel": False}
        name = str(grid).upper().replace("X", "x")
        yield name, keys
        if keeps:
            yield f"{name}, gathered kept", {**keys, "tp_keep_gathered": True}


def block_cost(name: str, job: Job, cluster: Cluster | None = None) -> BlockCost:
    """Return the cost of the job's first block for one rank."""
    block, at = job.model.blocks[0], job.at
    sent = {"norms": 0, "products": 0}
    for key, _, part in block.parts:
        kind = "norms" if key.startswith("norm") else "products"
        for call in part.collectives(at, job.batch):
            sent[kind] += call.times * wire_bytes(call.op, call.payload, at.size(call.axis))
    records = unit_records(block, at)
    copied = {axis: sum(r.numel for r in records if axis in r.partial and len(r.shape) > 1) for axis in GRID_AXES}
    gradients = sum(
        wire_bytes("all_reduce", numel * job.states.grad, at.size(axis)) for axis, numel in copied.items() if numel
    )
    selective = (job.stack.selective, job.stack.selective_core)
    kept = saved_by_unit(block, block.seen_by(at), job.batch, job.kernels, Recomputed.NOTHING, selective)
    weights = sum(record.numel for record in records) * job.states.param
    took = _seconds(block, job, cluster) if cluster is not None else 0.0
    return BlockCost(name, job, sent["products"], sent["norms"], gradients, weights, kept.lasting, took)


def _seconds(block: BlockUnit, job: Job, cluster: Cluster) -> float:
    time = unit_time(block, setting_of(job, cluster, Recomputed.NOTHING))
    return time.whole_forward + time.whole_backward


def compare(job: Job, cluster: Cluster | None, keeps: bool = True) -> tuple[list[BlockCost], list[str]]:
    """Compare all ways to shard the job's blocks over its tensor-parallel ranks.

    Return the costs, grouped by kind and sorted by bytes sent, and the reasons why other ways are impossible.
    """
    if job.config.layout.tp < 2:
        raise UserError("layout.tp=1 cuts nothing: give the ranks to compare, e.g. --layout tp=8")
    costs: list[BlockCost] = []
    refused: dict[str, str] = {}
    for name, keys in ways_of(job.config.layout.tp, keeps):
        other = job.with_keys(layout=keys)
        other = replace(other, stack=own_stack(other.config, job.host) if job.stack.own else job.stack)
        if why := first_broken_rule(other.config, job.world, PLANNING_RULES):
            refused.setdefault(why, name)
            continue
        costs.append(block_cost(name, other, cluster))
    order = ["1D", "2D", "2.5D", "3D"]
    costs.sort(key=lambda one: (order.index(one.name.split(",")[0].split()[0]), one.wire))
    return costs, [f"{name}: {why}" for why, name in refused.items()]


def report(job: Job, costs: list[BlockCost], refused: list[str]) -> str:
    """Return a comparison as text."""
    model = job.config.model
    b = job.batch
    shown = _shown(costs)
    rows = [("way to cut", "products", "norms", "copies", "all", "weights", "activations", "block")]
    for one in shown:
        rows.append((
            one.name, size(one.products), size(one.norms), size(one.gradients), size(one.wire), size(one.weights),
            size(one.activations), seconds(one.seconds),
        ))  # fmt: skip
    tokens = b.sequences * b.seq
    lines = [
        f"one block of hidden {model.hidden} on {job.config.layout.tp} tensor-parallel ranks, {tokens:,} tokens a "
        f"micro-batch ({tokens / model.hidden:.3g} x hidden), {job.config.train.precision}",
        "bytes that a rank sends: with every micro-batch for products (and keys and values of shared sequences) and "
        "norms, once per step for gradients of copied weights",
        "", table(rows), *([f"  ({len(costs) - len(shown)} more: --json)"] if len(shown) < len(costs) else []),
        "", *verdict(costs), *(f"not possible: {line}" for line in refused),
    ]  # fmt: skip
    return "\n".join(lines)


def _shown(costs: list[BlockCost], most: int = 3) -> list[BlockCost]:
    """Return, for each kind with and without saved factors, the ways with the fewest bytes sent, and the fastest."""
    kinds: dict[tuple[str, bool], list[BlockCost]] = {}
    for one in costs:
        kinds.setdefault((one.name.split()[0], one.name.endswith("kept")), []).append(one)
    chosen = {one.name for same in kinds.values() for one in same[:most]}
    chosen |= {min(same, key=lambda one: one.seconds).name for same in kinds.values()}
    return [one for one in costs if one.name in chosen]


def verdict(costs: list[BlockCost]) -> list[str]:
    """Return sentences naming the ways that send the fewest bytes, hold the least memory and take the least time."""
    plain = [one for one in costs if one.name.startswith("1D")]
    if not plain or len(costs) == len(plain):
        return ["no grid is possible here"]
    least = min(plain, key=lambda one: one.wire)
    best = min(costs, key=lambda one: one.wire)
    times = f": {least.wire / best.wire:.3g} times fewer than {least.name}" if best is not least else ""
    words = [f"{best.name} sends the fewest bytes{times}"]
    light = min(costs, key=lambda one: one.weights + one.activations)
    words.append(f"{light.name} holds the least: {size(light.weights)} of weights, {size(light.activations)} kept")
    if any(one.seconds for one in costs):
        fast = min(costs, key=lambda one: one.seconds)
        words.append(f"{fast.name} is the fastest: {seconds(fast.seconds)} for a block, forward and backward")
    return words


CHARTED_TP = (4, 8, 16, 64)  # The numbers of tensor-parallel ranks, with one chart each.
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # The tokens of a micro-batch divided by the hidden size.
SEQUENCES = 64  # The sequences of a charted micro-batch, a number that the rows of every charted grid divide.


def charts(job: Job, ranks: tuple[int, ...] = CHARTED_TP) -> list[Chart]:
    """Return a chart for each number of ranks of the bytes that the best grid of each kind sends for a block.

    The bytes are in units of the activations [tokens, hidden], over tokens / hidden.
    """
    hidden, result = job.config.model.hidden, []
    for tp in ranks:
        lines: dict[str, list[tuple[float, float]]] = {}
        for ratio in RATIOS:
            for kind, one in _best_of_kinds(job, tp, max(1, round(ratio * hidden / SEQUENCES))).items():
                tokens = one.job.batch.sequences * one.job.batch.seq
                lines.setdefault(kind, []).append((ratio, one.wire / (tokens * hidden * one.job.batch.element)))
        result.append(Chart(
            f"{tp} ranks, hidden {hidden}: sent by a rank for a block, forward and backward", "tokens / hidden",
            "x [tokens, hidden]", lines, label=lambda ratio: f"{ratio:g}",
        ))  # fmt: skip
    return result


def _best_of_kinds(job: Job, tp: int, seq: int) -> dict[str, BlockCost]:
    layout = {"tp": tp, "pp": 1, "cp": 1, "ep": 1, "etp": 0, "chunks": 1, "replicas": 1, "node_size": 0}
    train = {"micro_batch": SEQUENCES, "global_batch": SEQUENCES}
    one = job.with_keys(layout=layout | PLAIN, train=train, model={"seq": seq}, zero={"stage": 0})
    best: dict[str, BlockCost] = {}
    for cost in compare(replace(one, world=tp, cluster_node=tp), None)[0]:
        kind, kept = cost.name.split()[0].rstrip(","), cost.name.endswith("kept")
        name = f"{kind}, gathered kept" if kept else kind
        if kind == "1D":
            name = cost.name
        # A line for every kind would crowd the chart.
        if kept and kind != "3D":
            continue
        if name not in best or cost.wire < best[name].wire:
            best[name] = cost
    return best
