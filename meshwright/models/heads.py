"""The modules of units, by the kind of unit. Embeddings and heads are defined here, blocks in `nn/build.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.answers import Answers, answer_logps
from meshwright.nn.build import Block, build_module
from meshwright.nn.embedding import ScaledGrad
from meshwright.nn.grid.products import GridLinear
from meshwright.nn.inputs import NodeInputs, NodeModule
from meshwright.nn.linear import Linear
from meshwright.nn.loss import grid_output_loss, output_loss
from meshwright.nn.norm import NoNorm, Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.random import dropout
from meshwright.nn.rows import ChosenRows, Dense
from meshwright.spec.layout.params import records_under
from meshwright.spec.model.gpt import OutputLayerPart
from meshwright.spec.model.graph import Node
from meshwright.spec.model.part import BlockUnit, EmbeddingUnit, HeadUnit, MaskedHeadUnit, Records, Unit, innermost


class Embedding(NodeModule):
    """A module that maps token ids [batch, seq] to activations [tokens, hidden].

    Under sequence parallelism, the activations are this rank's rows.
    """

    def __init__(self, parallel: Parallel, unit: Unit, records: Records) -> None:
        super().__init__()
        built: dict[str, Any] = {
            key: build_module(part, parallel, records_under(records, key)) for key, _, part in unit.parts
        }
        self.tokens = built["tokens"]
        self.positions = built.get("positions")
        self.norm = built.get("norm")
        self.types = built.get("types")
        self.parallel = parallel

    def forward_arguments(self, node: Node, inputs: NodeInputs) -> tuple[Tensor | None, ...]:
        """Return the ids (from the node's first field), the positions and the token types."""
        types = inputs.batch.get("token_types") if "token_types" in node.fields else None
        return inputs.batch[node.fields[0]], inputs.positions, types

    def forward(self, ids: Tensor, positions: Tensor | None, types: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(ids.flatten())
        if self.tokens.grad_share != 1.0:
            x = ScaledGrad.apply(x, self.tokens.grad_share)
        if self.positions is not None:
            if positions is None:
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            x = x + self.positions(self.parallel.local_tokens(positions.flatten()))
        if self.types is not None:
            types = torch.zeros_like(ids) if types is None else types
            x = x + self.types(self.parallel.local_tokens(types.flatten()))
        if self.norm is not None:
            x = self.norm(x)
        if self.tokens.dropout and self.training:
            streams = self.parallel.streams
            x = dropout(x, self.tokens.dropout, streams.own if self.parallel.divides_stream else streams.same)
        return x


class Head(NodeModule):
    """The final norm, the output layer and the loss.

    The output layer is a column-parallel product whose weight may be tied to the embedding's. `fields` are the fields
    of a batch that the head reads in addition to the activations.
    """

    fields: tuple[str, ...] = ("labels", "loss_mask")
    output: Linear

    def __init__(self, parallel: Parallel, unit: Unit, records: Records) -> None:
        super().__init__()
        # A model of post-norm blocks has no final norm.
        self.norm: Norm = NoNorm()
        for key, _, part in unit.parts:
            self.add_module(key, build_module(part, parallel, records_under(records, key)))
        (output,) = (part for each in unit.parts if isinstance(part := innermost(each.part), OutputLayerPart))
        self.vocab, self.scale, self.parallel = output.vocab, output.scale, parallel
        self.loss: Callable[..., Tensor] = grid_output_loss if isinstance(self.output, GridLinear) else output_loss

    def forward_arguments(self, node: Node, inputs: NodeInputs) -> tuple[Any, ...]:
        fields = (inputs.batch[name] for name in self.fields)
        return inputs.streams[node.reads[0]], *fields, inputs.loss_weight

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.final_hidden(x))
        return logits

    def final_hidden(self, x: Tensor) -> Tensor:
        """Return the input of the output layer: the final norm of x, scaled."""
        x = self.norm(x)
        return x if self.scale == 1.0 else x * self.scale

    def forward(
        self, x: Tensor, labels: Tensor, mask: Tensor, weight: float | None = None, answers: Answers | None = None
    ) -> Any:
        """Return the sum of the losses or, with `answers`, the log-probability of each answer.

        `weight` announces the gradient that the sum will receive, or is None if it is not known.
        """
        x = self.final_hidden(x)
        if answers is not None:
            return answer_logps(x, self.output, labels.flatten(), mask.flatten(), answers, self.vocab, self.parallel)
        return self.loss(x, self.output, labels.flatten(), mask.flatten(), self.vocab, self.parallel, weight)

    def counts(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the count of each term of the loss in a micro-batch: its tokens or samples."""
        return [batch["loss_mask"].sum()]


class MaskedHead(Head):
    """A head that predicts the masked tokens of each sample.

    With a pooler, it also predicts from the first token whether the sample's two segments were swapped. It works on
    these rows alone, and every tp rank has all of them.
    """

    rows: ChosenRows
    dense: Dense
    dense_norm: Norm

    def __init__(self, parallel: Parallel, unit: Unit, records: Records) -> None:
        super().__init__(parallel, unit, records)
        self.parallel = replace(parallel, sequence_parallel=False)
        self.pools = any(key == "pooler" for key, _, _ in unit.parts)
        self.fields = ("labels", "loss_mask", "places") + (("swapped",) if self.pools else ())

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of rows x, which every tp rank holds in full."""
        logits: Tensor = self.output(self._transform(self.norm(x)))
        return logits

    def order_logits(self, x: Tensor) -> Tensor:
        """Return the logits for "segments in order" and "segments swapped" from the first row of each sample."""
        logits: Tensor = self.get_submodule("order")(self.get_submodule("pooler")(self.norm(x)))
        return logits

    def _transform(self, x: Tensor) -> Tensor:
        transformed: Tensor = self.dense_norm(self.dense(x))
        return transformed

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, *rest: Any) -> Any:
        """Return the summed loss of the masked tokens and, with a pooler, that of the samples' order.

        `rest` holds the places of the masked tokens, with a pooler which samples were swapped, and the gradient that
        the first sum will receive.
        """
        places, *swapped, weight = rest
        # The pooler reads the first token, so its row is chosen along with those of the masked tokens.
        if self.pools:
            places = torch.cat((torch.zeros_like(places[:, :1]), places), 1)
        rows = self.rows(x, places)
        chosen = self._transform(self.norm(rows[:, int(self.pools) :].flatten(0, 1)))
        loss = output_loss(chosen, self.output, labels.flatten(), mask.flatten(), self.vocab, self.parallel, weight)
        if not self.pools:
            return loss
        logits = self.order_logits(rows[:, 0])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        order_losses = F.cross_entropy(wide, swapped[0], reduction="none")
        # A sample without any masked token does not count.
        return loss, (order_losses * mask.amax(1)).sum()

    def counts(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the number of masked tokens and, with a pooler, of the samples that have any."""
        mask = batch["loss_mask"]
        return [mask.sum(), mask.amax(1).sum()][: 1 + int(self.pools)]


def sample_counts(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return the counts of one sample for the loss terms of a `MaskedHead` with a pooler."""
    mask = sample["loss_mask"]
    return {"loss": float(mask.sum()), "order": float(mask.max())}


# The module of each kind of unit. A program that defines another kind adds its module to this table.
UNITS: dict[type[Unit], Callable[[Parallel, Any, Records], nn.Module]] = {
    BlockUnit: Block,
    EmbeddingUnit: Embedding,
    HeadUnit: Head,
    MaskedHeadUnit: MaskedHead,
}


def build_unit(parallel: Parallel, unit: Unit, records: Records) -> nn.Module:
    """Build the module of a unit. A unit of no known kind must have a single part, whose module is built directly."""
    for kind in type(unit).__mro__:
        if kind in UNITS:
            return UNITS[kind](parallel, unit, records)
    ((key, _, part),) = unit.parts
    return build_module(part, parallel, records_under(records, key))
