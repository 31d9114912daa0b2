"""Mark the parameters of a model with the rule that updates them: their group, weight decay and matrices. No torch."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from meshwright.config.optimizer import RULES, OptimizerConfig
from meshwright.errors import UserError, nearest
from meshwright.spec.model.graph import AnyModel, Model, Node
from meshwright.spec.model.part import SINGLE_RANK, Unit, UpdateOptions


def with_updates(model: AnyModel, optimizer: OptimizerConfig) -> AnyModel:
    """Return the model with its parameters marked as an optimizer's settings say."""
    if not (optimizer.groups or optimizer.whole_matrices):
        return model
    return _with_updates(model, optimizer)  # type: ignore[return-value]


@lru_cache(maxsize=256)
def _with_updates(model: Model, optimizer: OptimizerConfig) -> Model:
    names = [name for node in model.nodes for name in _names(node)]
    for group in optimizer.groups:
        if not any(fnmatchcase(name, group.match) for name in names):
            raise UserError(
                f"optimizer.groups: match={group.match} matches no parameter{nearest(group.match, names)}: give a "
                f"pattern of names such as {names[0]}, *.norm1.* or *bias"
            )
    return model.map_units(lambda node: _marked_unit(node, optimizer))


def _names(node: Node) -> list[str]:
    return [record.name for record in node.unit.records(SINGLE_RANK, node.prefix).values()]


def _marked_unit(node: Node, optimizer: OptimizerConfig) -> Unit:
    # Blocks with equal marks stay equal values, which the planner relies on.
    heights = node.unit.matrices(optimizer.muon.per_head)
    updates = {}
    for name in _names(node):
        own = name.removeprefix(node.prefix)
        number = next((n for n, one in enumerate(optimizer.groups, 1) if fnmatchcase(name, one.match)), 0)
        group = optimizer.of_group(number)
        decay = optimizer.groups[number - 1].decay if number else None
        matrices = heights.get(own, ()) if RULES[group.name].whole_matrices else ()
        updated = UpdateOptions(number, None if decay is None else decay > 0, matrices)
        if updated != UpdateOptions():
            updates[own] = updated
    return replace(node.unit, updates=tuple(updates.items()))
