"""Losses over preferred or judged answers.

Each loss is one function of log-probabilities. It is divided by the number of pairs (or answers) of the whole global
batch. The reference model is the model without its adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import Config
from meshwright.config.tune import PREFERENCE_ACCURACY, TuneConfig
from meshwright.engine.output import LOSS, Ratio, StageOutput, Term
from meshwright.models.graph_stage import GraphStage
from meshwright.nn.adapters.adapters import without_adapters
from meshwright.nn.answers import AnswerLogps
from meshwright.spec.model.graph import reference_of


class Answer(NamedTuple):
    """The log-probabilities of some answers, those under the reference model (or 0), and the numbers of tokens."""

    logp: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        return self.logp - self.reference

    @property
    def mean(self) -> Tensor:
        return self.logp / self.tokens


def dpo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Return the DPO loss: -log sigmoid(beta (log-ratio of chosen - log-ratio of rejected)).

    Log-ratios are those of the trained model to the reference.
    """
    return -F.logsigmoid(tune.beta * (chosen.ratio - rejected.ratio))


def ipo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Return the IPO loss: (difference of the log-ratios per token - 1 / (2 beta))^2."""
    difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    return (difference - 1.0 / (2.0 * tune.beta)).square()


def simpo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Return the SimPO loss: -log sigmoid(beta (difference of mean log-probabilities) - margin), with no reference."""
    return -F.logsigmoid(tune.beta * (chosen.mean - rejected.mean) - tune.margin)


def orpo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Return the ORPO loss: the mean loss of the chosen answer, plus beta times the loss of the odds ratio."""
    # log(p / (1 - p)) with p = exp(mean); expm1 is exact where p is close to 1.
    log_odds = [answer.mean - torch.log(-torch.expm1(answer.mean)) for answer in (chosen, rejected)]
    return -chosen.mean - tune.beta * F.logsigmoid(log_odds[0] - log_odds[1])


def kto(answer: Answer, good: Tensor, present: Tensor, tune: TuneConfig) -> Tensor:
    """Return the KTO loss: 1 - sigmoid(beta (log-ratio - point)), with the opposite sign for bad answers.

    The point is the mean log-ratio of the answers in the same packed sample, at least 0, and is treated as a constant.
    """
    ratio = torch.where(present, answer.ratio, 0.0)
    point = (ratio.sum(1, keepdim=True) / present.sum(1, keepdim=True).clamp(min=1)).clamp(min=0.0).detach()
    return 1.0 - torch.sigmoid(tune.beta * torch.where(good, ratio - point, point - ratio))


PAIRED: dict[str, Callable[[Answer, Answer, TuneConfig], Tensor]] = {
    "dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo,
}  # fmt: skip


def preference_output(
    config: Config, module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]
) -> StageOutput:
    """Return the loss of one micro-batch, or the tensors that a stage before the last passes on.

    All ranks that share the sequences compute the same answers. The first of them returns the loss; the others return
    a loss of zero with the same gradient.
    """
    assert isinstance(module, GraphStage)
    reference: dict[str, Tensor] | AnswerLogps = {}
    own = {name: x for name, x in received.items() if name not in module.ungraded}
    if config.compares:
        training = module.training
        with torch.no_grad(), without_adapters(module.eval()):
            reference = module.answers(batch, {name: received[reference_of(name)] for name in own})
        module.train(training)
    answers = module.answers(batch, own)
    if isinstance(answers, dict):
        assert isinstance(reference, dict)
        return StageOutput(answers | {reference_of(name): x for name, x in reference.items()})
    reference_logps = reference.sums if isinstance(reference, AnswerLogps) else torch.zeros_like(answers.sums)
    loss_function = _kto_loss if config.tune.judges_each else _paired_loss
    losses, present, monitored = loss_function(answers, reference_logps, config.tune)
    total, count = torch.where(present, losses, 0.0).sum(), present.sum()
    if module.tokens.index > 0:
        # The value becomes zero, so that the loss is counted once, but the gradient remains.
        total = total - total.detach()
        count = torch.zeros_like(count)
    return StageOutput({}, [Term(LOSS, total, count)], monitored)


# Losses, a mask of the entries that exist (samples have different numbers of answers), and monitored values.
PreferenceLoss = tuple[Tensor, Tensor, dict[str, Ratio]]


def _kto_loss(answers: AnswerLogps, reference_logps: Tensor, tune: TuneConfig) -> PreferenceLoss:
    present = answers.counts > 0
    return kto(Answer(answers.sums, reference_logps, answers.counts), answers.good, present, tune), present, {}


def _paired_loss(answers: AnswerLogps, reference_logps: Tensor, tune: TuneConfig) -> PreferenceLoss:
    logps, references, counts = (x.view(len(x), -1, 2) for x in (answers.sums, reference_logps, answers.counts))
    present = (counts > 0).all(2)
    # A missing pair is replaced by answers of one token with probability 1/2, so that no gradient becomes infinite.
    logps = torch.where(present[..., None], logps, -0.7)
    chosen, rejected = (Answer(logps[..., n], references[..., n], counts[..., n].clamp(min=1.0)) for n in (0, 1))
    better = Ratio(((chosen.ratio > rejected.ratio) & present).sum(), present.sum())
    return PAIRED[tune.loss](chosen, rejected, tune), present, {PREFERENCE_ACCURACY: better}
