"""Finds keys of `comm` that are valid but change nothing on the given ranks, or that the planner does not price.

Invalid keys break a rule (`config/rules.py`) and end a command. The keys here may be meant for more ranks or nodes than
there are now. A run continues with them, and `config check` and the start of a run report them in one line. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.rules import axes_layout
from meshwright.config.sections import Config
from meshwright.errors import notice
from meshwright.spec.layout import Layout, exchange_parts
from meshwright.spec.layout.layout import mesh_width, neighbours_on_node
from meshwright.spec.layout.params import DATA_AXES
from meshwright.spec.model.experts import EXPERT_DATA_AXES


def say_what_has_no_effect(config: Config, world: int, node_size: int = 0) -> None:
    """Print a note about the keys that have no effect, if there are any."""
    if notes := without_effect(config, world, node_size):
        notice(f"meshwright: note: {'; '.join(notes)}")


def without_effect(config: Config, world: int, node_size: int = 0) -> list[str]:
    """Return a sentence for each key that changes nothing on `world` ranks.

    `node_size` is the number of ranks on a node if the config doesn't say; 0 means that all ranks are on one node.
    """
    layout = axes_layout(config, world, node_size)
    algorithm = config.comm.algorithm
    sums, exchanges = list(_sums(config, layout)), list(_exchanges(config, layout))
    # One word for both is meant for whichever the run has, so it is reported only if it affects neither.
    if algorithm.dp == algorithm.ep:
        sums, exchanges = sums if exchanges else [], []
    return [*sums, *exchanges, *_links(config)]


def _sums(c: Config, layout: Layout) -> Iterator[str]:
    """Yield sentences about the algorithm that sums gradients."""
    kind = c.comm.algorithm.dp
    if not c.comm.algorithm.sums_itself:
        return
    axes = (DATA_AXES, *([EXPERT_DATA_AXES] if c.model.experts.count else []))
    groups = [group for group in (layout.group(each, 0) for each in axes) if len(group) > 1]
    if not groups:
        yield f"comm.algorithm.dp={kind} has no effect, since no gradient is summed over several data-parallel ranks"
    elif kind == "hierarchical" and all(_one_ring(group, layout) for group in groups):
        yield f"comm.algorithm.dp=hierarchical sums as ring does, since {_places(groups[0], layout)}"
    elif kind == "mesh" and all(mesh_width(len(group)) == 1 for group in groups):
        yield f"comm.algorithm.dp=mesh sums as ring does, since {len(groups[0])} ranks are no mesh"


def _one_ring(group: tuple[int, ...], layout: Layout) -> bool:
    """Return True if all ranks of a group are on one node, or each is on another node."""
    return neighbours_on_node(group, layout.node_size or layout.world) in (1, len(group))


def _exchanges(config: Config, layout: Layout) -> Iterator[str]:
    """Yield sentences about the algorithm that exchanges rows among experts."""
    kind = config.comm.algorithm.ep
    if not config.comm.algorithm.exchanges_by_node:
        return
    key = f"comm.algorithm.ep={kind} has no effect, since"
    if layout.ep == 1:
        yield f"{key} {'layout.ep is 1' if config.model.experts.count else 'the model has no experts'}"
    elif not exchange_parts(layout):
        yield f"{key} {_places(layout.group('ep', 0), layout)}"


def _places(group: tuple[int, ...], layout: Layout) -> str:
    """Describe the nodes of a group's ranks, for a group that does not have several ranks on each of several nodes."""
    nodes = {rank // (layout.node_size or layout.world) for rank in group}
    size = f" (layout.node_size={layout.node_size})" if layout.node_size else " (layout.node_size is not given)"
    if len(nodes) == 1:
        return f"its {len(group)} ranks are on one node{size}"
    return f"its {len(group)} ranks are not several, and equally many, on each of {len(nodes)} nodes{size}"


def _links(config: Config) -> Iterator[str]:
    """Yield sentences about the descriptions of links and switches."""
    algorithm = config.comm.algorithm
    if config.comm.links.on and (not algorithm.chooses or config.comm.emulate.on):
        yield "comm.links has no effect, since only comm.algorithm=auto without emulated links reads it"
    if config.comm.switches and not algorithm.sums_itself:
        yield "comm.switches has no effect with comm.algorithm.dp=torch: it orders our own rings"
