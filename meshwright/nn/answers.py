"""The log-probability of each answer in packed conversations, computed from the last hidden states one tile of logits
at a time.

In a loss over several answers, the weight of a token depends on the log-probabilities of all of them. So the gradient
can't be computed in forward, and backward computes the logits again, also one tile at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.ops import reduce_from
from meshwright.nn.grid.sides import Sides, gather_input, scatter_input_grad
from meshwright.nn.linear import Linear
from meshwright.nn.loss import OutputGrads, Vocabulary, logit_tiles, loss_and_grad_
from meshwright.nn.parallel import Parallel
from meshwright.spec.model.loss_pieces import answers_of

# The mask's value for the tokens of an answer that was judged bad.
BAD = 2


class AnswerLogps(NamedTuple):
    """The answers of each conversation, [samples, conversations]: the sum of their log-probabilities, the number of
    their tokens, and whether they were judged good."""

    sums: Tensor
    counts: Tensor
    good: Tensor


@dataclass(frozen=True)
class Answers:
    """The conversation to which each token of a micro-batch belongs."""

    # The number of each token's conversation in the micro-batch, [tokens].
    places: Tensor
    samples: int
    # The number of conversations for which each sample has room.
    each: int

    @classmethod
    def of(cls, segments: Tensor, seq: int) -> Answers:
        """Build the answers from `segments` [samples, tokens], the number of each token's conversation in its sample.

        The tokens may be a part of sequences of `seq` tokens.
        """
        samples, each = len(segments), answers_of(seq)
        offsets = torch.arange(samples, device=segments.device)[:, None] * each
        return cls((segments + offsets).flatten(), samples, each)

    def split(self, sums: Tensor, mask: Tensor, ranks: Group) -> AnswerLogps:
        """Return the sums by sample and conversation, with the token counts and judgements of the answers.

        `ranks` hold different tokens of the same samples. Their numbers are summed, so that all of them compute the
        same loss.
        """

        def counted(where: Tensor) -> Tensor:
            return sums.new_zeros(sums.shape).index_add_(0, self.places, where.flatten().to(sums.dtype))

        totals = reduce_from(torch.stack((sums, counted(mask > 0), counted(mask == BAD))), ranks)
        logps, counts, bad = totals.view(3, self.samples, self.each)
        return AnswerLogps(logps, counts, bad == 0)


class _AnswerLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, mask: Tensor, answers: Answers,
        sides: Sides, vocabulary: Vocabulary,
    ) -> Tensor:  # fmt: skip
        ctx.sides, ctx.vocabulary, ctx.answers = sides, vocabulary, answers
        ctx.save_for_backward(x, weight, bias, labels, mask)
        full = gather_input(x, sides)
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = torch.zeros(answers.samples * answers.each, dtype=wide, device=x.device)
        for at, logits in logit_tiles(full, weight, bias):
            losses = loss_and_grad_(logits, labels[at], mask[at], None, vocabulary)
            sums.index_add_(0, answers.places[at], -losses)
            del logits
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels, mask = ctx.saved_tensors
        full = gather_input(x, ctx.sides, again=True)
        # The loss of a token is its negative log-probability, so the gradient of its log-probability changes sign.
        weights = -grad[ctx.answers.places] * mask
        grads = OutputGrads(full, weight, ctx.needs_input_grad[:3])
        for at, logits in logit_tiles(full, weight, bias):
            loss_and_grad_(logits, labels[at], weights[at], 1.0, ctx.vocabulary)
            grads.add(at, logits)
            del logits
        grad_x = None if grads.x is None else scatter_input_grad(grads.x, ctx.sides)
        parameter_grads = [None if wide is None else wide.to(weight.dtype) for wide in (grads.weight, grads.bias)]
        return grad_x, *parameter_grads, None, None, None, None, None


def answer_logps(
    x: Tensor, output: Linear, labels: Tensor, mask: Tensor, answers: Answers, vocab: int, parallel: Parallel
) -> Tensor:
    """Return the summed log-probability of the learned tokens of each conversation, from hidden states x [tokens,
    hidden]."""
    vocabulary = Vocabulary.of(output.weight.shape[0], vocab, parallel.tp, parallel.host)
    learned = (mask > 0).to(torch.promote_types(x.dtype, torch.float32))
    logps: Tensor = _AnswerLogps.apply(
        x, output.weight, output.bias, labels, learned, answers, output.sides, vocabulary
    )
    return logps
