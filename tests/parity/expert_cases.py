"""Mixtures of experts: every way to fold etp x ep x edp over tp x dp, and other variations. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.parity.cases import (
    ADAFACTOR,
    HEADS,
    LLAMA,
    MUON,
    OFFLOAD,
    SOAP,
    SPLIT,
    TWO_CHUNKS,
    Case,
    cut,
    layouts,
    special,
)

MIXTURES: dict[str, dict[str, Any]] = {
    # DeepSeek-V3's: sigmoid scores, a balancing bias, groups, a shared expert, a dense block first.
    "deepseek": {
        "count": 8, "top_k": 3, "ffn": 16, "shared": 1, "first_dense": 1, "router": "sigmoid", "bias_balance": 0.001,
        "scale": 2.5, "groups": 4, "groups_used": 2, "aux_loss": 0.05, "z_loss": 0.01,
    },
    # Mixtral's, in every second block.
    "mixtral": {"count": 4, "top_k": 2, "ffn": 24, "every": 2, "aux_loss": 0.05},
    "olmoe": {"count": 8, "top_k": 4, "ffn": 16, "normalise": False, "z_loss": 0.02},
}  # fmt: skip


# DeepSeek's attention from short vectors.
LATENT = {"q_rank": 12, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "v_dim": 6}


def _mixture(
    kind: str, cut: dict[str, Any], ep: int = 1, etp: int = 0, label: str = "", data: dict[str, Any] | None = None,
    **extra: Any,
) -> Case:  # fmt: skip
    """Return a case with a mixture. The keys of `extra` are written section__key, or without a section for
    model.experts.
    """
    keys = {f"model.experts.{key}": value for key, value in MIXTURES[kind].items()}
    keys |= {"layout.ep": ep, "layout.etp": etp, "model.layers": max(2, 2 * cut["pp"])}
    keys |= {key.replace("__", ".") if "__" in key else f"model.experts.{key}": value for key, value in extra.items()}
    words = [kind, f"ep{ep}", f"etp{etp}" if etp else "", label]
    if cut.get("schedule") in TWO_CHUNKS:
        keys["model.layers"] = 2 * cut["pp"]
    label, made = "-".join(filter(None, words)), tuple((data or {}).items())
    return Case(**{**LLAMA, **cut}, label=label, extra=tuple(keys.items()), data=made)


def _mixtures() -> Iterator[Case]:
    yield _mixture("deepseek", cut(1, 1, 1), data={"segments": True})
    for kind in MIXTURES:
        yield _mixture(kind, cut(2, 1, 1), ep=2)
        yield _mixture(kind, cut(1, 2, 1, sp=True), ep=2, etp=1)
    for dp, tp, pp, sp in layouts(4):
        for etp in (1, 2, 4):
            for ep in (1, 2, 4):
                if dp * tp % (etp * ep) == 0:
                    number = dp + 2 * tp + 3 * ep + etp
                    kind, zero = list(MIXTURES)[number % 3], number % 4
                    yield _mixture(kind, cut(dp, tp, pp, sp=sp), ep, etp, f"zero{zero}", zero__stage=zero)
    wide = [("deepseek", 4, 1, 3), ("mixtral", 2, 2, 1), ("olmoe", 8, 1, 2), ("deepseek", 2, 4, 0), ("olmoe", 2, 1, 3)]
    for kind, ep, etp, zero in wide[:3]:
        yield _mixture(kind, cut(4, 2, 1, sp=True), ep, etp, f"zero{zero}", zero__stage=zero)
    for kind, ep, etp, zero in wide:
        if etp * ep <= 4:
            yield _mixture(kind, cut(2, 2, 2, sp=ep == 2), ep, etp, f"zero{zero}", zero__stage=zero)
    for schedule in ("gpipe", "interleaved"):
        yield _mixture("deepseek", cut(2, 1, 2, schedule=schedule), ep=2)
    yield _mixture("mixtral", cut(1, 2, 2, sp=True, schedule="interleaved"), ep=2, etp=1, zero__stage=1)
    for zero, schedule in enumerate(SPLIT):
        yield _mixture("deepseek", cut(2, 1, 2, schedule=schedule), ep=2, label="split", zero__stage=zero % 4)
        yield _mixture("olmoe", cut(1, 2, 2, sp=True, schedule=schedule), ep=2, etp=1, label="split")
    for mode, zero in (("full", 0), ("every:2", 3), ("selective", 2)):
        recompute: dict[str, Any] = {"recompute__mode": mode, "zero__stage": zero}
        yield _mixture("deepseek", cut(2, 2, 1, sp=True), 2, 1, mode.replace(":", ""), **recompute)
    nodes: dict[str, Any] = {"layout__node_size": 2, "comm__algorithm": {"ep": "hierarchical"}}
    yield _mixture("deepseek", cut(4, 1, 1), 4, 1, "by-node", **nodes)
    yield _mixture("olmoe", cut(2, 2, 1, sp=True), 4, 1, "by-node-zero3", **nodes, zero__stage=3)
    yield _mixture("olmoe", cut(2, 1, 1), 2, 1, "all-choices", top_k=8)
    yield _mixture("olmoe", cut(2, 1, 1), 1, 1, "one-expert", count=1, top_k=1)
    yield _mixture("deepseek", cut(2, 2, 1), 4, 1, "masked-rank", {"blind": True})
    yield _mixture("mixtral", cut(2, 1, 1), 2, 1, "micro-batch-2", train__micro_batch=2, train__global_batch=8)
    yield _mixture("mixtral", cut(1, 2, 1), 2, 1, "gelu", model__mlp="gelu", model__bias=True)
    latent: dict[str, Any] = {f"model__latent__{key}": value for key, value in LATENT.items()}
    yield _mixture("deepseek", cut(2, 2, 1, sp=True), 2, 1, "latent", **latent)
    direct: dict[str, Any] = {**latent, "model__latent__q_rank": 0}
    yield _mixture("deepseek", cut(1, 2, 2), 2, 1, "latent-q", zero__stage=3, **direct)
    yield special("latent", cut(1, 2, 1, sp=True, **LLAMA), **latent)
    yield special("latent", cut(2, 2, 1, **LLAMA), {"segments": True}, **direct)
    yield _mixture("olmoe", cut(2, 1, 1), 2, 1, "offload", zero__stage=3, **_OFFLOADED)
    # Every expert, its gate and its other half, the router and the short projections are separate matrices.
    yield _mixture("deepseek", cut(2, 2, 1, sp=True), 2, 1, "muon-latent", **latent, **MUON, zero__stage=1)
    yield _mixture("deepseek", cut(2, 2, 1), 2, 1, "muon-latent-heads", **latent, **MUON, **HEADS, zero__stage=2)
    yield _mixture("olmoe", cut(2, 2, 1), 2, 2, "muon", **MUON, zero__stage=2)
    yield _mixture("mixtral", cut(4, 1, 1), 2, 1, "muon", **MUON, zero__stage=3)
    for name, rule in (("adafactor", ADAFACTOR), ("soap", SOAP)):
        yield _mixture("olmoe", cut(2, 2, 1), 2, 2, name, **rule, zero__stage=2)
        yield _mixture("mixtral", cut(4, 1, 1), 2, 1, name, **rule, zero__stage=3)


_OFFLOADED = {
    "zero__offload": {"optimizer": "cpu", "params": "cpu", "path": OFFLOAD, "buffer_mib": 0.02},
}

EXPERTS = list({case.name: case for case in _mixtures()}.values())
