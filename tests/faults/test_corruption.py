"""Silent corruption: a bit flipped on one rank is found, attributed to the rank and repaired, or the run stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.faults.corruption import Divergence, checksum, divergences
from meshwright.plan.communication import predict_step
from meshwright.spec.layout import Layout
from tests.faults.planted import Flip, events, lines, numbers, run
from tests.support.ranks import run_ranks

FAULTS = {"faults": {"check_every": 4}}


def story(rank: int, world: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    from meshwright.run import pretrain as module

    ends, real = {}, module.train
    for name, (flip, sections) in cases.items():

        def train(trainer: Any, hooks: Any, *more: Any) -> None:
            for hook in hooks:
                if isinstance(hook, Flip):
                    hook.trainer = trainer
            real(trainer, hooks, *more)

        module.train = train  # type: ignore[assignment]
        end = run(Path(folder) / name, None, (flip,) if flip else (), **FAULTS | sections)
        module.train = real  # type: ignore[assignment]
        ends[name] = end if isinstance(end, str) else end.step_number
    return ends


SMALL_MODEL = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8}
BATCH = {"global_batch": 8, "micro_batch": 1}
SMALL = {"train": {"global_batch": 6, "micro_batch": 1, "steps": 5}, "run": {"eval_samples": 6}}
BF16 = SMALL | {"train": SMALL["train"] | {"precision": "bf16"}}  # master weights are the bf16 weights and remainders
CASES: dict[str, tuple[Flip | None, dict[str, Any]]] = {
    "clean": (None, SMALL),
    "weight": (Flip(2, 4, "layers.1.mlp.down.weight"), SMALL),
    "moment": (Flip(1, 4, "layers.2.attention.qkv.weight", "exp_avg"), SMALL),
    "clean16": (None, BF16),
    "weight16": (Flip(2, 4, "layers.1.mlp.down.weight", bit=3), BF16),
    "late": (Flip(2, 3, "layers.1.mlp.down.weight", bit=22), SMALL),
}


def test_a_flipped_bit_is_named_and_mended(tmp_path: Path) -> None:
    ends = run_ranks(3, story, str(tmp_path), {name: case for name, case in CASES.items() if name != "late"})[0]
    assert set(ends.values()) == {5}
    for name in ("weight", "moment", "weight16"):
        assert not events(tmp_path / f"clean{name[6:]}", "fault")
        check_mended(tmp_path, name)


def check_mended(folder: Path, name: str) -> None:
    moment, weight = "exp_avg of layers.2.attention.qkv.weight", "layers.1.mlp.down.weight"
    rank, what = (1, moment) if name == "moment" else (2, weight)
    (event,) = events(folder / name, "fault")
    assert (event["rank"], event["step"]) == (rank, 4) and f"rank {rank} held another {what}" in event["text"]
    assert numbers(folder / name) == numbers(folder / f"clean{name[6:]}"), "bit for bit as if nothing had been"


def test_the_planner_knows_what_it_sends(tmp_path: Path) -> None:
    """The ledger counts the planned traffic of the comparisons, which happen in every fourth step."""
    from tests.support.oracle import small_config

    run_ranks(2, story, str(tmp_path), {"clean": (None, {})})
    config = small_config(
        model={"layers": 3, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8}, train={"precision": "fp32",
        "global_batch": 8, "micro_batch": 2, "steps": 12}, faults={"check_every": 4},
    )  # fmt: skip
    counted = [line["comm"]["world"] for line in lines(tmp_path / "clean")]
    planned = [predict_step(config, 2, step=step)["world"]._asdict() for step in range(1, 13)]
    assert counted == planned and [n for n, counts in enumerate(counted, 1) if counts["calls"] == 6] == [4, 8, 12]


@pytest.mark.wide
def test_mending_does_not_undo_what_was_trained(tmp_path: Path) -> None:
    run_ranks(3, story, str(tmp_path), {name: CASES[name] for name in ("clean", "late")})
    (event,) = events(tmp_path / "late", "fault")
    found, clean = numbers(tmp_path / "late"), numbers(tmp_path / "clean")
    assert event["rank"] == 2 and event["step"] == 4
    assert found[:2] == clean[:2] and found[3:] != clean[3:], "one step was computed with it"


@pytest.mark.wide
def test_of_two_nobody_knows_who_is_right(tmp_path: Path) -> None:
    case = (Flip(1, 8, "layers.1.mlp.down.weight"), {})
    ends = run_ranks(2, story, str(tmp_path), {"two": case, "zero": (case[0], {"zero": {"stage": 1}})})
    assert all("ranks 0, 1 hold different layers.1.mlp.down.weight, and nobody knows" in end["two"] for end in ends)


@pytest.mark.wide
@pytest.mark.parametrize("sections", [
    {"layout": {"tp": 2}}, {"layout": {"tp": 2, "sequence_parallel": True}}, {"layout": {"pp": 2}},
    {"zero": {"stage": 1}}, {"zero": {"stage": 3}}, {"train": BATCH | {"precision": "bf16"}},
    {"zero": {"stage": 2}, "train": BATCH | {"precision": "bf16"}, "optimizer": {"master_dtype": "bf16"}},
    {"layout": {"cp": 2}}, {"layout": {"ep": 2}, "model": SMALL_MODEL | {"experts": {"count": 4, "top_k": 2}}},
    {"layout": {"replicas": 2}, "train": BATCH | {"local": {"steps": 3}}},
    {"comm": {"reduce": {"kind": "int8"}}}, {"comm": {"reduce": {"kind": "topk", "ratio": 0.1}}},
    {"comm": {"reduce": {"kind": "powersgd"}}}, {"comm": {"algorithm": "halving_doubling"}},
    {"comm": {"algorithm": "mesh"}}, {"comm": {"algorithm": "tree"}}, {"train": BATCH | {"server": {"ranks": 1}}},
    {"layout": {"pp": 2, "tp": 2}, "model": SMALL_MODEL | {"kind": "t5"}},
])  # fmt: skip
def test_no_false_alarm(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Replicated state is equal to the last bit in every layout."""
    sections = {"model": SMALL_MODEL} | sections
    ends = run_ranks(4, story, str(tmp_path), {"run": (None, sections | {"faults": {"check_every": 2}})})
    assert ends[0]["run"] == 12, ends
    assert not events(tmp_path / "run", "fault") and len(lines(tmp_path / "run")) == 12


def test_who_is_wrong() -> None:
    def sums(layout: Layout, *changed: tuple[int, int]) -> list[list[int]]:
        return [[int((rank, column) in changed) for column in range(2)] for rank in range(layout.world)]

    four = Layout(4)
    assert divergences(four, ["dp"], sums(four)) == []
    assert divergences(four, ["dp"], sums(four, (2, 0))) == [Divergence("dp", (0, 1, 2, 3), (2,))]
    assert divergences(four, ["dp"], sums(four, (2, 0), (3, 0)))[0].wrong == ()
    # All four ranks hold the weight. If both axes have a group that differs, the rank in both groups is wrong.
    square = Layout(4, tp=2)
    found = divergences(square, ["dp", "tp"], sums(square, (3, 0), (3, 1)))
    assert {(each.axis, each.wrong) for each in found} == {("dp", (3,)), ("tp", (3,))}
    assert divergences(square, ["dp", "tp"], sums(square, (3, 0)))[0].wrong == ()


@pytest.mark.parametrize("size", [1, 3, 8, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
def test_every_bit_counts(size: int, dtype: torch.dtype) -> None:
    x = (torch.arange(size + 1) * 1.37).to(dtype)[size % 2 :]  # odd sizes begin within a word of 64 bits
    before, bits = int(checksum(x)), x.view(torch.uint8)
    for at in range(bits.numel()):
        bits[at] ^= 1 << at % 8
        assert int(checksum(x)) != before
        bits[at] ^= 1 << at % 8
    assert int(checksum(x)) == before
