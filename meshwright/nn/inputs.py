"""The values that a block's norms and bodies take beside x."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

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
