"""Schedules that compute weight gradients apart from input gradients; with experts: `expert_cases`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.parity.cases import LLAMA, SPLIT, Case, cut, special


def _split_cases() -> Iterator[Case]:
    """Yield every schedule with every axis and ZeRO stage. A V holds both ends of a tied embedding on one rank."""
    for number, schedule in enumerate(SPLIT):

        def on(dp: int, tp: int, pp: int, schedule: str = schedule, **more: Any) -> dict[str, Any]:
            return cut(dp, tp, pp, schedule=schedule, **more)

        yield special("split", on(1, 1, 2))
        yield special("split", on(1, 1, 4, **LLAMA, tied=number % 2 > 0))
        yield special("split", on(1, 1, 8, tied=number % 2 == 0))
        yield special("split", on(1, 2, 2, sp=True, **LLAMA))
        yield special("split", on(1, 2, 4, tied=False))
        yield special("split-chunks-on-one-rank", on(2, 1, 1))
        yield special("split-few", on(1, 1, 4), train__global_batch=2)
        for stage in (1, 2, 3):
            yield special(f"split-zero{stage}", on(2, 1, 2, **LLAMA, tied=stage != number % 3), zero__stage=stage)
        yield special("split-zero3", on(2, 2, 2, sp=True), zero__stage=3)
        yield special("split-recomputed", on(1, 1, 2, **LLAMA), recompute__mode="full")
        yield special("split-recomputed-zero2", on(2, 1, 2), recompute__mode="selective", zero__stage=2)
        yield special(
            "split-cp2", {**on(1, 1, 2, **LLAMA), "cp": 2}, {"segments": True}, layout__cp=2, context__kind="ring"
        )
        yield special("split-lora", on(1, 1, 2, **LLAMA), tune__kind="lora", tune__rank=3)


ZERO_BUBBLE = list(_split_cases())
