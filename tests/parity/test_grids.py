"""Grids of tensor-parallel ranks (2D, 2.5D, 3D) give the gradients, the norm, the parameters and the losses of one
process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.config.rules import check
from tests.parity.cases import MICRO_BATCHES, Case
from tests.parity.launches import Launches
from tests.support.oracle import complaints, small_config


@dataclass(frozen=True)
class GridCase(Case):
    """A case that states over how many steps its fp32 losses are compared."""

    steps: int = 4

    @property
    def fp32_steps(self) -> int:
        return self.steps


def grid_case(
    kind: str, sizes: tuple[int, ...], label: str = "", dp: int = 1, pp: int = 1, data: dict[str, Any] | None = None,
    family: str = "gpt", tied: bool = True, schedule: str = "1f1b", steps: int = 0, **extra: Any,
) -> Case:  # fmt: skip
    """Return a case on a grid. The keys of `extra` are written section__key. A micro-batch has a sequence for every
    part of the rows. fp32 losses are compared over `steps`, by default 20, or 4 if a label names another difference.
    """
    row, col, depth = (*sizes, 1)[:3]
    sequences = depth * (max(row, col) if kind == "3d" else row)
    keys: dict[str, Any] = {
        "layout.tp_grid": list(sizes), "layout.tp_kind": kind, "train.micro_batch": sequences,
        "train.global_batch": dp * MICRO_BATCHES[pp] * sequences,
    }  # fmt: skip
    keys |= {key.replace("__", "."): value for key, value in extra.items()}
    name = "-".join(filter(None, [kind, "x".join(map(str, sizes)), label]))
    made = tuple((data or {}).items())
    steps = steps or (4 if label else 20)
    return GridCase(
        dp, row * col * depth, pp, False, schedule, family, tied, name, tuple(keys.items()), made, steps=steps
    )


def _zero(stage: int) -> dict[str, Any]:
    return {"label": f"zero{stage}", "zero__stage": stage}


_FULL, _KEPT = {"recompute__mode": "full"}, {"layout__tp_keep_gathered": True}
_LLAMA = {"family": "llama"}
_ONE, _TWO = ({"train__micro_batch": n, "train__global_batch": 2 * n} for n in (1, 2))

CASES = [
    # Each kind with both families.
    *(grid_case("2d", (2, 2), family=family, tied=tied) for family, tied in (("gpt", True), ("llama", False))),
    *(grid_case("2.5d", (2, 2, 2), family=family) for family in ("gpt", "llama")),
    *(grid_case("3d", (2, 2, 2), family=family) for family in ("gpt", "llama")),
    # The same roles on fewer ranks, and grids that are not squares.
    grid_case("2d", (4, 1), "columns"),
    grid_case("2d", (2, 4), "wide", model__kv_heads=4),
    grid_case("2.5d", (1, 2, 2), "deep", **_LLAMA, tied=False),
    grid_case("3d", (2, 2, 1), "flat"),
    grid_case("3d", (1, 2, 2), "deep", **_LLAMA, tied=False),
    grid_case("3d", (4, 2, 1), "uneven"),
    # With the other axes, ZeRO and recomputation.
    *(
        grid_case("2d", (2, 2), dp=2, **_zero(stage), family=family, steps=20)
        for family in ("gpt", "llama")
        for stage in (0, 3)
    ),
    *(grid_case("2d", (2, 2), "pp", pp=2, family=family, steps=20) for family in ("gpt", "llama")),
    grid_case("2d", (2, 2), "pp-untied-full", pp=2, **_LLAMA, tied=False, **_FULL),
    grid_case("2.5d", (1, 2, 2), dp=2, **_zero(3)),
    grid_case("2.5d", (2, 1, 2), "pp", pp=2, **_LLAMA, **_FULL),
    grid_case("3d", (2, 2, 1), dp=2, **_LLAMA, **_zero(3), **_FULL),
    grid_case("3d", (2, 1, 2), "pp", pp=2),
    grid_case("3d", (2, 2, 1), "interleaved", pp=2, schedule="interleaved"),
    grid_case("2d", (1, 2), dp=4, **_zero(2)),
    # Other variations of a model.
    grid_case("2d", (2, 2), "documents", data={"segments": True}, **_LLAMA),
    grid_case("3d", (2, 2, 1), "documents-kept", data={"segments": True}, **_KEPT),
    grid_case("2.5d", (1, 2, 2), "kept", **_KEPT, **_LLAMA),
    grid_case("2d", (2, 2), "masked-samples", data={"blind": True}),
    grid_case("3d", (2, 2, 1), "alibi", model__position="alibi", model__embedding_norm=True),
    grid_case("2d", (2, 2), "qk-norm", **_LLAMA, model__qk_norm=True),
    grid_case("3d", (2, 2, 1), "qk-norm-over-all", **_LLAMA, model__qk_norm=True, model__qk_norm_over="all"),
    grid_case("2.5d", (2, 1, 2), "qk-norm", **_LLAMA, model__qk_norm=True),
    grid_case("2d", (2, 2), "post-norm", model__norm_place="post", model__mlp="geglu"),
    grid_case("3d", (2, 2, 1), "parallel-residual", model__parallel_residual=True, model__position="rope"),
    grid_case("2d", (2, 2), "selective-qkv-bias", **_LLAMA, model__qkv_bias=True, recompute__mode="selective"),
    grid_case("3d", (2, 2, 1), "small-vocabulary", model__vocab=5),
    # There are too few sequences to distribute, so ranks share them.
    grid_case("2d", (2, 2), "shared", **_ONE, **_LLAMA),
    grid_case("3d", (2, 2, 1), "window", **_LLAMA, model__window=5),
    grid_case("2d", (4, 1), "shared-window", **_ONE, **_LLAMA, model__window=5),
    grid_case("2d", (4, 1), "shared-documents", data={"segments": True}, **_ONE),
    grid_case("3d", (2, 2, 1), "shared-three", train__micro_batch=3, train__global_batch=6, **_FULL),
    grid_case("2.5d", (2, 1, 2), "shared-pairs", data={"segments": True}, **_TWO, **_LLAMA),
    grid_case("3d", (1, 2, 2), "shared-pp", pp=2, train__micro_batch=2, train__global_batch=6, **_LLAMA),
]
QUICK = {"dp1-tp4-pp1-1f1b-llama-untied-2.5d-1x2x2-deep"}  # the rest is marked wide


def _params() -> list[object]:
    return [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.wide]) for case in CASES]


def test_the_cases_are_valid() -> None:
    assert {case.name for case in CASES} >= QUICK and len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        for precision in ("fp64", "fp32"):
            check(small_config(**case.sections(precision)), case.world)
        check(small_config(**case.alone("fp64")), 1)


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    """In float64 every gradient, the norm and, after three steps, every parameter and the validation loss agree to
    1e-10 on every rank. In fp32 the losses of some steps agree to 1e-5.
    """
    assert complaints(launches.outcomes(case)) == []
