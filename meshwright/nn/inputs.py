"""The values that modules take beside x: norms and bodies of a block, and nodes of a model that are no blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from meshwright.spec.model.graph import Node

if TYPE_CHECKING:
    from meshwright.nn.attention.attention import KVCache
    from meshwright.nn.attention.context import ContextRows
    from meshwright.nn.attention.documents import Documents
    from meshwright.nn.attention.rotary import Tables
    from meshwright.nn.experts.experts import RoutedInputs

# What a body returns: x for the residual, its change of x and, if it adds to the loss, the sums of its terms. A body
# that fuses the norm with its first product returns an x whose gradient that kernel's backward adds to the norm's.
Result = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]


@dataclass
class Inputs:
    """One micro-batch as the norms and bodies of a block see it.

    `tables` are those of rotary positions or of ALiBi. `mask` says where documents begin, or which rows each rank holds
    of shared sequences; without it, attention is plainly causal or to all tokens. With `past`, x continues after the
    tokens in it. `streams` are the other streams of the model's graph that the block reads, by name.
    """

    sequences: int
    tables: Tables | None = None
    mask: Documents | ContextRows | None = None
    past: KVCache | None = None
    routed: RoutedInputs | None = None
    streams: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class NodeInputs:
    """One micro-batch as a node sees it that is no block: fields of the batch, the streams so far, the number of
    sequences, the positions of this rank's tokens where they do not just count, the tokens of each sequence that a
    cache holds, and what backward will multiply the sum of the loss by, where that is known."""

    batch: Mapping[str, Tensor]
    streams: Mapping[str, Tensor]
    sequences: int
    positions: Tensor | None = None
    cached: int = 0
    loss_weight: float | None = None


class NodeModule(nn.Module):
    """The module of a node that takes something else than its streams and fields."""

    def given(self, node: Node, inputs: NodeInputs) -> tuple[Any, ...]:
        """Returns the arguments of its forward."""
        raise NotImplementedError


def arguments_of(module: nn.Module, node: Node, inputs: NodeInputs) -> tuple[Any, ...]:
    """Returns what the module of a node is called with: the streams that the node reads and then the fields of the
    batch, unless it says otherwise."""
    if isinstance(module, NodeModule):
        return module.given(node, inputs)
    fields = (inputs.batch[name] for name in node.fields if name in inputs.batch)
    return (*(inputs.streams[name] for name in node.inputs), *fields)
