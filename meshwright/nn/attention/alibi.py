"""ALiBi lowers a score in proportion to the distance from the query to the key: by slope x (i - j).

A row of scores may be shifted as a whole, so slope x j does as well, and this is a product of something that a query
has and something that a key has. Queries and keys get a few more elements, whose products add up to slope x j; then
attention is the ordinary one, with wider heads: no bias of [tokens, tokens] exists, and every way of sharing a sequence
works. In half precision the number of a key is spread over three elements, since one has too few digits. Scores are
rounded at the size of slope x j: in float32 by 0.004 for the steepest head at the 65,536th token.
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
    """What is appended to queries and keys. A rank has its own heads' slopes."""

    queries: Tensor

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        heads = model.heads // parallel.tp.size
        first = heads * max(0, parallel.tp.index)
        slopes = torch.tensor(alibi_slopes(model.heads)[first : first + heads], dtype=torch.float64)
        slopes = slopes * math.sqrt(model.head_dim + ALIBI_WIDTH)  # by which attention divides its scores
        self.dtype, self.device = parallel.dtype, parallel.device
        pieces = _pieces(slopes, SLOPE_PIECES, self.dtype).repeat_interleave(KEY_PIECES, -1)
        self.register_buffer("queries", _padded(pieces)[None, None].to(self.device), persistent=False)

    def forward(self, positions: Tensor | None, seq: int) -> Tables:
        """Return what is appended to queries, [1, 1, heads, width], and to keys, [1 or batch, seq, 1, width]."""
        at = torch.arange(seq, device=self.device)[None] if positions is None else positions
        keys = _pieces(at.double(), KEY_PIECES, self.dtype).repeat(1, 1, SLOPE_PIECES)
        return self.queries, _padded(keys)[:, :, None]


def widen(q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [batch, seq, heads, width] of wider heads. The result of attention to them has
    zeros in the last elements."""
    width, (queries, keys) = q.shape[-1], tables
    q = q * math.sqrt((width + ALIBI_WIDTH) / width)  # scores are divided by the root of the larger width
    q = torch.cat((q, queries.expand(*q.shape[:3], ALIBI_WIDTH)), -1)
    k = torch.cat((k, keys.expand(*k.shape[:3], ALIBI_WIDTH)), -1)
    return q, k, F.pad(v, (0, ALIBI_WIDTH))


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes 2^(-8/n), 2^(-16/n), ... for the largest power of two n in `heads`; the heads beyond n take
    every other slope of 2n heads."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * n + 1) / power) for n in range(heads - power)]


def _pieces(values: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return float64 values as a sum of `count` values of a narrower dtype, in a last dimension."""
    found = []
    for _ in range(count):
        found.append(values.to(dtype))
        values = values - found[-1].double()
    return torch.stack(found, -1)


def _padded(pieces: Tensor) -> Tensor:
    return F.pad(pieces, (0, ALIBI_WIDTH - pieces.shape[-1]))
