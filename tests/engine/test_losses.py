"""A loss of several terms from several stages, each divided by its own count, and monitored values that only some ranks
have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.engine.losses import Normalisation
from meshwright.engine.output import StageOutput, Term
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.nn.unit import call_unit
from meshwright.plan.communication import stage_calls
from meshwright.plan.job import job_of
from meshwright.run.pretrain import build_modules
from meshwright.spec.traffic.counts import sums_length
from tests.support.oracle import Made, WholeTensors, gather_global, small_config, true_gradients, worst
from tests.support.ranks import run_ranks

EXACT = 1e-10
WEIGHT = 0.3
Found = tuple[WholeTensors, list[float], list[dict[str, float]], dict[str, Any]]


def chosen(tokens: Any) -> Any:
    """Select the tokens whose embeddings the second term keeps small. They differ from those that the loss counts."""
    return tokens % 3 == 0


def counts(sample: Any) -> dict[str, float]:
    return {"loss": float(sample["loss_mask"].sum()), "small": float(chosen(sample["tokens"]).sum())}


def small_embeddings(module: Any, batch: Any) -> tuple[Any, Any]:
    x = call_unit(module.embedding, batch["tokens"], None)
    which = chosen(batch["tokens"]).flatten()
    return (0.5 * x.square().sum(1) * which).sum(), which.sum()


def two_terms(ctx: Any, module: Any, batch: Any, received: Any) -> StageOutput:
    """Return a stage's output, to which the first stage adds one term and the last stage the other."""
    out = forward_step(ctx, module, batch, received)
    terms = list(out.terms)
    monitored = {"from the last": 3.0} if terms else {}
    if module.embedding is not None:
        terms.append(Term("small", *small_embeddings(module, batch), WEIGHT))
        monitored["from the first"] = 5.0
    return StageOutput(out.tensors, terms, monitored)


def one_term(ctx: Any, module: Any, batch: Any, received: Any) -> Any:
    """Return the second term as if it were the loss."""
    return *small_embeddings(module, batch), {}


def config_of(**layout: Any) -> Config:
    return small_config(layout=layout, train={"global_batch": 8, "clip": 0.7}, run={"eval_samples": 8})


def trainer_of(config: Config, step: Any, loss_counts: Any, rank: int = 0, world: int = 1) -> Trainer:
    ctx = build_context(config, rank, world, Device("cpu"), trains=True)
    data = Made(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider), step, data, data, loss_counts=loss_counts)


def found_of(trainer: Trainer) -> tuple[list[float], list[dict[str, float]], dict[str, Any]]:
    """Take two steps and validate. Return losses and norms, the values of terms and monitored quantities, and the
    validation.
    """
    results = [trainer.step() for _ in range(2)]
    numbers = [number for result in results for number in (result.loss, result.grad_norm)]
    line = trainer.validate()
    assert line is not None
    return numbers, [{**result.losses, **result.monitored} for result in results], line


def one_process() -> Found:
    trainer = trainer_of(config_of(), two_terms, counts)
    return gather_global(true_gradients(trainer)), *found_of(trainer)


def test_the_gradient_is_the_sum_of_the_terms_own() -> None:
    """Each term alone is divided after backward, as a loss of one term is. This is another way to the same numbers."""
    both = one_process()
    loss, small = (
        gather_global(true_gradients(trainer_of(config_of(), step, None))) for step in (forward_step, one_term)
    )
    scale = max(float(np.abs(value).max()) for value in both[0].values())
    for name, value in both[0].items():
        assert np.abs(value - loss[name] - WEIGHT * small[name]).max() <= EXACT * scale, name
    (first, *_), (values, _), line = both[1:]
    assert values["small"] > 0 and first == pytest.approx(values["loss"] + WEIGHT * values["small"], rel=1e-12)
    assert line["loss"] == pytest.approx(line["losses"]["loss"] + WEIGHT * line["losses"]["small"], rel=1e-12)
    # The planted bug divides every term by the count of the loss.
    with mock.patch.object(Normalisation, "gradient_factor", lambda self, name: self.weight / self.counts["loss"]):
        wrong = gather_global(true_gradients(trainer_of(config_of(), two_terms, counts)))
    assert max(np.abs(value - both[0][name]).max() for name, value in wrong.items()) > 1e-3 * scale


def measure(rank: int, world: int, layouts: list[dict[str, Any]], reference: Found, planted: bool) -> list[Any]:
    """Return by layout the worst error of a gradient, and the numbers that steps and validation report."""
    found = []
    for layout in layouts:
        trainer = trainer_of(config_of(**layout), two_terms, counts, rank, world)
        # The planted bug lets each rank divide by its own counts.
        if planted:
            with mock.patch("meshwright.engine.step.declared_counts", lambda ctx, names, mine: dict(mine)):
                found.append((worst(true_gradients(trainer), reference[0]),))
        else:
            found.append((worst(true_gradients(trainer), reference[0]), *found_of(trainer)))
    return found


def check_layouts(world: int, layouts: list[dict[str, Any]]) -> None:
    alone: Any = one_process()
    gradients, *reference = alone
    for rank in run_ranks(world, measure, layouts, (gradients, *reference), False):
        for layout, (error, numbers, values, line) in zip(layouts, rank, strict=True):
            assert error[0] <= EXACT, (layout, error)
            assert numbers == pytest.approx(reference[0], rel=EXACT), layout
            assert values == [pytest.approx(value, rel=EXACT) for value in reference[1]], layout
            assert line["losses"] == pytest.approx(reference[2]["losses"], rel=EXACT)
            assert line["loss"] == pytest.approx(reference[2]["loss"], rel=EXACT)


def test_two_terms_equal_one_process() -> None:
    check_layouts(4, [{"pp": 2}, {"pp": 2, "tp": 2}])
    found = run_ranks(2, measure, [{}], one_process(), True)
    assert min(rank[0][0][0] for rank in found) > 1e-3, "a count of one rank alone goes unnoticed"


@pytest.mark.wide
def test_two_terms_equal_one_process_on_every_axis() -> None:
    check_layouts(8, [{"pp": 2, "tp": 2}, {"pp": 4}])


def test_a_term_must_be_declared_and_counted_alike() -> None:
    with pytest.raises(UserError, match="term 'small' is not declared: pass loss_counts"):
        trainer_of(config_of(), two_terms, None).step()
    with pytest.raises(UserError, match="term 'small' is not among loss"):
        trainer_of(config_of(), two_terms, lambda sample: {"loss": counts(sample)["loss"]}).step()
    twice = lambda sample: {name: 2 * count for name, count in counts(sample).items()}  # noqa: E731
    with pytest.raises(UserError, match="loss_counts said .* for the term 'loss' and forward_step counted"):
        trainer_of(config_of(), two_terms, twice).step()
    with pytest.raises(UserError, match="returned a Tensor: return a dict"):
        trainer_of(config_of(), lambda ctx, module, batch, received: module(batch)[0], None).step()


@pytest.mark.parametrize("tied", [True, False])
def test_a_term_that_nobody_counted_leaves_the_others_alone(tied: bool) -> None:
    """In this step no token counts in the loss, but tokens count in the other term."""

    class Blind(Made):
        def sample(self, n: int) -> dict[str, Any]:
            found = super().sample(n)
            return found | {"loss_mask": np.zeros_like(found["loss_mask"])}

    config = small_config(model={"tied_embeddings": tied})
    ctx = build_context(config, 0, 1, Device("cpu"), trains=True)
    data = Blind(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, model_provider), two_terms, data, loss_counts=counts)
    result = trainer.step()
    assert 0 < result.grad_norm < float("inf") and not result.skipped


def test_the_loss_of_a_model_with_a_fused_gradient_has_weight_one() -> None:
    def weighted(ctx: Any, module: Any, batch: Any, received: Any) -> StageOutput:
        return StageOutput({}, [Term("loss", module(batch, None)[0], batch["loss_mask"].sum(), 0.5)], {})

    with pytest.raises(UserError, match="must have weight 1"):
        trainer_of(config_of(), weighted, None).step()


def test_declared_terms_are_planned() -> None:
    """The plan includes the counts before a step and the longer sums after it."""
    trainer = trainer_of(config_of(), two_terms, counts)
    job = job_of(trainer.ctx.config, 2, terms=2)
    world = [call for call in stage_calls(job, 0) if call.axis == "world"]
    assert sorted((call.phase, call.payload) for call in world)[0] == ("data", 16)
    assert {call.payload for call in world if call.phase == "optimizer"} == {8 * sums_length(2)}


def test_a_new_name_while_the_next_step_is_under_way() -> None:
    """A loop that runs ahead launches a step before it reads the previous one."""

    def step(ctx: Any, module: Any, batch: Any, received: Any) -> Any:
        return replace(forward_step(ctx, module, batch, received), monitored={"x": 2.0})

    trainer = trainer_of(config_of(), step, None)
    launched = [trainer.launch() for _ in range(2)]
    assert [trainer.read(each).monitored for each in launched] == 2 * [{"x": 2.0}]
    assert trainer.step().monitored == {"x": 2.0} and trainer.monitored.names == ("x",)


def some_ranks_monitor(rank: int, world: int) -> list[dict[str, float]]:
    """Return the monitored values of three steps. All ranks monitor their stage, and from the second step on the first
    data-parallel rank monitors a further value.
    """
    calls = 0

    def step(ctx: Any, module: Any, batch: Any, received: Any) -> Any:
        nonlocal calls
        calls += 1
        values = {"stage": float(ctx.pp_rank)}
        if ctx.mesh.samples.index == 0 and calls > 4:
            values["late"] = 7.0
        return replace(forward_step(ctx, module, batch, received), monitored=values)

    trainer = trainer_of(config_of(pp=2), step, None, rank, world)
    return [trainer.step().monitored for _ in range(3)]


def test_a_value_that_only_some_ranks_have_is_theirs_mean() -> None:
    for found in run_ranks(4, some_ranks_monitor):
        assert found == [{"stage": 0.5}, {"late": 7.0, "stage": 0.5}, {"late": 7.0, "stage": 0.5}]


def norms_of_replicas(rank: int, world: int) -> list[float]:
    """Return the norm of the first step of two replicas, without and with declared counts of the loss."""
    sections = {"steps": 2, "outer": "average"}
    config = small_config(layout={"replicas": 2}, train={"global_batch": 8, "local": sections}, run={"eval_samples": 8})
    loss_only = lambda sample: {"loss": counts(sample)["loss"]}  # noqa: E731
    return [trainer_of(config, forward_step, each, rank, world).step().grad_norm for each in (None, loss_only)]


def test_declared_counts_change_no_norm_of_replicas() -> None:
    """Undeclared, the squares are weighted by the mean tokens of a replica, and the replicas here differ by a few."""
    (undeclared, declared), _ = run_ranks(2, norms_of_replicas)
    assert declared == pytest.approx(undeclared, rel=0.05)
