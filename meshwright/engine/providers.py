"""The three providers of `pretrain` for our own models: its chunks, its token files, its forward step."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshwright.engine.context import Context
from meshwright.engine.datasets import datasets_of
from meshwright.engine.output import LOSS, StageOutput, Term
from meshwright.engine.preferences import preference_output
from meshwright.models.gpt import GPTStage
from meshwright.models.grid import GridStage
from meshwright.models.t5 import T5Stage
from meshwright.models.wrapped.stage import PlannedStage, loss_of
from meshwright.spec.model.part import Stage


def model_provider(ctx: Context, stage: Stage) -> nn.Module:
    facts = ctx.config.model.kind_facts
    if facts.is_foreign:
        return PlannedStage(ctx.parallel, ctx.config, ctx.at, stage)
    kind = T5Stage if facts.is_encoder_decoder else GPTStage if ctx.config.layout.grid is None else GridStage
    return kind(ctx.parallel, ctx.config, ctx.at, stage, ctx.ledger, ctx.mesh.tokens)


def datasets_provider(ctx: Context, samples: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    return datasets_of(ctx.config)


def forward_step(ctx: Context, module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]) -> Any:
    if isinstance(module, PlannedStage):
        return planned_step(module, batch, received)
    assert isinstance(module, GPTStage)
    if ctx.config.objective_facts.judges_answers:
        return preference_output(ctx.config, module, batch, received)
    out, losses = module(batch, **received)
    last = module.head is not None
    terms = []
    if module.head is not None:
        sums = out if isinstance(out, tuple) else (out,)
        terms = [Term(*term) for term in zip(module.terms, sums, module.head.counts(batch), strict=True)]
    if losses is not None:
        tokens = batch["loss_mask"].sum() * module.losses_here
        terms += [
            Term(term.name, total, tokens, term.weight * blocks)
            for (term, blocks), total in zip(module.losses, losses, strict=True)
        ]
    tensors = out if isinstance(out, dict) else {"hidden": out}
    return StageOutput({} if last else tensors, terms)


def planned_step(module: PlannedStage, batch: dict[str, Tensor], received: dict[str, Tensor]) -> StageOutput:
    """Forward of a chunk of a transformers module, with our loss."""
    out = module(batch, **received)
    if not module.stage.last:
        return StageOutput({"hidden": out})
    return StageOutput({}, [Term(LOSS, *loss_of(out, batch))])
