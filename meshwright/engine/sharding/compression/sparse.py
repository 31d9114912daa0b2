"""The codec of the largest elements: the k largest of every block, or about as many of a whole slice by a threshold.

A message consists of the positions and then the values of these elements. Positions in a block take one or two bytes.
Blocks are parts of one parameter, and no rank's slice ends inside a block, so that ranks of another layout choose the
same elements. A slice with a number that is not finite is decoded as one that is not finite either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.config.comm import ReduceConfig
from meshwright.engine.sharding.compression.quantised import aligned, blocks
from meshwright.engine.sharding.compression.sizes import INDEX_BYTES, blocks_of, chosen_elements, place_bytes

NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # the dtypes of positions by their bytes
SAMPLE = 4096  # the number of elements from which the threshold of a slice is estimated


class TopKCodec:
    """A codec of some elements: their positions and their values."""

    fills_gaps = False

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions and the values of the elements of slices [slices, elements] that are sent."""
        raise NotImplementedError

    def form(self, elements: int) -> tuple[int, int, int]:
        """Return the number of blocks of a slice, their size, and the elements of each that are sent."""
        raise NotImplementedError

    @property
    def place_bytes(self) -> int:
        """The bytes of a position."""
        return INDEX_BYTES

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return the messages [slices, bytes] of `x` [slices, elements]."""
        places, values = self.chosen(x)
        numbers = places.to(NUMBERS[self.place_bytes]).view(x.shape[0], -1)
        return torch.cat([numbers.view(torch.uint8), values.view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        count, wide, sent = self.form(elements)
        cut, shape = count * sent * self.place_bytes, (message.shape[0], count, -1)
        places = aligned(message[:, :cut]).view(NUMBERS[self.place_bytes]).long().view(shape)
        values = aligned(message[:, cut:]).view(dtype).view(shape)
        numbers = torch.zeros(message.shape[0], count, wide, dtype=dtype, device=message.device)
        return numbers.scatter_add_(2, places, values).view(message.shape[0], -1)[:, :elements].contiguous()


class TopK(TopKCodec):
    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        divided = blocks(x, self.config.block)
        places = divided.abs().topk(blocks_of(self.config, x.shape[1]).sent, dim=2, sorted=False).indices
        return places, divided.gather(2, places).view(x.shape[0], -1)

    def form(self, elements: int) -> tuple[int, int, int]:
        return blocks_of(self.config, elements)

    @property
    def place_bytes(self) -> int:
        return place_bytes(self.config)


class Threshold(TopKCodec):
    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return above_threshold(x, chosen_elements(self.config, x.shape[1]))

    def form(self, elements: int) -> tuple[int, int, int]:
        return 1, elements, chosen_elements(self.config, elements)


def above_threshold(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the positions and values of `count` elements per slice that reach a threshold.

    They are the first ones if more elements reach it; missing ones are zeros. The threshold is estimated from the
    largest elements of an evenly spaced sample, so that the elements need not be sorted.
    """
    elements, size = x.shape[1], x.abs()
    sample = size[:, :: max(1, elements // SAMPLE)]
    least = sample.topk(max(1, sample.shape[1] * count // elements), dim=1).values[:, -1:]
    reached = ~(size < least) & (x != 0)
    at = reached.cumsum(1) - 1
    # Elements that are not sent go to one extra position at the end, which is dropped.
    at = torch.where(reached & (at < count), at, count)
    numbers = torch.arange(elements, device=x.device).expand_as(at)
    places = torch.zeros(x.shape[0], count + 1, dtype=torch.int64, device=x.device).scatter_(1, at, numbers)[:, :count]
    filled = torch.arange(count, device=x.device) < reached.sum(1, keepdim=True)
    values = torch.where(filled, x.gather(1, places), 0)
    # 0 times the sum is NaN if any element is not finite, so that the whole slice then is.
    return places, values + 0 * size.sum(1, keepdim=True)
