"""The largest elements of a piece, each by its place and its value: the k largest, or about as many by a threshold.

A message is the places as int32 and then the values. What arrives of a piece that holds a number that is not finite is
not finite either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.config.comm import ReduceConfig
from meshwright.sharding.compression.quantised import aligned
from meshwright.sharding.compression.sizes import INDEX_BYTES, sent_elements

SAMPLE = 4096  # elements of a piece from which its threshold is estimated


@dataclass(frozen=True)
class Sparse:
    config: ReduceConfig
    fills_gaps = False

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Returns the messages [pieces, bytes] of `x` [pieces, elements]."""
        count = sent_elements(self.config, x.shape[1])
        if self.config.kind == "topk":
            places = x.abs().topk(count, dim=1, sorted=False).indices
            values = x.gather(1, places)
        else:
            places, values = above_threshold(x, count)
        return torch.cat([places.int().view(torch.uint8), values.view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        cut = sent_elements(self.config, elements) * INDEX_BYTES
        places = aligned(message[:, :cut]).view(torch.int32).long()
        values = aligned(message[:, cut:]).view(dtype)
        numbers = torch.zeros(message.shape[0], elements, dtype=dtype, device=message.device)
        return numbers.scatter_add_(1, places, values)


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
