"""The ends of models: what turns the last activations into terms of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.answers import Answers, answer_logps
from meshwright.nn.build import build_module
from meshwright.nn.linear import Linear
from meshwright.nn.loss import output_loss
from meshwright.nn.norm import NoNorm, Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.rows import ChosenRows, Dense
from meshwright.spec.layout.params import records_under
from meshwright.spec.model.gpt import OutputLayerPart
from meshwright.spec.model.part import Records, Unit


class Head(nn.Module):
    """The last norm, the output layer (a column-cut product whose weight may be the embedding's) and the loss. `fields`
    of a batch are what it takes beside the activations."""

    fields: tuple[str, ...] = ("labels", "loss_mask")
    output: Linear

    def __init__(self, parallel: Parallel, unit: Unit, records: Records, vocab: int) -> None:
        super().__init__()
        self.norm: Norm = NoNorm()  # after post-norm blocks
        for key, _, part in unit.parts:
            self.add_module(key, build_module(part, parallel, records_under(records, key)))
        self.vocab, self.parallel = vocab, parallel
        self.scale = next((part.scale for _, _, part in unit.parts if isinstance(part, OutputLayerPart)), 1.0)

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.ended(x))
        return logits

    def ended(self, x: Tensor) -> Tensor:
        """Returns what the output layer takes."""
        x = self.norm(x)
        return x if self.scale == 1.0 else x * self.scale

    def forward(
        self, x: Tensor, labels: Tensor, mask: Tensor, weight: float | None = None, answers: Answers | None = None
    ) -> Any:
        """Returns the sum of the losses, where `weight` announces the gradient that this sum will get; or, with
        `answers`, the log-probability of each of them."""
        x = self.ended(x)
        if answers is not None:
            return answer_logps(x, self.output, labels.flatten(), mask.flatten(), answers, self.vocab, self.parallel)
        return output_loss(x, self.output, labels.flatten(), mask.flatten(), self.vocab, self.parallel, weight)

    def counts(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns what each term of the loss counts in a micro-batch."""
        return [batch["loss_mask"].sum()]


class MaskedHead(Head):
    """Predicts the tokens at some places of each sample and, with a pooler, whether its two segments were swapped, from
    its first token. It works on these rows alone, and every tp rank has all of them."""

    rows: ChosenRows
    dense: Dense
    dense_norm: Norm

    def __init__(self, parallel: Parallel, unit: Unit, records: Records, vocab: int) -> None:
        super().__init__(parallel, unit, records, vocab)
        self.parallel = replace(parallel, sequence_parallel=False)
        self.pools = any(key == "pooler" for key, _, _ in unit.parts)
        self.fields = ("labels", "loss_mask", "places") + (("swapped",) if self.pools else ())

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits of any rows that every tp rank holds."""
        logits: Tensor = self.output(self._predicts(self.norm(x)))
        return logits

    def order_logits(self, x: Tensor) -> Tensor:
        """Returns, from samples' first rows, the logits of segments in their order and of swapped ones."""
        logits: Tensor = self.get_submodule("order")(self.get_submodule("pooler")(self.norm(x)))
        return logits

    def _predicts(self, x: Tensor) -> Tensor:
        found: Tensor = self.dense_norm(self.dense(x))
        return found

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, *rest: Any) -> Any:
        """Returns the sum of the losses of masked tokens and, with a pooler, of the samples' order. `rest`: the places
        of the masked tokens, which samples were swapped, and the gradient that the first sum will get."""
        places, *swapped, weight = rest
        if self.pools:
            places = torch.cat((torch.zeros_like(places[:, :1]), places), 1)
        rows = self.rows(x, places)
        chosen = self._predicts(self.norm(rows[:, int(self.pools) :].flatten(0, 1)))
        loss = output_loss(chosen, self.output, labels.flatten(), mask.flatten(), self.vocab, self.parallel, weight)
        if not self.pools:
            return loss
        logits = self.order_logits(rows[:, 0])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.cross_entropy(wide, swapped[0], reduction="none")
        return loss, (each * mask.amax(1)).sum()

    def counts(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the tokens that count and, with a pooler, the samples that have any."""
        mask = batch["loss_mask"]
        return [mask.sum(), mask.amax(1).sum()][: 1 + int(self.pools)]


def sample_counts(sample: Mapping[str, Any]) -> dict[str, float]:
    """Returns what the terms of a `MaskedHead` with a pooler count in one sample."""
    mask = sample["loss_mask"]
    return {"loss": float(mask.sum()), "order": float(mask.max())}
