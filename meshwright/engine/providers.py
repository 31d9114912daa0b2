"""The providers that `pretrain` uses for built-in models: of the model's chunks, the datasets and the forward step."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from meshwright.engine.context import Context
from meshwright.engine.datasets import datasets_of
from meshwright.engine.output import StageOutput, Term
from meshwright.engine.preferences import preference_output
from meshwright.models.graph_stage import GraphStage
from meshwright.models.stage import StepModule
from meshwright.models.wrapped.stage import PlannedStage
from meshwright.spec.model.graph import Stage


def model_provider(ctx: Context, stage: Stage) -> nn.Module:
    facts = ctx.config.model.kind_facts
    if facts.is_foreign:
        return PlannedStage(ctx.parallel, ctx.config, ctx.at, stage)
    return GraphStage(ctx.parallel, ctx.config, ctx.at, stage, ctx.ledger, ctx.mesh.tokens)


def datasets_provider(ctx: Context, samples: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    return datasets_of(ctx.config)


def forward_step(ctx: Context, module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]) -> Any:
    if ctx.config.objective_facts.judges_answers:
        return preference_output(ctx.config, module, batch, received)
    tensors, terms = cast(StepModule, module).step(batch, received)
    return StageOutput(tensors, [Term(*term) for term in terms])
