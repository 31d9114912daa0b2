"""Grids of tensor-parallel ranks: the stated parts against a dry run of a rank, the elements of parameters that each
rank holds, and refused combinations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from meshwright.cli.dryrun import compare
from meshwright.config.rules import first_broken_rule
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.run_rank import make_rank, run_rank
from meshwright.dryrun.stand_ins import fake_world, release
from meshwright.errors import UserError
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from meshwright.spec.model.description import layout_of, model_of
from meshwright.spec.model.part import SINGLE_RANK, coordinate_of
from tests.support.oracle import small_config

LLAMA = {
    "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "kv_heads": 4, "tied_embeddings": False,
}  # fmt: skip

COMPILED = {"compile": "auto"}  # on a CUDA device, where norms, SwiGLU and rotations count as a part of the products


def config_of(
    kind: str, grid: tuple[int, ...], sections: dict[str, dict[str, Any]] | None = None, **layout: Any
) -> Config:
    given = sections or {}
    model = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 103, "seq": 64} | given.get("model", {})
    train = {"precision": "bf16", "micro_batch": 4, "global_batch": 8} | given.get("train", {})
    rest = {name: keys for name, keys in given.items() if name not in ("model", "train")}
    cut = {"tp": int(np.prod(grid)), "tp_grid": list(grid), "tp_kind": kind, **layout}
    return small_config(model=model, train=train, layout=cut, **{"run": {"device": "cuda"}, **rest})


DRY: dict[str, tuple[int, Config]] = {
    "2d": (4, config_of("2d", (2, 2))),
    "2d-wide-zero3": (16, config_of("2d", (2, 4), {"zero": {"stage": 3}, "model": LLAMA})),
    "2.5d-kept": (8, config_of("2.5d", (2, 2, 2), {"model": LLAMA}, tp_keep_gathered=True)),
    "2.5d-pp-full": (16, config_of("2.5d", (2, 2, 2), {"recompute": {"mode": "full"}}, pp=2)),
    "3d-llama": (8, config_of("3d", (2, 2, 2), {"model": LLAMA})),
    "3d-uneven-zero1": (16, config_of("3d", (4, 2, 1), {"zero": {"stage": 1}})),
    "2d-shared": (4, config_of("2d", (4, 1), {"train": {"micro_batch": 2}, "model": LLAMA})),
    "3d-shared-full": (8, config_of("3d", (2, 2, 2), {"train": {"micro_batch": 2}, "recompute": {"mode": "full"}})),
    "2d-compiled": (4, config_of("2d", (2, 2), {"model": LLAMA, "train": COMPILED})),
    "2d-compiled-biases": (4, config_of("2d", (4, 1), {"model": LLAMA | {"bias": True}, "train": COMPILED})),
    "2.5d-compiled-kept": (8, config_of("2.5d", (2, 2, 2), {"model": LLAMA, "train": COMPILED}, tp_keep_gathered=True)),
    "3d-compiled-full": (
        8,
        config_of("3d", (2, 2, 2), {"model": LLAMA, "train": COMPILED, "recompute": {"mode": "full"}}),
    ),
    "3d-long-kept": (8, config_of("3d", (1, 2, 4), {"train": {"micro_batch": 8}}, tp_keep_gathered=True)),
}


@pytest.mark.parametrize("name", list(DRY))
def test_a_dry_rank_is_the_planned_one(name: str) -> None:
    """Parameters, bytes of states and all calls are equal. Saved activations agree to a hundredth, apart from the batch
    itself, which autograd does not save.
    """
    world, config = DRY[name]
    for rank in (0, world - 1):
        one = compare(
            rank, run_rank(config, world, rank, Device("meta")), planned_rank(checked_job(config, world), rank)
        )
        assert one["equal"], one
        kept = one["most"]["activations"]
        fields = 3 if config.layout.pp == 1 else 2 * (rank == 0)  # with pp: the tokens of two micro-batches
        batch = 8 * fields * config.train.micro_batch * config.model.seq
        assert kept["planned"] == pytest.approx(kept["ran"] + batch, rel=0.01)


def _kept_by_a_block(
    kind: str, grid: tuple[int, ...], keeps: bool = False, compiled: bool = False
) -> tuple[float, float]:
    """Return the bytes of weights and of activations saved for backward that one more block adds on a dry rank."""
    found = []
    own: dict[str, Any] = {"train": COMPILED} if compiled else {}
    for layers in (2, 3):
        model = LLAMA | {"layers": layers, "heads": 8, "kv_heads": 8, "seq": 128}
        shape = own | {"model": model | ({} if compiled else {"norm": "layernorm"})}
        config = config_of(kind, grid, shape, tp_keep_gathered=keeps) if grid else _alone(shape)
        ran = run_rank(config, int(np.prod(grid or (1,))), 0, Device("meta"))
        found.append((ran.states["parameters"], ran.most["activations"]))
    (weights, kept), (more_weights, more_kept) = found
    return more_weights - weights, more_kept - kept


def _alone(shape: dict[str, dict[str, Any]]) -> Config:
    config = config_of("2d", (2, 2), shape)
    return replace(config, layout=replace(config.layout, tp=1, tp_grid=(), tp_kind=""))


@pytest.mark.wide
@pytest.mark.parametrize("compiled", [False, True])
def test_storages_of_a_block_are_divided_as_the_formulas_say(compiled: bool) -> None:
    """Activations are divided by all ranks, and weights by q^2 or q^3. Gathered factors are saved only if asked for."""
    weights, kept = _kept_by_a_block("", (), compiled=compiled)
    for kind, grid, parts in (("2d", (2, 2), 4), ("2.5d", (2, 2, 2), 4), ("3d", (2, 2, 2), 8)):
        ranks = int(np.prod(grid))
        own_weights, own_kept = _kept_by_a_block(kind, grid, compiled=compiled)
        assert own_weights == pytest.approx(weights / parts, rel=0.02), kind
        assert own_kept == pytest.approx(kept / ranks, rel=0.02), kind
        assert _kept_by_a_block(kind, grid, True, compiled)[1] > 1.3 * own_kept, kind


def test_a_compiled_grid_keeps_no_more_than_one_axis() -> None:
    flat = config_of("2d", (2, 2), {"model": LLAMA | {"hidden": 128, "seq": 1024}, "train": COMPILED})
    axis = replace(flat, layout=replace(flat.layout, tp_grid=(), tp_kind="", sequence_parallel=True))
    kept = [run_rank(config, 4, 0, Device("meta")).most["activations"] for config in (flat, axis)]
    assert kept[0] <= 1.01 * kept[1]


@pytest.mark.wide
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_compiler_keeps_what_the_plan_says(family: str) -> None:
    """A compiler itself chooses which tensors it saves. None as wide as a row is saved in float32, and the stated
    number of them in bf16.
    """
    model = (LLAMA if family == "llama" else {}) | {"seq": 128}
    config = config_of("2d", (2, 2), {"model": model, "train": {"compile": "true"}, "run": {"device": "cpu"}})
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def saw(x: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(x.shape), x.dtype))
        return x

    with fake_world(0, 4):
        trainer = make_rank(config, 4, 0, Device("cpu"))
        trainer.step()
        with saved_tensors_hooks(saw, lambda x: x):
            trainer.step()
        release(trainer)
    rows, width = config.train.micro_batch * config.model.seq // 2, config.model.hidden // 2
    assert seen.count(((rows, width), torch.float32)) == 0
    # These are, in each of two blocks, the inputs of both norms and the results of layer norms. In addition, there are
    # the last norm's input and the loss's gradient.
    each = 2 * (2 if family == "llama" else 4) + 2
    assert seen.count(((rows, width), torch.bfloat16)) == each * config.train.global_batch // config.train.micro_batch


def test_the_peak_has_what_the_kernel_of_attention_needs() -> None:
    """The heads of this model are wider than everything else, so their backward is the peak."""
    model = LLAMA | {"heads": 16, "kv_heads": 2, "head_dim": 64, "ffn": 64, "seq": 1024}
    config = config_of("2d", (2, 2), {"model": model, "train": COMPILED})
    ran = run_rank(config, 4, 0, Device("meta")).most["peak"]
    assert planned_rank(checked_job(config, 4), 0).most["peak"] == pytest.approx(ran, rel=0.01)


@pytest.mark.parametrize("name", list(DRY))
def test_ranks_hold_every_element_as_often_as_they_say(name: str) -> None:
    world, config = DRY[name]
    layout, model = layout_of(config, world), model_of(config)
    held = {record.name: np.zeros(record.shape) for record in model.records(SINGLE_RANK).values()}
    for rank in layout.group("tp", 0):
        for record in model.records(coordinate_of(layout, rank, False)).values():
            copies = np.prod([layout.size(axis) for axis in record.copies if axis.startswith("tp")] or [1])
            for box in record.boxes:
                where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
                held[record.name][where] += 1.0 / copies
    assert all(np.allclose(count, 1.0) for count in held.values())
    # A rank holds only its part of each matrix, and never a whole one.
    grid = config.layout.grid
    assert grid is not None
    weights = [r for r in model.records(coordinate_of(layout, 0, False)).values() if r.name.endswith("up.weight")]
    copies = grid.depth if grid.kind == "2.5d" else 1
    assert all(r.numel * config.layout.tp // copies == np.prod(r.shape) for r in weights) and weights


WRONG: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "grid and tp": ({"layout": {"tp": 8, "tp_grid": [2, 2]}}, "has 2 x 2 = 4 ranks, and layout.tp=8: set layout.tp=4"),
    "no kind": ({"layout": {"tp": 8, "tp_grid": [2, 2, 2]}}, "may be 2.5D or 3D: set layout.tp_kind=2.5d"),
    "kind and numbers": ({"layout": {"tp": 4, "tp_grid": [2, 2], "tp_kind": "3d"}}, "takes layout.tp_grid=[row, col,"),
    "no grid": ({"layout": {"tp_grid": [], "tp_kind": "2d"}}, "belongs to a grid: give layout.tp_grid too"),
    "one number": ({"layout": {"tp": 4, "tp_grid": [4]}}, "has 1 numbers: give [row, col]"),
    "heads": ({"layout": {"tp": 6, "tp_grid": [2, 3]}}, "cuts model.heads=4 into 3 equal parts"),
    "kv heads": ({"layout": {"tp": 4, "tp_grid": [1, 4]}, "model": {"kv_heads": 2}}, "model.kv_heads=2 into 4 equal"),
    "hidden": ({"layout": {"tp": 4, "tp_grid": [1, 4]}, "model": {"hidden": 36, "head_dim": 8, "ffn": 64}}, ""),
    "micro-batch": (
        {
            "layout": {"tp": 8, "tp_grid": [2, 2, 2], "tp_kind": "3d"},
            "train": {"micro_batch": 1},
        },
        "is not a multiple of the 4 parts of layout.tp_grid=[2, 2, 2]: set train.micro_batch=4, or a multiple of 2",
    ),
    "shared": ({"train": {"micro_batch": 1}, "model": {"seq": 18}}, "model.seq=18 is not a multiple of 4: change it"),
    "sequence parallel": ({"layout": {"sequence_parallel": True}}, "set layout.sequence_parallel=false"),
    "cp": ({"layout": {"cp": 2}}, "can't be combined with layout.cp=2 yet"),
    "experts": ({"model": {"experts": {"count": 4, "ffn": 16}}}, "can't be combined with model.experts.count=4 yet"),
    "fp8": ({"train": {"precision": "fp8"}}, "can't be combined with train.precision=fp8 yet"),
    "encoder": ({"model": {"kind": "bert"}}, "can't be combined with model"),
    "adapters": ({"tune": {"kind": "lora", "base": "x"}}, "can't be combined with tune.kind=lora yet"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_does_not_fit_is_one_sentence(name: str) -> None:
    sections, sentence = WRONG[name]
    base: dict[str, dict[str, Any]] = {
        "layout": {"tp": 4, "tp_grid": [2, 2]}, "train": {"micro_batch": 2, "precision": "fp32"},
    }  # fmt: skip
    try:
        config = small_config(**{key: base.get(key, {}) | sections.get(key, {}) for key in {*base, *sections}})
        found = first_broken_rule(config, config.layout.tp * config.layout.cp)
    except UserError as error:
        found = str(error)
    assert found is None if not sentence else found is not None and sentence in found, found
