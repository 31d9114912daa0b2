"""Keys of `comm` that are right but change nothing on so many ranks, or that the planner does not price. No torch.

What can't be right is a rule's (`config/rules.py`) and ends a command. These keys may be meant for more ranks or nodes
than there are now, so a run goes on with them, and `config check` and the start of a run say so in one line.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.rules import axes_layout
from meshwright.config.sections import Config
from meshwright.errors import notice
from meshwright.spec.layout import Layout, exchange_parts
from meshwright.spec.layout.params import DATA_AXES
from meshwright.spec.model.experts import EXPERT_DATA_AXES
from meshwright.spec.traffic.algorithms import mesh_width, neighbours_on_node


def say_what_has_no_effect(config: Config, world: int, node_size: int = 0) -> None:
    if found := without_effect(config, world, node_size):
        notice(f"meshwright: note: {'; '.join(found)}")


def without_effect(config: Config, world: int, node_size: int = 0) -> list[str]:
    """Returns what changes nothing on `world` ranks. `node_size`: ranks on a node, where the config doesn't say; 0: all
    ranks are on one."""
    layout, algorithm = axes_layout(config, world, node_size), config.comm.algorithm
    sums, exchanges = list(_sums(config, layout)), list(_exchanges(config, layout))
    if algorithm.dp == algorithm.ep:  # one word for both is meant for what there is
        sums, exchanges = sums if exchanges else [], []
    return [*sums, *exchanges, *_links(config)]


def _sums(c: Config, layout: Layout) -> Iterator[str]:
    """Of the algorithm that sums gradients."""
    kind = c.comm.algorithm.dp
    if kind == "torch":
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
    return neighbours_on_node(group, layout.node_size or layout.world) in (1, len(group))


def _exchanges(c: Config, layout: Layout) -> Iterator[str]:
    """Of the algorithm that exchanges rows among experts."""
    kind = c.comm.algorithm.ep
    if kind == "torch":
        return
    key = f"comm.algorithm.ep={kind} has no effect, since"
    if layout.ep == 1:
        yield f"{key} {'layout.ep is 1' if c.model.experts.count else 'the model has no experts'}"
    elif not exchange_parts(layout):
        yield f"{key} {_places(layout.group('ep', 0), layout)}"


def _places(group: tuple[int, ...], layout: Layout) -> str:
    """Returns where the ranks of a group are, which are not several on each of several nodes."""
    nodes = {rank // (layout.node_size or layout.world) for rank in group}
    size = f" (layout.node_size={layout.node_size})" if layout.node_size else " (layout.node_size is not given)"
    if len(nodes) == 1:
        return f"its {len(group)} ranks are on one node{size}"
    return f"its {len(group)} ranks are not several, and equally many, on each of {len(nodes)} nodes{size}"


def _links(c: Config) -> Iterator[str]:
    """Of what is told of links and switches."""
    kind = c.comm.algorithm.dp
    if c.comm.links.on and (kind != "auto" or c.comm.emulate.on):
        yield "comm.links has no effect, since only comm.algorithm=auto without emulated links reads it"
    if c.comm.switches and kind == "torch":
        yield "comm.switches has no effect with comm.algorithm.dp=torch: it orders our own rings"
    elif c.comm.switches:
        yield "comm.switches is not priced: clusters have no rate between switches, so predicted times are as without"
