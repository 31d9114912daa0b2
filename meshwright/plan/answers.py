"""What a loss over answers communicates beside a plain one: the forward of the frozen weights, with which it compares,
and the output layer's logits, which backward computes again. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.plan.job import Job
from meshwright.spec.model.gpt import OutputLayerPart
from meshwright.spec.model.loss_pieces import answers_of
from meshwright.spec.model.part import Collective, Unit, innermost


def answer_collectives(job: Job, unit: Unit) -> Iterator[Collective]:
    """Yields the calls of one micro-batch that a unit makes more often than its parts state: for a reference all of a
    forward, without DoRA's norms; of the output layer those of forward once more in backward, and its input is
    gathered again. Ranks that share sequences sum three numbers of each answer: A = s + 2 of a sample, 3 b A w."""
    if job.config.objective != "preference":
        return
    at, batch = unit.seen_by(job.at), unit.rows.of(job.batch)
    for part in (innermost(each.part) for each in unit.parts):
        forward = [call for call in part.collectives(at, batch) if call.phase == "forward" and at.size(call.axis) > 1]
        if job.config.compares:
            yield from (replace(call, replayed=True) for call in forward)
        if isinstance(part, OutputLayerPart):
            yield from (replace(call, phase="backward") for call in forward)
            payload = 3 * batch.sequences * answers_of(batch.seq) * batch.wide
            yield Collective("forward", "cp", "all_reduce", payload, 1 + job.config.compares, replayed=True)
