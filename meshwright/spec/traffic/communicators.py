"""Communicators: the connections that a back end makes for a group of ranks when it is first used.

NCCL makes one communicator for the collectives of a process group, and one for each pair of its ranks that send to each
other. Each holds device memory of its own and a stream of its own. A run connects its communicators before it builds
the model, and the planner counts their memory, both from the list that `communicators` returns.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from meshwright.config.sections import Config
from meshwright.spec.layout import Layout
from meshwright.spec.layout.grid import GRID_AXES
from meshwright.spec.layout.layout import INNER, REPLICAS
from meshwright.spec.layout.params import DATA_AXES, EP_ACROSS, EP_NODE
from meshwright.spec.model.experts import EXPERT_DATA_AXES
from meshwright.spec.model.gpt import KV_COPIES
from meshwright.spec.schedule.kinds import placement_of
from meshwright.spec.traffic.placement import copy_axis, shard_axes

PP, PP_BACK = "pp", "pp.back"
"""The pipeline's groups: activations go over the first and gradients over the second. A pair of ranks has one queue per
communicator, so in a common one a receive that was posted early would hold up the next send the other way."""

EMBEDDING, WORLD, SEQUENCE = "embedding", "world", "tp-cp"

# The most thread blocks of a kernel, where NCCL chooses up to 32. Its memory grows with them. World and the router's
# sums move kilobytes. Pipeline sends move one tensor at a time, and a posted receive holds its blocks until the tensor
# comes: four carry more than a network card does.
# A layout whose order has cp before tp names the router's group the other way round.
MOST_BLOCKS = {WORLD: 2, SEQUENCE: 2, "cp-tp": 2, EMBEDDING: 4, PP: 4, PP_BACK: 4}

# The compute stream waits for these at once, while others run beside it.
_URGENT = ("tp", "cp", "ep", "etp", "pp")


class Communicator(NamedTuple):
    """One communicator of a rank: the group it belongs to, its ranks, and whether it connects two neighbours."""

    group: str
    ranks: tuple[int, ...]
    is_pair: bool = False

    @property
    def is_small(self) -> bool:
        return self.group in MOST_BLOCKS


def is_urgent(group: str) -> bool:
    """Return True if compute waits for a group's calls, which then get high-priority streams."""
    return all(word.split(".")[0] in _URGENT for word in group.split("-"))


def shared_by_world(layout: Layout) -> str | None:
    """Returns the group of all ranks, besides `world`, whose process group `world` uses too: one communicator serves
    both. None where there is no such group."""
    names = (name for name in layout.step_groups() if name not in (PP, WORLD))
    return next((name for name in names if layout.world > 1 and layout.size(name) == layout.world), None)


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
