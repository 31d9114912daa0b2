"""The inputs that modules take in addition to x: those of a block's norms and bodies, and those of other nodes of the
model's graph."""

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

# The result of a body: x for the residual, the body's output, and the sums of its loss terms if it adds to the loss.
# A body that fuses the norm with its first product returns an x whose gradient the fused backward adds to the norm's.
Result = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]


@dataclass
class Inputs:
    """The inputs of a block's norms and bodies for one micro-batch.

    `sequences` is the number of sequences. `tables` are those of rotary positions or of ALiBi. `mask` says where
    documents begin, or, under context parallelism, which rows each rank holds. Without a mask, attention is plainly
    causal, or to all tokens. With `past`, x continues after the cached tokens. `routed` is for the routers of experts.
    `streams` holds the other streams of the model's graph that the block reads, by name.
    """

    sequences: int
    tables: Tables | None = None
    mask: Documents | ContextRows | None = None
    past: KVCache | None = None
    routed: RoutedInputs | None = None
    streams: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class NodeInputs:
    """The inputs, for one micro-batch, of a node of the model's graph that is not a block."""

    # The fields of the batch, and the streams computed so far, by name.
    batch: Mapping[str, Tensor]
    streams: Mapping[str, Tensor]
    sequences: int
    # The positions of this rank's tokens; None if they simply count from 0.
    positions: Tensor | None = None
    # The number of tokens of each sequence in the key-value cache.
    cached: int = 0
    # The factor by which backward will multiply the summed loss, if it is known.
    loss_weight: float | None = None


class NodeModule(nn.Module):
    """The module of a node that computes its own arguments, instead of taking the node's streams and batch fields."""

    def forward_arguments(self, node: Node, inputs: NodeInputs) -> tuple[Any, ...]:
        """Return the arguments of `forward`."""
        raise NotImplementedError


def arguments_of(module: nn.Module, node: Node, inputs: NodeInputs) -> tuple[Any, ...]:
    """Return the arguments of a node's module: the streams that the node reads and then the fields of the batch, unless
    the module chooses its own (`NodeModule.forward_arguments`)."""
    if isinstance(module, NodeModule):
        return module.forward_arguments(node, inputs)
    fields = (inputs.batch[name] for name in node.fields if name in inputs.batch)
    return (*(inputs.streams[name] for name in node.inputs), *fields)
