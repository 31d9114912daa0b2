"""Losses over preferred and judged answers equal plain definitions in float64, on several layouts."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import meshwright.spec.model.tuning as tuning
from meshwright.check.made_samples import MadeAnswers
from meshwright.cli.dryrun import compare
from meshwright.config.rules import READING_RULES, first_broken_rule
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.engine.step import Trainer
from meshwright.models.graph_stage import GraphStage
from meshwright.nn.adapters.adapters import without_adapters
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from meshwright.spec.layout.params import Init
from tests.support.oracle import EXACT, Pairs, gather_global, make_trainer, small_config, true_gradients, worst
from tests.support.ranks import run_ranks

SEQ = 24


def config_of(loss: str, **more: dict[str, Any]) -> Config:
    kind = "full" if loss in ("orpo", "simpo") else "lora"
    sections: dict[str, Any] = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "seq": SEQ, "vocab": 53, "position": "rope"},
        "data": {"prefixes": ["made"], "objective": "preference"}, "train": {"global_batch": 8, "micro_batch": 2},
        "tune": {"kind": kind, "rank": 4, "loss": loss, "beta": 0.3, "margin": 0.2},
    }  # fmt: skip
    return small_config(**{key: {**sections.get(key, {}), **more.get(key, {})} for key in {*sections, *more}})


def trainer_of(config: Config, rank: int = 0, world: int = 1) -> Trainer:
    return make_trainer(config, rank, world, MadeAnswers(53, SEQ, config.tune.loss == "kto"))


# Half of the gradients would be zero if adapters began at zero.
far = mock.patch.object(tuning, "ZEROS", Init("normal", 0.3))


def logp(module: GraphStage, sample: dict[str, np.ndarray], segment: int) -> tuple[torch.Tensor, int]:
    """Return the log-likelihood of the answer in one conversation, by the plain definition, and its number of
    tokens.
    """
    at = sample["segments"] == segment
    ids, labels, mask = (torch.tensor(sample[key][at]) for key in ("tokens", "labels", "loss_mask"))
    hidden, _ = module.trunk({"tokens": ids[None]})
    assert module.head is not None
    each = F.log_softmax(module.head.logits(hidden), -1).gather(1, labels[:, None])[:, 0]
    return each[mask > 0].sum(), int((mask > 0).sum())


def plain_loss(trainer: Trainer) -> torch.Tensor:
    """Return the mean loss over the pairs, or the judged answers, of eight samples."""
    (module,), tune = trainer.modules, trainer.ctx.config.tune
    assert isinstance(module, GraphStage)
    losses = []
    for n in range(8):
        sample = MadeAnswers(53, SEQ, tune.loss == "kto").sample(n)
        count = int(sample["segments"].max())
        found = [logp(module, sample, segment) for segment in range(count)]
        with torch.no_grad(), without_adapters(module):
            before = [logp(module, sample, segment)[0] for segment in range(count)]
        ratios = [value - old for (value, _), old in zip(found, before, strict=True)]
        if tune.loss == "kto":
            point = max(0.0, float(sum(ratios).detach()) / count)
            for segment, ratio in enumerate(ratios):
                good = int(sample["loss_mask"][sample["segments"] == segment].max()) == 1
                losses.append(1 - torch.sigmoid(tune.beta * (ratio - point if good else point - ratio)))
            continue
        for pair in range(0, count, 2):
            (a, na), (b, nb), ra, rb = *found[pair : pair + 2], *ratios[pair : pair + 2]
            losses.append({
                "dpo": lambda ra=ra, rb=rb: -F.logsigmoid(tune.beta * (ra - rb)),
                "ipo": lambda ra=ra, rb=rb, na=na, nb=nb: (ra / na - rb / nb - 1 / (2 * tune.beta)) ** 2,
                "simpo": lambda a=a, b=b, na=na, nb=nb: -F.logsigmoid(tune.beta * (a / na - b / nb) - tune.margin),
                "orpo": lambda a=a, b=b, na=na, nb=nb: -a / na - tune.beta * F.logsigmoid(
                    torch.log((a / na).exp() / (1 - (a / na).exp())) - torch.log((b / nb).exp() / (1 - (b / nb).exp()))
                ),
            }[tune.loss]())  # fmt: skip
    return torch.stack(losses).mean()


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_the_loss_and_its_gradients_are_those_of_the_definition(loss: str) -> None:
    with far:
        trainer, apart = trainer_of(config_of(loss)), trainer_of(config_of(loss))
        for layer in apart.modules[0].modules():  # without sinks, autograd returns the gradients of weights
            getattr(layer, "sinks", {}).clear()
        wanted = plain_loss(apart)
        slots = [slot for buffer in apart.data_parallel.trained for slot in buffer.slots]
        grads = torch.autograd.grad(wanted, [slot.parameter for slot in slots], allow_unused=True)
        plain = {slot.record.name: (torch.zeros_like(slot.parameter) if grad is None else grad).numpy()
                 for slot, grad in zip(slots, grads, strict=True)}  # fmt: skip
        assert worst(true_gradients(trainer), plain)[0] < EXACT
        assert trainer.step().loss == pytest.approx(float(wanted.detach()), rel=1e-12)


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"layout": {"tp": 2, "sequence_parallel": True}}),
    (2, {"zero": {"stage": 3}, "recompute": {"mode": "full"}}),
    (2, {"layout": {"tp": 2}, "train": {"micro_batch": 4}}),
    (2, {"layout": {"pp": 2}}),
    (2, {"layout": {"cp": 2}}),
    (2, {"layout": {"pp": 2, "chunks": 2}, "model": {"layers": 4}, "pipeline": {"schedule": "interleaved"}}),
    (4, {"layout": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 2}}),
    (4, {"layout": {"cp": 2, "pp": 2}, "context": {"kind": "ring", "order": "zigzag"}}),
    (4, {"layout": {"pp": 2}, "zero": {"stage": 3}, "recompute": {"mode": "full"}}),
]


def gradients(rank: int, world: int, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[Pairs, float, float]]:
    """Return the gradients of the first step, and the loss and the number of pairs that it reports."""
    found = []
    with far:
        for loss, more in cases:
            trainer = trainer_of(config_of(loss, **more), rank, world)
            pairs, result = true_gradients(trainer), trainer.step()
            found.append((pairs, result.loss, result.counted))
    return found


def check_layouts(world: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    alone: dict[Any, Any] = {}
    for found in run_ranks(world, gradients, cases, deadline=200.0):
        for (loss, more), (pairs, value, tokens) in zip(cases, found, strict=True):
            model = more.get("model", {})
            if (key := (loss, *model.values())) not in alone:
                alone[key] = gradients(0, 1, [(loss, {"model": model})])[0]
            wanted, wanted_loss, wanted_tokens = alone[key]
            assert worst(pairs, gather_global(wanted))[0] < EXACT, (loss, more)
            assert value == pytest.approx(wanted_loss, rel=EXACT) and tokens == wanted_tokens, (loss, more)


def test_answers_whose_tokens_or_layers_lie_on_other_ranks() -> None:
    check_layouts(2, [("dpo", {"layout": {"cp": 2}}), ("kto", {"layout": {"pp": 2}})])


@pytest.mark.wide
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_gives_the_gradients_of_one_process(world: int) -> None:
    losses = ("dpo", "orpo", "kto")
    check_layouts(world, [(loss, more) for ranks, more in LAYOUTS if ranks == world for loss in losses])


PLANNED: list[tuple[int, dict[str, Any]]] = [
    (8, {"layout": {"tp": 2, "sequence_parallel": True, "pp": 2}, "zero": {"stage": 3}, "tune": {"kind": "dora"}}),
    (2, {"layout": {"cp": 2}}),
]


@pytest.mark.parametrize("loss", ["dpo", pytest.param("orpo", marks=pytest.mark.wide)])
def test_every_call_of_a_step_is_planned(loss: str) -> None:
    """The forward of the reference is planned too, with its gathers and its sends between stages."""
    for world, more in [*PLANNED, *LAYOUTS] if loss == "orpo" else PLANNED:
        config = config_of(loss, run={"device": "cpu"}, **more if loss == "dpo" else {**more, "tune": {}})
        for rank in {0, world - 1}:
            said = planned_rank(checked_job(config, world), rank)
            found = compare(rank, run_rank(config, world, rank, Device("meta")), said)
            assert found["equal"], [each for each in found["calls"] if not each["equal"]]
            assert found["most"]["peak"]["ratio"] == pytest.approx(1.0, abs=0.2)


def test_dpo_begins_at_log_2_and_what_it_can_not_do_is_refused() -> None:
    """Adapters begin at zero, so a run begins equal to its reference."""
    result = trainer_of(config_of("dpo")).step()
    assert result.loss == math.log(2) and result.counted == 14  # pairs of eight samples
    said = first_broken_rule(config_of("dpo", tune={"kind": "full"}), 1)
    assert said is not None and "use orpo or simpo" in said
    # A reader of the run has adapters and weights as one model, and trains nothing.
    assert first_broken_rule(config_of("dpo", tune={"kind": "full"}), 1, READING_RULES) is None
