"""ZeRO stages over every way to cut 4 and 8 ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.parity.cases import (
    ADAFACTOR,
    FAMILIES,
    HEADS,
    INTERLEAVED,
    LLAMA,
    MUON,
    OFFLOAD,
    SCHEDULES,
    SOAP,
    Case,
    cut,
    layouts,
    special,
)

# Every way to cut 4 and 8 ranks is tried with ZeRO. Other factors are chosen so that every pair of values meets.
STAGES = (1, 2, 3)
FACTORS: dict[str, tuple[Any, ...]] = {
    "optimizer": ("none", "cpu", "disk"),
    "params": ("none", "cpu", "disk"),
    "recompute": ("none", "selective", "full", "every:2"),
    "schedule": SCHEDULES,  # Interleaved has two chunks, the others one.
    "sp": (False, True),
}
Choice = dict[str, Any]
LION: dict[str, Any] = {"optimizer__name": "lion", "optimizer__lr": 1e-4, "optimizer__betas": [0.9, 0.99]}
# Matrices, other rules and decaying norms in one run.
GROUPS: dict[str, Any] = {**MUON, "optimizer__groups": [
    {"match": "embedding.*", "optimizer": "lion", "lr": 1e-4}, {"match": "*norm*", "decay": 0.2},
    {"match": "layers.1.mlp.*", "optimizer": "adamw"}, {"match": "layers.0.*", "lr": 2e-3},
]}  # fmt: skip
DISK: dict[str, Any] = {
    "zero__stage": 3, "zero__offload__optimizer": "disk", "zero__offload__params": "disk",
    "zero__offload__path": OFFLOAD, "zero__offload__buffer_mib": 0.02,
}  # fmt: skip


def pairs_of(choice: Choice) -> set[tuple[Any, ...]]:
    """Return every pair of values of one case."""
    items = sorted(choice.items())
    return {(*a, *b) for i, a in enumerate(items) for b in items[i + 1 :]}


def _choices(stage: int, tp: int, pp: int) -> Iterator[Choice]:
    for values in product(*FACTORS.values()):
        choice = dict(zip(FACTORS, values, strict=True))
        fits = (stage == 3 or choice["params"] == "none") and (tp > 1 or not choice["sp"])
        if fits and (pp > 1 or choice["schedule"] != "gpipe"):
            yield choice


def _cover() -> Iterator[tuple[int, int, int, int, Choice]]:
    """Yield (stage, dp, tp, pp, choice). Each choice is the one that adds the most pairs that were not met before."""
    met: set[tuple[Any, ...]] = set()
    for world in (4, 8):
        for stage in STAGES:
            for dp, tp, pp, sp in layouts(world):
                if not sp:
                    choice = max(_choices(stage, tp, pp), key=lambda c: len(pairs_of(c) - met))
                    if dp > 1:
                        met |= pairs_of(choice)
                    yield stage, dp, tp, pp, choice


def _sharded(number: int, stage: int, dp: int, tp: int, pp: int, choice: Choice) -> Case:
    extra: dict[str, Any] = {
        "zero.stage": stage, "recompute.mode": choice["recompute"], "zero.offload.optimizer": choice["optimizer"],
        "zero.offload.params": choice["params"], "zero.offload.path": OFFLOAD, "zero.offload.buffer_mib": 0.02,
    }  # fmt: skip
    family, tied = list(FAMILIES)[number % 2], number % 3 != 0
    label = f"zero{stage}-{choice['optimizer']}-{choice['params']}-{choice['recompute']}"
    return Case(dp, tp, pp, choice["sp"], choice["schedule"], family, tied, label, tuple(extra.items()))


def _with_matrix_states(name: str, rule: dict[str, Any]) -> Iterator[Case]:
    """Yield cases of a rule that keeps states of whole matrices on their owners."""
    yield special(name, cut(2, 1, 1, **LLAMA), **rule)
    yield special(name, cut(1, 2, 2, sp=True, **LLAMA), **rule)
    yield special(f"{name}-kv-copies", cut(1, 4, 1, sp=True, **LLAMA), **rule)
    yield special(f"{name}-heads-zero2-kv-copies", cut(2, 4, 1, **LLAMA), **rule, **HEADS, zero__stage=2)
    yield special(f"{name}-zero1-cpu", cut(2, 1, 2, **LLAMA), **rule, zero__stage=1, zero__offload__optimizer="cpu")
    yield special(
        f"{name}-zero1-node", cut(4, 1, 1, **LLAMA), **rule, zero__stage=1, zero__shard_group="node",
        layout__node_size=2,
    )  # fmt: skip
    yield special(f"{name}-zero2", cut(2, 2, 1, sp=True, **LLAMA), **rule, zero__stage=2)
    yield special(f"{name}-zero3-disk", cut(2, 1, 2, **LLAMA), **rule, **DISK)
    yield special(f"{name}-zero3", cut(2, 2, 2, **LLAMA), **rule, zero__stage=3)
    yield special(f"{name}-zero2-cp", cut(1, 1, 2, cp=2, **LLAMA), **rule, zero__stage=2, layout__cp=2)
    yield special(f"{name}-zero3-chunks", cut(4, 1, 2, **LLAMA, **INTERLEAVED), **rule, zero__stage=3)


COVER = list(_cover())
SHARDED = [_sharded(number, *found) for number, found in enumerate(COVER)] + [
    special("zero1-node", cut(4, 1, 1), zero__stage=1, zero__shard_group="node", layout__node_size=2),
    special("zero3-node", cut(4, 1, 2, **LLAMA), zero__stage=3, zero__shard_group="node", layout__node_size=2),
    special("zero3-ramp", cut(2, 1, 1), zero__stage=3, train__ramp=[2, 2, 20], train__global_batch=6),
    special("zero2-masked-rank", cut(2, 1, 1), {"blind": True}, zero__stage=2),
    special("zero3-chunks-on-one-rank", cut(2, 1, 1, **INTERLEAVED), zero__stage=3),
    # Lion cases have no biases: a key's bias has no gradient but rounding, whose sign Lion would follow.
    special("lion", cut(2, 2, 1, **LLAMA), **LION),
    special("lion-zero1-cpu", cut(2, 1, 2, **LLAMA), **LION, zero__stage=1, zero__offload__optimizer="cpu"),
    special("lion-zero2", cut(2, 2, 1, sp=True, **LLAMA), **LION, zero__stage=2),
    special("lion-zero3-disk", cut(2, 1, 2, **LLAMA), **LION, **DISK),
    special("lion-zero3", cut(2, 2, 2, **LLAMA), **LION, zero__stage=3),
    special("groups-zero2", cut(2, 2, 1, sp=True, **LLAMA), **GROUPS, zero__stage=2),
    special("groups-zero3-disk", cut(2, 2, 2, **LLAMA), **GROUPS, **DISK),
    special("groups-zero1-pp", cut(2, 1, 4, **LLAMA), **GROUPS, zero__stage=1),
    special("ema", cut(2, 2, 1, sp=True, **LLAMA), optimizer__ema=0.7),
    special("ema-zero2-muon", cut(2, 2, 1, sp=True, **LLAMA), **MUON, optimizer__ema=0.7, zero__stage=2),
    special("ema-zero3-disk", cut(2, 1, 2, **LLAMA), optimizer__ema=0.7, **DISK),
    special("muon", cut(2, 1, 1), **MUON),
    special("muon", cut(1, 2, 1, sp=True), **MUON),
    special("muon-kv-copies", cut(1, 4, 1, sp=True, **LLAMA), **MUON),
    special("muon-heads", cut(1, 2, 1), **MUON, **HEADS),
    special("muon-heads-kv-copies", cut(2, 4, 1, sp=True, **LLAMA), **MUON, zero__stage=1, **HEADS),
    special("muon-heads-zero2", cut(2, 2, 1, sp=True, **LLAMA), **MUON, zero__stage=2, **HEADS),
    special("muon-heads-zero3", cut(2, 2, 2, **LLAMA), **MUON, zero__stage=3, **HEADS),
    special("muon-zero1-cpu", cut(2, 1, 2, **LLAMA), **MUON, zero__stage=1, zero__offload__optimizer="cpu"),
    special("muon-zero1-node", cut(4, 1, 1), **MUON, zero__stage=1, zero__shard_group="node", layout__node_size=2),
    special("muon-zero2", cut(2, 2, 1, sp=True, **LLAMA), **MUON, zero__stage=2),
    special("muon-zero2-kv-copies", cut(2, 4, 1, **LLAMA), **MUON, zero__stage=2, optimizer__muon__scale="original"),
    special("muon-zero3-disk", cut(2, 1, 2, **LLAMA), **MUON, **DISK),
    special("muon-zero3", cut(2, 2, 2, **LLAMA), **MUON, zero__stage=3, optimizer__muon__coefficients="polar_express"),
    special("muon-zero2-cp", cut(1, 1, 2, cp=2, **LLAMA), **MUON, zero__stage=2, layout__cp=2),
    special("muon-zero3-chunks", cut(4, 1, 2, **LLAMA, **INTERLEAVED), **MUON, zero__stage=3),
    *(case for name, rule in (("adafactor", ADAFACTOR), ("soap", SOAP)) for case in _with_matrix_states(name, rule)),
]
