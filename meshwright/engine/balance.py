"""The balance of a step's tokens over the experts.

The counts are summed over all ranks and reported, and biases of the routers are moved to even them out. The counts are
whole numbers, so their sums are exactly the same in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.device import Download
from meshwright.engine.context import Context
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.models.stage import stage_of
from meshwright.nn.experts.experts import Experts
from meshwright.spec.layout.rows import balance
from meshwright.spec.traffic.counts import balance_length

MAX_LISTED = 4096  # metrics.jsonl lists the rows of every expert of every layer up to this many numbers


class ExpertBalance:
    """The balance of the experts in this rank's chunks, whose modules are in `held` by layer."""

    def __init__(self, ctx: Context, modules: Sequence[nn.Module], parallel: DataParallel) -> None:
        self.ctx, self.parallel = ctx, parallel
        model = ctx.config.model
        self.layers = [layer for layer in range(model.layers) if model.experts.in_block(layer)]
        self.held: dict[int, Experts] = {}
        for module in modules:
            for layer, block in stage_of(module).layers.items():
                self.held.update((layer, part) for part in block.children() if isinstance(part, Experts))

    @torch.no_grad()
    def update(self, squares: Tensor) -> Download | None:
        """Sum the rows of every expert over all ranks, move the biases, and begin to count the next step.

        A step whose squared gradient norm is not finite makes no update, so it moves no bias either.
        """
        if not self.layers:
            return None
        count, device = self.ctx.config.model.experts.count, self.ctx.device.torch
        table = torch.zeros(len(self.layers), balance_length(count), dtype=torch.float64, device=device)
        # Ranks without a layer contribute zeros, so that one all-reduce over the world serves all stages.
        for row, layer in enumerate(self.layers):
            if layer in self.held:
                table[row] = self.held[layer].tally
                self.held[layer].tally.zero_()
        self.ctx.mesh.world.all_reduce(table)
        step = self.ctx.config.model.experts.bias_balance
        # 1 or 0 on the device: a branch on the host would wait for the device.
        is_finite = torch.isfinite(squares).to(table.dtype)
        for row, layer in enumerate(self.layers):
            bias = self.held[layer].router.bias if layer in self.held else None
            if step and bias is not None:
                rows = table[row, :count]
                self.parallel.add_to_frozen(bias, step * is_finite * (rows.mean() - rows).sign())
        return self.ctx.device.download(table)

    def forget(self) -> None:
        """Discard the counts of a step that makes no update."""
        for part in self.held.values():
            part.tally.zero_()

    def read(self, table: Download) -> dict[str, Any]:
        """Return the section "experts" of a step's line in metrics.jsonl.

        It has the rows of the busiest expert and of the busiest rank relative to the mean (one number per block), the
        mean entropy of the routers, and the share of choices that were dropped.
        """
        e, ep = self.ctx.config.model.experts, self.ctx.layout.ep
        numbers = np.array(table.read()).reshape(len(self.layers), -1)
        rows, (dropped, entropy) = numbers[:, : e.count], numbers[:, e.count :].T
        choices = rows.sum(1)
        figures = {
            "busiest": [balance(row) for row in rows],
            "busiest_rank": [balance(row.reshape(ep, -1).sum(1)) for row in rows],
            "entropy": float((entropy * e.top_k / choices).mean()),
            "dropped": float((dropped / choices).mean()),
        }
        listed = {"rows": rows.astype(int).tolist()} if rows.size <= MAX_LISTED else {}
        return figures | listed
