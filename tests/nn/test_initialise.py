"""Every layout and precision starts from the same weights, and no rank draws more than the tiles it touches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import meshwright.nn.parallel as parallel_module
from meshwright.comm.mesh import Mesh
from meshwright.config.sections import ModelConfig
from meshwright.nn.parallel import Parallel, initialise
from meshwright.nn.random import Streams
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import TILE, Box, Init, ParamRecord, columns_of, rows_of, whole
from meshwright.spec.model.description import describe, kv_parts, split_layers
from meshwright.spec.model.part import coordinate_of
from tests.parity.cases import FAMILIES
from tests.support.oracle import gather_global


def drawn(records: list[ParamRecord], seed: int = 1, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return the initialised parameters of a module with these records."""
    cpu = torch.device("cpu")
    parallel = Parallel(Mesh(Layout(world=1), 0).tp, False, dtype, cpu, Streams(1, 0, 0, cpu))
    module = nn.ParameterList([parallel.parameter(record) for record in records])
    initialise(module, seed)
    return [parameter.detach() for parameter in module.parameters()]


def gathered(model: ModelConfig, tp: int, pp: int, sp: bool = False) -> dict[str, np.ndarray]:
    """Return the whole model, assembled from the ranks of a layout. Copies must agree."""
    found: dict[str, np.ndarray] = {}
    for tp_rank in range(tp):
        at = coordinate_of(Layout(tp * pp, tp=tp, pp=pp, parts=kv_parts(model, tp)), tp_rank, sp)
        for stage in split_layers(model.layers, pp):
            records = list(describe(model).records(at, stage).values())
            for record, value in zip(records, drawn(records), strict=True):
                target = found.setdefault(record.name, np.full(record.shape, np.nan))
                mine = gather_global([(record, value)])[record.name]
                held = gather_global([(record, torch.ones_like(value))])[record.name] > 0
                assert (np.isnan(target) | ~held | (target == mine)).all(), f"copies of {record.name} differ"
                target[held] = mine[held]
    assert not any(np.isnan(value).any() for value in found.values()), "no part is missing"
    return found


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_cut_starts_from_the_same_model(family: str, tied: bool) -> None:
    model = ModelConfig(
        **{"layers": 2, "hidden": 160, "vocab": 301, "seq": 24, "tied_embeddings": tied, **FAMILIES[family], "ffn": 320}
    )
    reference = gathered(model, 1, 1)
    assert ("head.weight" in reference) != tied
    for tp, pp, sp in ((2, 1, False), (4, 2, True), (8, 1, False)):
        other = gathered(model, tp, pp, sp)
        assert other.keys() == reference.keys()
        for name, value in reference.items():
            assert (other[name] == value).all(), (name, tp, pp)


def test_every_expert_starts_with_weights_of_its_own() -> None:
    """A rank draws only those of its experts, and draws the same numbers as one process."""
    normal, shape = Init("normal", 0.02), (4, 130, 40)
    (experts,) = drawn([whole("e", shape, normal)])
    assert experts.std().item() == pytest.approx(0.02, rel=0.02)
    for n, one in enumerate(experts):
        for other in experts[:n]:
            assert abs(float((one * other).mean())) < 5 * 0.02**2 / one.numel() ** 0.5
    part = ParamRecord("e", shape, (2, 65, 40), (Box((1, 65, 0), (2, 65, 40), (0, 0, 0)),), normal)
    real, calls = torch.randn, []
    with mock.patch.object(parallel_module.torch, "randn", lambda *s, **n: calls.append(s) or real(*s, **n)):
        (held,) = drawn([part])
    assert torch.equal(held, experts[1:3, 65:]) and calls == [(1, TILE, TILE)] * 4


def test_scale_and_independence() -> None:
    """The spread is the requested one, and no two tensors, seeds or tiles are alike."""
    normal = Init("normal", 0.02)
    a, b = drawn([whole("a", (512, 384), normal), whole("b", (512, 384), normal)])
    (c,) = drawn([whole("a", (512, 384), normal)], seed=2)
    assert a.std().item() == pytest.approx(0.02, rel=0.01) and abs(a.mean().item()) < 2e-4
    blocks = [t[i : i + TILE, j : j + TILE] for t in (a, b, c) for i in (0, TILE) for j in (0, TILE)]
    for i, one in enumerate(blocks):
        for other in blocks[:i]:
            assert abs(float((one * other).mean())) < 5 * 0.02**2 / TILE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_precisions_round_the_same_numbers(dtype: torch.dtype) -> None:
    record = whole("a", (130, 40), Init("normal", 0.02))
    (exact,), (rounded,) = drawn([record]), drawn([record], dtype=dtype)
    assert torch.equal(rounded, exact.float().to(dtype))


def test_zeros_and_ones_draw_nothing() -> None:
    with mock.patch.object(parallel_module.torch, "randn", side_effect=AssertionError("drew")):
        zeros, ones = drawn([whole("z", (5,), Init("zeros")), whole("o", (5,), Init("ones"))])
    assert not zeros.any() and (ones == 1).all()


@pytest.mark.parametrize(
    ("record", "tiles"),
    [
        (whole("w", (4 * TILE, 2 * TILE), Init("normal", 1.0)), 8),
        (columns_of("w", 4 * TILE, 8 * TILE, 4, 1, Init("normal", 1.0)), 4 * 2),
        (rows_of("w", ((2 * TILE, TILE, 0),), 8 * TILE, (3 * TILE,), Init("normal", 1.0)), 3),
        (rows_of("w", ((TILE - 1, 2, 0),), 8 * TILE, (TILE,), Init("normal", 1.0)), 2),
        (rows_of("w", ((0, TILE, 0), (4 * TILE, TILE, TILE)), 8 * TILE, (TILE + 1,), Init("normal", 1.0)), 4),
        (rows_of("w", ((9, 0, 0),), 9, (16,), Init("normal", 1.0), 3), 0),
    ],
    ids=["whole", "columns", "rows", "across-an-edge", "two-boxes", "nothing-held"],
)
def test_only_the_tiles_touched_are_drawn(record: ParamRecord, tiles: int) -> None:
    real, sizes = torch.randn, []

    def counted(*shape: int, **named: Any) -> torch.Tensor:
        sizes.append(shape)
        return real(*shape, **named)

    with mock.patch.object(parallel_module.torch, "randn", counted):
        drawn([record])
    assert sizes == [(TILE, TILE)] * tiles
