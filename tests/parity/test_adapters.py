"""Adapters over frozen weights (LoRA, DoRA) give the same results on every layout as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.nn.adapters.adapters as adapters
from meshwright.comm.group import DONE
from meshwright.engine.step import Trainer
from tests.parity.cases import MUON, Case, layouts
from tests.parity.expert_cases import LATENT, MIXTURES
from tests.parity.launches import Launches, data_of, reference_of
from tests.support.oracle import Outcome, Reference, compare_steps, complaints, make_trainer, small_config
from tests.support.ranks import run_ranks


def case(dp: int, tp: int, pp: int, sp: bool = False, kind: str = "lora", label: str = "", **extra: Any) -> Case:
    """Return a case. `extra` has fields of a case, or keys written section__key."""
    fields = {key: extra.pop(key) for key in ("schedule", "family", "tied", "cp", "data") if key in extra}
    keys = {"tune.kind": kind, "tune.rank": 4} | {key.replace("__", "."): value for key, value in extra.items()}
    words = [kind, label, *(f"zero{value}" for key, value in extra.items() if key == "zero__stage")]
    return Case(dp, tp, pp, sp, label="-".join(filter(None, words)), extra=tuple(keys.items()), **fields)


def _matrix() -> Iterator[Case]:
    number = 0
    for world in (2, 4):
        for dp, tp, pp, sp in layouts(world):
            for kind in ("lora", "dora"):
                number += 1
                more = {"family": ("llama", "gpt")[number % 2], "tied": number % 3 > 0, "zero__stage": number % 4}
                more |= {"recompute__mode": "full"} if number % 5 == 0 else {}
                yield case(dp, tp, pp, sp, kind, **more)
    yield case(2, 2, 2, True, "dora", family="llama", zero__stage=3, recompute__mode="every:2")
    yield case(1, 2, 2, True, schedule="interleaved", zero__stage=1)
    for kind in ("lora", "dora"):
        yield case(1, 4, 1, True, kind, "kv-copies", family="llama", model__bias=True)
        yield case(1, 2, 1, False, kind, "few", family="llama", tune__targets=["q", "v", "down"], tune__rslora=True)
        latent = {f"model__latent__{key}": value for key, value in LATENT.items()}
        yield case(1, 2, 1, True, kind, "latent", family="llama", **latent)
    yield case(2, 2, 1, True, label="muon", family="llama", zero__stage=2, **MUON)
    yield case(1, 4, 1, False, "dora", "muon-kv-copies", family="llama", **MUON)
    kept = ["embedding", "norm1", "final_norm"]
    yield case(1, 2, 1, True, label="kept", tune__modules_to_save=kept)
    yield case(2, 1, 2, label="kept", tune__modules_to_save=kept, zero__stage=2)
    yield case(1, 2, 1, True, label="pieces", family="llama", recompute__pieces=3)
    yield case(1, 1, 1, label="cp", family="llama", cp=2, layout__cp=2, data=(("segments", True),))
    experts = {f"model__experts__{key}": value for key, value in MIXTURES["deepseek"].items() if key != "bias_balance"}
    yield case(2, 1, 1, label="experts", family="llama", layout__ep=2, **experts)
    yield case(1, 2, 1, True, label="experts", family="llama", layout__ep=2, layout__etp=1, **experts)


# The widths of a rank are multiples of 64, since blocks of 64 values can't be cut.
NF4 = {"tune__quantise": "nf4", "family": "llama", "model__hidden": 128, "model__ffn": 128, "model__head_dim": 16}
NF4_4 = NF4 | {"model__hidden": 256, "model__ffn": 256, "model__head_dim": 32}


def _packed() -> Iterator[Case]:
    for stage in range(4):
        yield case(2, 1, 1, kind=("lora", "dora")[stage % 2], label="nf4", zero__stage=stage, **NF4)
    for kind in ("lora", "dora"):
        yield case(1, 2, 1, True, kind, "nf4", **NF4)
        yield case(1, 4, 1, False, kind, "nf4-kv-copies", model__bias=True, **NF4_4)
    yield case(1, 1, 2, label="nf4", tune__targets=["q", "down"], tied=False, **NF4)
    yield case(2, 2, 2, True, "dora", label="nf4", zero__stage=3, recompute__mode="full", **NF4)
    yield case(2, 2, 1, label="nf4", zero__stage=3, recompute__pieces=3, schedule="1f1b", **NF4)
    yield case(1, 2, 2, label="nf4", zero__stage=1, **{**NF4, "family": "gpt", "model__mlp": "gelu"})


EXPERTS = ["all", "expert_gate", "expert_up", "expert_down"]


def expert_case(kind: str, dp: int, tp: int, pp: int = 1, sp: bool = False, ep: int = 1, etp: int = 0, label: str = "",
                **extra: Any) -> Case:  # fmt: skip
    keys = {f"model__experts__{key}": value for key, value in MIXTURES[kind].items() if key != "bias_balance"}
    keys |= {"layout__ep": ep, "layout__etp": etp, "tune__targets": EXPERTS, "model__layers": max(2, 2 * pp)}
    words = "-".join(filter(None, (kind, f"ep{ep}", f"etp{etp}" if etp else "", label)))
    return case(dp, tp, pp, sp, label=words, **{"family": "llama", **keys, **extra})


def _of_experts() -> Iterator[Case]:
    """Yield every way to fold etp x ep x edp over tp x dp, with ZeRO stages and other variations."""
    number = 0
    for dp, tp, pp, sp in (*layouts(2), *layouts(4)):
        for etp in (1, 2, 4):
            for ep in (1, 2, 4):
                if dp * tp % (etp * ep) == 0:
                    number += 1
                    more: dict[str, Any] = {"recompute__mode": "full"} if number % 3 == 0 else {}
                    more |= {"tune__rslora": True} if number % 5 == 0 else {}
                    kind = list(MIXTURES)[number % 3]
                    yield expert_case(kind, dp, tp, pp, sp, ep, etp, zero__stage=number % 4, **more)
    yield expert_case("mixtral", 2, 2, 2, True, 2, 2, zero__stage=3)
    yield expert_case("olmoe", 4, 2, 1, True, 2, 2, zero__stage=1)
    yield expert_case("olmoe", 2, 1, 1, ep=2, label="few", tune__targets=["q", "expert_down"])
    yield expert_case("olmoe", 1, 2, 1, label="up-alone", tune__targets=["expert_up"])
    yield expert_case("mixtral", 1, 2, 1, label="gelu", model__mlp="gelu", tune__targets=["expert_up", "expert_down"])
    yield expert_case("olmoe", 2, 1, 2, ep=2, label="interleaved", schedule="interleaved")
    packed = NF4 | {"model__experts__ffn": 64}
    yield expert_case("olmoe", 2, 1, 1, ep=2, label="nf4", zero__stage=3, **packed)


QUICK = (
    expert_case("olmoe", 1, 2, 1, True, label="quick"),
    expert_case("mixtral", 2, 1, 1, ep=2, label="quick", zero__stage=3, model__layers=1, model__experts__every=1),
    case(1, 2, 1, True, label="nf4-quick", **NF4),
    case(1, 2, 1, True, "dora", "quick", recompute__mode="full"),
    case(2, 1, 1, label="quick", family="llama", zero__stage=3),
)
CASES = {each.name: each for each in (*QUICK, *_matrix(), *_packed(), *_of_experts())}


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c in QUICK else [pytest.mark.wide]) for c in CASES.values()]
)
def test_adapters_agree_with_one_process(case: Case, launches: Launches) -> None:
    assert complaints(launches.outcomes(case)) == []


Plant = Callable[[Trainer], Any]


def _half_not_summed(half: str, axis: str = "tp") -> Plant:
    """Return a bug that does not sum the gradient of the half that all ranks along an axis hold."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        group = trainer.ctx.mesh.group(axis)
        real = group.all_reduce
        buckets = [bucket for buffer in trainer.data_parallel.trained for bucket in buffer.buckets
                   if axis in buffer.key.partial]  # fmt: skip
        held = [bucket.own_grads.data_ptr() for bucket in buckets
                if all(slot.record.name.endswith(half) for slot in bucket.slots)]  # fmt: skip
        assert held

        def fake(x: torch.Tensor, *more: Any, **named: Any) -> Any:
            return DONE if x.data_ptr() in held else real(x, *more, **named)

        with mock.patch.object(group, "all_reduce", fake):
            yield

    return plant


@contextmanager
def _norm_taken_locally(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: each rank takes the norms of its columns for those of whole rows, in products whose inputs are
    cut.
    """
    real = adapters.all_reduce_

    def fake(x: torch.Tensor, group: str, op: str) -> None:
        if x.shape[0] != 2:
            real(x, group, op)

    with mock.patch.object(adapters, "all_reduce_", fake):
        yield


def planted(rank: int, world: int, case: Case, reference: Reference, name: str) -> Outcome:
    trainer = make_trainer(small_config(**case.sections("fp64")), rank, world, data_of(case))
    with BUGS[name](trainer):
        return compare_steps(trainer, reference)


BUGS: dict[str, Plant] = {
    "the half that a column product shares": _half_not_summed("lora_a"),
    "the half that a row product shares": _half_not_summed("lora_b"),
    "a norm of columns": _norm_taken_locally,
    "the half that experts' first products share": _half_not_summed("lora_a", "etp"),
    "the half that experts' last products share": _half_not_summed("lora_b", "etp"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", list(BUGS))
def test_planted_bugs_are_found(name: str) -> None:
    kind = "dora" if "norm" in name else "lora"
    one = case(1, 2, 1, kind=kind, label="planted", comm__bucket_mib=1e-4)
    # With one tp rank, etp spans the data-parallel ranks.
    if "experts" in name:
        one = expert_case("olmoe", 2, 1, 1, etp=2, label="planted", comm__bucket_mib=1e-4)
    outcomes = run_ranks(2, planted, one, reference_of(one), name, deadline=120.0)
    assert complaints(outcomes) != []
