"""The block: the unit that is split over stages, recomputed, compiled, gathered and counted."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.layout.params import ParamRecord, records_under
from meshwright.nn.attention import KVCache
from meshwright.nn.build import build_module
from meshwright.nn.experts import Experts, RoutedInputs
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.parts.part import BlockUnit as Description


class Block(nn.Module):
    """Adds to x [tokens, hidden], for each branch, a body of a norm: of the sum so far or, if parallel, of x itself.

    A body takes (x, norm, batch, rotary, mask, past, given) and returns x, its result and, if it adds to the loss, the
    sums of its terms. The residual uses the returned x: a body that fuses the norm with its first product also adds the
    residual's gradient in that kernel's backward.
    """

    def __init__(self, parallel: Parallel, block: Description, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.branches = [(norm.key, body.key) for norm, body in block.branches]
        for key, _, part in block.parts:
            self.add_module(key, build_module(part, parallel, records_under(records, key)))
        self.parallel_residual, self.p = block.parallel, block.dropout
        self.stream = parallel.streams.own if parallel.splits_tokens else parallel.streams.same

    def forward(
        self,
        x: Tensor,
        batch: int,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        past: KVCache | None = None,
        given: RoutedInputs | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the sum and, if a body adds to the loss, the sums of its terms."""
        total: Tensor | None = None
        losses: Tensor | None = None
        for norm, body in self.branches:
            source = x if total is None or self.parallel_residual else total
            source, change, *terms = getattr(self, body)(source, getattr(self, norm), batch, rotary, mask, past, given)
            losses = terms[0] if terms else losses
            change = self._drop(change)
            if total is None:
                x, total = source, source + change
            else:
                total = (total if self.parallel_residual else source) + change
        assert total is not None
        return total if losses is None else (total, losses)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(getattr(self, body), Experts) for _, body in self.branches)

    def compiled_parts(self) -> list[nn.Module]:
        """The block as one graph; beside experts, whose rows no compiler can count before, only the other bodies."""
        if not self.has_experts:
            return [self]
        bodies = [getattr(self, body) for _, body in self.branches]
        return [body for body in bodies if not isinstance(body, Experts)]

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.stream) if self.p and self.training else x
