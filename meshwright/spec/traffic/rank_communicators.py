"""The communicators of a rank in a training run, for the run, which connects them early, and for the planner, which
counts their memory. No torch."""

from __future__ import annotations

from itertools import pairwise

from meshwright.config.sections import Config
from meshwright.spec.layout import Layout
from meshwright.spec.layout.grid import GRID_AXES
from meshwright.spec.layout.layout import INNER, REPLICAS
from meshwright.spec.layout.params import DATA_AXES, EP_ACROSS, EP_NODE
from meshwright.spec.model.experts import EXPERT_DATA_AXES
from meshwright.spec.model.gpt import KV_COPIES
from meshwright.spec.schedule.kinds import placement_of
from meshwright.spec.traffic.communicators import EMBEDDING, PP, PP_BACK, SEQUENCE, WORLD, Communicator, shared_by_world
from meshwright.spec.traffic.placement import copy_axis, shard_axes


def used_groups(config: Config, layout: Layout) -> set[str]:
    """Returns the names of the groups over which a step of this config makes collectives, on some rank."""
    parts = {name for _, pieces in layout.parts for name, _ in pieces}
    names = {WORLD, "tp"} | parts & {*GRID_AXES, KV_COPIES}
    names |= {config.context_plan.inner, config.context_plan.outer} - {""} or {"cp"}
    names |= _data_groups(config, layout)
    experts = config.model.experts
    if experts.count and experts.capacity is not None:
        names.add("cp")  # an expert's places are counted over the whole sequence
    if experts.count:
        names |= parts & {EP_NODE, EP_ACROSS} or {"ep"}
        names.add("etp")
        if experts.aux_loss or experts.z_loss:
            names.add(SEQUENCE)
    names |= {name for name, _ in layout.shared if name != EMBEDDING}
    if config.model.tied_embeddings:
        names.add(EMBEDDING)
    if layout.replicas > 1:
        names |= {REPLICAS, INNER}
    if (twin := shared_by_world(layout)) is not None:
        names = names - {WORLD} | {twin}
    return {name for name in map(layout.without_ones, names) if layout.size(name) > 1}


def _data_groups(config: Config, layout: Layout) -> set[str]:
    """Returns the groups that sum gradients and gather weights."""
    found: set[str | None] = set()
    for axes in (DATA_AXES, EXPERT_DATA_AXES) if config.model.experts.count else (DATA_AXES,):
        division = shard_axes(layout, config.zero, axes)
        found |= {division.shards, division.replicas, copy_axis(layout, config.zero, config.comm.gather, axes)}
    return {name for name in found if name}


def pipeline_pairs(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """Returns the pairs of pipeline ranks that send to each other, each with the lower one first, in one order."""
    placement = placement_of(config.pipeline.schedule, config.layout.pp, config.layout.chunks)
    neighbours = (sorted((before, after)) for (before, _), (after, _) in pairwise(placement) if before != after)
    return sorted({(low, high) for low, high in neighbours})


def communicators(config: Config, layout: Layout, rank: int) -> list[Communicator]:
    """Returns the communicators of a rank, in an order in which all ranks can connect them without a deadlock: names,
    and then pairs, ascend everywhere, so the ranks of the least one that is missing all wait for it."""
    found = [Communicator(name, layout.group(name, rank)) for name in sorted(used_groups(config, layout))]
    stages = layout.group(PP, rank)
    # The spans of a traced step are gathered over the pipeline's ranks.
    if config.run.trace and len(stages) > 1 and all(layout.group(axis, rank)[0] == rank for axis in ("dp", "cp", "tp")):
        found.append(Communicator(PP, stages))
    for group in (PP, PP_BACK):
        pairs = ((stages[low], stages[high]) for low, high in pipeline_pairs(config, layout))
        found += [Communicator(group, pair, is_pair=True) for pair in pairs if rank in pair]
    return [each for each in found if rank in each.ranks]
