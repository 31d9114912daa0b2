"""The all-gather of weights in fewer bits (`comm.gather.kind`, ZeRO stage 3).

The rank that owns a shard rounds it to the nearest codes. Every rank, the owner included, decodes the same messages, so
that all compute with equal weights. The shard itself, which is updated and saved, is not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.group import Group, Pending
from meshwright.config.comm import GatherConfig
from meshwright.engine.sharding.compression.exchange import codec_of
from meshwright.engine.sharding.compression.residual import wide


class GatheredCodes:
    """A gather in flight. The decoded weights can be used after `wait`."""

    def __init__(self, config: GatherConfig, group: Group, whole: Tensor, share: Tensor) -> None:
        self._codec, self._whole, self._group = codec_of(config), whole, group
        self._message = self._codec.encode(share.detach().to(wide(share.dtype))[None], None)
        self._received = torch.empty(
            (group.size, self._message.shape[1]), dtype=self._message.dtype, device=self._message.device
        )
        self._pending: Pending = group.all_gather(self._received, self._message, wait=False)

    @torch.no_grad()
    def wait(self) -> None:
        self._pending.wait()
        out = self._whole.view(self._group.size, -1)
        out.copy_(self._codec.decode(self._received, out.shape[1], wide(out.dtype)))
