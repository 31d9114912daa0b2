"""Sequences shared by context-parallel ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.parity.cases import BLOOM, LLAMA, YARN, Case, cut, special
from tests.parity.expert_cases import LATENT, MIXTURES


def _contexts() -> Iterator[Case]:
    """Yield sequences shared by cp ranks: every way and order, with and without documents, and with the other axes.

    The made samples have 16 tokens, in documents of 1 to 15 tokens. Many of these are longer than the 8, 4 or 2 tokens
    of a rank. In the contiguous order a ring's first ranks see no key of the blocks of later ranks.
    """

    def case(label: str, cut: dict[str, Any], cp: int, data: dict[str, Any] | None = None, **extra: Any) -> Case:
        return special(f"cp{cp}-{label}", {**LLAMA, **cut, "cp": cp}, data, layout__cp=cp, **extra)

    kinds: list[dict[str, Any]] = [{"context__kind": kind} for kind in ("gather", "ring", "ulysses")]
    kinds.append({"context__kind": "hybrid", "context__inner": 2})
    for kind in kinds:
        name = kind["context__kind"]
        for number, order in enumerate(("zigzag", "striped", "contiguous", "documents")):
            for documents in (False, True):
                cp = 4 if name == "hybrid" or (number + documents) % 2 else 2
                label = f"{name}-{order}" + ("-documents" if documents else "")
                yield case(label, cut(1, 1, 1), cp, {"segments": documents}, context__order=order, **kind)
    yield case("ring-tp-sp", cut(1, 2, 1, sp=True), 2, {"segments": True}, **kinds[1], zero__stage=1)
    yield case("gather-tp", cut(1, 2, 1), 2, **kinds[0], zero__stage=3)
    yield case("ulysses-tp", cut(1, 2, 1), 2, **kinds[2])
    yield case("ring-pp", cut(1, 1, 2), 2, {"segments": True}, **kinds[1], model__rope_scaling=YARN)
    latent = {f"model__latent__{key}": value for key, value in LATENT.items()}
    scaled = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}
    yield case("latent-yarn", cut(1, 2, 1), 2, {"segments": True}, **kinds[0], **latent, model__rope_scaling=scaled)
    yield case("ring-chunks", cut(1, 1, 2, schedule="interleaved"), 2, **kinds[1], zero__stage=2)
    yield case("gather-dp", cut(2, 1, 1), 2, {"blind": True}, **kinds[0], zero__stage=3)
    yield case("ring-recompute", cut(1, 1, 1), 2, {"segments": True}, **kinds[1], recompute__mode="full")
    pairs: dict[str, Any] = {"train__micro_batch": 2, "train__global_batch": 8}
    yield case("learned", cut(2, 1, 1, family="gpt"), 2, {"segments": True}, **kinds[1], **pairs)
    yield case("one-kv-head", cut(1, 1, 1), 4, **kinds[2], model__kv_heads=1)
    yield case("ring-8", cut(1, 1, 1), 8, {"segments": True}, **kinds[1])
    yield case("hybrid-8", cut(1, 1, 1), 8, {"segments": True}, **kinds[3])
    yield case("gather-8", cut(1, 1, 1), 8, {"segments": True}, **kinds[0])
    yield case("gather-tp-sp-pp", cut(1, 2, 2, sp=True), 2, {"segments": True}, **kinds[0])
    yield case("ring-dp", cut(2, 1, 1), 2, {"segments": True}, **kinds[1], zero__stage=2)
    yield case("ulysses-chunks", cut(1, 1, 2, schedule="interleaved"), 2, {"segments": True}, **kinds[2], zero__stage=3)
    # Every sample of a micro-batch is distributed by its own documents.
    for kind in kinds:
        label = f"{kind['context__kind']}-pairs"
        yield case(label, cut(1, 1, 1), 4, {"segments": True}, **kind, context__order="documents", **pairs)
    bloom: dict[str, Any] = {**BLOOM, "model__kv_heads": 4}
    yield case("alibi-ring", cut(1, 1, 1, family="gpt"), 2, {"segments": True}, **kinds[1], **bloom)
    yield case("alibi-gather-tp", cut(1, 2, 1, sp=True), 2, {"segments": True}, **kinds[0], **BLOOM, zero__stage=3)
    yield case("alibi-ulysses-pp", cut(1, 1, 2), 2, **kinds[2], **bloom)
    yield case("alibi-hybrid", cut(1, 1, 1), 4, {"segments": True}, **kinds[3], **bloom, model__heads=8)
    experts: dict[str, Any] = {f"model__experts__{key}": value for key, value in MIXTURES["deepseek"].items()}
    yield case("experts", cut(1, 1, 1), 4, **kinds[1], **experts, layout__ep=4)
    yield case("experts-tp", cut(1, 2, 1), 2, **kinds[0], **experts, layout__ep=2, layout__etp=1)


CONTEXTS = list(_contexts())
