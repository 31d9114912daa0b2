"""The largest elements, each by its place and its value: the k largest of every block, or about as many of a whole
piece by a threshold.

A message is the places and then the values; places in a block are numbers of one or two bytes. Blocks are parts of one
parameter that no rank's piece cuts, so that ranks of another layout choose the same elements. What arrives of a piece
that holds a number that is not finite is not finite either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.config.comm import ReduceConfig
from meshwright.engine.sharding.compression.quantised import aligned, blocks
from meshwright.engine.sharding.compression.sizes import blocks_of, place_bytes, sent_elements

NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes
SAMPLE = 4096  # elements of a piece from which its threshold is estimated


@dataclass(frozen=True)
class Sparse:
    config: ReduceConfig
    fills_gaps = False

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the messages [pieces, bytes] of `x` [pieces, elements]."""
        if self.config.kind == "topk":
            sent = blocks_of(self.config, x.shape[1]).sent
            divided = blocks(x, self.config.block)
            places = divided.abs().topk(sent, dim=2, sorted=False).indices
            values = divided.gather(2, places).view(x.shape[0], -1)
        else:
            places, values = above_threshold(x, sent_elements(self.config, x.shape[1]))
        numbers = places.to(NUMBERS[place_bytes(self.config)]).view(x.shape[0], -1)
        return torch.cat([numbers.view(torch.uint8), values.view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        size = place_bytes(self.config)
        cut, count, wide = sent_elements(self.config, elements) * size, 1, elements
        if self.config.kind == "topk":
            count, wide, _ = blocks_of(self.config, elements)
        shape = (message.shape[0], count, -1)
        places = aligned(message[:, :cut]).view(NUMBERS[size]).long().view(shape)
        values = aligned(message[:, cut:]).view(dtype).view(shape)
        numbers = torch.zeros(message.shape[0], count, wide, dtype=dtype, device=message.device)
        return numbers.scatter_add_(2, places, values).view(message.shape[0], -1)[:, :elements].contiguous()


def above_threshold(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the places and values of `count` elements that reach the threshold, the first ones if there are more;
    missing ones are zeros. The threshold is that of the largest elements of an even sample: no element is sorted."""
    elements, size = x.shape[1], x.abs()
    sample = size[:, :: max(1, elements // SAMPLE)]
    least = sample.topk(max(1, sample.shape[1] * count // elements), dim=1).values[:, -1:]
    reached = ~(size < least) & (x != 0)
    at = reached.cumsum(1) - 1
    at = torch.where(reached & (at < count), at, count)  # all that is not sent goes to one place behind the others
    numbers = torch.arange(elements, device=x.device).expand_as(at)
    places = torch.zeros(x.shape[0], count + 1, dtype=torch.int64, device=x.device).scatter_(1, at, numbers)[:, :count]
    filled = torch.arange(count, device=x.device) < reached.sum(1, keepdim=True)
    values = torch.where(filled, x.gather(1, places), 0)
    return places, values + 0 * size.sum(1, keepdim=True)  # which is no number if any element is none
