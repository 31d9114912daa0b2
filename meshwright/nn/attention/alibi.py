"""ALiBi: attention scores are lowered in proportion to the distance from the query i to the key j, by slope * (i - j).

Softmax ignores a constant that is added to a row of scores, so adding slope * j has the same effect. That is a product
of a query's number and a key's number. Queries and keys therefore get a few more elements, whose products add up to
slope * j, and ordinary attention with wider heads does the rest. No bias [tokens, tokens] exists, and every kind of
context parallelism works.

In half precision one element has too few digits, so a key's position is split into a sum of three elements, and the
slope into two. Scores are rounded relative to the size of slope * j: in float32 by 0.004 for the steepest head at the
65,536th token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import ModelConfig
from meshwright.nn.attention.rotary import Tables
from meshwright.nn.parallel import Parallel
from meshwright.spec.model.gpt import ALIBI_WIDTH

SLOPE_PIECES, KEY_PIECES = 2, 3


class Alibi(nn.Module):
    """The elements that are appended to queries and keys, for this rank's heads."""

    queries: Tensor

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        heads = model.heads // parallel.tp.size
        first = heads * max(0, parallel.tp.index)
        slopes = torch.tensor(alibi_slopes(model.heads)[first : first + heads], dtype=torch.float64)
        # Attention divides its scores by this root.
        slopes = slopes * math.sqrt(model.head_dim + ALIBI_WIDTH)
        self.dtype, self.device = parallel.dtype, parallel.device
        # Every summand of a slope meets every summand of a key's position in one element.
        summands = _summands(slopes, SLOPE_PIECES, self.dtype).repeat_interleave(KEY_PIECES, -1)
        self.register_buffer("queries", _pad_summands(summands)[None, None].to(self.device), persistent=False)

    def forward(self, positions: Tensor | None, seq: int) -> Tables:
        """Return the elements to append to queries, [1, 1, heads, width], and to keys, [1 or batch, seq, 1, width]."""
        at = torch.arange(seq, device=self.device)[None] if positions is None else positions
        keys = _summands(at.double(), KEY_PIECES, self.dtype).repeat(1, 1, SLOPE_PIECES)
        return self.queries, _pad_summands(keys)[:, :, None]


def widen(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [batch, seq, heads, width] with wider heads. The result of attention has zeros in
    the appended elements."""
    width, (queries, keys) = q.shape[-1], tables
    # Attention divides scores by the root of the larger width.
    q = q * math.sqrt((width + ALIBI_WIDTH) / width)
    q = torch.cat((q, queries.expand(*q.shape[:3], ALIBI_WIDTH)), -1)
    k = torch.cat((k, keys.expand(*k.shape[:3], ALIBI_WIDTH)), -1)
    return q, k, F.pad(v, (0, ALIBI_WIDTH))


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes 2^(-8/n), 2^(-16/n), ... for the largest power of two n in `heads`; the heads beyond n take
    every other slope of 2n heads."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * n + 1) / power) for n in range(heads - power)]


def _summands(values: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return float64 values, each as `count` summands of a narrower dtype in a new last dimension."""
    summands = []
    for _ in range(count):
        summands.append(values.to(dtype))
        values = values - summands[-1].double()
    return torch.stack(summands, -1)


def _pad_summands(summands: Tensor) -> Tensor:
    return F.pad(summands, (0, ALIBI_WIDTH - summands.shape[-1]))
