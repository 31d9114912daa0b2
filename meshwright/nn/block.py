"""The block: the unit that is split over stages, recomputed, compiled, gathered and counted."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.config.sections import ModelConfig
from meshwright.layout.params import ParamRecord, under
from meshwright.nn.attention import Attention, Past
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout


class Block(nn.Module):
    """x [tokens, hidden] plus attention of its norm, plus the MLP of that sum's norm (parallel: of x's norm too)."""

    def __init__(self, parallel: Parallel, model: ModelConfig, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.norm1 = Norm(parallel, model.norm, model.norm_eps, under(records, "norm1"))
        self.attention = Attention(parallel, model, under(records, "attention"))
        self.norm2 = Norm(parallel, model.norm, model.norm_eps, under(records, "norm2"))
        self.mlp = MLP(parallel, model.mlp, under(records, "mlp"))
        self.parallel_residual, self.p = model.parallel_residual, model.dropout
        self.stream = parallel.streams.own if parallel.splits_tokens else parallel.streams.same

    def forward(
        self,
        x: Tensor,
        batch: int,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        x, change = self.attention(x, self.norm1, batch, rotary, mask, past)
        attended = x + self._drop(change)
        if self.parallel_residual:
            return attended + self._drop(self.mlp(x, self.norm2)[1])
        attended, change = self.mlp(attended, self.norm2)
        return attended + self._drop(change)

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.stream) if self.p and self.training else x
