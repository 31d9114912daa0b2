"""The three providers of `pretrain` for our own GPT: its chunks, its token files, its forward step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshwright.models.gpt import GPTStage
from meshwright.parts.part import Stage
from meshwright.pipeline.output import Term, as_output
from meshwright.train.context import Context
from meshwright.train.datasets import datasets_of


def model_provider(ctx: Context, stage: Stage) -> nn.Module:
    return GPTStage(ctx.parallel, ctx.config, ctx.at, stage, ctx.ledger)


def datasets_provider(ctx: Context, samples: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    return datasets_of(ctx.config)


def forward_step(ctx: Context, module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]) -> Any:
    assert isinstance(module, GPTStage)
    out, losses = module(batch, received.get("hidden"))
    result: Any = {"hidden": out} if module.head is None else (out, batch["loss_mask"].sum(), {})
    if losses is None:
        return result
    tokens = batch["loss_mask"].sum() * module.losses_here
    added = [
        Term(term.name, total, tokens, term.weight * blocks)
        for (term, blocks), total in zip(module.losses, losses, strict=True)
    ]
    output = as_output(result)
    return replace(output, terms=[*output.terms, *added])
