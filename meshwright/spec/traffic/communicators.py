"""Communicators: the connections that a back end makes for a group of ranks when it is first used.

NCCL makes one communicator for the collectives of a process group, and one for each pair of its ranks that send to each
other. Each has its own device memory and its own stream. A run connects its communicators before it builds the model,
and the planner counts their memory. Both use the list that `communicators` returns.
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
"""The pipeline's groups: activations travel over the first and gradients over the second. A pair of ranks has one queue
per communicator. In a shared one, a receive that was posted early would block the next send in the other direction."""

EMBEDDING, WORLD, SEQUENCE = "embedding", "world", "tp-cp"

# The limit of thread blocks per kernel; NCCL would choose up to 32. A communicator's memory grows with them. World and
# the router's sums move kilobytes. Pipeline sends move one tensor at a time, and a posted receive occupies its blocks
# until the tensor arrives. Four blocks carry more than a network card does.
# A layout whose order has cp before tp calls the router's group "cp-tp".
MAX_BLOCKS = {WORLD: 2, SEQUENCE: 2, "cp-tp": 2, EMBEDDING: 4, PP: 4, PP_BACK: 4}

# The compute stream waits for calls over these axes at once. Calls over others overlap with compute.
_URGENT = ("tp", "cp", "ep", "etp", "pp")


class Communicator(NamedTuple):
    """One communicator of a rank: its group's name and its ranks. `is_pair`: it connects two pipeline neighbours."""

    group: str
    ranks: tuple[int, ...]
    is_pair: bool = False

    @property
    def is_small(self) -> bool:
        return self.group in MAX_BLOCKS


def is_urgent(group: str) -> bool:
    """Return True if compute waits for a group's calls, so that they get high-priority streams."""
    return all(word.split(".")[0] in _URGENT for word in group.split("-"))


def shared_by_world(layout: Layout) -> str | None:
    """Return the name of a group, other than `world`, that contains all ranks; None if there is none.

    `world` then uses that group's process group, so that one communicator serves both.
    """
    names = (name for name in layout.step_groups() if name not in (PP, WORLD))
    return next((name for name in names if layout.world > 1 and layout.size(name) == layout.world), None)


def used_groups(config: Config, layout: Layout) -> set[str]:
    """Return the names of the groups over which any rank issues collectives in a step of this config."""
    parts = {name for _, pieces in layout.parts for name, _ in pieces}
    names = {WORLD, "tp"} | parts & {*GRID_AXES, KV_COPIES}
    names |= {config.context_plan.inner, config.context_plan.outer} - {""} or {"cp"}
    names |= _data_groups(config, layout)
    experts = config.model.experts
    if experts.count and experts.capacity is not None:
        # An expert's capacity is counted over the whole sequence.
        names.add("cp")
    if experts.count:
        names |= parts & {EP_NODE, EP_ACROSS} or {"ep"}
        names.add("etp")
        if experts.aux_loss or experts.z_loss:
            names.add(SEQUENCE)
    names |= {name for name, _ in layout.shared if name != EMBEDDING}
    # The layout always has an embedding group, but only tied weights sum gradients over it.
    if config.model.tied_embeddings:
        names.add(EMBEDDING)
    if layout.replicas > 1:
        names |= {REPLICAS, INNER}
    if (twin := shared_by_world(layout)) is not None:
        names = names - {WORLD} | {twin}
    return {name for name in map(layout.without_ones, names) if layout.size(name) > 1}


def _data_groups(config: Config, layout: Layout) -> set[str]:
    """Return the groups that sum gradients and gather weights."""
    names: set[str | None] = set()
    for axes in (DATA_AXES, EXPERT_DATA_AXES) if config.model.experts.count else (DATA_AXES,):
        division = shard_axes(layout, config.zero, axes)
        names |= {division.shards, division.replicas, copy_axis(layout, config.zero, config.comm.gather, axes)}
    return {name for name in names if name}


def pipeline_pairs(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """Return the pairs of pipeline ranks that send to each other, sorted, each with the lower rank first."""
    placement = placement_of(config.pipeline.schedule, config.layout.pp, config.layout.chunks)
    # Consecutive stages on one rank pass activations without a send.
    neighbours = (sorted((before, after)) for (before, _), (after, _) in pairwise(placement) if before != after)
    return sorted({(low, high) for low, high in neighbours})


def communicators(config: Config, layout: Layout, rank: int) -> list[Communicator]:
    """Return the communicators of a rank, in an order in which all ranks can connect them without a deadlock.

    Names ascend, and then pairs ascend, on every rank. All ranks of the lowest communicator that is not yet connected
    are therefore waiting for it.
    """
    candidates = [Communicator(name, layout.group(name, rank)) for name in sorted(used_groups(config, layout))]
    stages = layout.group(PP, rank)
    # The spans of a traced step are gathered over the pipeline's ranks.
    if config.run.trace and len(stages) > 1 and all(layout.group(axis, rank)[0] == rank for axis in ("dp", "cp", "tp")):
        candidates.append(Communicator(PP, stages))
    for group in (PP, PP_BACK):
        pairs = ((stages[low], stages[high]) for low, high in pipeline_pairs(config, layout))
        candidates += [Communicator(group, pair, is_pair=True) for pair in pairs if rank in pair]
    return [communicator for communicator in candidates if rank in communicator.ranks]
