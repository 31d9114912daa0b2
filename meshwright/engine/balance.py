"""How evenly a step's tokens fell on the experts: summed over all ranks, reported, and evened out by the bias that the
routers choose with. The sums are whole numbers, so they are the same in every layout."""

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

MOST_LISTED = 4096  # rows of each expert are listed in metrics.jsonl up to so many numbers


class ExpertBalance:
    """The mixtures of experts of this rank's chunks, by their layer."""

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
        """Sums the rows of every expert over all ranks, moves the biases, and begins to count the next step. A step
        whose squared gradient norm is not finite makes no update, and moves no bias."""
        if not self.layers:
            return None
        count, device = self.ctx.config.model.experts.count, self.ctx.device.torch
        table = torch.zeros(len(self.layers), balance_length(count), dtype=torch.float64, device=device)
        for row, layer in enumerate(self.layers):
            if layer in self.held:
                table[row] = self.held[layer].tally
                self.held[layer].tally.zero_()
        self.ctx.mesh.world.all_reduce(table)
        step = self.ctx.config.model.experts.bias_balance
        counts = torch.isfinite(squares).to(table.dtype)
        for row, layer in enumerate(self.layers):
            bias = self.held[layer].router.bias if layer in self.held else None
            if step and bias is not None:
                rows = table[row, :count]
                self.parallel.add_to_frozen(bias, step * counts * (rows.mean() - rows).sign())
        return self.ctx.device.download(table)

    def forget(self) -> None:
        """Forgets what was counted of a step that makes no update."""
        for part in self.held.values():
            part.tally.zero_()

    def read(self, table: Download) -> dict[str, Any]:
        """Returns what metrics.jsonl says of a step's experts: per block the busiest expert's and the busiest rank's
        rows over the mean, the mean entropy of the routers, and the share of choices that were dropped."""
        e, ep = self.ctx.config.model.experts, self.ctx.layout.ep
        numbers = np.array(table.read()).reshape(len(self.layers), -1)
        rows, (dropped, entropy) = numbers[:, : e.count], numbers[:, e.count :].T
        choices = rows.sum(1)
        found = {
            "busiest": [balance(row) for row in rows],
            "busiest_rank": [balance(row.reshape(ep, -1).sum(1)) for row in rows],
            "entropy": float((entropy * e.top_k / choices).mean()),
            "dropped": float((dropped / choices).mean()),
        }
        listed = {"rows": rows.astype(int).tolist()} if rows.size <= MOST_LISTED else {}
        return found | listed
