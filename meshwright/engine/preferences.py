"""Losses over answers that were preferred or judged: each is one function of log-probabilities and is divided by the
number of pairs (or answers) of the whole global batch. The reference is the model without its adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import Config
from meshwright.config.tune import BETTER, TuneConfig
from meshwright.engine.output import LOSS, Share, StageOutput, Term
from meshwright.models.graph_stage import GraphStage
from meshwright.nn.adapters.adapters import without_adapters
from meshwright.nn.answers import AnswerLogps
from meshwright.spec.model.graph import reference_of


class Answer(NamedTuple):
    """Of some answers: the log-probability, that of the reference (0 without one), and the number of tokens."""

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
    """Direct preference optimisation: -log sigmoid(beta (chosen's log-ratio to the reference - rejected's))."""
    return -F.logsigmoid(tune.beta * (chosen.ratio - rejected.ratio))


def ipo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Identity preference optimisation, with log-ratios per token: (difference - 1 / (2 beta))^2."""
    difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    return (difference - 1.0 / (2.0 * tune.beta)).square()


def simpo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Simple preference optimisation: mean log-probabilities, no reference, and a margin."""
    return -F.logsigmoid(tune.beta * (chosen.mean - rejected.mean) - tune.margin)


def orpo(chosen: Answer, rejected: Answer, tune: TuneConfig) -> Tensor:
    """Odds ratio preference optimisation: the chosen answer's mean loss, and beta times the loss of the odds' ratio."""
    odds = [each.mean - torch.log(-torch.expm1(each.mean)) for each in (chosen, rejected)]
    return -chosen.mean - tune.beta * F.logsigmoid(odds[0] - odds[1])


def kto(answer: Answer, good: Tensor, there: Tensor, tune: TuneConfig) -> Tensor:
    """Kahneman-Tversky optimisation: 1 - sigmoid(beta (log-ratio - point)), of bad answers with the other sign. The
    point is the mean log-ratio of the answers in the same packed sample, at least 0, as a constant."""
    ratio = torch.where(there, answer.ratio, 0.0)
    point = (ratio.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)).clamp(min=0.0).detach()
    return 1.0 - torch.sigmoid(tune.beta * torch.where(good, ratio - point, point - ratio))


PAIRED: dict[str, Callable[[Answer, Answer, TuneConfig], Tensor]] = {
    "dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo,
}  # fmt: skip


def preference_output(
    config: Config, module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]
) -> StageOutput:
    """The loss of one micro-batch, or what a stage before the last passes on. All ranks that share the sequences know
    the same answers; the first of them gives the loss and the others its gradient alone."""
    assert isinstance(module, GraphStage)
    reference: dict[str, Tensor] | AnswerLogps = {}
    own = {name: x for name, x in received.items() if name not in module.ungraded}
    if config.compares:
        training = module.training
        with torch.no_grad(), without_adapters(module.eval()):
            reference = module.answers(batch, {name: received[reference_of(name)] for name in own})
        module.train(training)
    found = module.answers(batch, own)
    if isinstance(found, dict):
        assert isinstance(reference, dict)
        return StageOutput(found | {reference_of(name): x for name, x in reference.items()})
    before = reference.sums if isinstance(reference, AnswerLogps) else torch.zeros_like(found.sums)
    losses, there, monitored = (_judged if config.tune.judges_each else _paired)(found, before, config.tune)
    total, count = torch.where(there, losses, 0.0).sum(), there.sum()
    if module.tokens.index > 0:
        total, count = total - total.detach(), torch.zeros_like(count)
    return StageOutput({}, [Term(LOSS, total, count)], monitored)


Judged = tuple[Tensor, Tensor, dict[str, Share]]  # losses, which of them are there, values to monitor


def _judged(found: AnswerLogps, before: Tensor, tune: TuneConfig) -> Judged:
    there = found.counts > 0
    return kto(Answer(found.sums, before, found.counts), found.good, there, tune), there, {}


def _paired(found: AnswerLogps, before: Tensor, tune: TuneConfig) -> Judged:
    pairs = [each.view(len(each), -1, 2) for each in (found.sums, before, found.counts)]
    there = (pairs[2] > 0).all(2)
    # Where there is no pair, one token of probability 1/2 stands for it, so that no gradient becomes infinite.
    logps = torch.where(there[..., None], pairs[0], -0.7)
    chosen, rejected = (Answer(logps[..., n], pairs[1][..., n], pairs[2][..., n].clamp(min=1.0)) for n in (0, 1))
    better = Share(((chosen.ratio > rejected.ratio) & there).sum(), there.sum())
    return PAIRED[tune.loss](chosen, rejected, tune), there, {BETTER: better}
